"""Small models with units, a root, ties, frozen weights, branches, experts; their data; and plain torch's gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint

DIM = 8

Batch = tuple[Tensor, Tensor]
Make = Callable[[], nn.Module]


class Block(nn.Module):
    """A unit: two matrices of different row lengths and two vectors."""

    def __init__(self, dim: int = DIM, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return x + out


class Net(nn.Module):
    """Units one after another between a matrix and a vector of the root."""

    def __init__(self, units: int = 3, dim: int = DIM, hidden: int = 12, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.entry = nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.9))
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x) * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class Branches(nn.Module):
    """Units side by side, called in the order of `path`, which may leave some out."""

    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.path = list(range(units))
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        out = x * 1.0
        for place in self.path:
            out = out + self.blocks[place](x)
        return out


class Layer(nn.Module):
    """A unit around units of the same and of another listed class."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(DIM, DIM)
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.own(x))
        return out


class Chain(nn.Module):
    """A root without parameters around units, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def partly_frozen() -> nn.Module:
    """A frozen unit, and units with a frozen half."""
    model = Chain(*(Block() for _ in range(3)))
    for part in ("blocks.1", "blocks.0.up", "blocks.2.up"):
        model.get_submodule(part).requires_grad_(False)
    return model


class Tied(nn.Module):
    """The same matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class SmallRows(nn.Module):
    """Rows 30 and 8 long, in a unit; nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 30))
        self.narrow = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.narrow.T).sum(-1, keepdim=True) * self.wide.mean()


class Single(nn.Module):
    """A unit with a parameter of one row beside a matrix: on several ranks most hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.row = nn.Parameter(torch.randn(1, 2 * DIM) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.row.view(2, DIM).sum(0)


class Unused(nn.Module):
    """Parameters used by the root itself, one that no microbatch uses, and a unit used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.never = nn.Parameter(torch.ones(3, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x @ self.matrix)
        if not self.skip:
            x = self.blocks[1](x)
        return x @ self.matrix.T


class Experts(nn.Module):
    """A unit: a dense matrix, then one expert a rank of `group`, which sees the tokens of all of them.

    Without a group all `count` experts are here: what the ranks must agree with.
    """

    def __init__(self, group: dist.ProcessGroup | None, count: int, own: int) -> None:
        super().__init__()
        self.group = group
        self.dense = nn.Linear(DIM, DIM)
        made = []
        for number in range(count):
            torch.manual_seed(100 + number)
            made.append(nn.Linear(DIM, DIM, bias=False))
        self.experts = nn.ModuleList(made if group is None else [made[own]])
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        if self.group is None:
            return x + sum(torch.tanh(expert(x)) for expert in self.experts)
        own, size = dist.get_rank(self.group), self.group.size()
        tokens = torch.stack([x if rank == own else torch.zeros_like(x) for rank in range(size)])
        seen = all_reduce(tokens, group=self.group)  # of all ranks, in their order
        summed: Tensor = all_reduce(torch.tanh(self.experts[0](seen)), group=self.group)
        return x + summed[own]


class Mixture(nn.Module):
    """A root's matrix and one unit of experts."""

    def __init__(self, group: dist.ProcessGroup | None, count: int, own: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(DIM, DIM)
        self.layer = Experts(group, count, own)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.entry(x))
        return out


class Fused(torch.autograd.Function):
    """A linear map whose backward adds its weight gradient to the main gradient, as a fused kernel does.

    What autograd gets for the weight is a stand-in of zeros, which only tells that the gradient has come.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        computed = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        main = weight.get_main_grad()
        if getattr(weight, "overwrite_main_grad", False):
            main.copy_(computed.view_as(main))
        else:
            main.add_(computed.view_as(main))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.zeros((), dtype=gradient.dtype).expand(weight.shape)


class FusedBlock(nn.Module):
    """A unit whose matrix writes its own main gradient where `fused` says so; its vector does not."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            out: Tensor = Fused.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return x + torch.tanh(out + self.bias)
        return x + torch.tanh(x @ self.weight.T + self.bias)


class Filled(nn.Linear):
    """Values of a linear map that depend on its own shape alone, so that the order of initialisation does not show."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            numel = self.weight.numel()
            self.weight.copy_(torch.linspace(-0.3, 0.3, numel).reshape(self.weight.shape))
            if self.bias is not None:
                self.bias.copy_(torch.linspace(0.1, 0.2, self.bias.numel()))


class FilledBlock(nn.Module):
    """A unit that can be made on the meta device and filled later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Filled(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def seeded(model: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Make:
    """A maker of the same model, with the same weights, each time."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return model(*args, **kwargs)

    return make


def holding(make: Make, weights: dict[str, Tensor]) -> Make:
    """A maker of the same model with other weights."""

    def made() -> nn.Module:
        model = make()
        model.load_state_dict(weights)
        return model

    return made


def batch(index: int, dim: int = DIM) -> Batch:
    """Microbatch `index` of the whole run: inputs and targets [4, dim]."""
    generator = torch.Generator().manual_seed(7_000 + index)
    return torch.randn(4, dim, generator=generator), torch.randn(4, dim, generator=generator)


def loss_of(model: Any, data: Batch) -> Tensor:
    """Mean squared error, in fp32 or wider. A wrapped model says which dtype its inputs have."""
    x, target = data
    dtype = getattr(model, "input_dtype", None) or next(iter(model.parameters())).dtype
    out = model(x.to(dtype))
    wide = torch.promote_types(out.dtype, torch.float32)
    loss: Tensor = (out.to(wide) - target.to(wide)).square().mean()
    return loss


def plain_gradients(make: Make, batches: Sequence[Batch] | Iterable[Batch]) -> dict[str, Tensor]:
    """Gradient of the mean loss over microbatches, by one process in double precision."""
    model = make().double()
    data = list(batches)
    for each in data:
        (loss_of(model, each) / len(data)).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
