"""Peers can be seen from outside in a captured step: local gradients, and the weights that their forwards use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.schema import Dtype
from harness.parity.tensors import read
from harness.probe.hooks import ParameterHooks
from tests.support.factory import layouts, small_config, train, with_dtypes
from tests.support.mutants import Slip, kills
from tests.support.spawn import made_by, run_ranks

ENGINES: dict[str, dict[str, Any]] = {
    **layouts(
        fsdp1="no_shard optim_grads optim_grads_params",
        deepspeed="optim optim_grads optim_grads_params",
        megatron_fsdp="no_shard optim optim_grads optim_grads_params",
    ),
}
UNEVEN = {"model__vocab_size": 65, "model__ffn_dim": 47}


def trains(rank: int, folder: Path) -> None:
    for kind, changes in ENGINES.items():
        for dtype in (Dtype.fp32, Dtype.bf16):
            if kind.endswith("-no_shard") and dtype is Dtype.bf16:
                continue  # DeepSpeed has no such policy; FSDP1 adds microbatches up in bf16
            config = small_config(mesh__world_size=2, measure__capture_steps=[1, 3], **UNEVEN, **changes)
            train(with_dtypes(config, dtype, Dtype.fp32), folder / f"{kind}-{dtype.name}", rank)


runs = made_by(trains, 2)


@pytest.mark.parametrize("kind", ENGINES)
def test_sums_of_what_ranks_saw_are_the_reduced_gradients(runs: Path, kind: str) -> None:
    for run in sorted(runs.glob(f"{kind}-*")):
        found = read(run / "capture", (1, 3), ())
        assert not found.problems
        for step in (1, 3):
            seen, reduced = found.witnesses[step], found.gradients[step]
            assert seen.capture.tensors.keys() == reduced.tensors.keys()
            assert not seen.wrong_weights, "forwards used the main weights, cast"
            for name in reduced.tensors:
                off = np.linalg.norm(seen.capture.values(name) - reduced.values(name))
                assert off <= 1e-6 * seen.terms[name], (run.name, step, name)
                assert seen.terms[name] > 0, "each rank has data of its own, and all weights are used"


def trains_once(rank: int, folder: Path) -> None:
    config = small_config(mesh__world_size=2, **ENGINES["fsdp1-optim_grads_params"])
    with Slip(ParameterHooks, "_before", "isinstance(weight._base, nn.Parameter)", "False").patched():
        train(config, folder, rank)


@kills("Witnesses", "views of a flat parameter", "Of FSDP1 no local gradient is seen, so a reduction has no place")
def test_gradients_of_views_are_missed_where_parameters_alone_are_listened_to(tmp_path: Path) -> None:
    run_ranks(trains_once, 2, tmp_path)
    assert not read(tmp_path / "capture", (1,), ()).witnesses
