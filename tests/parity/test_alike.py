"""Two runs that are equal so far owe equal weights after equal gradients, in 16 bits too, where no bound is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.parity import Grade, Outcome
from harness.parity.record import load
from harness.parity.tiers import divergence
from tests.parity.arms import Arm, Params, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import OURS, OURS_BF16
from tests.parity.network import Optimizer, bf16
from tests.support.mutants import finds

AT = 8
NAME = "blocks.1.w_up.weight"
PURE = replace(OURS_BF16, checked=True, main="bf16", steps=12, captures=(1,), updates=(1,))
WIDE = replace(OURS, checked=True, strategy="optim_grads", updates=(1,))
Updated = Callable[[int, Params, Params], None]


def kept_in_bf16(step: int, before: Params, weights: Params) -> None:
    """Weights that are kept in 16 bits."""
    for value in weights.values():
        value[...] = bf16(value)


def frozen_row(step: int, before: Params, weights: Params) -> None:
    kept_in_bf16(step, before, weights)
    if step >= AT:
        weights[NAME][5] = before[NAME][5]


def grown_weight(step: int, before: Params, weights: Params) -> None:
    """One weight of large size grows by two units a step, which the rule of single updates allows."""
    kept_in_bf16(step, before, weights)
    if step >= AT:
        flat = weights[NAME].ravel()
        flat[abs(flat).argmax()] += 2**-6


def one_kept(step: int, before: Params, weights: Params) -> None:
    """One element is not updated in one step."""
    kept_in_bf16(step, before, weights)
    if step == AT:
        weights[NAME].ravel()[77] = before[NAME].ravel()[77]


def forgotten(step: int, optimizer: Optimizer) -> None:
    """Sixty-four second moments are zeroed as a step leaves them."""
    if step == AT - 1:
        optimizer.v[NAME].ravel()[:64] = 0.0


def rounded_otherwise(step: int, before: Params, weights: Params) -> None:
    """Another kernel's last bits."""
    if step >= AT:
        weights[NAME].ravel()[3] *= 1 + 2**-22


def another_element(step: int, values: Params) -> Params:
    """A gradient whose one element has another last bit."""
    changed = {name: value.copy() for name, value in values.items()}
    if step == AT:
        flat = changed[NAME].ravel()
        flat[abs(flat).argmax()] *= 1 + 2**-7
    return changed


TWIN = broken(replace(PURE, replicate=1), updated=kept_in_bf16)
CASES: dict[str, tuple[Arm, Arm, str]] = {
    "a frozen row": (broken(PURE, updated=frozen_row), TWIN, NAME),
    "a weight that grows": (broken(PURE, updated=grown_weight), TWIN, NAME),
    "an element, once": (broken(PURE, updated=one_kept), TWIN, NAME),
    "64 moments": (broken(PURE, updated=kept_in_bf16, moments=forgotten), TWIN, NAME),
    "in fp32": (broken(WIDE, updated=rounded_otherwise), replace(WIDE, replicate=1), NAME),
    "run twice": (broken(PURE, updated=kept_in_bf16), TWIN, ""),
    "run twice, hot": (
        broken(replace(PURE, lr=0.1), updated=kept_in_bf16),
        broken(replace(PURE, lr=0.1, replicate=1), updated=kept_in_bf16),
        "",
    ),
    "other gradients": (broken(PURE, updated=kept_in_bf16, local=another_element), TWIN, ""),
    "other microbatches": (broken(replace(PURE, k=4), updated=kept_in_bf16), TWIN, ""),
    "another engine": (broken(WIDE, updated=rounded_otherwise), replace(WIDE, engine="fsdp2"), ""),
}
"""Arm, control, and the tensor that is different in step 8; none in a clean pair."""


def wrong(bench: Bench) -> Iterator[str]:
    for name, (arm, control, tensor) in CASES.items():
        verdict = bench.held(arm, control)
        found = [f for f in verdict.findings if f.grade is Grade.bad]
        if not tensor and verdict.outcome not in (Outcome.EQUAL, Outcome.EQUIVALENT):
            yield f"{name}: {verdict.sentence}"
        if tensor and [(f.check, f.step, f.tensor, f.place) for f in found[:1]] != [
            (divergence.ALIKE, AT, tensor, "between clipping and optimizer")
        ]:
            yield f"{name}: {verdict.sentence}"
    left, right = (load(bench.run(each)) for each in CASES["a frozen row"][:2])
    elsewhere = [replace(run, config={**run.config, "cluster.device": "cuda"}) for run in (left, right)]
    if [f.grade for f in divergence.after_equal_gradients(*elsewhere)] != [Grade.doubt]:
        yield "on another device"
    if divergence.after_equal_gradients(
        replace(left, provenance={**left.provenance, "sources_digest": "another"}), right
    ):
        yield "other sources"
    own = [replace(run, config={**run.config, "optimizer.name": "ext"}) for run in (left, right)]
    if divergence.after_equal_gradients(*own):
        yield "one's own optimizer"
    other = replace(left, columns={**left.columns, "grad_norm": [1.0, *left.columns["grad_norm"][1:]]})
    if divergence.after_equal_gradients(other, right):
        yield "after another norm"


def test_what_a_run_shows_of_itself_comes_first(bench: Bench) -> None:
    """A whole tensor that is not updated breaks the rule of single updates, which says in which run."""

    def stopped(step: int, before: Params, weights: Params) -> None:
        if step >= AT:
            weights[NAME][...] = before[NAME]

    verdict = bench.held(broken(WIDE, updated=stopped), replace(WIDE, replicate=1))
    assert divergence.ALIKE not in {finding.check for finding in verdict.findings}
    assert f"at step {AT}, update by the rule, sampled" in verdict.sentence


test_a_mutant_is_found = finds(
    "The comparator: equal until",
    wrong="""
        whatever the gradients: Other gradients owe equal weights
            parity.tiers.divergence._steps_of_equal_gradients: steps if equal.all() => steps if True
        whatever the norm: Gradients that were clipped otherwise owe them too
            parity.tiers.divergence._steps_of_equal_gradients: "grad_norm", =>
        any configuration: Any kernel owes bits
            parity.tiers.divergence._one_configuration: same and same_code => same_code
        any sources: Other code owes bits
            parity.tiers.divergence._one_configuration: same and same_code => same
        any optimizer: One's own optimizer owes bits
            parity.tiers.divergence._one_configuration: in KNOWN => != ''
        all tensors: One tensor is let off
            parity.tiers.divergence._finding: differs.any(1) => differs.all(1)
        on any device: Memory chooses no kernel on any device
            parity.tiers.divergence._finding: == "cpu" => != ""
        nobody asks: Equal gradients owe nothing
            parity.judgement.Judgement.verdict: own += [ => [
    """,
)
