"""Every awkward property of the odd family is really there, in the default data too, and costs the function nothing."""

from __future__ import annotations

import math

import torch
from torch import nn

from harness.data.loader import Loader
from harness.models.odd import Block, Frozen, Odd
from harness.models.workload import workload_for
from tests.models.families import filled, joined, mean_gradient, option, rows

RANKS = (2, 4, 8, 16)


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def odd(**changes: object) -> tuple[object, nn.Module]:
    workload = workload_for(option("model=odd", **changes))
    return workload, filled(workload)


def test_the_side_branch_is_used_by_some_microbatches_of_the_default_data_and_not_by_others() -> None:
    """So a parameter's gradient is absent on one rank and present on the other, within one step."""
    config = option("model=odd")
    workload = workload_for(config)
    model = filled(workload, torch.float32)
    used: list[list[bool]] = []
    for step in range(1, 9):
        used.append([])
        for rank in range(config.mesh.world_size):
            for part in Loader(config, rank).batch(step):
                model.zero_grad(set_to_none=True)
                tokens, targets = (torch.from_numpy(each)[:, :4] for each in part)
                workload.loss(model, (tokens, targets)).backward()
                absent = {name for name, weight in model.named_parameters() if weight.grad is None}
                sides = {name for name in absent if ".side." in name}
                assert absent - sides == frozen_names(model), "nothing else is ever unused"
                assert len(sides) in (0, 2 * config.model.num_layers)
                used[-1].append(not sides)
    flat = [each for step in used for each in step]
    assert 0.2 < sum(flat) / len(flat) < 0.95
    half = len(used[0]) // 2
    diverging = [any(step[:half]) != any(step[half:]) for step in used]
    assert sum(diverging) >= 2, "in some steps one rank uses it and the other does not"
    assert any(step[0] != step[half] for step in used)


def frozen_names(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


def test_called_on_nothing_the_side_branch_gets_zeros_instead() -> None:
    for skip_idle in (True, False):
        config = option("model=odd", skip_idle=skip_idle)
        workload = workload_for(config)
        assert workload.may_leave_unused is skip_idle
        model = filled(workload)
        tokens = torch.full((2, 5), 1)
        workload.loss(model, (tokens, tokens)).backward()
        side = model.get_parameter("blocks.0.side.weight")
        assert side.grad is None if skip_idle else torch.equal(side.grad, torch.zeros_like(side))


def test_shapes_are_awkward() -> None:
    config = option("model=odd")
    model = workload_for(config).build("meta", torch.bfloat16)
    sizes = (config.model.vocab_size, config.model.dim, config.model.ffn_dim)
    assert all(is_prime(size) for size in sizes)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert {len(shape) for shape in shapes.values()} == {1, 2, 3, 4}
    assert {(1,), (3,)} < set(shapes.values())
    for ranks in RANKS:
        assert any(math.prod(shape) < ranks for shape in shapes.values())
        assert all(shape[0] % ranks for name, shape in shapes.items() if name.startswith("blocks."))
    assert any(math.prod(shape[1:]) % 2 for shape in shapes.values() if len(shape) > 1)
    for unit in (Block, Frozen):
        assert any(isinstance(module, unit) for module in model.modules())


def test_weights_are_tied_frozen_and_owned_by_the_root() -> None:
    workload, model = odd()
    assert isinstance(model, Odd)
    assert model.output.weight is model.embedding.weight
    assert model.blocks[0].fixed_QD.requires_grad is False
    assert not any(weight.requires_grad for weight in model.frozen.parameters())
    assert any(weight.requires_grad for weight in model.blocks[0].parameters())
    owned = {id(w) for m in model.modules() if isinstance(m, workload.unit_classes) for w in m.parameters()}
    root = {name for name, weight in model.named_parameters() if id(weight) not in owned}
    assert root == {"embedding.weight", "cells", "taps", "temperature", "norm.weight", "output.bias"}
    for name in frozen_names(model):  # exact in every format an engine may keep them in
        value = model.get_parameter(name)
        assert all(torch.equal(value.to(d).double(), value.double()) for d in (torch.bfloat16, torch.float16))
        assert value.abs().max() > 0


def test_the_tied_matrix_gets_both_gradients_and_the_frozen_unit_passes_them_on() -> None:
    workload, model = odd()
    parts = joined(rows(option("model=odd"), 2), 2)
    _, tied = mean_gradient(workload, model, parts)
    model.output.weight = nn.Parameter(model.embedding.weight.detach().clone())
    _, apart = mean_gradient(workload, model, parts)
    both = apart["embedding.weight"] + apart["output.weight"]
    torch.testing.assert_close(tied["embedding.weight"], both, rtol=1e-12, atol=1e-15)
    assert apart["embedding.weight"].norm() > 1e-3 * both.norm()
    assert tied["blocks.0.conv.weight"].norm() > 0, "the first block lies before the frozen unit"


def test_what_is_called_how_often() -> None:
    for repeat_unit, calls in ((False, 1), (True, 2)):
        workload, model = odd(repeat_unit=repeat_unit)
        counts = {"block": 0, "ffn": 0}
        model.blocks[0].register_forward_hook(lambda *_, c=counts: c.update(block=c["block"] + 1))
        model.blocks[0].ffn.register_forward_hook(lambda *_, c=counts: c.update(ffn=c["ffn"] + 1))
        mean_gradient(workload, model, rows(option("model=odd"), 1))
        assert counts == {"block": calls, "ffn": 2 * calls}


def test_it_sees_only_the_past() -> None:
    _, model = odd()
    tokens = rows(option("model=odd"), 1)[0].tokens
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 257
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_buffers_are_wide_constant_and_found_again_from_meta() -> None:
    workload = workload_for(option("model=odd"))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        real = filled(workload, dtype)
        assert {buffer.dtype for buffer in real.buffers()} == {expected}
        model = workload.build("meta", dtype)
        assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])
        workload.materialise_buffers(model, torch.device("cpu"))
        for (name, buffer), other in zip(model.named_buffers(), real.buffers(), strict=True):
            assert torch.equal(buffer, other), name
    kept = [name for name in real.state_dict() if name in dict(real.named_buffers())]
    assert kept == [f"blocks.{number}.shift_D" for number in range(3)], "one buffer in state, one not"
