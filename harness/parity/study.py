"""A study's verdict: every arm against the control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.config.errors import refuse
from harness.parity.compare import CHECKOUT, judge
from harness.parity.outcome import StudyVerdict
from harness.parity.record import Record, load
from harness.store.provenance import sources_digest
from harness.store.rundir import RunDir, Store

LABELS = ("name", "strategy", "mode", "kind", "policy")
"""Settings of a group that carry its option's name, for controls such as `sharding=no_shard`."""

PAIRED = ("train.seed", "data.order_seed")
"""An arm is held against a control of the same seeds."""


def verdict(root: Path | str, study: str, *, sources: str | None = CHECKOUT) -> StudyVerdict:
    """Judge every run of a study.

    Each arm is held against the control of its seeds and its replicate (the lowest replicate, where that one has none).
    Replicates of the control are held against its first: an A/A pair that shows the noise.

    Args:
        root: the store, `launch.root`.
        study: name of the study.
        sources: as in `compare`.

    Raises:
        BadRequest: there is no such study, it names no control, or no run is the control.
    """
    runs = Store(root).runs(study)
    if not runs:
        known = ", ".join(Store(root).studies()) or "none yet"
        raise refuse(
            f"verdict {study}", f"no such study under {root}", choices=known, fix="python run.py -m study=NAME"
        )
    choice, question = _control(study, runs)
    digest = sources_digest() if sources == CHECKOUT else sources
    controls = [load(run.path, digest) for run in runs if matches(run, choice)]
    if not controls:
        wanted = " ".join(f"{key}={value}" for key, value in choice.items())
        fix = f"python run.py -m study={study}"
        raise refuse(f"study.control={wanted}", f"is none of the {len(runs)} runs of {study}", fix=fix)
    controls.sort(key=_replicate)
    arms = [load(run.path, digest) for run in runs if not matches(run, choice)]
    pairs = [(arm, _partner(arm, controls)) for arm in (*arms, *controls)]
    return StudyVerdict(
        study, question, choice, tuple(judge(arm, control) for arm, control in pairs if control is not arm)
    )


def _control(study: str, runs: Sequence[RunDir]) -> tuple[dict[str, str], str]:
    """The control's overrides and the question, as the newest frozen cell has them."""
    newest = max(runs, key=lambda run: (run.path / "config.yaml").stat().st_mtime_ns)
    body = newest.config()["study"]
    if not body.get("control"):
        fix = f"control: {{sharding: no_shard}} in sweeps/{study}.yaml"
        raise refuse(f"study.control of {study}", "is empty: an arm needs something to be held against", fix=fix)
    return {str(key): str(value) for key, value in body["control"].items()}, str(body.get("question") or "")


def matches(run: RunDir, choice: Mapping[str, str]) -> bool:
    """Whether a run has every override of the choice: as it was typed, or as its configuration has it."""
    typed, config = set(run.overrides()), run.config()
    return all(f"{key}={value}" in typed or value in _values(config, key) for key, value in choice.items())


def _values(config: Mapping[str, object], key: str) -> set[str]:
    """What `key` is set to: a setting's value, or the label of a group's option."""
    node: object = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        return {str(node[label]) for label in LABELS if label in node}
    return {str(node), str(node).lower()}  # YAML writes true


def _replicate(run: Record) -> int:
    return int(run.config["train.replicate"])


def _partner(arm: Record, controls: Sequence[Record]) -> Record:
    """The control an arm is held against; the first where none has its seeds (T0 then says what differs)."""
    if arm in controls:
        return next((c for c in controls if _seeds(c) == _seeds(arm)), controls[0])
    same = [control for control in controls if _seeds(control) == _seeds(arm)]
    return next((control for control in same if _replicate(control) == _replicate(arm)), (same or list(controls))[0])


def _seeds(run: Record) -> tuple[object, ...]:
    return tuple(run.config[key] for key in PAIRED)
