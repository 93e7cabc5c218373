"""Record of a run, read once and checked: the only module of this package that opens a run's files.

Roundings of a foreign model are not counted, so their effect must be observed: by a run of `experiment=oracle`, one
fp64 process that repeats its first step with an error after every operation (`harness.probe.rounding`). One run serves
every pair with the same weights and first batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.config.doc import unknown_settings, unknown_words
from harness.config.errors import refuse
from harness.config.schema import ModelFamily
from harness.parity import baseline, tensors
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.tensors import Capture, Recomputed
from harness.store import check_stream, checksums, provenance, status
from harness.store.check_stream import Forward, Stream
from harness.store.commands import verb
from harness.store.errors import StoreError
from harness.store.metrics import read_columns
from harness.store.provenance import SERIES, WATCHED
from harness.store.reading import read_json
from harness.store.rundir import CONFIG, RunDir, flatten, read_summary
from harness.store.shapes import ROUNDING

NUMBERS = ("loss", "grad_norm", "lr", "tokens")

FIELDS = ("step", *NUMBERS, "param_norm", "data_digest", "fed_digest", "skipped")

WEIGHTS = ("initial_weights", "final_weights")

STRANGE = "was it edited, or made by another version of the code?"

NOT_STARTED, NOT_DONE, IS_STALE = "was never started", ", not done", "it is stale"
"""Problems of a run that a request would start, or restart with `launch.rerun=stale`."""


class Settings(dict[str, Any]):
    """Frozen configuration with dotted keys; a missing key raises an error with the damaged file."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise StoreError(f"{self.file} has no {key}: it was cut or edited, or an older version made the run")


@dataclass(frozen=True, eq=False)
class Record:
    """One immutable run; captures are opened lazily. Compared by identity."""

    path: Path
    name: str
    """`<study>/<run>`."""
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    summary: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]
    """Fields of `metrics.jsonl` for a verdict (`FIELDS`), each a list over the steps with None for gaps."""
    captures: Mapping[int, Capture]
    updates: Mapping[int, Capture]
    weights: Mapping[int, Capture]
    """Main weights before captured updates, by step, unless they follow from the update before."""
    moments: Mapping[int, Capture]
    """Moments of the optimizer there, as `<parameter>/<entry>`; not before step 1, where they are zero."""
    witnesses: Mapping[int, Recomputed]
    """Observations beside the engine by captured step; empty where an engine exposes nothing."""
    moves: Mapping[str, Mapping[str, Mapping[str, float]]]
    """Effect of rounding on gradients of step 1, by compute dtype and parameter ("" for all), each `distance`, `scale`
    and, of all, `loss`.

    Empty without measure.rounding_draws.
    """
    draws: int
    """Draws that `moves` is the mean square of."""
    attempts: int
    forward: Forward | None
    """Sketches of the modules' outputs at step 1, if observed."""
    stream: Stream | None
    """Observations of every step, read lazily; None where there is none."""
    problems: tuple[str, ...]
    """Why no verdict can use this run; empty for a complete one."""
    files: str = "not known"
    """`whole`: all files have the bytes that the run listed, or `problems` names them. `not known`: it listed none."""
    as_recorded: Record | None = None
    """The run as it was recorded, of one whose gradients are those after clipping (`tiers.comparable.as_stepped`)."""
    is_baseline: bool = False
    """True of a golden file, which has sketches of a run's tensors and none of them whole."""

    @property
    def length(self) -> int:
        return len(self.columns["step"])

    def series(self, key: str) -> Sequence[float | None]:
        """One field over the steps; None where a step has none."""
        return self.columns[key]

    @property
    def is_watched(self) -> bool:
        """True if `harness.capture` recorded another program's loop."""
        return WATCHED in self.provenance

    @property
    def gathers_twice(self) -> bool:
        """True if the backward gathers weights again, which no stream observes."""
        return self.config.get("sharding.strategy") == "optim_grads_params"

    @cached_property
    def skipped(self) -> frozenset[int]:
        """Steps whose update a dynamic loss scale skipped; their gradients overflowed."""
        return frozenset(step for step, left_out in enumerate(self.columns["skipped"], start=1) if left_out)

    def updates_until(self, step: int) -> int:
        return step - sum(each <= step for each in self.skipped)


def load(path: Path, sources: str | None = None, *, assumed: Mapping[str, Any] | None = None) -> Record:
    """Record of a run directory, or of a baseline's file.

    Args: sources: required digest; None accepts any. assumed: values of settings unknown to the run's version, by
    dotted key.

    Raises `StoreError`: no run, or an unreadable configuration; `BadRequest`: a series of numbers alone. Anything less
    is one of `problems`.
    """
    if Path(path).is_file():
        return _of_baseline(Path(path), sources, assumed or {})
    run = RunDir(Path(path))
    damaged = _read(lambda: checksums.damage(run.path), None, [])  # `_state_problems` tells of a damaged status
    try:
        found = _load(run, sources, assumed or {})
    except StoreError as error:
        if damaged and CONFIG in damaged:
            raise StoreError(f"{run.path}: {damaged[CONFIG]}; {checksums.RESTORE}") from error
        raise
    if damaged is None:
        return found
    others = [each for each in found.problems if not any(name in each for name in damaged)]
    return replace(found, problems=(*damaged.values(), *others), files="whole")


def settings_of(path: Path) -> dict[str, Any]:
    """Configuration of a run or a baseline, by dotted key. Raises `StoreError`: it is neither."""
    if Path(path).is_file():
        return dict(baseline.read(Path(path))["config"])
    return flatten(RunDir(Path(path)).config())


def _of_baseline(path: Path, sources: str | None, assumed: Mapping[str, Any]) -> Record:
    found = baseline.read(path)
    origin, config = found["provenance"], Settings(path, {**assumed, **found.pop("config")})
    problems = _origin_problems(origin, None if WATCHED in origin else sources)
    found |= {key: {} for key in ("captures", "updates", "weights", "moments", "witnesses")}
    found |= {"problems": tuple(problems), "files": "whole", "is_baseline": True}
    return Record(path, path.name, config, **found)


def _load(run: RunDir, sources: str | None, assumed: Mapping[str, Any]) -> Record:
    config = Settings(run.path / CONFIG, {**assumed, **flatten(run.config())})
    problems = [f"{CONFIG} has {each}: {STRANGE}" for each in unknown_words(config)]
    if (
        sources is not None and "watched.version" not in config
    ):  # of two versions of the code, one may have settings that the other has not
        strange = unknown_settings(config)
        problems += [f"{CONFIG} has {each}={config[each]}, which is no setting: {STRANGE}" for each in strange]
    problems += _state_problems(run)
    origin = _read(lambda: provenance.read(run.path), {}, problems)
    if SERIES in origin:
        raise refuse(run.name, "is a series of numbers alone", fix=verb("verdict NEW --history OLD"))
    watched = WATCHED in origin
    problems += _origin_problems(origin, None if watched else sources)
    summary = _read(lambda: read_summary(run), None, problems)
    columns = _read(lambda: read_columns(run.metrics, FIELDS), {key: [] for key in FIELDS}, problems)
    problems += _step_problems(columns, int(config["train.steps"]), () if watched else (*NUMBERS, "data_digest"))
    problems += _summary_problems(run, summary, () if watched else WEIGHTS)
    of = tensors.read(run.capture, config["measure.capture_steps"], config["measure.update_steps"])
    problems += of.problems
    config |= {"measure.capture_steps": list(of.plan.gradients), "measure.update_steps": list(of.plan.updates)}
    return Record(
        run.path,
        run.name,
        config,
        origin,
        summary or {},
        columns,
        of.gradients,
        of.updates,
        of.weights,
        of.moments,
        of.witnesses,
        *_rounding(run, problems),
        len(run.attempts()),
        _read(lambda: check_stream.read_forward(run.path), None, problems),
        _read(lambda: check_stream.read(run.path), None, problems),
        tuple(problems),
    )


def _read(read: Any, default: Any, problems: list[str]) -> Any:
    try:
        return read()
    except (StoreError, OSError, UnicodeDecodeError) as error:
        problems.append(str(error))
        return default


def _state_problems(run: RunDir) -> list[str]:
    try:
        state = status.effective(run.path)
    except StoreError as error:
        return [str(error)]
    if state is None:
        return [f"it {NOT_STARTED}"]
    if state.state is not status.State.done:
        return [f"it is {state.state.value}{NOT_DONE}" + (f" ({state.reason})" if state.reason else "")]
    return []


def _origin_problems(origin: Mapping[str, Any], sources: str | None) -> list[str]:
    digest = origin.get("sources_digest")
    if not digest:
        return ["provenance.json has no sources_digest: what code made it is not known"]
    if sources is not None and digest != sources:
        return [f"{IS_STALE}: made by sources {digest[:8]}, and they are {sources[:8]} now"]
    if sources is not None and (edited := provenance.edited(origin)):
        return [f"{IS_STALE}: the files of {' and '.join(edited)} were edited since"]
    return []


def _step_problems(columns: Mapping[str, Sequence[Any]], expected: int, required: Sequence[str]) -> list[str]:
    if columns["step"] != list(range(1, expected + 1)):
        return [f"metrics.jsonl does not hold steps 1 to {expected}, each of them once"]
    broken = [
        f"metrics.jsonl is damaged: step {step} has no {key}"
        for key in required
        for step, value in enumerate(columns[key], start=1)
        if (type(value) not in (int, float) if key in NUMBERS else not value)
    ]
    return broken[:1]


def _summary_problems(run: RunDir, summary: Mapping[str, Any] | None, required: Sequence[str]) -> list[str]:
    if summary is None:  # a damaged one has been named
        return [] if run.summary.exists() else ["it has no summary.json"]
    missing = [key for key in required if not summary.get(key)]
    return [f"summary.json has no {' and no '.join(missing)}"] if missing else []


def _rounding(run: RunDir, problems: list[str]) -> tuple[Mapping[str, Any], int]:
    path = run.capture / "rounding-000001.json"
    facts = _read(lambda: read_json(path, ROUNDING), None, problems)
    if facts is None:
        return {}, 0
    if facts["draws"] < 1:
        problems.append(f"{path} is damaged: draws is {facts['draws']}")
        return {}, 0
    return facts["moves"], facts["draws"]


BOUNDS = "verdict bounds"


def with_reach(arm: Record, control: Record) -> Record:
    if control.config.get("model.family") != ModelFamily.ext.name or arm.moves or control.moves:
        return control
    folders = dict.fromkeys((control.path.parent, arm.path.parent))
    paths = [path for folder in folders for path in sorted(folder.glob("*/capture/rounding-000001.json"))]
    for path in paths:
        try:
            found = load(path.parents[1])
        except StoreError:
            continue
        if found.moves and _begins_with(found) == _begins_with(control):
            return replace(control, moves=found.moves, draws=found.draws)
    return control


def _begins_with(run: Record) -> tuple[object, ...]:
    own = [(each["kind"], each["digest"]) for each in run.provenance.get("own", ()) if each["kind"] == "model"]
    first = run.columns["data_digest"][0] if run.length else None
    return (run.provenance.get("sources_digest"), own, run.summary.get("initial_weights"), first)


def unbounded(arm: Record) -> Finding:
    model = arm.config.get("model.target")
    note = (
        f"nothing says how far rounding moves {model}; run its reference in double precision first, which any verdict "
        "on the same model, seed and data then uses"
    )
    return Finding("T0", BOUNDS, Stage.record, Grade.bad, "unknown", "known", note=note)
