"""Base of engines whose optimizer steps the module's own parameters: step, norm, full tensors, and state by name.

Between steps a parameter holds this rank's piece of each main weight: all of it, or consecutive elements of the
flattened weight, in rank order, possibly none. Adapters define how pieces arise and when gradients are reduced into
them.

The norm sums local squares in fp64 over the ranks that share one copy of the model (`harness.engines.optim`). Torch's
`clip_grad_norm_` costs the same, but sums ranks in the gradient's dtype, and FSDP1's needs the root wrapper.

`ReplicatedEngine` is the base of `single` and `ddp`, with the entire model on every rank.

Modules of engines with plain parameters only: casts, FP8 layers, and evaluation.

Before every forward a copy of each parameter in the compute dtype shadows it, and autograd returns gradients of the
parameter. Weights of FP8 layers are ordinary ones too, quantized at each use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config
from harness.engines import optim
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch, Ranks, Seen, State, Workload
from harness.fp8.linear import Fp8Linear
from harness.fsdp import TpShard, create_state
from harness.probe.step_checks.pieces import Piece


def shadow_weights(model: nn.Module, dtype: torch.dtype, uncast: Collection[int] = ()) -> None:
    """Before every forward, shadow each parameter by a copy in `dtype`.

    Parameters whose ids are in `uncast` keep their dtype. Python finds an instance attribute before a registered
    parameter: `module.weight` is the copy, `named_parameters()` still yields the parameter. Copies stay until the next
    forward, for recomputation in the backward.
    """
    slots = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]

    def shadow(_module: nn.Module, _args: object) -> None:
        for module, name, param in slots:
            module.__dict__[name] = param if id(param) in uncast else param.to(dtype)

    model.register_forward_pre_hook(shadow)


def uncast(model: nn.Module) -> set[int]:
    """Ids of parameters quantized from the main weights' dtype: a cast to the compute dtype would round twice."""
    return {id(layer.weight) for layer in model.modules() if isinstance(layer, Fp8Linear) and layer.is_held}


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which modules evaluate; modes and random numbers are then as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def plain_model(workload: Workload, config: Config, device: torch.device) -> Iterator[nn.Module]:
    """Unsharded model with uninitialised parameters in the main dtype, cast to the compute dtype before each forward.

    Its memory is freed with the last reference.
    """
    compute, main = TORCH_DTYPES[config.dtype.compute], TORCH_DTYPES[config.dtype.main_params]
    model = workload.build(device, main)
    workload.quantize(model, device)
    if compute is not main:
        shadow_weights(model, compute, uncast(model))
    try:
        yield model
    finally:
        model._forward_pre_hooks.clear()  # the one that casts holds the model: a cycle would wait for its collector


class ShardedEngine(Engine):
    """Everything but construction and the schedule of reductions.

    A subclass builds and wraps the model, then calls `_finish` with its parameters by the model's own names.
    """

    model: nn.Module
    wrapped: nn.Module
    """Called in a forward: the model, unless a subclass wraps it."""
    group: dist.ProcessGroup | None = None
    """Ranks with the other pieces of weights; None: each has all of them."""
    tensor: dist.ProcessGroup | None = None
    """Tensor-parallel ranks, or None."""
    portable = False
    """True if any layout can load the state."""
    tp_shards: Mapping[str, TpShard] = MappingProxyType({})
    """By name, the parts of weights that pieces are cut from; none without such an axis."""

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        self.workload = workload
        self.config = config
        self.ranks = ranks
        self.main_dtype = TORCH_DTYPES[config.dtype.main_params]
        self.compute_dtype = TORCH_DTYPES[config.dtype.compute]
        self.wire_dtype = TORCH_DTYPES[config.dtype.grad_comm]
        self.microbatches_per_rank = microbatches_per_rank(config)
        self.reduced = False

    def _finish(self, weights: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Size], *, fused: bool) -> None:
        """Make the optimizer.

        Args: weights: parameters in model order, each once. shapes: full ones. fused: one kernel a group.
        """
        self.wrapped = self.model
        self.weights, self.shapes = dict(weights), dict(shapes)
        self.names: dict[Tensor, str] = {weight: name for name, weight in weights.items()}
        self.trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        groups = optim.groups_of(self.config.optimizer, self.workload, self.trained, shapes)
        self.optimizer = optim.make_optimizer(self.config.optimizer, groups, fused=fused)
        create_state(self.optimizer)
        self.pieces = self._pieces()

    def _piece(self, tensor: Tensor) -> Tensor:
        """This rank's elements of a weight, gradient or moment, as a plain tensor sharing memory."""
        return tensor.detach()

    def _rhythm(self, last: bool) -> AbstractContextManager[object]:
        """Context of one microbatch's forward and backward."""
        return nullcontext()

    def _after_backward(self, last: bool) -> None:
        """Hook after a microbatch's reductions, if `_rhythm` arranged any."""

    def _padding_elements(self) -> tuple[int, int]:
        """Padding elements of this rank's weights, and of its gradients."""
        return 0, 0

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Loss scaled by 1 / k; the wrapper divides by the number of ranks, as documented.

        FSDP2's `set_gradient_divide_factor` could divide by M, but a factor other than the group's size takes
        PREMUL_SUM, which gloo lacks, and a group of one divides fp64 twice.
        """
        with self._rhythm(last):
            loss = self.workload.loss(self.wrapped, batch)
            (loss / self.microbatches_per_rank).backward()
        self._after_backward(last)
        self.reduced = last
        return loss.detach()

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        with evaluating(self.model, self.ranks.device):
            return [self.workload.loss(self.model, batch).item() for batch in batches]

    def step(self, lr: float) -> float:
        gradients = {name: self._piece(gradient) for name, gradient in self._gradients().items()}
        norm = self._norm(gradients)
        coefficient = optim.clip_coefficient(norm, self.config.optimizer.clip_norm)
        optim.scale(list(gradients.values()), coefficient)
        optim.set_lr(self.optimizer, lr)
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.reduced = False
        return norm

    def _update(self) -> None:
        self.optimizer.step()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        found, dtype = self.local_gradients(), TORCH_DTYPES[self.config.dtype.main_grads]
        for name, piece in self.pieces.items():
            if name in self.trained:
                yield name, self._whole(piece, found.get(name), dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, piece in self.pieces.items():
            yield name, self._whole(piece, piece.local, self.main_dtype)

    def local_gradients(self) -> Mapping[str, Tensor]:
        return {name: self._piece(gradient) for name, gradient in self._gradients().items()}

    def weight_norm(self) -> float:
        return self._norm({name: self._piece(weight) for name, weight in self.weights.items()})

    def state(self) -> State:
        """This rank's pieces of weights and optimizer state; the next forward gathers from the same memory."""
        tensors = {f"weights/{name}": self._piece(weight) for name, weight in self.weights.items()}
        moments = optim.optimizer_state(self.optimizer, self.names)
        tensors |= {f"optimizer/{key}": self._piece(value) for key, value in moments.items()}
        return State(tensors, lambda: None, self.portable)

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role; gradients count, though they are freed between steps.

        Gathered weights in the compute dtype are gone after the step's last backward, under every strategy.
        """
        moments = optim.optimizer_state(self.optimizer, self.names).values()
        itemsize = self.main_dtype.itemsize
        return {
            "compute_weights": 0,
            "main_weights": sum(self._piece(weight).numel() for weight in self.weights.values()) * itemsize,
            "main_grads": sum(self._piece(weight).numel() for weight in self.trained.values()) * itemsize,
            "optimizer": sum(self._piece(value).nbytes for value in moments),
            "padding": sum(self._padding_elements()) * itemsize,
            "buffers": sum(buffer.nbytes for buffer in self.model.buffers()),
        }

    def _gradients(self) -> dict[str, Tensor]:
        """Reduced gradients by name; zeros where unused in the step. Raises `RuntimeError`: the last microbatch has not
        been run."""
        self._demand_reduced()
        found = {}
        for name, weight in self.trained.items():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            found[name] = weight.grad
        return found

    def _demand_reduced(self) -> None:
        if not self.reduced:
            first = next(iter(self.trained), "any weight")
            raise RuntimeError(f"no gradient for {first}: no microbatch was marked as the step's last one")

    def _norm(self, pieces: Mapping[str, Tensor]) -> float:
        return optim.euclidean_norm(self._counted(pieces), self.ranks.device, self._total)

    def _counted(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Pieces that this rank counts in sums over ranks, of which others may have copies."""
        return [
            piece
            for name, piece in pieces.items()
            if name not in self.tp_shards or self.tp_shards[name].is_counted_here
        ]

    def _total(self, squares: Tensor) -> Tensor:
        """Sum over ranks with other pieces and parts, in place. Collective over them."""
        for group in (self.group, self.tensor):
            if group is not None:
                dist.all_reduce(squares, group=group)
        return squares

    def _pieces(self) -> dict[str, Piece]:
        """This rank's piece of each weight, by name."""
        flat = self.flat_pieces()
        return {n: Piece.of(n, weight) if flat is None else flat[f"weights/{n}"] for n, weight in self.weights.items()}

    def _whole(self, piece: Piece, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Full tensor, on the CPU. Collective over the ranks with the other pieces."""
        shard = self.tp_shards.get(piece.name)
        groups = [self.group, None if shard is None or shard.is_copied else self.tensor]
        return whole(piece, part, groups, dtype, self.ranks.device).cpu()


@torch.no_grad()
def whole(
    piece: Piece,
    part: Tensor | None,
    groups: Iterable[dist.ProcessGroup | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Full tensor of the pieces of all ranks, to the bit: bytes are added, and where a rank has no elements its are 0.

    Collective over the groups. Args: part: this rank's elements, in the places of the piece.
    """
    found = torch.zeros(piece.shape, dtype=dtype, device=device)
    if part is not None:
        piece.put(found, part)
    for group in groups:
        if group is not None:
            dist.all_reduce(found.view(-1).view(torch.uint8), group=group)
    return found


def mesh_of(config: Config, ranks: Ranks) -> DeviceMesh:
    """`dp_outer` x `dp_shard` x `tp`, without an outer or tensor-parallel axis of one rank; tensor-parallel ranks are
    neighbours. Collective over all ranks."""
    outer, tp = config.mesh.dp_outer, config.mesh.tp
    sizes = {"dp_outer": outer, "dp_shard": ranks.world_size // (outer * tp), "tp": tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def units_of(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """Modules to wrap one by one, innermost first, without the model itself.

    A module that shares a parameter with another is left to the root: neither wrapper takes a parameter in two units,
    and a copy would untie the weights.
    """
    everywhere, units = _uses(model), [each for each in model.modules() if isinstance(each, tuple(classes))]
    return [each for each in reversed(units) if each is not model and _uses(each).items() <= everywhere.items()]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(param for part in module.modules() for param in part._parameters.values() if param is not None)


class ReplicatedEngine(ShardedEngine):
    portable = True

    def __init__(self, workload: Workload, config: Config, ranks: Ranks, *, fused: bool) -> None:
        super().__init__(workload, config, ranks)
        self.model = workload.build(ranks.device, self.main_dtype)
        workload.quantize(self.model, ranks.device)
        weights = dict(self.model.named_parameters())
        shapes = {name: weight.shape for name, weight in weights.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(workload.initial_weight(name, weight.shape))
        self.uncast = uncast(self.model)  # before copies shadow them
        if self.compute_dtype is not self.main_dtype:
            shadow_weights(self.model, self.compute_dtype, self.uncast)
        self._finish(weights, shapes, fused=fused)

    def seen(self) -> Seen:
        """The user's module; losses are scaled by 1 / k, so that the divisor is the number of ranks."""
        return Seen(self.model, self.ranks.world_size, self.compute_dtype)

    def expect(self, held: Mapping[str, Tensor]) -> None:
        optim.make_room(self.optimizer, self.weights, held)

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role; gradients count, though they are freed between steps."""
        if self.compute_dtype is self.main_dtype:
            return super().accounted_bytes()
        cast = sum(weight.numel() for weight in self.weights.values() if id(weight) not in self.uncast)
        return super().accounted_bytes() | {"compute_weights": cast * self.compute_dtype.itemsize}
