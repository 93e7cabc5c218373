"""How DeepSpeed is asked, and that its adapter leaves the process as it found it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch.nn.functional as F

from harness.config.schema import Config, Device
from harness.engines.adapters.deepspeed import deepspeed_config
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import run_case
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: make peers")


def test_on_a_gpu_it_is_used_as_its_users_do() -> None:
    config = Config()
    asked = {}
    for device in Device:
        config.cluster.device = device
        asked[device] = deepspeed_config(config, 3)["zero_optimization"]
    assert asked[Device.cuda]["overlap_comm"]
    assert "stage3_param_persistence_threshold" not in asked[Device.cuda]
    assert not asked[Device.cpu]["overlap_comm"]
    assert asked[Device.cpu]["stage3_param_persistence_threshold"] == 0


WATCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT")


def surroundings(rank: int) -> list[str]:
    """What an engine of ZeRO-3 that was used and closed left changed."""
    case = Case("deepspeed", "optim_grads_params", None, 2, 1, "sgd", False, "bf16", "small", "fast")
    before, linear = dict(os.environ), F.linear
    run_case(case, case.config(), rank)
    changed = [name for name in WATCHED if before.get(name) != os.environ.get(name)]
    return changed + (["F.linear"] if F.linear is not linear else [])


@pytest.mark.full
def test_nothing_is_left_behind() -> None:
    assert run_ranks(surroundings, 2) == [[], []]
