"""Minimal script: reproduces a verdict's first bad finding from overrides alone.

It is written to `<arm>/verdict/<control>.py`, needs no run directory and nothing of this package, and cuts both runs to
two steps where it can. [Note: Length] The learning rate of a step depends on `train.steps` (cosine and linear reach
their end at the last one), so that stays and `launch.preempt_at` ends the runs early, unsaved. Findings about the last
step, a mean over many, or a resume need complete runs.
"""

from __future__ import annotations

import pprint
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.config.update_rule import Iteration, Rule
from harness.config.words import as_word
from harness.parity.alone import every_step
from harness.parity.outcome import IN_16_BITS, OF_FORWARD, Finding, Grade, Outcome, Verdict
from harness.store import commands, provenance
from harness.store.check_stream import ONCE
from harness.store.files import private_folder, write_atomic
from harness.store.identity import EXCLUDED
from harness.store.provenance import WATCHED
from harness.store.rundir import RunDir, flatten, read_summary

PAIR = (("arm", "step"), ("control", "step"))
UPDATES = (("arm", "update"), ("control", "update"))
WITNESS = (("arm", "step"), ("arm", "witness"))
TESTIMONIES = (("arm", "witness"), ("control", "witness"))

OF_RULE = ("rule", "rounded")
"""Templates that need captured updates, and the optimizer's rule."""


@dataclass(frozen=True)
class Look:
    """Recipe of a script for one check.

    body: template under `scripts/`. measure: expression compared with the bound. sides: runs and kinds of captures to
    compare. alone: about one run. captured: needs gradients. whole: needs every step.
    """

    body: str
    measure: str = ""
    sides: tuple[tuple[str, str], ...] = ()
    alone: bool = False
    captured: bool = False
    whole: bool = False
    key: str = ""
    file: str = ""
    keys: tuple[str, ...] = ()
    row: int = 0

    @property
    def updates(self) -> bool:
        return self.sides == UPDATES or self.body in OF_RULE


def _tensors(measure: str, sides: tuple[tuple[str, str], ...] = PAIR) -> Look:
    return Look("tensors", MEASURES[measure], sides, alone=sides is WITNESS, captured=sides != UPDATES)


def _series(measure: str, key: str) -> Look:
    return Look("series", OF_SERIES[measure], whole=measure.startswith("mean"), key=key)


def _fact(file: str, *keys: str, alone: bool = True, measure: str = "bool(found[0])") -> Look:
    captured = file.startswith("capture")
    return Look("facts", measure, (), alone, captured, not captured, file=file, keys=keys)


def _update(measure: str) -> Look:
    return Look("rule", measure, alone=True, captured=True)


ROUNDED = Look("rounded", alone=True, captured=True)

MEASURES = {
    "distance": "ratio(d.norm().item(), norm)",
    "piece": "piece",
    "scale": "abs(b)",
    "size": "abs(ratio(a.norm().item(), norm) - 1)",
    "bits": "float((a.view(torch.int64) != c.view(torch.int64)).sum())",
    "finite": "float((~a.isfinite()).sum() + (~c.isfinite()).sum())",
    "exists": "0.0",
}

OF_SERIES = {
    "relative": "abs(a - c) / abs(c) if a != c else 0.0",
    "bits": "float(a.hex() != c.hex())",
    "finite": "float(not math.isfinite(a)) + float(not math.isfinite(c))",
    "mean": "abs(sum(float(x) - float(y) for x, y in both[STEP // 2 :]) / sum(float(y) for _, y in both[STEP // 2 :]))",
    "mean of logarithms": "abs(sum(math.log(float(x) / float(y)) for x, y in both[STEP // 2 :])) / (STEP - STEP // 2)",
}

STREAMED = (*((look.check, column, 0) for column, look in every_step.LOOKS.items()), (every_step.AFTER_END, "kept", 1))
"""Checks of a run's stream: column, and True for the row after the step."""


def _stream(column: str, after: int) -> Look:
    return Look("stream", alone=True, captured=column in ONCE, whole=bool(after), key=column, row=after)


SHARED = "list(found[0].values()).count(found[0][TENSOR]) > 1"

LOOKS: Mapping[str, Look] = {
    "tokens as fed": Look("fed", alone=True),
    "gradient distance": _tensors("distance"),
    "gradient, worst piece": _tensors("piece"),
    "gradient among its fellows": _tensors("piece"),
    "gradient scale": _tensors("scale"),
    "scale of all gradients": _tensors("scale"),
    "tensor exists": _tensors("exists"),
    "gradient bits": _tensors("bits"),
    "gradient is finite": _tensors("finite"),
    "update size": _tensors("size", UPDATES),
    "update by the rule": _update("d.norm().item() / c.norm().item()"),
    "update by the rule, worst piece": _update("piece"),
    IN_16_BITS: ROUNDED,
    "update without a gradient": _update("a.abs().max().item()"),
    "sum of local gradients": _tensors("distance", WITNESS),
    "sum, worst piece": _tensors("piece", WITNESS),
    "scale of the sum": _tensors("scale", WITNESS),
    "witnessed tensor": _tensors("exists", WITNESS),
    OF_FORWARD: _fact("capture/step-{step:06d}.safetensors", "wrong_weights"),
    "weights apart": _fact("capture/step-{step:06d}.safetensors", "kept", measure=SHARED),
    "replicas": _fact("summary.json", "other_replicas"),
    "tensors apart": _fact("summary.json", "structure", measure='found[0]["aliases"] + found[0]["elsewhere"] != []'),
    "ties kept": _fact("summary.json", "structure", "untied"),
    "state as saved": _fact("summary.json", "restored", "wrong"),
    "final weights": _fact("summary.json", "final_weights", alone=False, measure="found[0] != found[1]"),
    "logged norm": Look("norm", alone=True, captured=True),
    **{check: _stream(column, after) for check, column, after in STREAMED},
    "local gradient given the weights": _tensors("distance", TESTIMONIES),
    "gradient given the weights": _tensors("distance"),
    "weights given those before": _tensors("distance", UPDATES),
    "weights after equal gradients": _tensors("distance", UPDATES),
    "loss given the weights": _series("relative", "loss"),
    "loss": _series("relative", "loss"),
    "gradient norm": _series("relative", "grad_norm"),
    "weight norm": _series("relative", "param_norm"),
    "loss, mean of the later half": _series("mean", "loss"),
    "gradient norm, mean of the later half": _series("mean of logarithms", "grad_norm"),
    **{f"{key} bits": _series("bits", key) for key in ("loss", "grad_norm", "param_norm")},
    **{f"{key} is finite": _series("finite", key) for key in ("loss", "grad_norm", "param_norm")},
}
"""Recipe of each check, by name; other checks have no script."""


FOLDER = "verdict"

TEMPLATES = Path(__file__).parent / "scripts"
PARTS = {"head", "captured", "foot"}
WIDTH = 120
ALONE, BOTH = (
    "Makes one run again and looks at what it recorded.",
    "Makes both runs again and compares what they recorded.",
)
USAGE = (
    "Start it in a checkout, alone or by `git bisect run`. Exit code 1: still beyond the bound; 0: not any more; 125: "
    "it could not run. A folder as argument keeps the runs."
)
CUT = "`launch.preempt_at` ends a run early; `train.steps` stays, because the learning rate depends on it."
WHOLE = "Runs go to their end: what it shows needs that."

ALWAYS = ("RUNS", "RESUMED", "STEP", "CHECK", "BOUND")
CONSTANTS = ("FILE", "KEYS", "TENSOR", "SIDES", "KEY", "RULE", "OPTIONS", "CLIP", "DTYPE", "ROW")
"""Names that a template may use beside `ALWAYS`."""

KEPT = ("cluster.device", "cluster.threads_per_rank")

OWN = ("ckpt", "measure")


def scripted(*verdicts: Verdict) -> tuple[tuple[Verdict, ...], str]:
    """Write the minimal script of every verdict that has one, and name it there.

    Returns the verdicts, and why scripts could not be written (a read-only store); empty if all were.
    """
    done, complaint = [], ""
    for each in verdicts:
        try:
            path = write_script(each)
        except OSError as error:
            complaint = complaint or f"no minimal script was written beside the verdict: {error}"
            path = None
        done.append(each if path is None else replace(each, script=commands.script(path)))
    return tuple(done), complaint


def write_script(verdict: Verdict) -> Path | None:
    """Path of the script of a DIFFERENT or UNDECIDED verdict.

    None without a wrong number (only missing evidence), or where the two runs differ in no setting. Raises `OSError`:
    the arm's directory is not writable.
    """
    path = Path(verdict.arm) / FOLDER / f"{Path(verdict.control).name}.py"
    text = script(verdict)
    if text is None:
        return None
    private_folder(path.parent)
    write_atomic(path, text)
    return path


def script(verdict: Verdict) -> str | None:
    finding = first_shown(verdict)
    watched = any(WATCHED in provenance.read(Path(each)) for each in (verdict.arm, verdict.control))
    if finding is None or watched:  # no request of ours makes another program's run again
        return None
    look = look_of(finding)
    values, is_cut = _constants(verdict, finding, look)
    if len(values["RUNS"]) == 2 and len({tuple(sorted(overrides)) for overrides in values["RUNS"].values()}) == 1:
        return None
    return _render(verdict, look, values, CUT if is_cut else WHOLE)


def look_of(finding: Finding) -> Look:
    look = LOOKS[finding.check]
    pooled = look.measure == MEASURES["scale"] and finding.tensor is None
    return replace(look, body="pooled", measure="") if pooled else look


def first_shown(verdict: Verdict) -> Finding | None:
    """First finding of the verdict's grade with a recipe; for one about all tensors, a tensor's of the same step and
    stage."""
    if verdict.outcome not in (Outcome.DIFFERENT, Outcome.UNDECIDED):
        return None
    grave = Grade.bad if verdict.outcome is Outcome.DIFFERENT else Grade.doubt
    able = [f for f in verdict.findings if f.grade is grave and f.check in LOOKS and f.step is not None]
    if not able:
        return None
    first, sides = able[0], LOOKS[able[0].check].sides
    if first.tensor:
        return first
    same = (f for f in able if f.tensor and (f.step, f.stage) == (first.step, first.stage))
    return next((f for f in same if LOOKS[f.check].sides == (sides or LOOKS[f.check].sides)), first)


def _constants(verdict: Verdict, finding: Finding, look: Look) -> tuple[dict[str, Any], bool]:
    """Values of `ALWAYS` and `CONSTANTS`; and True if runs end early."""
    paths = {"arm": RunDir(Path(verdict.arm)), "control": RunDir(Path(verdict.control))}
    if look.alone:
        other = paths["control"].name in finding.note and paths["arm"].name not in finding.note
        paths.pop("arm" if other else "control")
    configs = {name: flatten(run.config()) for name, run in paths.items()}
    step, steps = finding.step or 1, min(int(config["train.steps"]) for config in configs.values())
    stop = 0 if look.whole else min(max(2, step), steps)
    resumed = {name: at for name, run in paths.items() if (at := _resumed_after(run)) is not None and at < step}
    runs = {
        name: [*overrides(config), *_measured(look, step, config), *_length(stop, steps, resumed.get(name))]
        for name, config in configs.items()
    }
    first = next(iter(configs))
    rule = _rule(configs[first], paths[first], finding.tensor) if look.body in OF_RULE else {}
    values = {
        "RUNS": runs,
        "RESUMED": tuple(resumed),
        "STEP": step,
        "CHECK": finding.check,
        "BOUND": 0.0 if isinstance(finding.allowed, str) else float(finding.allowed),
        "TENSOR": finding.tensor,
        "SIDES": [(first if look.alone else side, kind) for side, kind in look.sides],
        "KEY": look.key,
        "FILE": look.file.format(step=step),
        "KEYS": list(look.keys),
        "ROW": step - 1 + look.row,
        **rule,
    }
    return values, not resumed and 0 < stop < steps


def _rule(config: Mapping[str, Any], run: RunDir, tensor: str | None) -> dict[str, Any]:
    by_muon = tensor in (read_summary(run) or {}).get("orthogonalized", ())
    name = Rule.of(config).of_tensor(orthogonalized=by_muon).name
    torchs, constants = {
        "sgd": ("SGD", ("momentum",)),
        "adam": ("Adam", ("betas", "eps")),
        "adamw": ("AdamW", ("betas", "eps")),
        "muon": ("Muon", ("momentum", *Iteration._fields)),
    }[name]
    options = {each: config[f"optimizer.{each}"] for each in ("weight_decay", *constants)}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(config.get("dtype.main_params")))
    return {"RULE": torchs, "OPTIONS": options, "CLIP": config["optimizer.clip_norm"], "DTYPE": dtype}


def _resumed_after(run: RunDir) -> int | None:
    restored = (read_summary(run) or {}).get("restored")
    return int(restored["step"]) if restored else None


def _measured(look: Look, step: int, config: Mapping[str, Any]) -> list[str]:
    if look.body == "rule":
        window = list(range(1, step + 1))
    elif look.key in ONCE or look is ROUNDED:
        window = [step]
    else:
        window = sorted({max(1, step - 1), step} if step > 1 else {1, min(2, int(config["train.steps"]))})
    words = [f"measure.capture_steps={_listed(window if look.captured else [])}"]
    if look.updates:
        words.append(f"measure.update_steps={_listed(window)}")
    if (look.captured or look.updates) and config[LIMIT] != _default()[LIMIT]:
        words.append(f"{LIMIT}={config[LIMIT]}")
    return words


LIMIT = "measure.capture_limit_mib"


def _listed(steps: Iterable[int]) -> str:
    return f"[{','.join(map(str, steps))}]"


def _length(stop: int, steps: int, resumed_after: int | None) -> list[str]:
    if resumed_after is not None:
        return ["ckpt.policy=last", f"launch.preempt_at={resumed_after}"]
    return ["ckpt.policy=none", *([f"launch.preempt_at={stop}"] if 0 < stop < steps else [])]


def overrides(config: Mapping[str, Any]) -> list[str]:
    """Overrides `key=value` of a frozen configuration against the default.

    Args: config: flat, dotted keys. Location, start and records are left out.
    """
    default = _default()
    return [
        f"{key}={as_word(value)}"
        for key, value in config.items()
        if (key.split(".")[0] not in EXCLUDED or key in KEPT)
        and key.split(".")[0] not in OWN
        and (key not in default or default[key] != value)
    ]


@cache
def _default() -> Mapping[str, Any]:
    from harness.config.compose import composed, plain

    return flatten(plain(composed()))


def _render(verdict: Verdict, look: Look, values: Mapping[str, Any], length: str) -> str:
    texts = {name: (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8") for name in PARTS | {look.body}}
    body = texts[look.body].replace("@measure@", look.measure)
    used = [*ALWAYS, *(name for name in CONSTANTS if re.search(rf"\b{name}\b", body))]
    filled = {
        "sentence": _filled(verdict.sentence.replace("\\", "/").replace('"', "'")),
        "usage": _filled(f"{ALONE if look.alone else BOTH} {USAGE} {length}"),
        "constants": "\n".join(_constant(name, values[name]) for name in used),
    }
    text = "".join([texts["head"], texts["captured"] * ("captured(" in body), body, texts["foot"]])
    return re.sub("@(" + "|".join(filled) + ")@", lambda match: filled[match[1]], text)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH - 3, break_long_words=False, break_on_hyphens=False)


def _constant(name: str, value: object) -> str:
    return f"{name} = {pprint.pformat(value, width=WIDTH - len(name) - 3, compact=True, sort_dicts=False)}"
