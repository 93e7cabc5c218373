"""Minimal script: reproduces a verdict's first bad finding from overrides alone.

It is written to `<arm>/verdict/<control>.py`, needs no run directory and nothing of this package, and cuts both runs to
two steps where it can. [Note: Length] The learning rate of a step depends on `train.steps` (cosine and linear reach
their end at the last one), so that stays and `launch.preempt_at` ends the runs early, unsaved. Findings about the last
step, a mean over many, or a resume need complete runs.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.config.update_rule import OF_ITERATION, Rule
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
    again: str = "Makes both runs again and holds what they recorded side by side."
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

    def values(self, step: int) -> Mapping[str, Any]:
        row = {"COLUMN": self.key, "ROW": step - 1 + self.row}
        return {"KEY": self.key, "FILE": self.file.format(step=step), "KEYS": list(self.keys), **row}


def _tensors(measure: str, sides: tuple[tuple[str, str], ...] = PAIR) -> Look:
    again = "Makes both runs again for two steps and compares one tensor."
    if sides is WITNESS:
        again = "Makes one run again for two steps: the engine's gradient against the sum of what autograd handed out."
    alone, captured = sides is WITNESS, sides != UPDATES
    return Look("tensors", MEASURES[measure], sides, again, alone=alone, captured=captured)


def _series(measure: str, key: str) -> Look:
    return Look("series", OF_SERIES[measure], whole=measure.startswith("mean"), key=key)


def _fact(file: str, *keys: str, alone: bool = True, measure: str = "bool(found[0])") -> Look:
    again = "Makes one run again and reads what it recorded of itself." if alone else Look.again
    captured = file.startswith("capture")
    return Look("facts", measure, (), again, alone, captured, not captured, file=file, keys=keys)


def _update(measure: str) -> Look:
    again = "Makes one run again: its update, and what torch's optimizer makes of the gradients it captured."
    return Look("rule", measure, again=again, alone=True, captured=True)


ROUNDED = Look(
    "rounded",
    again="Makes one run again: its update, and what torch's fused kernel makes of the state that it captured.",
    alone=True,
    captured=True,
)

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
    again = "Makes one run again and reads what it says of its own step."
    captured = column in ONCE
    return Look("stream", "", (), again, True, captured, bool(after), key=column, row=after)


NORM_AGAIN = "Makes one run again: the norm it logs against that of the gradients it captures."

SHARED = "list(found[0].values()).count(found[0][TENSOR]) > 1"

FED_AGAIN = "Makes one run again: the digest of what it was fed against that of its data source."

LOOKS: Mapping[str, Look] = {
    "tokens as fed": Look("fed", again=FED_AGAIN, alone=True),
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
    "logged norm": Look("norm", again=NORM_AGAIN, alone=True, captured=True),
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

CONSTANTS = ("FILE", "KEYS", "TENSOR", "SIDES", "KEY", "RULE", "OPTIONS", "CLIP", "DTYPE", "COLUMN", "ROW")
"""Names that a template may use beside STEP, CHECK and BOUND, in the order of a script."""

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
    plan = _plan(verdict, finding, look_of(finding))
    if len(plan.runs) == 2 and len({tuple(sorted(overrides)) for overrides in plan.runs.values()}) == 1:
        return None
    return _render(verdict, plan)


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


@dataclass(frozen=True)
class _Plan:
    look: Look
    runs: Mapping[str, Sequence[str]]
    """Complete overrides by name, `arm` or `control`."""
    resumed: tuple[str, ...] = ()
    stop: int = 0
    """Step after which runs end; 0: they do not end early."""
    values: Mapping[str, Any] = field(default_factory=dict)


def _plan(verdict: Verdict, finding: Finding, look: Look) -> _Plan:
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
        "STEP": step,
        "CHECK": finding.check,
        "BOUND": 0.0 if isinstance(finding.allowed, str) else float(finding.allowed),
        "TENSOR": finding.tensor,
        "SIDES": [(first if look.alone else side, kind) for side, kind in look.sides],
        **look.values(step),
        **rule,
    }
    return _Plan(look, runs, tuple(resumed), 0 if resumed or stop == steps else stop, values)


def _rule(config: Mapping[str, Any], run: RunDir, tensor: str | None) -> dict[str, Any]:
    by_muon = tensor in (read_summary(run) or {}).get("orthogonalized", ())
    name = Rule.of(config).of_tensor(orthogonalized=by_muon).name
    torchs, constants = {
        "sgd": ("SGD", ("momentum",)),
        "adam": ("Adam", ("betas", "eps")),
        "adamw": ("AdamW", ("betas", "eps")),
        "muon": ("Muon", ("momentum", *OF_ITERATION)),
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


def _render(verdict: Verdict, plan: _Plan) -> str:
    texts = {name: (TEMPLATES / f"{name}.txt").read_text(encoding="utf-8") for name in PARTS | {plan.look.body}}
    reads = texts["captured"] if "captured(" in texts[plan.look.body] else ""
    body = "".join([texts["head"], reads, texts[plan.look.body], texts["foot"]]).replace("@measure@", plan.look.measure)
    cut = "`launch.preempt_at` ends a run early; `train.steps` stays, because the learning rate depends on it."
    end = cut if plan.stop else "Runs go to their end: what it shows needs that."
    about, usage = body.split('"""')[1].split("\n\n")
    said = {"sentence": verdict.sentence.replace("\\", "/").replace('"', "'"), "again": plan.look.again, "length": end}
    intro = "\n\n".join(_filled(_put(paragraph, said)) for paragraph in (about, usage)) + "\n"
    used = [name for name in CONSTANTS if re.search(rf"\b{name}\b", texts[plan.look.body] + plan.look.measure)]
    constants = _constants(plan, ("STEP", "CHECK", "BOUND", *used))
    return _put(body.replace(f"{about}\n\n{usage}", intro), {"imports": _imports(body), "constants": constants})


def _put(text: str, values: Mapping[str, str]) -> str:
    return re.sub("@(" + "|".join(values) + ")@", lambda match: values[match[1]], text)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH - 3, break_long_words=False, break_on_hyphens=False)


def _imports(body: str) -> str:
    own = [name for name in ("json", "math", "shlex", "shutil", "subprocess", "sys", "tempfile") if f"{name}." in body]
    theirs = [*(["import torch"] if "torch." in body else [])]
    theirs += ["from safetensors import safe_open"] if "safe_open(" in body else []
    lines = [*(f"import {name}" for name in own), *(["from array import array"] if "array(" in body else [])]
    lines.append("from pathlib import Path")
    return "\n".join([*lines, *(["", *theirs] if theirs else [])])


def _constants(plan: _Plan, used: Sequence[str]) -> str:
    lists = list(plan.runs.values())
    both = [word for word in lists[0] if all(word in each for each in lists)] if len(lists) == 2 else []
    lines = _list("BOTH = [", both, "]") if both else []
    lines.append("RUNS = {")
    for name, words in plan.runs.items():
        own = [word for word in words if word not in both]
        lines += _list(f'    "{name}": [{"*BOTH, " if both else ""}', own, "],")
    lines += ["}", f"RESUMED = {json.dumps(plan.resumed)}"]
    return "\n".join([*lines, *(f"{name} = {_literal(plan.values[name])}" for name in used)])


def _list(head: str, words: Sequence[str], tail: str) -> list[str]:
    lines, margin = [head], " " * (len(head) - len(head.lstrip()) + 4)
    for word in map(json.dumps, words):
        if len(lines[-1]) + len(word) + 4 > WIDTH:
            lines.append(margin)
        lines[-1] += f"{word}, "
    return [*(line.rstrip() for line in lines[:-1]), lines[-1].removesuffix(", ") + tail]


def _literal(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str | list) else repr(value)
