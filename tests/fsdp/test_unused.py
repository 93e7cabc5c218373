"""A parameter that got a gradient on no rank is left alone, as torch's optimizers leave one whose `.grad` is None.

Decay and momentum move what has a gradient of zero, so that the weights tell. What one rank used, or one microbatch,
is used.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from harness.fsdp import MixedPrecisionPolicy
from tests.fsdp.checked import each_is_found, of_slips
from tests.fsdp.pairs import PAIRS, Pair
from tests.fsdp.unused import (
    OPTIMIZERS,
    WORLD,
    Trial,
    bf16,
    difference,
    differences,
    fp32,
    fp64,
    run_plain,
    sharded,
)
from tests.support.covering import Cover

ADAMW = "adamw"
TRIALS = Cover(
    (
        Trial(pair, name, k, fp32 if numerics == "exact" else fp64, (("numerics", numerics),))
        for pair, k, name, numerics in itertools.product(PAIRS, (1, 2), OPTIMIZERS, ("fast", "ordered", "exact"))
    ),
    values=lambda trial: (
        trial.pair.inner,
        trial.pair.outer,
        trial.k,
        "" if trial.pair.outer else trial.optimizer,
        trial.more,
    ),
)


@pytest.mark.parametrize("trial", TRIALS.params())
def test_an_unused_parameter_is_left_alone(trial: Trial) -> None:
    """A rank without rows of a parameter keeps nothing of it either way."""
    trials, right = TRIALS.batch(trial), run_plain(trial.optimizer, trial.k)
    found = [ran[trials.index(trial)] for ran in sharded(trials)]
    assert difference(found[0], trial) == ""
    assert found[0].norms == pytest.approx(right.norms, rel=1e-5)
    assert set().union(*(kept.stateless for kept in found)) == right.stateless


# -- in which formats --------------------------------------------------------------------------------------------------

FORMATS: tuple[tuple[int, torch.dtype, MixedPrecisionPolicy | None], ...] = (
    (2, bf16, MixedPrecisionPolicy(grad_comm_dtype=bf16)),
    (1, bf16, MixedPrecisionPolicy(main_grads_dtype=bf16, allow_low_precision_grads=True)),
    (2, fp32, MixedPrecisionPolicy(grad_comm_dtype=torch.float16)),
    (2, fp32, None),
)
OPTIONS = (
    Trial(PAIRS[0], ADAMW, 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads", "optim"), ADAMW, 2, more=(("grad_buffer", "concat"),)),
    Trial(Pair("optim_grads", "no_shard"), ADAMW, 2, more=(("double_buffer", True),)),
    Trial(Pair("optim", ""), ADAMW, 2, more=(("offload_optimizer", True),)),
    Trial(Pair("optim_grads_params", "optim"), ADAMW, 1, more=(("offload_optimizer", True), ("transport", "backend"))),
    Trial(Pair("optim_grads", ""), ADAMW, 2, more=(("report_nan_in_param_grad", True), ("transport", "auto"))),
    Trial(Pair("no_shard", ""), ADAMW, 2, more=(("report_nan_in_param_grad", True),)),
)
WAYS = Cover(
    (
        *OPTIONS,
        *(Trial(pair, ADAMW, k, dtype, policy=p) for pair, (k, dtype, p) in itertools.product(PAIRS, FORMATS)),
    ),
    values=lambda trial: (trial.pair.inner, trial.pair.outer, (trial.k, trial.dtype, trial.policy), trial.more),
)


@pytest.mark.parametrize("trial", WAYS.params())
def test_in_every_buffer_and_format(trial: Trial) -> None:
    """By which weights move, and in every step: what decays is used."""
    trials, right = WAYS.batch(trial), run_plain(trial.optimizer, trial.k)
    found = [ran[trials.index(trial)] for ran in sharded(trials)]
    assert [kept.moved() for kept in found] == [right.moved()] * WORLD
    assert set().union(*(kept.stateless for kept in found)) == right.stateless


# -- mutants -----------------------------------------------------------------------------------------------------------

SPOILT = {
    "no_shard": Trial(PAIRS[0], ADAMW),
    "optim_grads": Trial(Pair("optim_grads", ""), ADAMW),
    "ordered": Trial(Pair("optim_grads", ""), ADAMW, 2, more=(("numerics", "ordered"),)),
}
CHECKS = {"differences": lambda rank, trial: differences(rank, SPOILT[trial])}
MUTANTS = of_slips(
    r"""
    zeros for all: A parameter that no rank used is updated as if its gradient were zero
        fsdp.runtime.gradient_sync.Usage.find: lambda *_: 0
        differences / no_shard
    one rank decides: What this rank did not use counts as used by none
        fsdp.runtime.gradient_sync.Usage._count: _read(comm, pending, sent[len(sent) - len(had) :], progress) => had
        differences / optim_grads
    the last microbatch decides: A parameter is used if the last microbatch used it
        fsdp.storage.gradients.Gradients.take: return bucket => self.arrived = set()\n    return bucket
        differences / ordered
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what it leaves alone")
