"""What a cell needs, worked out before any rank starts."""

from __future__ import annotations

import pytest

from harness.config.derived import parameter_count, persistent_bytes_per_rank
from harness.config.schema import Config, Dtype
from harness.fsdp.vocabulary import OuterStrategy, Strategy

# bytes an element of weights, main weights, gradients and Adam's state on 6 ranks, two copies of three, by hand:
# w = 2, m = 4, g = 4, o = 8; I = 3, O = 2
HYBRID = {
    ("no_shard", "no_shard"): 2 + 4 + 4 + 8,
    ("no_shard", "optim"): 2 + 4 + (4 + 8) / 2,
    ("optim", "no_shard"): 2 + 4 + (4 + 8) / 3,
    ("optim", "optim"): 2 + 4 + (4 + 8) / 6,
    ("optim_grads", "no_shard"): 2 + (4 + 4 + 8) / 3,
    ("optim_grads", "optim"): 2 + 4 / 3 + (4 + 8) / 6,
    ("optim_grads_params", "no_shard"): (4 + 4 + 8) / 3,
    ("optim_grads_params", "optim"): (2 + 4) / 3 + (4 + 8) / 6,
}


@pytest.mark.parametrize(("inner", "outer"), HYBRID)
def test_what_a_rank_keeps(inner: str, outer: str) -> None:
    config = Config()
    config.sharding.strategy, config.sharding.outer = Strategy[inner], OuterStrategy[outer]
    config.mesh.world_size, config.mesh.dp_outer = 6, 2
    config.dtype.compute = Dtype.bf16
    assert persistent_bytes_per_rank(config) == pytest.approx(parameter_count(config) * HYBRID[inner, outer], rel=1e-4)


def test_one_dtype_is_kept_once() -> None:
    """In fp32 the compute weights that are kept are the main weights; under ZeRO-3 none are kept."""
    config = Config()
    config.mesh.world_size = 2
    count = parameter_count(config)
    config.sharding.strategy = Strategy.no_shard
    assert persistent_bytes_per_rank(config) == count * (4 + 4 + 8)
    config.sharding.strategy = Strategy.optim_grads_params
    assert persistent_bytes_per_rank(config) == pytest.approx(count * (4 + 4 + 8) / 2, abs=4)
