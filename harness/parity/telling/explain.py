"""What the words of a verdict mean, for whoever reads one for the first time: a sentence an outcome, and for
`--explain` a sentence a check."""

from __future__ import annotations

from collections.abc import Sequence

from harness.parity.outcome import Finding, Outcome

OUTCOMES = {
    Outcome.EQUAL: "Every recorded bit agrees: it is the same training.",
    Outcome.EQUIVALENT: "Bits differ, and rounding explains every difference: it is the same training.",
    Outcome.DIFFERENT: "Rounding cannot explain what is named here: another training, or one of the two runs is wrong.",
    Outcome.UNDECIDED: "It could be rounding or a fault, or too little was recorded; the next command may decide.",
    Outcome.NOT_COMPARABLE: "The two were not asked to train the same, or one is incomplete; nothing was compared.",
}
"""What each outcome says, for newcomers."""

TIERS = {
    "T0": "may the two be compared at all: data, initial weights, settings, versions",
    "T1": "bits, and facts that are right or wrong: a fault where the same order of sums is owed",
    "T2": "numbers, each against what rounding alone explains",
}

CHECKS = {
    "comparable": "facts that must agree before anything is compared",
    "scale of all gradients": "one factor between all gradients of step 1: a rank or microbatch counted twice",
    "gradient distance": "how far a tensor's gradient is off, over its norm",
    "gradient, worst piece": "the same of the worst of 32 pieces: a lost shard or tail",
    "gradient among its fellows": "the worst piece against those of the other tensors: rounding moves all alike",
    "gradient scale": "a factor between the two gradients of one tensor, which rounding does not make",
    "logged norm": "the norm that is clipped by against that of the captured gradients",
    "loss": "the loss of a step, relative",
    "gradient norm": "the logged norm, relative",
    "weight norm": "the norm of all weights, relative",
    "update size": "the length of a tensor's update",
    "loss, mean of the later half": "a gap that stays: paired seeds decide it",
    "gradient norm, mean of the later half": "likewise, of the gradient's norm",
    "tensor exists": "both runs train the same parameters",
    "final weights": "the digest of what a run ended with",
    "witnessed tensor": "the engine gives a gradient to every parameter that autograd gave one",
    "sum, worst piece": "the worst of 32 pieces of that sum",
    "scale of the sum": "a factor between the engine's gradient and that sum",
    "update by the rule, worst piece": "the worst of 32 pieces of that update",
    "update without a gradient": "what has no gradient must not move",
    "weights of the forward": "at captured steps, the weights that each rank's forward used",
    "weights apart": "two weights that hold the same bits are one",
    "replicas": "at the end all ranks give the same weights",
    "tensors apart": "no two tensors share memory",
    "ties kept": "what the model ties is still tied",
    "state as saved": "what an engine holds after loading is what was saved",
    "sum of local gradients": "the engine's gradient against the sum of what autograd handed out, in one run",
    "update by the rule": "an update against the optimizer's rule in double precision, in one run",
    "sum at every step": "the same sum at every step, from four sketches a tensor",
    "weights of every forward": "the weights a forward used against the main ones",
    "weights between steps": "what a step begins with against what the last one left",
    "weights after the last step": "what a run ended with against what its last step left",
    "copies of every step": "ranks that hold copies of one piece hold the same",
    "update by the rule, sampled": "a sample of elements against the rule; 1 is the most that rounding explains",
    "logged norm of every step": "the logged norm against that of the gradient",
    "update is made": "under a dynamic loss scale, whether both runs left an update out, or one alone",
    "update left out": "an update is left out where gradients overflow, and nowhere else",
    "gradient worked out again": "once in a run: a rank's gradients against the plain model's, of the same weights",
    "the same function": "once in a run: the plain model, asked the same as the run begins and as it ends",
    "local gradient given the weights": "a gradient that jumps away while the weights do not: a forward or backward",
    "gradient given the weights": "the same of the reduced gradient",
    "weights given those before": "weights that jump apart from one step to the next",
    "weights at the end": "how far apart the last weights are, captured whole; two runs cannot walk farther apart",
    "weights at the end, sketched": "the same of their sketches, where whole weights were too large to keep",
    "weights at the end follow": "the last weights must be those before the last captured updates, and these",
    "loss given the weights": "a loss that differs by more than its gradient times the weights' distance",
    "output of a module": "in 16 bits, at step 1: what each module gave out; equal shapes leave no room for rounding",
    "loss given the logits": "logits that are the same have the same loss",
    "resolution": "whether a pass could have failed: the smallest wrong scale that would have shown",
    "gradients captured": "without gradients of step 1 Adam can hide a wrong scale",
}
"""What each check looks at. One that ends in `bits` or `is finite` says so itself."""

PAGE = "docs/verdicts.md derives every bound"


def lines(evidence: Sequence[Finding]) -> list[str]:
    """A line a tier and a check that stand in a table."""
    checks = dict.fromkeys(finding.check for finding in evidence if finding.check in CHECKS)
    tiers = sorted({finding.tier for finding in evidence} & TIERS.keys())
    size = max(map(len, checks), default=0)
    told = [f"{tier}  {TIERS[tier]}" for tier in tiers]
    marks = "ok: allowed. ?: in doubt. BAD: refuted. differ: other bits, where equal bits are not promised."
    return [*told, marks, *(f"{check.ljust(size)}  {CHECKS[check]}" for check in checks), PAGE]
