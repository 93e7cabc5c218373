"""Modules that declare their own meshes are told the right ones, begin, train and are saved as whole ones are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness.fsdp import MegatronModel, MixedPrecisionPolicy, build, fully_shard, tensor_parallel
from harness.fsdp.comm import mesh
from harness.fsdp.runtime import materialize
from tests.fsdp.checked import Mutant, each_is_found, patched
from tests.fsdp.tensor_parallel.training import Case, mesh_of, whole_of
from tests.support.spawn import run_ranks

WORLD = 4
WIDTH, HIDDEN, ROWS = 6, 12, 3
LARGEST = 448.0
"""Of e4m3."""


class PortionLinear(nn.Module):
    """y = x w^T + b, of rows of w (`column`), of columns of w (`row`), or of all of it.

    It does what TransformerEngine's layers do: sized for this rank's TP shard, told its meshes, and rounded under one
    amax of the whole weight.

    Args:
        tp_rank, tp_size: this rank's TP shard.
    """

    def __init__(self, wide_in: int, wide_out: int, mode: str, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.mode, self.tp_rank, self.tp_size = mode, tp_rank, tp_size
        self.tp_mesh: DeviceMesh | None = None
        self.weight_mesh: DeviceMesh | None = None
        rows, columns = (tp_size, 1) if mode == "column" else (1, tp_size)
        self.weight = nn.Parameter(torch.empty(wide_out // rows, wide_in // columns, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(wide_out // rows, dtype=torch.float64))
        if not self.weight.is_meta:
            self.reset_parameters()

    def placement(self, name: str) -> Placement:
        """How a parameter lies on the tensor-parallel axis."""
        if self.mode == "column":
            return Shard(0)
        return Shard(1) if name == "weight" else Replicate()

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Take meshes, and make DTensors of the parameters."""
        self.tp_mesh, self.weight_mesh = tp_mesh, weight_mesh
        for name, param in list(self._parameters.items()) if tp_mesh is not None else ():
            self._put(name, param.detach())

    def _put(self, name: str, local: Tensor) -> None:
        made: Any = local
        if self.tp_mesh is not None:
            made = DTensor.from_local(local, self.tp_mesh, [self.placement(name)], run_check=False)
        setattr(self, name, nn.Parameter(made))

    def reset_parameters(self) -> None:
        """Other numbers in every TP shard; parameters without memory are registered anew."""
        for name, param in list(self._parameters.items()):
            local = param.to_local() if isinstance(param, DTensor) else param.detach()
            tp_shard = 0 if isinstance(self.placement(name), Replicate) else self.tp_rank
            values = torch.linspace(-0.1, 0.1 + 0.1 * tp_shard, local.numel(), dtype=local.dtype).reshape(local.shape)
            self._put(name, values.clone())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias))
        weight = self._rounded(weight)
        if self.tp_mesh is None:
            return F.linear(x, weight, bias)
        if self.mode == "column":
            whole = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
            return F.linear(whole.to_local(grad_placements=[Partial()]), weight, bias)
        term = DTensor.from_local(F.linear(x, weight), self.tp_mesh, [Partial()], run_check=False)
        return term.redistribute(placements=[Replicate()]).to_local() + bias

    def _rounded(self, weight: Tensor) -> Tensor:
        """The weight as 8 bits hold it under one scale of the whole; its gradient is that of the weight."""
        amax = weight.detach().abs().max()
        if self.weight_mesh is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.weight_mesh.get_group())
        scaled = (weight.detach() * (LARGEST / amax)).float().to(torch.float8_e4m3fn)
        return weight + (scaled.double() * (amax / LARGEST) - weight).detach()


class Pair(nn.Module):
    """Two of them, and an ordinary layer that every rank has whole."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.up = PortionLinear(WIDTH, HIDDEN, "column", tp_rank, tp_size)
        self.down = PortionLinear(HIDDEN, WIDTH, "row", tp_rank, tp_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.first(x))))
        return out


def batch(step: int, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def sharded_pair(case: Case, **options: Any) -> tuple[MegatronModel, torch.optim.Optimizer, Pair]:
    """The pair, whose optimizer is there before the engine is."""
    mesh = mesh_of(case)
    place, size = mesh.get_local_rank("tp"), case.tp
    if options.get("init_model_with_meta_device"):
        with torch.device("meta"):
            pair = Pair(place, size)
    else:
        pair = Pair(place, size)
    outer = {"dp_outer_dim": "outer"} if case.outer > 1 else {}
    model, optimizer = fully_shard(
        pair,
        torch.optim.SGD(pair.parameters(), lr=0.01, momentum=0.9),
        device_mesh=mesh,
        dp_shard_dim="inner",
        fsdp_unit_modules=[PortionLinear],
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer_strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        **({"tp_dim": "tp"} if size > 1 else {}),
        **outer,
        **options,
    )
    return model, optimizer, pair


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    return [] if mesh is None else dist.get_process_group_ranks(mesh.get_group())


def cutting(case: Case, rank: int) -> list[int]:
    """Ranks that have other parts of the weights than this one, or of which this one has the same for its own."""
    grid = torch.arange(dist.get_world_size()).reshape(case.outer, case.inner, case.tp)
    outer, inner, _ = (int(each) for each in (grid == rank).nonzero()[0])
    rows = slice(None) if case.strategy != "no_shard" else slice(inner, inner + 1)
    planes = slice(None) if case.outer_strategy == "optim" and case.outer > 1 else slice(outer, outer + 1)
    return [int(each) for each in grid[planes, rows].flatten()]


def follow(rank: int, case: Case, **options: Any) -> list[str]:
    """What is wrong with meshes, beginning, two steps and state, beside a whole pair in one process."""
    model, optimizer, pair = sharded_pair(case, **options)
    told = []
    for part in (pair.up, pair.down):
        wanted = cutting(case, rank)
        told += [] if ranks_of(part.weight_mesh) == (wanted if len(wanted) > 1 else []) else [f"{part.weight_mesh}"]
        told += [] if len(ranks_of(part.tp_mesh)) == (case.tp if case.tp > 1 else 0) else [f"{part.tp_mesh}"]
    whole, begun = Pair(), beginning(case.tp)
    held = dict(model.full_weights())
    told += [f"{name} begins otherwise" for name, value in begun.items() if not torch.equal(held[name], value)]
    whole.load_state_dict(held)
    plain = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    places = case.data_parallel
    for step in range(2):
        model(batch(step, rank // case.tp)).square().mean().backward()
        torch.stack([whole(batch(step, place)).square().mean() for place in range(places)]).mean().backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
    weights = dict(model.full_weights())
    apart = {n: float((weights[n] - p).detach().abs().max()) for n, p in whole.named_parameters()}
    told += [f"{name} is off by {by}" for name, by in apart.items() if not by < 1e-13]
    state = {name: whole_of(value) for name, value in model.state_dict().items()}
    told += [f"{name} is saved otherwise" for name, value in state.items() if not torch.equal(value, weights[name])]
    shapes = {name: tuple(value.shape) for name, value in whole.state_dict().items()}
    told += [f"{name} has shape {value.shape}" for name, value in state.items() if tuple(value.shape) != shapes[name]]
    model.close()
    return told


def beginning(tp: int) -> dict[str, Tensor]:
    """Whole weights of the declared layers, put together from the TP shards."""
    pairs = [Pair(place, tp) for place in range(tp)]
    return {
        "up.weight": torch.cat([each.up.weight.detach() for each in pairs], 0),
        "up.bias": torch.cat([each.up.bias.detach() for each in pairs]),
        "down.weight": torch.cat([each.down.weight.detach() for each in pairs], 1),
        "down.bias": pairs[0].down.bias.detach(),
    }


def told_before(rank: int) -> list[str]:
    """A layer that the program told its meshes is not told again; a method of other arguments is not called."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    class Other(nn.Linear):
        def set_device_mesh(self, device_mesh: DeviceMesh) -> None:
            raise AssertionError("called")

    pair = Pair(mesh.get_local_rank("tp"), 2)
    pair.first = Other(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for param in pair.first.parameters():
            param.fill_(0.5)
    for part in (pair.up, pair.down):
        part.set_device_mesh(mesh["tp"])
    model, _ = fully_shard(
        pair, torch.optim.SGD(pair.parameters(), lr=0.1), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp",
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )  # fmt: skip
    told = [] if pair.up.weight_mesh is None and pair.up.tp_mesh == mesh["tp"] else ["told again"]
    held = dict(model.full_weights())
    told += [name for name, value in beginning(2).items() if not torch.equal(held[name], value)]
    model.close()
    return told


HSDP = Case(1, 2, outer=2)
CASES = (
    Case(2, 2),
    Case(2, 2, strategy="no_shard"),
    HSDP,
    Case(1, 2, outer=2, outer_strategy="optim"),
    Case(2, 1, outer=2, strategy="optim"),
    Case(1, 4, strategy="optim"),
)
"""DP 2 x TP 2, sharded and not; HSDP and HFSDP x TP 2; HSDP; TP 4."""


def follow_from_meta(rank: int, case: Case) -> list[str]:
    return follow(rank, case, device=torch.device("cpu"), init_model_with_meta_device=True)


MUTANTS = {
    "copies are in the mesh": Mutant(
        "Ranks that replicate weights are told to a module as ranks that cut them",
        patched(build, "_cutting", lambda groups, placements: groups.everyone),
        follow,
        HSDP,
    ),
    "TP shards are not told": Mutant(
        "A module that sizes itself for its TP shard is told of the data-parallel ranks alone",
        patched(build, "mesh_of", lambda data, tensor, kind: mesh.mesh_of(data, None, kind)),
        follow,
        Case(2, 2),
    ),
    "reset whole": Mutant(
        "A module that resets its own TP shard is given the whole parameter",
        patched(materialize, "declares", return_value=False),
        follow_from_meta,
        Case(2, 2),
    ),
    "other objects": Mutant(
        "An optimizer that was built before holds parameters that the module has no more",
        patched(tensor_parallel, "_succeed"),
        follow,
        Case(2, 2),
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by declared meshes")


def _visit(rank: int) -> dict[str, Any]:
    return {
        "right": [follow(rank, case) for case in CASES],
        "meta": [follow_from_meta(rank, case) for case in (Case(2, 2), HSDP)],
        "before": told_before(rank),
    }


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """One visit of four ranks; what each has to tell."""
    return run_ranks(_visit, WORLD)


def test_modules_are_told_the_axes_that_cut_them_and_train_as_whole_ones(told: list[dict[str, Any]]) -> None:
    assert [found["right"] for found in told] == [[[]] * len(CASES)] * 4


def test_modules_on_the_meta_device_reset_their_own_tp_shards(told: list[dict[str, Any]]) -> None:
    assert [found["meta"] for found in told] == [[[], []]] * 4


def test_a_module_that_was_told_is_left_alone(told: list[dict[str, Any]]) -> None:
    assert [found["before"] for found in told] == [[]] * 4
