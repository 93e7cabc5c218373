"""Recipes of minimal scripts: captures, comparison and measure of each check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.store.check_stream import ONCE

PAIR = (("arm", "step"), ("control", "step"))
UPDATES = (("arm", "update"), ("control", "update"))
WITNESS = (("arm", "step"), ("arm", "witness"))
TESTIMONIES = (("arm", "witness"), ("control", "witness"))


@dataclass(frozen=True)
class Look:
    """Recipe of a script for one check.

    body: template under `scripts/`. measure: expression compared with the bound. constants: names besides STEP, CHECK
    and BOUND. sides: runs and kinds of captures to compare. alone: about one run. captured: needs gradients. whole:
    needs every step. history: needs gradients and updates of every step up to it.
    """

    body: str
    measure: str = ""
    constants: tuple[str, ...] = ()
    sides: tuple[tuple[str, str], ...] = ()
    again: str = "Makes both runs again and holds what they recorded side by side."
    alone: bool = False
    captured: bool = False
    whole: bool = False
    history: bool = False
    key: str = ""
    file: str = ""
    keys: tuple[str, ...] = ()
    row: int = 0

    @property
    def updates(self) -> bool:
        return self.sides == UPDATES or self.history

    def values(self, step: int) -> Mapping[str, Any]:
        row = {"COLUMN": self.key, "ROW": step - 1 + self.row}
        return {"KEY": self.key, "FILE": self.file.format(step=step), "KEYS": list(self.keys), **row}


def _tensors(measure: str, sides: tuple[tuple[str, str], ...] = PAIR) -> Look:
    again = "Makes both runs again for two steps and compares one tensor."
    if sides is WITNESS:
        again = "Makes one run again for two steps: the engine's gradient against the sum of what autograd handed out."
    return Look(
        "tensors",
        MEASURES[measure],
        ("TENSOR", "SIDES"),
        sides,
        again,
        alone=sides is WITNESS,
        captured=sides != UPDATES,
    )


def _series(measure: str, key: str) -> Look:
    return Look("series", OF_SERIES[measure], ("KEY",), whole=measure.startswith("mean"), key=key)


def _fact(file: str, *keys: str, alone: bool = True, measure: str = "bool(found[0])") -> Look:
    again = "Makes one run again and reads what it recorded of itself." if alone else Look.again
    captured = file.startswith("capture")
    constants = ("FILE", "KEYS", *(["TENSOR"] if "TENSOR" in measure else []))
    return Look("facts", measure, constants, (), again, alone, captured, not captured, file=file, keys=keys)


def _rule(measure: str) -> Look:
    again = "Makes one run again: its update, and what torch's optimizer makes of the gradients it captured."
    constants = ("TENSOR", "RULE", "OPTIONS", "CLIP")
    return Look("rule", measure, constants, again=again, alone=True, captured=True, history=True)


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

STREAMED = (
    ("sum, sketched", "sum", 0),
    ("weights of forwards, sketched", "gather", 0),
    ("weights between steps", "kept", 0),
    ("weights after the last step", "kept", 1),
    ("copies, sketched", "replicas", 0),
    ("update by the rule, sampled", "rule", 0),
    ("logged norm, sketched", "norm", 0),
    ("gradient worked out again", "again", 0),
    ("the same function", "drift", 0),
)
"""Checks of a run's stream: column, and True for the row after the step."""


def _stream(column: str, after: int) -> Look:
    again = "Makes one run again and reads what it says of its own step."
    captured = column in ONCE
    return Look("stream", "", ("COLUMN", "ROW"), (), again, True, captured, bool(after), key=column, row=after)


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
    "update by the rule": _rule("d.norm().item() / c.norm().item()"),
    "update by the rule, worst piece": _rule("piece"),
    "update without a gradient": _rule("a.abs().max().item()"),
    "sum of local gradients": _tensors("distance", WITNESS),
    "sum, worst piece": _tensors("piece", WITNESS),
    "scale of the sum": _tensors("scale", WITNESS),
    "witnessed tensor": _tensors("exists", WITNESS),
    "weights of the forward": _fact("capture/witness-{step:06d}.json", "wrong_weights"),
    "weights apart": _fact("capture/witness-{step:06d}.json", "kept", measure=SHARED),
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
