"""unsharded() makes weights whole, as many as are asked for; edits in it, and between steps, are kept."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard
from harness.shm.transfer import Transport
from tests.fsdp.checked import RANKS, ZERO3, each_holds, each_is_found, of_slips, said
from tests.fsdp.pairs import PAIRS, STRATEGIES, arguments_of
from tests.support.spawn import run_ranks

BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32)


class Marked(nn.Parameter):
    """A parameter class of the program's own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = Marked(torch.full((6,), 0.7))
        self.seen: set[type] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {type(self.linear.weight), type(self.scale)}
        return x + torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    """An encoder and a decoder of which methods besides forward run parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.blocks = nn.Embedding(10, 6), nn.Sequential(Block(), Block(), Block())
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.embed(tokens)) * self.frozen
        return F.linear(x, self.embed.weight)

    def encode(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks[1](self.blocks[0](self.embed(tokens)))
        return x @ self.embed.weight.T

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int = 4) -> Tensor:
        """Greedy: the model once a token, and parts of it before and after."""
        found = []
        for _ in range(length):
            tokens = (self.encode(tokens) + self(tokens) @ self.embed.weight.mean(1)[:, None]).argmax(-1)
            found.append(tokens)
        return torch.stack(found)


def built(strategy: str, *, narrow: bool = False, **more: Any) -> tuple[ShardedModel, torch.optim.Optimizer]:
    module = Net().bfloat16() if narrow else Net()
    more |= {"mixed_precision_policy": BF16} if narrow else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return fully_shard(module, optimizer, **{"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy} | more)


def tokens_of(rank: int) -> Tensor:
    return (torch.arange(5) + 2 * rank) % 10


def released(model: ShardedModel) -> bool:
    return not any(bucket.is_whole for bucket in model.engine.buckets)


def in_turn(rank: int, strategy: str) -> list[str]:
    """An edit right after a forward, or inside unsharded(), waits for ranks that still take this rank's weights."""
    model, optimizer = built(strategy)
    model(tokens_of(rank)).square().mean().backward()
    with slow_to_take(0.1) if rank == 1 else nullcontext(), torch.no_grad():
        optimizer.step()
        out = model(tokens_of(0))
        for param in model.parameters():
            param.mul_(2)
        with model.unsharded():
            for param in model.parameters():
                param.add_(1)
    with model.unsharded():
        mine = {name: param.detach().clone() for name, param in model.named_parameters()} | {"the output": out}
    everyone: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(everyone, mine)
    return [name for name, value in mine.items() if not all(torch.equal(value, each[name]) for each in everyone)]


def slow_to_take(seconds: float) -> Any:
    """Ranks that take others' weights take their time."""
    taking = Transport._advance

    def advance(*args: Any) -> None:
        time.sleep(seconds)
        taking(*args)

    return mock.patch.object(Transport, "_advance", advance)


def edited(rank: int, strategy: str, narrow: bool) -> list[str]:
    """Edits inside `gathered` count, elements that were not edited keep every bit of their main weights."""
    model, optimizer = built(strategy, narrow=narrow)
    model(tokens_of(rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return _edited(model, rank) + _trains(model, optimizer, rank)


def _edited(model: ShardedModel, rank: int) -> list[str]:
    net, told = model.module, []
    before = dict(model.full_weights())
    with model.unsharded():
        for name, param in model.named_parameters():
            told += [] if torch.equal(param, before[name].to(param.dtype)) else [f"{name} reads otherwise"]
    told += [] if all(torch.equal(w, before[n]) for n, w in model.full_weights()) else ["reading has changed weights"]
    with model.unsharded():
        dtype = net.embed.weight.dtype
        with torch.no_grad():
            net.embed.weight[2].mul_(2)
        net.blocks[2].scale.data.fill_(0.25)
        net.blocks[0].linear.bias.data = torch.full_like(net.blocks[0].linear.bias, 3)
        net.blocks[1].linear.weight.detach().view(torch.uint8).numpy()[0] = 0  # torch counts no edit here
        net.frozen.data[1:3] = 5
        inside = model(tokens_of(rank)).detach()
    right = {name: value.clone() for name, value in before.items()}
    right["embed.weight"][2] = (before["embed.weight"][2].to(dtype) * 2).float()
    right["blocks.2.scale"][:] = 0.25
    right["blocks.0.linear.bias"][:] = 3
    weight = right["blocks.1.linear.weight"]
    weight[0] = torch.zeros_like(weight[0])
    right["frozen"][1:3] = 5
    after = dict(model.full_weights())
    told += [name for name in right if not torch.equal(after[name], right[name])]
    with torch.no_grad():
        told += [] if torch.equal(model(tokens_of(rank)), inside) else ["the next forward does not see it"]
    return told


def _trains(model: ShardedModel, optimizer: torch.optim.Optimizer, rank: int) -> list[str]:
    """The next step begins where the edit has ended."""
    before = dict(model.full_weights())
    model(tokens_of(rank)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    moved = max(float((value - before[name]).abs().max()) for name, value in model.full_weights())
    return [] if 0 < moved < 0.1 else [f"a step moves a weight by {moved}"]


def outside(rank: int, strategy: str) -> list[str]:
    """Edits of main weights between steps count where bf16 is computed with."""
    model, optimizer = built(strategy, narrow=True)
    net, told = model.module, []
    edits: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
        "data": (lambda: net.embed.weight.data.clamp_(-0.3, 0.3), lambda seen: seen.clamp(-0.3, 0.3)),
        "assigned": (lambda: setattr(net.embed.weight, "data", net.embed.weight.data * 0.5), lambda seen: seen * 0.5),
        "in place": (lambda: torch.no_grad()(net.embed.weight.mul_)(2), lambda seen: seen * 2),
    }
    for name, (edit, right) in edits.items():
        before = dict(model.full_weights())["embed.weight"]
        edit()
        after = dict(model.full_weights())["embed.weight"]
        told += [] if torch.equal(after, right(before)) else [f"{name} is lost"]
        with model.unsharded():
            seen = net.embed.weight.detach().clone()
        told += [] if torch.equal(seen, after.to(seen.dtype)) else [f"{name} is not what is computed with"]
        model(tokens_of(rank)).float().square().mean().backward()
        edit()  # between backward and step
        edge = dict(model.full_weights())["embed.weight"]
        optimizer.step()
        optimizer.zero_grad()
        moved = float((dict(model.full_weights())["embed.weight"] - edge).abs().max())
        told += [] if moved < 0.05 else [f"{name} before a step is lost: {moved}"]
    return told


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda param: torch.no_grad()(param.mul_)(2),
    "through data": lambda param: param.data.mul_(2),
    "data assigned": lambda param: setattr(param, "data", param.data * 2),
}


def after_a_forward(rank: int, strategy: str, cases: list[tuple[str, bool]]) -> list[str]:
    """Edits of root weights, unsharded after a forward that no backward follows, count or are refused.

    cases: how they are edited, and whether weights are looked at before the next forward.
    """
    told = []
    for narrow, (how, looks) in itertools.product((False, True), cases):
        model, _ = built(strategy, narrow=narrow)
        right = 2 * dict(model.full_weights())["embed.weight"]
        model(tokens_of(rank))
        EDITS[how](model.module.embed.weight)
        try:
            if not looks:
                model(tokens_of(rank))
            after = dict(model.full_weights())["embed.weight"]
            told += [] if torch.equal(after, right) else [f"{how} is lost, narrow={narrow} looks={looks}"]
        except RuntimeError as error:
            told += [] if "parameter embed.weight was" in str(error) else [str(error)]
        model.close()
    return told


def refusing(rank: int, strategy: str) -> list[str]:
    """What `gathered` does not take, the same on all ranks; and that the model is as before."""
    model, optimizer = built(strategy)
    net = model.module
    before = dict(model.full_weights())

    def stepping() -> None:
        model(tokens_of(rank)).square().mean().backward()
        with model.unsharded():
            optimizer.step()

    def within() -> None:
        handle = net.blocks[0].register_forward_hook(lambda *_: model.unsharded().__enter__())
        try:
            model(tokens_of(rank))
        finally:
            handle.remove()

    def foreign() -> None:
        with model.unsharded(nn.Linear(2, 2)):
            pass

    told: list[str] = []
    wanted: dict[Callable[[], None], tuple[type[Exception], str]] = {
        stepping: (RuntimeError, r"call optimizer\.step\(\) and load_state_dict\(\) outside"),
        within: (RuntimeError, "inside the model's forward"),
        foreign: (ValueError, "not the sharded model's"),
    }
    for call, (kind, says) in wanted.items():
        told += said(call, kind, says)
        model.zero_grad()
    with torch.no_grad():
        model(tokens_of(rank))  # a forward that raised leaves its weights to the next one
    told += [] if strategy != ZERO3 or released(model) else ["something stays whole"]
    after = dict(model.full_weights())
    return told + [name for name in before if not torch.equal(before[name], after[name])]


def of_owners(rank: int, strategy: str) -> list[str]:
    """Where ranks edit differently, each element is what its owner has made of it, on all ranks."""
    model, _ = built(strategy)
    block = model.module.blocks[1]
    with model.unsharded(block):
        for param in block.parameters() if rank == 1 else ():
            param.data.fill_(9)
    with model.unsharded():
        mine = torch.cat([param.detach().flatten() for param in block.parameters()])
    everyone: list[Tensor] = [mine] * RANKS
    dist.all_gather_object(everyone, mine)
    told = [] if any(bool((each == 9).any()) for each in everyone) else ["an edit of its owner is lost"]
    return told + ([] if strategy == "no_shard" or torch.equal(*everyone) else ["copies part"])


def in_parts(rank: int, strategy: str) -> list[str]:
    """`gathered` of a part makes its units whole, and no other; in a double buffer as many as fit."""
    told = []
    model, _ = built(strategy)
    for wanted in (model.module.blocks[1].linear, model.module.blocks[1]):
        with model.unsharded(wanted):
            whole = [bucket.name for bucket in model.engine.buckets if bucket.is_whole]
            told += [] if strategy != ZERO3 or whole == ["blocks.1/float32"] else [f"{wanted}: {whole}"]
            with model.unsharded():
                pass
            told += [] if bool(model.module.blocks[1].scale.isfinite().all()) else ["gone after an inner one"]
    model(tokens_of(rank)).sum().backward()
    loss = model(tokens_of(rank)).sum() if strategy not in STRATEGIES[:2] else None
    with model.unsharded():
        pass
    if loss is not None:
        loss.backward()  # what a backward needs is still there
    with suppress(KeyError), model.unsharded():
        raise KeyError("body")
    model.zero_grad()
    told += [] if strategy != ZERO3 or released(model) else ["something stays whole"]
    return told + _in_double_buffer(strategy)


def _in_double_buffer(strategy: str) -> list[str]:
    model, _ = built(strategy, double_buffer=True)
    with model.unsharded(nn.ModuleList([*model.module.blocks[:2], model.module.embed])):
        pass
    if strategy != ZERO3:
        return []
    told = said(model.unsharded().__enter__, ValueError, "need double_buffer=False")
    return told + ([] if released(model) else ["something stays whole"])


CHECKS: dict[str, Callable[..., list[str]]] = {
    each.__name__: each for each in (in_turn, outside, refusing, of_owners, in_parts)
}
SEEN = [("in place", False)]
"""Torch's counters tell the next forward."""
UNSEEN = [case for case in itertools.product(EDITS, (False, True)) if case not in SEEN]
CHECKS |= {
    "after a forward": lambda rank, strategy: after_a_forward(rank, strategy, SEEN),
    "after a forward, unseen": lambda rank, strategy: after_a_forward(rank, strategy, UNSEEN),
}
CHECKS |= {
    f"edited {kind}": lambda rank, strategy, narrow=narrow: edited(rank, strategy, narrow)
    for kind, narrow in (("fp32", False), ("bf16", True))
}


test_weights_are_right_or_refused = each_holds(__name__, CHECKS)


def edited_under(rank: int) -> dict[str, list[str]]:
    """Under every pair of strategies, on both axes."""
    told = {}
    for pair, narrow in itertools.product(PAIRS, (False, True)):
        model, _ = built(pair.inner, narrow=narrow, **arguments_of(pair))
        told[f"{pair} {narrow}"] = _edited(model, rank)
        model.close()
    return told


def test_edits_count_under_every_pair_of_strategies() -> None:
    for told in run_ranks(edited_under, 4):
        assert not {pair: each for pair, each in told.items() if each}


# -- mutants -----------------------------------------------------------------------------------------------------------


MUTANTS = of_slips(
    """
    edits dropped: What is edited inside unsharded() is dropped with the gathered weights
        fsdp.runtime.weights.Weights._take_edits: bucket.take_over(places) => pass
        edited fp32
    low bits lost: Main weights become what the narrow compute weights say, edited or not
        fsdp.storage.param_group.ParamGroup.take_over: torch.where(places, seen.to(main.dtype), main.detach()) => seen
        edited bf16
    counted edits only: Only edits that torch counts are looked for
        fsdp.storage.param_group.ParamGroup.differing: if self.computes_with_main_weights: => if True:
        edited fp32
    not installed: What ranks have edited stays what each has made of its copy
        fsdp.runtime.weights.Weights.unsharded: self.install() => pass
        of_owners / optim
    readers forgotten: Weights are edited while other ranks still read them where they are
        fsdp.runtime.gather.GatherPipeline.wait_for_peers: group.settle() => pass
        in_turn / optim
    lost after a forward: The next forward overwrites edits of weights that stayed unsharded
        fsdp.storage.param_group.ParamGroup.refuse_lost_edits: self.sharded().edited() => []
        after a forward
    all units: unsharded() of a part makes the whole model whole
        fsdp.runtime.weights.Weights._units_of: if wanted is None: => if True:
        in_parts
    counters unread: Edits of main weights that are computed with are not looked for
        fsdp.storage.at_rest.ShardedParameters.edited: lambda self: []
        of_owners / optim
    data leaves no trace: Edits through `data` of main weights that are computed with are not counted
        fsdp.storage.at_rest.ShardedParameters.count_edits: lambda self: None
        of_owners / optim
    edits uncounted: Edits of sharded parameters do not reach compute weights that are kept
        fsdp.storage.param_group.ParamGroup.is_stale: False
        outside / optim
    """
)


test_a_wrong_engine_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs edit")
