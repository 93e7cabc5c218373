"""A rank's part of weights that the program edits, while another rank still reads it."""

from __future__ import annotations

import time

import pytest
import torch

from harness.fsdp import fully_shard_model
from harness.fsdp.runtime.weights import Weights
from tests.fsdp.local_step.world import WIDE, WORLD, Block, Net, data
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

SLIPS = slips(
    """
    read too late: The root's weights are edited while others read them
        fsdp.storage.at_rest.MainWeight.__torch_function__: place[0].before_write() => pass
        optim
    """
)


def edited_while_read(rank: int, strategy: str, slip: str = "") -> list[str]:
    """After a forward that no backward follows, where the second rank reads the first one's part late."""
    module = Net().double()
    right = {name: (param.detach() + 1) * 0.5 for name, param in module.named_parameters() if "blocks" not in name}
    model = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, mixed_precision_policy=WIDE)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if slip:
            SLIPS[slip][0].put(patch)
        for param in model.parameters():
            param.add_(1)
        if rank:
            wait = Weights.wait
            patch.setattr(Weights, "wait", lambda weights: (time.sleep(0.1), wait(weights))[1])
        with torch.enable_grad():
            model(data(0, rank))
        for name in right:
            model.get_parameter(name).mul_(0.5)
        with model.unsharded():
            found = [name for name in right if not torch.allclose(model.get_parameter(name), right[name])]
    model.close()
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_weights_are_edited_once_others_have_read_them(strategy: str) -> None:
    assert run_ranks(edited_while_read, WORLD, strategy) == [[], []]


@pytest.mark.parametrize("slip", each("sharded parameters that others read", SLIPS))
def test_a_slip_is_found(slip: str) -> None:
    assert any(run_ranks(edited_while_read, WORLD, SLIPS[slip][1], slip))
