"""What the engine promises of parameters that a plan of tensor parallelism has cut, and mutants of each promise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.fsdp import (
    Fp8Linear,
    MixedPrecisionPolicy,
    ReplicaDrift,
    ShardedModel,
    UnknownPlan,
    fully_shard,
    fully_shard_model,
)
from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.runtime.gradient_sync import SameData
from tests.fsdp.checked import Mutant, each_holds, each_is_found, of_slips, said
from tests.fsdp.tensor_parallel.training import (
    Block,
    Case,
    Shape,
    alone,
    built,
    cut,
    loss_of,
    mesh_of,
    rows_of,
    sharded,
    train,
)

WORLD = 4
SEQUENCE = Shape(layers=1, sequence_parallel=True)
PLAIN = Shape(layers=1)


def asked(strategy: str, shape: Shape = SEQUENCE, **more: Any) -> Case:
    return Case(2, 2, strategy=strategy, shape=shape, **more)


def rows(case: Case, mesh: DeviceMesh, step: int = 0) -> Tensor:
    return rows_of(case, step, 0, mesh.get_local_rank("inner"))


def differs(found: dict[str, Tensor], wanted: dict[str, Tensor], close: float = 0.0) -> list[str]:
    return [name for name, value in found.items() if not float((value - wanted[name]).detach().abs().max()) <= close]


# -- right -------------------------------------------------------------------------------------------------------------


def training(rank: int, strategy: str) -> list[str]:
    """Gradients, norms and weights of two steps are those of one process."""
    case = asked(strategy, clip=0.05, steps=2, optimizer="sgd")
    found, wanted = train(rank, case), alone(case)
    told = differs(found.gradients, wanted.gradients, 1e-14) + differs(found.weights, wanted.weights, 1e-13)
    pairs = zip(found.norms, wanted.norms, strict=True)
    return told + [f"norm {norm}, not {other}" for norm, other in pairs if abs(norm / other - 1) > 1e-13]


def meta(_: int, strategy: str) -> list[str]:
    """A model that was cut on the meta device is reset to the numbers of an ordinary construction."""
    mesh = mesh_of(asked(strategy))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))
    wanted = {name: param.detach().clone() for name, param in plain.named_parameters()}
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))
    halves(module, mesh["tp"])
    torch.manual_seed(3)
    model = fully_shard_model(
        module, device_mesh=mesh, dp_shard_dim="inner", tp_dim="tp", zero_dp_strategy=strategy,
        device=torch.device("cpu"), init_model_with_meta_device=True,
    )  # fmt: skip
    told = differs(dict(model.full_weights()), wanted)
    model.close()
    return told


def halves(module: nn.Sequential, mesh: DeviceMesh) -> None:
    """Cut the first matrix by rows and the second by columns."""
    for part, dim in zip(module, (0, 1), strict=False):
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(dim)]))


def frozen(rank: int, strategy: str) -> list[str]:
    """What is frozen, cut or copied, stays; and what was frozen after sharding trains once it is unfrozen."""
    case = asked(strategy, PLAIN, steps=2)
    mesh = mesh_of(case)
    module = cut(built(PLAIN), PLAIN, mesh["tp"])
    names = ("blocks.0.up.weight", "blocks.0.norm1.bias")
    module.blocks[0].down.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = fully_shard(
        module, optimizer, device_mesh=mesh, dp_shard_dim="inner", tp_dim="tp", fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy, mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )  # fmt: skip
    plain = built(PLAIN)
    plain.blocks[0].down.requires_grad_(False)
    stepped = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for name in names:
            model.get_parameter(name).requires_grad_(bool(step))
            plain.get_parameter(name).requires_grad_(bool(step))
        loss_of(model, rows(case, mesh, step)).backward()
        torch.stack([loss_of(plain, rows_of(case, step, 0, place)) for place in range(2)]).mean().backward()
        for each_one in (optimizer, stepped):
            each_one.step()
            each_one.zero_grad()
    told = differs(dict(model.full_weights()), dict(plain.named_parameters()), 1e-13)
    model.close()
    return told


def marks(rank: int, strategy: str) -> list[str]:
    """Plain tensors that a module cut by itself are known by Megatron's marks, in state and norm."""
    case = asked(strategy)
    mesh = mesh_of(case)
    place, size = mesh.get_local_rank("tp"), 2
    torch.manual_seed(5)
    wide = torch.randn(6, 4, dtype=torch.float64)
    module = nn.Linear(4, 3, bias=True, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(wide.chunk(size)[place])
        module.bias.copy_(torch.arange(6.0, dtype=torch.float64).chunk(size)[place])
    for param in module.parameters():
        vars(param).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    model = fully_shard_model(
        module, device_mesh=mesh, dp_shard_dim="inner", tp_dim="tp", zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )  # fmt: skip
    told = differs(dict(model.full_weights()), {"weight": wide, "bias": torch.arange(6.0, dtype=torch.float64)})
    wanted = torch.cat([wide.flatten(), torch.arange(6.0)]).norm()
    told += [] if abs(model.weight_norm() / float(wanted) - 1) < 1e-12 else ["the weights' norm"]
    model.close()
    return told


# -- seen --------------------------------------------------------------------------------------------------------------


def access(_: int, strategy: str) -> list[str]:
    """TP shards are read and edited between passes and inside unsharded(), as DTensors and as what is here of them; the
    next forward computes with the edits."""
    case = asked(strategy, PLAIN)
    mesh = mesh_of(case)
    model, _ = sharded(case, mesh)
    wanted, told = dict(model.full_weights()), list[str]()
    with torch.no_grad():
        for factor in (2.0, 3.0):
            with nullcontext() if factor == 2.0 else model.unsharded():
                up: Any = model.get_parameter("blocks.0.up.weight")
                told += [] if torch.equal(up.full_tensor(), wanted["blocks.0.up.weight"]) else ["what is read"]
                up.mul_(factor)
                model.get_parameter("blocks.0.down.weight").to_local().add_(factor)
                model.get_parameter("norm.weight").mul_(factor)
            wanted["blocks.0.up.weight"] *= factor
            wanted["blocks.0.down.weight"] += factor
            wanted["norm.weight"] *= factor
    plain = built(PLAIN)
    plain.load_state_dict(wanted, strict=False)
    loss, right = (float(loss_of(each_one, rows(case, mesh))) for each_one in (model, plain))
    told += [] if abs(loss / right - 1) < 1e-14 else [f"the loss is {loss}, not {right}"]
    told += differs(dict(model.full_weights()), wanted)
    model.close()
    return told


def edits(_: int, strategy: str) -> list[str]:
    """Weights that are whole after a forward, edited through their local tensor, are refused by the next one."""
    case = asked(strategy, PLAIN, dtype=torch.bfloat16, options=(("mixed_precision_policy", MixedPrecisionPolicy()),))
    mesh = mesh_of(case)
    model, _ = sharded(case, mesh)
    loss_of(model, rows(case, mesh))
    with torch.no_grad():
        model.get_parameter("embed.weight").to_local().mul_(2)
    try:
        loss_of(model, rows(case, mesh))
    except RuntimeError as error:
        return [] if "embed.weight was edited in place while it was unsharded" in str(error) else [str(error)]
    finally:
        model.close()
    return ["an edit is lost"]


def drift(rank: int, strategy: str) -> list[str]:
    """What every tensor-parallel rank has whole is watched over them."""
    case = asked(strategy, PLAIN, options=(("check_replicas_every", 1),))
    mesh = mesh_of(case)
    model, optimizer = sharded(case, mesh)
    loss_of(model, rows(case, mesh)).backward()
    if mesh.get_local_rank("tp"):
        for bucket in model.engine.buckets:
            for shard in bucket.main_shards:
                shard.add_(1e-6)
    optimizer.step()
    told = said(lambda: loss_of(model, rows(case, mesh)), ReplicaDrift, "replicas differ after update 1")
    model.close()
    return told


def not_finite(rank: int, strategy: str) -> list[str]:
    """A gradient that is not finite on one tensor-parallel rank stops them all; torch's scaler steps on none."""
    told: list[str] = []
    for guarded in (True, False):
        case = asked(strategy, PLAIN, options=(("report_nan_in_param_grad", guarded),))
        mesh = mesh_of(case)
        model, optimizer = sharded(case, mesh)
        before = dict(model.full_weights())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=not guarded)
        with poisoned(model, here=rank == 1):
            loss = scaler.scale(loss_of(model, rows(case, mesh)))
            if guarded:
                told += said(loss.backward, FloatingPointError, "blocks.0.up.weight on rank 1")
            else:
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
                told += [] if scaler.get_scale() == 2.0 else [f"the factor is {scaler.get_scale()}"]
        told += differs(dict(model.full_weights()), before)
        model.close()
    return told


@contextmanager
def poisoned(model: ShardedModel, *, here: bool) -> Iterator[None]:
    """Put a NaN into this rank's TP shard of a gradient."""
    weight = model.get_parameter("blocks.0.up.weight")

    def spoil(gradient: Tensor) -> Tensor:
        assert isinstance(gradient, DTensor)
        local = gradient.to_local().clone()
        local[0, 0] = float("nan")
        return DTensor.from_local(local, gradient.device_mesh, gradient.placements, run_check=False)

    handle = weight.register_hook(spoil) if here else None
    yield
    if handle is not None:
        handle.remove()


# -- refused -----------------------------------------------------------------------------------------------------------


def plans(rank: int, strategy: str) -> list[str]:
    """What no axis of tensor parallelism explains is refused before anything changes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp", "zero_dp_strategy": strategy}

    def of(placements: list[Any], over: DeviceMesh) -> nn.Module:
        module = nn.Linear(8, 8)
        module.weight = nn.Parameter(distribute_tensor(module.weight, over, placements))
        return module

    torch.manual_seed(rank)
    differing = nn.Linear(8, 8)
    torch.manual_seed(7)
    told = said(lambda: fully_shard_model(of([Shard(0)] * 2, mesh), **names), UnknownPlan, "on 2 mesh dimensions")
    told += said(
        lambda: fully_shard_model(of([Shard(0)], mesh["dp"]), tp_dim="tp", **names), UnknownPlan,
        r"parameter weight is a DTensor .* over ranks \[\d, \d\], but the tensor-parallel axis",
    )  # fmt: skip
    told += said(
        lambda: fully_shard_model(of([Shard(0)], mesh["tp"]), zero_dp_strategy=strategy), UnknownPlan,
        "tensor-parallel axis and on the sharding one", "mesh_dim_names",
    )  # fmt: skip
    eight = nn.Sequential(nn.Linear(16, 16))
    Fp8Linear.convert(eight, "current")
    halves(eight, mesh["tp"])
    told += said(
        lambda: fully_shard_model(eight, tp_dim="tp", **names), ValueError,
        r"0\.weight cannot be multiplied in 8 bits: tensor parallelism cuts its weight",
    )  # fmt: skip
    told += said(lambda: fully_shard_model(differing, tp_dim="tp", **names), UnknownPlan, "weight", "seed them alike")
    norm = nn.LayerNorm(8)
    norm.weight.sequence_parallel = True
    return told + said(
        lambda: fully_shard_model(norm, tp_dim="tp", **names), UnknownPlan,
        r"parameter weight has sequence_parallel=True.*SequenceParallel\(\)",
    )  # fmt: skip


CHECKS = {
    "training": training,
    "meta": meta,
    "frozen": frozen,
    "marks": marks,
    "access": access,
    "edits": edits,
    "drift": drift,
    "not finite": not_finite,
    "plans": plans,
}


def _looks_at_nothing(*_: object) -> None: ...


@contextmanager
def on_one_axis() -> Iterator[None]:
    alone_on_it = property(lambda self: self.dense.everyone)
    with mock.patch.object(Meshes, "everyone", alone_on_it), mock.patch.object(SameData, "_look", _looks_at_nothing):
        yield  # the others would wait in later checks for those who have heard


MUTANTS = of_slips(
    r"""
    copies count twice: What every tensor-parallel rank has whole is counted by each of them in norms
        fsdp.tensor_parallel.TpShard.is_counted_here: True
        training
    cut weights count once: Of what is cut, one tensor-parallel rank's TP shard alone is counted in norms
        fsdp.tensor_parallel.TpShard.is_counted_here: self.rank == 0 or not self.is_copied => self.rank == 0
        training
    a term for the sum: The gradient of a norm under sequence parallelism is this rank's term of it
        fsdp.tensor_parallel.gradient_here: if gradient.placements != placements
            => if gradient.placements != placements and not placements[0].is_replicate()
        training
    tp_shards in another order: TP shards are put together in another order than they were cut
        fsdp.tensor_parallel.TpShard.join: made.full_tensor().contiguous()
            => torch.cat(made.full_tensor().chunk(self.size, self.dim)[::-1], self.dim)
        training
    own numbers: A module on the meta device resets each TP shard by itself
        fsdp.runtime.weights._values_of: return found
            => [v.copy_(torch.cat([v.chunk(2)[0]] * 2)) for v in found.values() if v.dim() > 1]\n    return found
        meta
    marks are ignored: What a module cut by itself counts as a copy on every rank
        fsdp.tensor_parallel.TpShard.of: not getattr(param, "tensor_model_parallel", False) => True
        marks
    edits of a TP shard: Edits of the tensor inside a DTensor are not seen
        fsdp.storage.at_rest.edits_of: version_of
        edits / optim
    unwatched copies: Nobody compares what tensor-parallel ranks have whole
        fsdp.guards.held_by_several: meshes.tensor is not None => False
        drift
    copies that differ: Tensor-parallel ranks may begin with other values of what is not cut
        fsdp.build.check_copies: lambda *_, **__: None
        plans
    """
) | {
    "told on one axis": Mutant(
        "Ranks of the tensor-parallel axis do not hear what one of them finds",
        on_one_axis,
        "not finite",
    ),
}


test_it_holds = each_holds(__name__, CHECKS)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by tensor parallelism")
