"""megatron-fsdp's own tests of its entries, run on this engine: the text of upstream with a few replacements.

[Note: Upstream's tests] `tests/vendored/megatron_lm` has upstream's file as it is. `REPLACED` is all that is changed in
it: what is imported, the device, and two places that read upstream's buffers. Whatever else a test there says of the
engine must hold here. Its cases are upstream's parametrisations, but for those that need TransformerEngine, a CUDA
graph, or tensor parallelism; each runs on eight ranks, as upstream's do.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import MegatronModel

SOURCE = Path(__file__).parents[1] / "vendored" / "megatron_lm" / "test_mfsdp_fully_shard.txt"
RANKS = 8

REPLACED = (
    # imports
    ("import transformer_engine as te\n", ""),
    ("from tests.unit_tests.test_utilities import Utils\n", ""),
    ("from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import (", "from harness.fsdp import ("),
    # the device
    ('"cuda"', '"cpu"'),
    (".cuda()", ".cpu()"),
    # what is read of internals
    (
        "any(\n"
        "                isinstance(p.grad, torch.Tensor) and p.grad.to_local().count_nonzero().item() > 0\n"
        "                for p in model.parameters()\n"
        "            )",
        "gradients_exist(model, optimizer)",
    ),
    ("mfsdp_model.param_and_grad_buffer.parameter_groups[0]", "buffers_of(mfsdp_model)"),
)
"""What is replaced in upstream's text, everywhere, and by what."""

NEEDS_MORE = {"test_full_iteration_cuda_graph", "test_fully_shard_te_quantized"}
"""Tests that need a CUDA graph or TransformerEngine."""


def gradients_exist(model: MegatronModel, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's tensors have gradients; upstream hangs them there as a synchronising backward ends."""
    if model.model_auto_sync:
        model.attach_grad_to_optimizer_state()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return any(weight.grad is not None and bool((weight.grad != 0).sum()) for weight in weights)


def buffers_of(model: MegatronModel) -> SimpleNamespace:
    """The first bucket's buffers: main weights where they have a dtype of their own, and main gradients."""
    bucket = model.buckets[0]
    apart = bucket.dtypes.main != bucket.dtypes.compute
    return SimpleNamespace(
        main_weight_buffer=SimpleNamespace(data=bucket.main_shards[0]) if apart else None,
        main_grad_buffer=SimpleNamespace(data=bucket.grad_shards[0]),
    )


def replaced(text: str) -> str:
    """Upstream's text with everything in `REPLACED` replaced.

    Raises:
        AssertionError: something that is to be replaced is not there.
    """
    for old, new in REPLACED:
        assert old in text, f"upstream has no {old!r} any more"
        text = text.replace(old, new)
    return text


@cache
def upstream() -> ModuleType:
    """Upstream's module of tests, as it runs here."""
    module = ModuleType("upstream_mfsdp_fully_shard")
    module.__dict__.update(gradients_exist=gradients_exist, buffers_of=buffers_of)
    exec(compile(replaced(SOURCE.read_text()), str(SOURCE), "exec"), module.__dict__)
    return module


class Case(NamedTuple):
    """One parametrisation of one test: the place of each argument's value among upstream's."""

    test: str
    places: tuple[int, ...]

    def __str__(self) -> str:
        return "-".join([self.test.removeprefix("test_"), *(_named(value) for value in self.arguments.values())])

    @property
    def arguments(self) -> dict[str, Any]:
        """By name, outermost decorator first."""
        chosen = zip(_parameters(self.test).items(), self.places, strict=True)
        return {name: values[place] for (name, values), place in chosen}


def _named(value: Any) -> str:
    if isinstance(value, dict):
        return "meta" if value["init_model_with_meta_device"] else "plain"
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def _parameters(test: str) -> dict[str, list[Any]]:
    marks = getattr(getattr(upstream().TestMegatronFsdpFullyShard, test), "pytestmark", [])
    return {mark.args[0]: list(mark.args[1]) for mark in reversed(marks) if mark.name == "parametrize"}


def cases() -> Iterator[Case]:
    """Every parametrisation that needs neither TransformerEngine nor a CUDA graph nor tensor parallelism."""
    for test in vars(upstream().TestMegatronFsdpFullyShard):
        if test.startswith("test_") and test not in NEEDS_MORE:
            sizes = [range(len(values)) for values in _parameters(test).values()]
            found = (Case(test, places) for places in itertools.product(*sizes))
            yield from (case for case in found if _runs_here(case.arguments))


def _runs_here(arguments: dict[str, Any]) -> bool:
    tensor_parallel = arguments.get("mesh_dim_config", (1,))[-1] > 1
    engine = arguments.get("model_type") == "te_transformer" or arguments.get("optimizer_type") == "fused_adam"
    return not (tensor_parallel or engine)


def run_cases(rank: int, chosen: tuple[Case, ...]) -> dict[Case, str]:
    """How each case ended on this rank: "passed", or why it was left out."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    upstream().SHARED_TMP_DIR = folder[0]
    return {case: _outcome(case) for case in chosen}


def _outcome(case: Case) -> str:
    torch._dynamo.reset()
    try:
        getattr(upstream().TestMegatronFsdpFullyShard(), case.test)(**case.arguments)
    except (pytest.skip.Exception, pytest.xfail.Exception) as left_out:
        return f"left out: {left_out}"
    return "passed"
