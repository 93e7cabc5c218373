"""megatron-fsdp's own tests of its entries hold here: the text of upstream with a few replacements.

[Note: Upstream's tests] `tests/vendored/megatron_lm` has upstream's file as it is. `REPLACED` is all that is changed in
it: what is imported, the device, and two places that read upstream's buffers. Whatever else a test there says of the
engine must hold here. Its cases are upstream's parametrisations, but for those that need TransformerEngine, a CUDA
graph, or tensor parallelism; each runs on eight ranks, as upstream's do.
"""

from __future__ import annotations

import hashlib
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
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

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
    bucket = model.engine.buckets[0]
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


BLOB = "28e95ed4a56880f13e51f1736457cb22b3fca465"
"""What git calls upstream's file."""


def is_left_out(case: Case) -> bool:
    """Whether upstream leaves a case out of its own tests, as what its engine does not do."""
    given = case.arguments
    inner = given.get("dp_shard_strategy", given.get("shard_strategy"))
    outer = given.get("dp_outer_strategy", given.get("outer_shard_strategy"))
    hybrid = outer == "optim" and inner != "optim_grads_params"
    replicated = inner == "no_shard" and case.test == "test_dcp_checkpoint_save_and_load"
    if case.test == "test_fully_shard":
        replicated = inner == "no_shard" and (
            given["common_args"]["init_model_with_meta_device"] or outer == "no_shard"
        )
    return hybrid or replicated


def is_slow(case: Case) -> bool:
    """Whether torch.compile is in it."""
    return bool(case.arguments.get("common_args", {}).get("torch_compile"))


def visit(case: Case) -> tuple[bool, str | None]:
    """With whom a case is run: eight ranks that compile one model for the first time take a minute or two."""
    return is_slow(case), case.arguments.get("model_type") if is_slow(case) else None


CASES = Cover(sorted(cases(), key=is_left_out), values=lambda case: case[:1], key=visit, strength=1)
"""`make test` runs one case of every test of upstream's."""


@once
def ran(batch: tuple[Case, ...]) -> list[dict[Case, str]]:
    return run_ranks(run_cases, RANKS, batch)


@pytest.mark.parametrize("case", CASES.params())
def test_upstream_s_test_holds(case: Case) -> None:
    outcomes = {of_rank[case] for of_rank in ran(CASES.batch(case))}
    assert len(outcomes) == 1, f"ranks end otherwise: {outcomes}"
    assert (outcomes != {"passed"}) == is_left_out(case), outcomes
    if is_left_out(case):
        pytest.skip(f"upstream: {outcomes.pop()}")


def test_what_is_vendored_is_upstream_s() -> None:
    content = SOURCE.read_bytes()
    assert hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == BLOB
    assert "NVIDIA CORPORATION" in (SOURCE.parent / "LICENSE").read_text()


def test_every_other_test_is_run() -> None:
    tests = {name for name in vars(upstream().TestMegatronFsdpFullyShard) if name.startswith("test_")}
    assert {case.test for case in CASES} == tests - NEEDS_MORE
    assert len(CASES) == 115
