"""Sketches are the same in every layout, linear, and tell distances."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from harness.config.roundoff import FINEST
from harness.fsdp.options import Numerics
from harness.probe.step_checks import pieces, sketch as module
from harness.probe.step_checks.local import ForwardWatch, LocalWatch
from harness.probe.step_checks.pieces import Block, Piece, own_places, shares
from harness.probe.step_checks.sketch import SKETCHES, Place, Signs, Sketch
from harness.probe.step_checks.table import largest_table, step_numbers, summed_table
from harness.store.check_stream import step_columns
from harness.train.step_checks import integer_floor
from tests.support.factory import small_config
from tests.support.mutants import finds


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_signs_depend_on_the_name_and_the_place_alone() -> None:
    a, b = drawn(4, 9), drawn(4, 9, seed=1)
    at = Place.whole(a.shape)
    first, again, other = (signs.sketch(name, a.shape, a, at).values for signs, name in
                           ((Signs(), "w"), (Signs(), "w"), (Signs(), "v")))  # fmt: skip
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    signs = Signs()
    linear = signs.sketch("w", a.shape, a + 2 * b, at).values
    torch.testing.assert_close(linear, first + 2 * signs.sketch("w", b.shape, b, at).values, rtol=1e-5, atol=1e-5)


def test_parts_that_are_widened_one_by_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a, signs = drawn(64, 8), Signs()
    at_once = signs.sketch("w", a.shape, a, Place.whole(a.shape))
    monkeypatch.setattr(module, "AT_ONCE", 40)
    in_parts = signs.sketch("w", a.shape, a, Place.whole(a.shape))
    torch.testing.assert_close(in_parts.values, at_once.values, rtol=1e-13, atol=1e-13)
    assert float(in_parts.squares) == pytest.approx(float(at_once.squares), rel=1e-13)


@pytest.mark.parametrize(
    ("width", "length"), [(0, 1), (1, 1), (15, 1), (16, 2), (61, 1), (64, 8), (176, 22), (1344, 64)]
)
def test_a_row_has_eight_cells_or_more_and_all_are_whole(width: int, length: int) -> None:
    assert module.cell_of(width) == length


def wrong_cells() -> Iterator[str]:
    """Pieces that end inside cells add up to the whole; and the mean of four squares is off by no more than that of
    four products of signs of rows and columns, though all four share the signs within a cell: of a whole matrix, of one
    row of it, of one column."""
    whole, signs = drawn(3, 64), Signs()
    cuts = itertools.pairwise((0, 5, 24, 31, 64))
    found = torch.stack([signs.sketch("w", (3, 64), whole[:, a:b], Place((0, 3), (a, b))).values for a, b in cuts])
    wanted = signs.sketch("w", (3, 64), whole, Place.whole(whole.shape)).values
    if not torch.allclose(found.sum(0), wanted, rtol=1e-13, atol=1e-13):
        yield "pieces that end inside cells"
    for name, rows, columns in (("whole", 16, 64), ("row", 1, 64), ("column", 16, 1)):
        a = torch.zeros(16, 64)
        a[:rows, :columns] = drawn(16, 64)[:rows, :columns]
        norm = float((a.double() ** 2).sum())
        every = [Signs().sketch(f"w{n}", a.shape, a, Place.whole(a.shape)).values for n in range(300)]
        means = (torch.stack(every) ** 2).mean(1)
        if (
            float(means.std()) / norm > ((9 - 1) / SKETCHES) ** 0.5
            or float((means < norm / 400).double().mean()) > 0.01
        ):
            yield f"a {name}: four sketches err more than four draws do"


def wrong_places() -> Iterator[str]:
    """The first look at a weight is also one at what is kept, where that is the very memory, and nowhere else."""
    layer, other = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(layer, other)
    names = [name for name, _ in model.named_parameters()]
    kept = {0: layer.weight.detach(), 2: other.weight.detach().clone(), 3: other.bias.detach()[:1]}
    first = layer.weight.detach().clone()
    with LocalWatch(model, names, Signs(), kept=kept) as watch:
        model(torch.ones(4, 3))
        with torch.no_grad():
            layer.weight += 1
        model(torch.ones(4, 3))
    if list(watch.begun) != [0]:
        yield f"looks at {list(watch.begun)} are taken for looks at what is kept"
    elif not torch.equal(watch.begun[0].values, Signs().sketch(names[0], (2, 3), first, Place.whole((2, 3))).values):
        yield "not the first look"


test_a_mutant_is_found = finds(
    "The comparator: sketches",
    wrong_places="""
        every look is one at what is kept: A step begins with what its forward computes with, whatever the rank keeps
            probe.step_checks.local.LocalWatch._forward: _is_same_memory(weight, kept) => True
    """,
    wrong_cells="""
        a row is one cell: All sketches of a row alone have one size, and may all be small
            probe.step_checks.sketch.cell_of: width // CELLS => width
        pieces begin with a cell: A piece that begins inside a cell has the signs of another place
            probe.step_checks.sketch.Signs.sketch: (left % length, -right % length)
            => (0, left % length + -right % length)
        cells of the whole row: A piece has the signs of the row's first cells
            probe.step_checks.sketch.Signs.sketch: drawn.cells[:, left // length : -(-right // length)]
                => drawn.cells[:, : -(-right // length) - left // length]
        one sign a row: All sketches share the rows' signs
            probe.step_checks.sketch.sketch: (of_rows * signs.rows) => (of_rows * signs.rows[:1])
    """,
    wrong_portions="""
        the first rows of all: Copies all look at the same rows, which count for each
            probe.step_checks.pieces.portions: share(earlier, copies) => share(0, 1)
    """,
)


@pytest.mark.parametrize("shape", [(40, 30), (300,), (1, 200), (5, 3, 3, 3), ()])
def test_the_mean_square_is_the_squared_norm(shape: tuple[int, ...]) -> None:
    """Over many names, with the spread of a product of signs: a fourth moment of at most 9."""
    a = drawn(*shape)
    squares = torch.stack([Signs().sketch(f"w{n}", shape, a, Place.whole(shape)).values for n in range(400)]) ** 2
    error = (9 - 1) ** 0.5 / squares.numel() ** 0.5
    assert float(squares.mean()) == pytest.approx(float((a.double() ** 2).sum()), rel=4 * error)


def test_a_piece_that_is_no_block_of_rows_and_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="cut behind its second dimension"):
        Place.of((4, 5, 6), (0, 0, 3), (4, 5, 3))


def test_copies_count_once_and_their_weights_add_up_to_nought() -> None:
    whole = Piece.of("a", drawn(4, 2))
    half = [Piece("b", (4, 2), drawn(2, 2), (Block(Place((top, top + 2), (0, 2))),)) for top in (0, 2)]
    missing = Piece("c", (4, 2), drawn(0, 2), ())
    ranks = [[whole, half[rank % 2], missing] for rank in range(4)]
    rows = [own_places(each) for each in ranks]
    told = [shares(rows, rank) for rank in range(len(ranks))]
    assert torch.stack([counted for counted, _ in told]).tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    among = torch.stack([weights for _, weights in told])
    assert torch.allclose(among[:, 0].sum(), torch.zeros((), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(among[[0, 2], 1].sum(), torch.zeros((), dtype=torch.float64), atol=1e-12)
    assert bool((among[:, :2].abs() > 0.01).all())
    assert among[:, 2].tolist() == [0.0] * 4


def wrong_portions() -> Iterator[str]:
    """Of copies every row is looked at once, also where there are fewer rows than copies; sketches of the portions add
    up to that of the whole."""
    whole, few = drawn(7, 6), drawn(2)
    for copies in (1, 2, 3, 5):
        ranks = [[Piece.of("a", whole), Piece.of("b", few), Piece("c", (4, 2), drawn(0, 2), ())] for _ in range(copies)]
        rows = [own_places(each) for each in ranks]
        found = [pieces.portions(each, rows, rank) for rank, each in enumerate(ranks)]
        if any(each[2] for each in found):
            yield "nothing is looked at"
        for index, tensor in enumerate((whole, few)):
            looked = [each[index] for each in found]
            seen = [row for blocks in looked for block in blocks for row in range(*block.place.rows)]
            of_blocks = [ranks[0][index].sketch(Signs(), tensor, blocks).values for blocks in looked]
            expected = ranks[0][index].sketch(Signs(), tensor).values
            off = float((torch.stack(of_blocks).sum(0) - expected).abs().max())
            if seen != [*range(len(tensor))] or off > 1e-12:
                yield f"{copies} copies look at {seen}, and are {off} off"


def test_sketches_on_a_device_are_put_together_with_those_of_nothing() -> None:
    with FakeTensorMode():
        there, nothing = (
            Sketch(torch.zeros(4, device=device), torch.zeros((), device=device)) for device in ("cuda", "cpu")
        )
        assert Sketch.stack([nothing, there]).values.device.type == "cpu"


def test_a_watch_is_gone_with_its_step() -> None:
    """In a cycle it would wait for the collector, and its small sketches keep the memory between them from being
    reused: a default run of 400 steps took 480 to 620 MiB instead of 330."""
    layer = torch.nn.Linear(3, 2)
    gc.collect()
    gc.disable()
    try:
        watch = LocalWatch(layer, ["weight", "bias"], Signs())
        with watch:
            layer(torch.ones(4, 3)).sum().backward()
        assert watch.saw_gradients
        left = weakref.ref(watch)
        del watch
        assert left() is None
    finally:
        gc.enable()


# -- the numbers of a step, from what ranks have added up --------------------------------------------------------------

M = SKETCHES


def sum_of(microbatches: int, alike: float, factor: float, least: float = 0.0) -> float:
    """The column `sum` where so many local gradients of norm 1 were added, whose sum is so much of what equal ones
    would have, and the engine's is times a factor off it."""
    summed, largest = summed_table(1), largest_table(1)
    total = alike * microbatches
    values = torch.full((1, M), total, dtype=torch.float64)
    summed["local"][:] = values
    summed["terms"][:] = float(microbatches)
    summed["saw"][:] = 1.0
    mean = values * factor / microbatches
    summed.put("reduced", Sketch(mean, mean[:, 0] ** 2))
    row, _ = step_numbers(summed, largest, microbatches, alike, least)
    return row[step_columns(M).index("sum")]


@pytest.mark.parametrize("microbatches", [1, 16, 1024])
def test_a_sum_of_equal_gradients_is_held_to_its_own_norm(microbatches: int) -> None:
    """Rounding errs by a share of the sum. Held to the norm of its terms, which is sqrt(M) times shorter, a clean sum
    of 1,024 microbatches would be off by 32 times that share."""
    assert sum_of(microbatches, 1.0, 1 + 1e-6) == pytest.approx(1e-6, rel=1e-3)


def test_what_cancels_is_held_to_its_terms() -> None:
    assert sum_of(1024, 1e-3, 2.0) == pytest.approx(1e-3 * math.sqrt(1024), rel=1e-6)


def test_what_integers_cannot_hold_of_a_tiny_gradient_is_told_of_a_larger_one() -> None:
    """A clean run under numerics=exact was DIFFERENT: its gradients were of a size with the integers' resolution."""
    config = small_config(numerics__mode=Numerics.exact, train__global_batch_size=8, train__microbatch_size=2)
    (floor,) = integer_floor(config, [(32, 32)])
    generator = torch.Generator().manual_seed(0)
    unit = 2.0**-config.numerics.exact_bits
    local = torch.rand(4, 32, 32, dtype=torch.float64, generator=generator) * 1000 * unit
    lost = float(((local / unit).round().sum(0) * unit / 4 - local.mean(0)).norm())
    assert lost / floor == pytest.approx(FINEST, rel=0.1)
    assert sum_of(4, 1.0, 1 + 1e-6, least=100.0) == pytest.approx(1e-8, rel=1e-3)
    assert integer_floor(small_config(), [(32, 32)]) == 0.0


def test_a_sum_that_is_lost_or_far_too_long_is_no_sum() -> None:
    assert sum_of(1024, 1.0, 0.0) == pytest.approx(math.sqrt(1024))
    assert sum_of(1024, 1.0, 1e6) == pytest.approx(1.0, rel=1e-5)


# -- ranges of flattened tensors, as FSDP1, DeepSpeed and Megatron cut them --------------------------------------------


SHAPES = ((7, 6), (5, 4, 3), (11,), (1, 40), (9, 1), ())
CUTS = ((), (1,), (5,), (6,), (7,), (4, 9), (2, 3, 10))


def flat(shape: tuple[int, ...], whole: Tensor, begin: int, end: int) -> Piece:
    """Elements of a flattened tensor in a buffer that has others before and behind them."""
    buffer = torch.cat([torch.full((3,), 7.0), whole.flatten()[begin:end], torch.full((2,), 7.0)])
    return Piece("w", shape, buffer, pieces.blocks_of(shape, begin, end, 3))


def wrong_ranges() -> Iterator[str]:
    for shape, cuts in itertools.product(SHAPES, CUTS):
        numel = math.prod(shape)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(numel))
        bounds = [0, *(cut for cut in cuts if cut < numel), numel]
        cut = [flat(shape, whole, a, b) for a, b in itertools.pairwise(bounds)]
        wanted = Signs().sketch("w", shape, whole, Place.whole(shape))
        parts = [each.sketch(Signs(), each.local) for each in cut]
        if not torch.allclose(torch.stack([part.values for part in parts]).sum(0), wanted.values, rtol=0, atol=1e-12):
            yield f"{shape} cut at {cuts}: another sketch"
        if abs(sum(float(part.squares) for part in parts) - float(wanted.squares)) > 1e-12 * numel:
            yield f"{shape} cut at {cuts}: other squares"
        found = torch.cat([each.local.take(each.indices(range(numel))) for each in cut])
        if not torch.equal(found, whole.flatten()):
            yield f"{shape} cut at {cuts}: other elements"
        put = torch.zeros(shape)
        for piece in cut:
            piece.put(put, piece.local)
        if not torch.equal(put, whole):
            yield f"{shape} cut at {cuts}: put elsewhere"
    yield from wrong_copies()


def wrong_copies() -> Iterator[str]:
    """Three ranks that keep the same range look at each element of it once."""
    whole = torch.arange(30.0).view(5, 6)
    held = [[flat((5, 6), whole, 4, 27)] for _ in range(3)]
    rows = [own_places(each) for each in held]
    shares = [pieces.portions(each, rows, rank)[0] for rank, each in enumerate(held)]
    seen = torch.cat([held[0][0].local[each.begin : each.end] for share in shares for each in share])
    if not torch.equal(seen.sort().values, whole.flatten()[4:27]):
        yield "copies do not look at each element once"
    wanted = held[0][0].sketch(Signs(), held[0][0].local)
    parts = [held[0][0].sketch(Signs(), held[0][0].local, share).values for share in shares]
    if not torch.allclose(torch.stack(parts).sum(0), wanted.values, rtol=0, atol=1e-12):
        yield "what copies look at has another sketch"


test_a_mutant_of_ranges_is_found = finds(
    "The comparator: sketches",
    wrong_ranges="""
        a range begins with a row: The end of a row has the signs of its begin
            probe.step_checks.pieces.blocks_of: (left, width)) => (0, width - left))
        rows one on: A range that begins with a row has the signs of the next
            probe.step_checks.pieces.blocks_of: top + bool(left), bottom => top + 1, bottom + (not left)
            ()
            ^RuntimeError
        elements from the begin of the tensor: A range's element is looked up where the tensor's lies
            probe.step_checks.sketch.Place.index: (row - top) * => row *
            ()
            ^IndexError
        all copies look at all: What copies hold counts several times
            probe.step_checks.pieces.Block.share: (bottom - top) * each // parts => (bottom - top) * (each > part)
    """,
)


# -- what modules give out, whoever computes which part of a batch and how often ---------------------------------------


SEQUENCES, TOKENS = 6, 4
ROWS = SEQUENCES * TOKENS


class Small(nn.Module):
    """Two layers, the second computed again in the backward or not."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embedding = nn.Embedding(11, 6, dtype=torch.float64)
        self.up = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embedding(tokens)
        return checkpoint(self.up, found, use_reentrant=False) if self.again else self.up(found)


def seen(cuts: Sequence[Sequence[int]], *, again: bool = False, rows: int = ROWS) -> dict[str, Tensor]:
    """Sketches, added over ranks, where each rank has so many sequences in each of its microbatches."""
    torch.manual_seed(0)
    model, tokens = Small(again=again), torch.randint(0, 11, (SEQUENCES, TOKENS))
    found: dict[str, Tensor] = {}
    begin = 0
    for microbatches in cuts:
        with ForwardWatch(model, Signs(), rows, begin * TOKENS) as watch:
            for count in microbatches:
                model(tokens[begin : begin + count]).square().sum().backward()
                begin += count
        for name, values in watch.found.items():
            found[name] = found.get(name, torch.zeros(SKETCHES + 1, dtype=torch.float64)) + values
    return found


def wrong_sketches() -> Iterator[str]:
    """What is not the same however the batch is cut, lazily."""
    whole = seen([[SEQUENCES]])
    if [*whole] != ["embedding", "up.0", "up.1", "up", ""]:
        yield f"modules in the order of their calls: {[*whole]}"
    for cuts, again in (([[2, 4]], False), ([[3], [3]], False), ([[2, 1], [1, 2]], False), ([[3, 3]], True)):
        for name, found in seen(cuts, again=again).items():
            if not torch.allclose(found, whole[name], rtol=1e-12, atol=1e-12):
                yield f"{name or 'the model'} of {cuts}, {again=}"
    part = seen([[SEQUENCES]], rows=5)
    for cuts in ([[1, 5]], [[1], [5]], [[2, 4]]):
        for name, found in seen(cuts, rows=5).items():
            if not torch.allclose(found, part[name], rtol=1e-12, atol=1e-12):
                yield f"{name or 'the model'} of {cuts}, of the first five positions"


test_a_mutant_of_forwards_is_found = finds(
    "The comparator: forwards in 16 bits",
    wrong_sketches="""
        what is computed again counts again: A call in the backward counts as one more
            probe.step_checks.local.ForwardWatch._hook: name in self._called or =>
        of the last microbatch: Sketches of a microbatch replace those of the one before
            probe.step_checks.local.ForwardWatch._look: torch.float64)) + row => torch.float64)) * 0 + row
        every microbatch is the first: Microbatches begin where the first one does
            probe.step_checks.local.ForwardWatch._new: self.next += inputs
            => self.next = self.next if self.next else inputs
        every rank is the first: A rank's place is not looked at
            probe.step_checks.local.ForwardWatch.__init__: min(rows, ROWS), first => min(rows, ROWS), 0
        every microbatch is cut alike: Positions beyond those that are looked at are looked at too
            probe.step_checks.local.ForwardWatch._look: min(self._begin + count, self.rows)
            => self._begin + min(count, self.rows)
    """,
)
