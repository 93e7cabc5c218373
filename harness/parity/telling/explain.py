"""Meaning of a verdict's words: a sentence an outcome, and for `--explain` a sentence a check."""

from __future__ import annotations

from collections.abc import Sequence

from harness.parity.outcome import IN_16_BITS, OF_FORWARD, WORKED_OUT, Finding, Outcome
from harness.store.commands import page

OUTCOMES = {
    Outcome.EQUAL: "Every recorded bit agrees: by this, it is the same training.",
    Outcome.EQUIVALENT: "Bits differ, and rounding explains all that was recorded: by this, it is the same training.",
    Outcome.DIFFERENT: "Rounding cannot explain what is named here: another training, or one of the two runs is wrong.",
    Outcome.UNDECIDED: "It could be rounding or a fault, or too little was recorded; the next command may decide.",
    Outcome.NOT_COMPARABLE: "The two were not asked to train the same, or one is not whole; nothing was compared.",
}

TIERS = {
    "T0": "whether the two runs may be compared: data, initial weights, settings, versions",
    "T1": "bits and yes-or-no facts; differing bits are a fault only where the order of sums is the same",
    "T2": "numbers, each compared with what rounding alone explains",
}

CHECKS = {
    "comparable": "facts that must agree before anything is compared",
    "files as the run left them": "runs of older versions have no checksums: a damaged file can look like a fault",
    "scale of all gradients": "a common factor of all gradients of step 1, as of a rank counted twice",
    "gradient distance": "the distance of a tensor's gradient from the control's, divided by its norm",
    "gradient distance, sketched": "the same from four sketches of a tensor, against a baseline",
    "length of a gradient": "the norm of a tensor's gradient, against a baseline",
    "gradient, worst piece": "the same for the worst of 32 pieces of a tensor; finds a lost shard or tail",
    "gradient among its fellows": "the worst piece compared with those of the other tensors; rounding moves all alike",
    "gradient scale": "a factor between the two gradients of one tensor; rounding does not cause one",
    "logged norm": "the norm used for clipping, compared with that of the captured gradients",
    "loss": "the relative difference of a step's loss",
    "gradient norm": "the relative difference of the logged norm",
    "weight norm": "the relative difference of the norm of all weights",
    "update size": "the norm of a tensor's update",
    "loss, mean of the later half": "a lasting gap of the loss; several seeds must decide it",
    "gradient norm, mean of the later half": "a lasting gap of the gradient's norm; several seeds must decide it",
    "tensor exists": "whether both runs train the same parameters",
    "final weights": "the digest of a run's final weights",
    "witnessed tensor": "whether the engine has a gradient for every parameter for which autograd had one",
    "sum, worst piece": "the same for the worst of 32 pieces of a tensor",
    "scale of the sum": "a factor between the engine's gradient and that sum",
    "update by the rule, worst piece": "the same for the worst of 32 pieces of a tensor",
    IN_16_BITS: "in one run: the share of 16-bit weights without the bits that the rule leaves",
    "update without a gradient": "a parameter without a gradient must not change",
    OF_FORWARD: "at captured steps, the weights that each rank's forward used",
    "weights apart": "two different weights must not hold the same bits",
    "replicas": "whether all ranks have the same final weights",
    "tensors apart": "whether no two tensors share memory",
    "ties kept": "whether tied weights are still tied",
    "state as saved": "whether the state after loading is the saved state",
    "sum of local gradients": "in one run: the engine's gradient against the sum of autograd's local gradients",
    "update by the rule": "in one run: an update against the optimizer's rule in double precision",
    "tokens as fed": "in one run: tokens and targets that the engine was given against those of the data source",
    "sum, sketched": "the sum of local gradients in each step that was looked at, from four sketches per tensor",
    "weights of forwards, sketched": "the weights a forward used against the main ones",
    "weights between steps": "weights before a step against those after the previous step",
    "weights after the last step": "a run's final weights against those after its last step",
    "copies, sketched": "whether ranks that hold copies of a piece hold the same values",
    "update by the rule, sampled": "a sample of elements against the optimizer's rule; rounding explains at most 1",
    "logged norm, sketched": "the logged norm against that of the gradient",
    "update is made": "under a dynamic loss scale, whether both runs skipped an update, or only one",
    "update left out": "whether updates were skipped exactly where gradients overflowed",
    WORKED_OUT: "in captured and drawn steps: a rank's gradients against the plain model's",
    "the same function": "once in a run: the plain model's gradients at the first weights, at the start and at the end",
    "local gradient given the weights": "a local gradient jumps although weights do not: wrong forward or backward",
    "gradient given the weights": "the same for the reduced gradient",
    "weights after equal gradients": "in two runs that are equal so far, equal gradients must leave equal weights",
    "weights given those before": "whether the distance of weights jumps from one step to the next",
    "weights at the end": "the distance of the final weights against the most that both runs can move",
    "weights at the end, sketched": "the same from sketches, if whole weights were too large to keep",
    "weights at the end follow": "whether the final weights are those before the last captured update, plus it",
    "loss given the weights": "whether losses differ by more than the gradient times the weights' distance",
    "output of a module": "in 16 bits, at step 1: each module's output; with equal shapes all bits must agree",
    "loss given the logits": "equal logits must have the same loss",
    "resolution": "the smallest wrong scale that would have been detected; a pass needs it small enough",
    "gradients captured": "without captured gradients of step 1, Adam can hide a wrong scale",
}

PAGE = f"{page('verdicts.md')} derives every bound"


def lines(evidence: Sequence[Finding]) -> list[str]:
    checks = dict.fromkeys(finding.check for finding in evidence if finding.check in CHECKS)
    tiers = sorted({finding.tier for finding in evidence} & TIERS.keys())
    size = max(map(len, checks), default=0)
    lines = [f"{tier}  {TIERS[tier]}" for tier in tiers]
    marks = "ok: allowed. ?: in doubt. BAD: refuted. differ: other bits, where equal bits are not promised."
    return [*lines, marks, *(f"{check.ljust(size)}  {CHECKS[check]}" for check in checks), PAGE]
