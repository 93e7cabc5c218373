"""A declared map: packed, stacked and renamed parameters, and those cut by hand, beside a program that keeps each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from harness.capture import Part, watch
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

WORDS, WIDTH, ROWS, LENGTH, STEPS, EXPERTS = 16, 8, 8, 6, 11, 2


class Apart(nn.Module):
    """Each tensor is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(EXPERTS))
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mixed = self.q(x) * self.k(x).sigmoid() + self.v(x)
        return self.output(x + sum(torch.tanh(mixed @ expert) for expert in self.experts))


class Packed(nn.Module):
    """The same weights in fewer parameters; of two tensor-parallel ranks, each with every second half."""

    def __init__(self, of: Apart, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.embedding, self.ranks = of.embedding, ranks
        here = slice(rank * WIDTH // ranks, (rank + 1) * WIDTH // ranks)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // ranks)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([each.weight[here] for each in (of.q, of.k, of.v)]))
            self.qkv.bias.copy_(torch.cat([each.bias[here] for each in (of.q, of.k, of.v)]))
        self.experts = nn.Parameter(torch.stack([each.detach()[here] for each in of.experts]))
        self.head = of.output

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(_Sum.apply(x, False) if self.ranks > 1 else x).chunk(3, -1)
        mixed = q * k.sigmoid() + v
        products = [mixed @ expert for expert in self.experts]
        whole = [_Sum.apply(each, True) if self.ranks > 1 else each for each in products]
        return self.head(x + sum(torch.tanh(each) for each in whole))


class _Sum(torch.autograd.Function):
    """Sum over the ranks in the forward, or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.forward_sums = forward
        return _summed(x) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient if ctx.forward_sums else _summed(gradient), None


def _summed(x: Tensor) -> Tensor:
    found = x.clone()
    dist.all_reduce(found)
    return found


def packed(name: str, shape: Sequence[int]) -> list[Part] | None:
    if name.startswith("qkv."):
        each = shape[0] // 3
        return [Part(name.replace("qkv", of), rows=(i * each, (i + 1) * each)) for i, of in enumerate("qkv")]
    if name == "experts":
        return [Part(f"experts.{e}", rows=(e, e + 1), shape=(WIDTH, WIDTH)) for e in range(EXPERTS)]
    return [Part("output.weight")] if name == "head.weight" else None


def cut(name: str, shape: Sequence[int]) -> list[Part] | None:
    """Of two ranks, which cut every one of the packed tensors."""
    half = dist.get_rank() * WIDTH // 2, 0
    if name.startswith("qkv."):
        return [Part(each.name, each.rows, (WIDTH, *shape[1:]), half) for each in packed(name, shape) or ()]
    if name == "experts":
        return [Part(f"experts.{e}", (e, e + 1), (WIDTH, WIDTH), half) for e in range(EXPERTS)]
    return packed(name, shape)


def interleaved(name: str, shape: Sequence[int]) -> list[Part] | None:
    """As `cut`, with the tensor's rows under one name, as another program packs them."""
    if name.startswith("qkv."):
        each, rank = shape[0] // 3, dist.get_rank()
        whole = (3 * WIDTH, *shape[1:])
        return [Part(name, (i * each, (i + 1) * each), whole, (i * WIDTH + rank * each, 0)) for i in range(3)]
    return cut(name, shape)


MAPS = {"packed": packed, "fsdp2": packed, "cut": cut, "interleaved": interleaved}


def train(rank: int, kind: str, path: Path | None, fault: bool = False) -> list[bytes]:
    torch.manual_seed(0)
    apart = Apart()
    by_hand = kind in ("cut", "interleaved")
    model = apart if kind == "apart" else Packed(apart, rank, 2) if by_hand else Packed(apart)
    if kind == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = None if path is None else watch(model, optimizer, path, share=1.0, parts=MAPS.get(kind))
    generator = torch.Generator().manual_seed(1)
    for number in range(1, STEPS + 1):
        batch = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
        rows = batch.chunk(2)[rank] if kind == "fsdp2" else batch
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault and number == 10:
            with torch.no_grad():
                model.get_parameter("experts")[1].mul_(1.01)
        if run is not None:
            run.step(loss=loss, data=rows)
    if run is not None:
        run.close()
    return [getattr(param, "_local_tensor", param).detach().numpy().tobytes() for param in model.parameters()]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "study"
    for kind, ranks in (("apart", 1), ("packed", 1), ("fsdp2", 2), ("cut", 2), ("interleaved", 2)):
        run_ranks(train, ranks, kind, folder / kind)
    return folder


@pytest.mark.parametrize("kind", ["packed", "fsdp2", "cut"])
def test_each_is_equivalent_to_a_program_that_keeps_them_apart(kind: str, study: Path) -> None:
    assert load(study / kind).summary["unplaced"] == {}
    verdict = compare(study / kind, study / "apart")
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.EQUAL), verdict.sentence


def test_interleaved_rows_are_put_in_their_place(study: Path) -> None:
    assert load(study / "interleaved").summary["unplaced"] == {}
    found, whole = (load(study / name).captures[1] for name in ("interleaved", "apart"))
    packed_rows = found.values("qkv.weight")
    for number, name in enumerate("qkv"):
        part = packed_rows[number * WIDTH : (number + 1) * WIDTH]
        assert part == pytest.approx(whole.values(f"{name}.weight"), rel=1e-4, abs=1e-7)


def test_a_fault_is_named_by_the_declared_name(study: Path, tmp_path: Path) -> None:
    run_ranks(partial(train, fault=True), 1, "packed", tmp_path / "study" / "faulty")
    verdict = compare(tmp_path / "study" / "faulty", study / "apart")
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    for word in ("at step 10, ", "experts.1", "optimizer"):
        assert word in verdict.sentence


def test_the_map_changes_no_bit(tmp_path: Path) -> None:
    assert run_ranks(train, 2, "cut", tmp_path / "study" / "run") == run_ranks(train, 2, "cut", None)


def test_a_part_that_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = {"weight": [Part("w", rows=(0, 1), shape=(2, 4))]}
    with watch(model, optimizer, tmp_path / "study" / "run", parts=lambda name, shape: wrong.get(name)) as run:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        run.step()
    assert "are not the whole of" in load(run.path).summary["unplaced"]["weight"]


MUTANTS = slips(
    """
    rows of a part: A part begins at the parameter's row
        capture.shards._moved: down * length - rows[0] * width => down * length
        cut
    where a part begins: Each part is read from the parameter's first row
        capture.shards._moved: begin + start - of => begin
        packed
    place of a part: Ranks overwrite each other's rows
        capture.shards._moved: first - rows[0] + down => first - rows[0]
        cut
    local gradients of a part: Each part is given the local gradient of the parameter's first rows
        capture.watching.Watching._local_gradient: slice(*shard.whole) => slice(0, shard.whole[1] - shard.whole[0])
        packed
    """
)


def mutated(rank: int, name: str, path: Path) -> None:
    slip, kind = MUTANTS[name]
    with slip.patched():
        train(rank, kind, path)


@pytest.mark.parametrize("name", each("Declared parts", MUTANTS))
def test_a_mutant_is_found(name: str, study: Path, tmp_path: Path) -> None:
    path = tmp_path / "study" / "wrong"
    run_ranks(mutated, 2 if MUTANTS[name][1] == "cut" else 1, name, path)
    if name.startswith("local"):
        stream = load(path).stream
        assert stream is not None
        assert abs(stream.column("local_0") - stream.column("reduced_0")).max() > 1e-3
    else:
        assert compare(path, study / "apart").outcome not in (Outcome.EQUIVALENT, Outcome.EQUAL)
