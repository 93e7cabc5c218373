"""What FSDP2 computes and this engine refuses is what docs/compatibility.md lists, each with its fix."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.fsdp import MixedPrecisionPolicy, fully_shard as own_fully_shard, fully_shard_model, fully_shard_optimizer
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.ragged.calls import HALVES, REFUSED, cut, mesh_of
from tests.support.spawn import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WIDTH = 8
"""Divides evenly, as some of FSDP2's operations need."""
Act = Callable[[nn.Module, Callable[..., Any]], Any]
"""Something done to a module after a backward; the second argument takes an optimizer of it."""


def closure(module: nn.Module) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        module.zero_grad()
        value: Tensor = module(torch.ones(2, WIDTH)).square().mean()
        value.backward()
        return value

    return loss


OPERATIONS: dict[str, Act] = {
    "`parameter.t().mul_(2)`, `parameter.view(-1).mul_(2)`": lambda m, _: [
        view.mul_(2) for p in m.parameters() for view in (p.detach().view(-1), p.detach().t())
    ],
    "`nn.Parameter(parameter)`": lambda m, _: [nn.Parameter(p) for p in m.parameters()],
    "`load_state_dict(state, assign=True)`": lambda m, _: (
        m.load_state_dict(m.state_dict(), assign=True),
        m(torch.ones(2, WIDTH)),
    ),
    "a module, or a parameter, put in after sharding": lambda m, _: (
        setattr(m, "1", nn.Linear(WIDTH, WIDTH, bias=False)),
        m(torch.ones(2, WIDTH)),
    ),
    "`torch.optim.LBFGS`, where rows divide evenly": lambda m, take: take(torch.optim.LBFGS(m[:2].parameters())).step(
        closure(m)
    ),
    "`requires_grad_(True)` of what was frozen when it was sharded": lambda m, _: (
        m[2].requires_grad_(True),
        m(torch.ones(2, WIDTH)).sum().backward(),
    ),
    "`copy.copy(model)`": lambda m, _: copy.copy(m),
}


def told(act: Callable[..., Any], *args: Any) -> str:
    try:
        act(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _as_it_is(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def partly_frozen() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    layers[2].requires_grad_(False)
    return nn.Sequential(*layers)


def of_models(rank: int) -> dict[str, tuple[str, str]]:
    """What FSDP2 and this engine say, by operation."""
    warnings.simplefilter("ignore")
    found = {}
    for name, act in OPERATIONS.items():
        theirs, mine = (partly_frozen() for _ in range(2))
        for part in (*theirs, theirs):
            fully_shard(part)
        model = fully_shard_model(mine, fsdp_unit_modules=[nn.Linear])
        for each in (theirs, model):
            each(torch.ones(2, WIDTH) + rank).sum().backward()
        found[name] = told(act, theirs, _as_it_is), told(act, mine, partial(fully_shard_optimizer, model))
        model.close()
    return found


TRAININGS = (
    *(((2,), strategy) for strategy in STRATEGIES),
    ((1, 2), "optim_grads_params"),
    ((2, 1), "optim_grads_params"),
)
"""Sizes of a mesh, the inner axis last, and a strategy."""


def narrow(rank: int) -> list[str]:
    """Trainings of an fp32 module under `param_dtype` and `reduce_dtype`, in which a frozen layer follows another one
    slowly, that do not end with FSDP2's bits."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    wrong = []
    for sizes, strategy in TRAININGS:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[2 - len(sizes) :])
        theirs, mine = (partly_frozen() for _ in range(2))
        for part in (*theirs, theirs):
            fully_shard(part, mesh=mesh, mp_policy=TheirPolicy(**dtypes))
        policy = MixedPrecisionPolicy(**dtypes)
        model = own_fully_shard(mine, mesh=mesh, unit_modules=[nn.Linear], strategy=strategy, mp_policy=policy)
        right, found = (trained(each, rank) for each in (theirs, model))
        model.close()
        if {value.dtype for value in found} != {torch.float32} or not all(map(torch.equal, right, found)):
            wrong.append(f"{sizes}, {strategy}")
    return wrong


def trained(model: Any, rank: int) -> list[Tensor]:
    """Weights after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        out = model(torch.arange(2.0 * WIDTH).view(2, WIDTH) / 7 + rank + step)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[2].weight.lerp_(model[0].weight, 1e-3)
    return [(v.full_tensor() if isinstance(v, DTensor) else v).clone() for v in model.state_dict().values()]


def of_tensors(rank: int) -> list[str]:
    """Calls that this engine refuses and torch's own DTensor gets right."""
    warnings.simplefilter("ignore")
    found = []
    for call in REFUSED:
        values, mesh = torch.arange(24.0).view(8, 3), mesh_of(HALVES)
        names = {"torch": torch, "nn": nn}
        plain, p = values.clone(), distribute_tensor(values.clone(), mesh, [Shard(0)])
        right = told(exec, call, {**names, "p": plain, "q": plain + 1})
        theirs = told(exec, call, {**names, "p": p, "q": p + 1}) or told(p.full_tensor)
        mine = cut(values.clone(), HALVES, mesh)
        assert told(exec, call, {**names, "p": mine, "q": mine + 1}), call
        if not right and not theirs and torch.equal(p.full_tensor(), plain):
            found.append(call)
    return found


def listed() -> dict[str, str]:
    """Operations of the page, and what to write instead."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("## What FSDP2 computes and ours refuses")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[1:])


def test_the_page_lists_what_fsdp2_computes_and_ours_refuses() -> None:
    page = listed()
    assert page.keys() == OPERATIONS.keys()
    assert len(page) <= 10
    for found in run_ranks(of_models, 2):
        for name, (theirs, ours) in found.items():
            assert theirs == "", f"FSDP2 raises at {name}: remove it from the list"
            assert ours.split(":")[0] in {"RuntimeError", "NotImplementedError", "TypeError", "ValueError"}, (
                name,
                ours,
            )


def test_a_policy_in_fsdp2_s_names_gives_fsdp2_s_bits() -> None:
    assert run_ranks(narrow, 2) == [[], []]


def test_torch_gets_no_other_call_right() -> None:
    for calls in run_ranks(of_tensors, 2):
        assert calls == ["p.t().mul_(2)", "p.view(-1).mul_(2)"]
