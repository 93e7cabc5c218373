"""What models are made of: residual pieces of torch's own layers, carried from one to the next in any container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 6, 11


@dataclass
class Batch:
    """A microbatch: tokens and targets [rows, length], int64.

    weight: what its loss counts in the step. last: of this rank's, in this step. other: more data of the same rank.
    """

    tokens: Tensor
    targets: Tensor
    step: int
    index: int
    rank: int
    weight: float = 1.0
    last: bool = True
    other: Batch | None = None


# -- containers --------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    hidden: Tensor
    note: str


@dataclass
class Data:
    hidden: Tensor
    note: str = ""


class Thing:
    """An object that pytree does not know."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


CARRIES: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda h: h, lambda c: c),
    "tuple": (lambda h: (h, "note"), lambda c: c[0]),
    "list": (lambda h: [h], lambda c: c[0]),
    "dict": (lambda h: {"hidden": h, "note": ""}, lambda c: c["hidden"]),
    "namedtuple": (lambda h: Named(h, ""), lambda c: c.hidden),
    "dataclass": (Data, lambda c: c.hidden),
    "object": (Thing, lambda c: c.hidden),
}
"""How a tensor is put into a container, and taken out."""


# -- pieces ------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """Adds `change(h)` to h: [rows, length, WIDTH]. In most programs a unit."""

    around: ClassVar[str] = ""
    """How the model calls it: "checkpoint" or as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.carry = "tensor"
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, carried: Any, batch: Batch) -> Any:
        put, take = CARRIES[self.carry]
        h = take(carried)
        return put(h + self.change(h, batch))

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(h)))
        return out

    def runs(self, batch: Batch) -> bool:
        """Whether the model calls it for a microbatch."""
        return True


class Mlp(Piece):
    """Two matrices."""


class Norms(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms, self.group = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.GroupNorm(2, WIDTH)

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        h = self.group(self.rms(self.layer(h)).flatten(0, 1)).view_as(h)
        return super().change(h, batch)


class Conv(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        return super().change(self.conv(h.transpose(1, 2)).transpose(1, 2), batch)


class Recurrent(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.rnn(h)[0]
        return out


class Attention(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return out


class Encoder(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True)

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.layer(h)
        return out


class Looped(Piece):
    """One block three times in a forward."""

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        for _ in range(3):
            h = super().change(h, batch)
        return h


class Checkpointed(Piece):
    """Recomputed from outside."""

    around = "checkpoint"


class CheckpointedInside(Piece):
    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = checkpoint(super().change, h, batch, use_reentrant=False)
        return out


class Reentrant(Piece):
    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = checkpoint(self._computed, h, batch, use_reentrant=True)
        return out

    def _computed(self, h: Tensor, batch: Batch) -> Tensor:
        return super().change(h, batch)


class Adapted(Reentrant):
    """Two small matrices beside frozen ones, inside a reentrant checkpoint, which needs an input that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        return super().change(h if h.requires_grad else h.detach().requires_grad_(), batch)

    def _computed(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = super()._computed(h, batch) + self.adapter(h)
        return out


class Unused(Piece):
    """A branch that no rank takes."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)


class InTurns(Piece):
    """A branch in even steps, another in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        return super().change(self.turns[batch.step % 2](h), batch)


class DroppedTogether(Piece):
    """Left out by all ranks in some steps."""

    def runs(self, batch: Batch) -> bool:
        return batch.step % 3 != 1


class DroppedApart(Piece):
    """Left out by one rank at a time, and by both in the last step."""

    def runs(self, batch: Batch) -> bool:
        return (batch.step + batch.rank) % 2 == 0 and batch.step != 3


class Experts(Piece):
    """Two of three experts a microbatch, chosen by the data of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        gates = self.gate(h).softmax(-1)
        left_out = (batch.step + batch.rank + batch.index) % 3
        return sum(e(h) * gates[..., i, None] for i, e in enumerate(self.experts) if i != left_out)  # type: ignore[return-value] # sum() of none is 0


class WeightNorm(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(self.up)


class Bare(Piece):
    """Parameters of its own, a scalar among them, in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.each = nn.ParameterList(torch.full((WIDTH,), 0.3) for _ in range(2))
        self.named = nn.ParameterDict({"shift": torch.full((WIDTH,), 0.1)})

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        return (super().change(h, batch) * self.each[0] + self.each[1] * h + self.named["shift"]) * self.gain


class Borrowing(Piece):
    """Uses a weight of the root."""

    lender: tuple[nn.Embedding, ...] = ()

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = super().change(F.linear(h, self.lender[0].weight), batch)
        return out

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WORDS, 7)


class Shared(Piece):
    """One and the same layer stands in several units."""

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.common(super().change(h, batch))
        return out


class Auxiliary(Piece):
    """Leaves a term of the loss as an attribute."""

    aux: Tensor | None = None

    def change(self, h: Tensor, batch: Batch) -> Tensor:
        h = super().change(h, batch)
        self.aux = h.square().mean()
        return h


class InPlace(Piece):
    """Edits what it got."""

    def forward(self, carried: Any, batch: Batch) -> Any:
        put, take = CARRIES[self.carry]
        return put(take(carried).add_(self.change(take(carried).clone(), batch)))


class Narrower(nn.Linear):
    """A linear layer of values that 16 bits hold: in bf16 where it was in fp32, in fp32 where it was in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float64: torch.float64}
        for name, param in linear.named_parameters():
            setattr(self, name, nn.Parameter(param.detach().bfloat16().to(other[param.dtype])))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


KINDS = tuple(kind.__name__ for kind in Piece.__subclasses__())


class Net(nn.Module):
    """An embedding, pieces, a norm and a head; gives logits [rows, length, WORDS] in a container.

    Args:
        kinds: of the pieces, by name. carry: what pieces hand on and the model returns, by name.
        tied: the head's weight is the embedding's.
    """

    def __init__(self, kinds: tuple[str, ...], carry: str = "tensor", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.carry = carry
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.pieces = nn.ModuleList(globals()[kind]() for kind in kinds)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        common = nn.Linear(WIDTH, WIDTH)
        for piece in self.pieces:
            piece.carry = carry
            if isinstance(piece, Borrowing):
                piece.lender = (self.embed,)
            if isinstance(piece, Shared):
                piece.common = common
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> Any:
        put, take = CARRIES[self.carry]
        carried = put(self.embed(batch.tokens))
        for piece in self.pieces:
            if not piece.runs(batch):
                continue
            if piece.around == "checkpoint":
                carried = checkpoint(piece, carried, batch, use_reentrant=False)
            else:
                carried = piece(carried, batch)
        logits = self.head(self.norm(take(carried)))
        return put(logits + sum(p.aux for p in self.pieces if isinstance(p, Auxiliary) and p.aux is not None))


class Critic(nn.Module):
    """Tells a model's logits from right ones: one number a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.entry, self.piece, self.exit = nn.Linear(WORDS, WIDTH), Mlp(), nn.Linear(WIDTH, 1)

    def forward(self, logits: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.exit(self.piece(self.entry(logits), batch)).mean((1, 2))
        return out


def loss_of(out: Any, batch: Batch) -> Tensor:
    """Of a model's output in whatever container: fp32 or wider."""
    logits = logits_of(out)
    return F.cross_entropy(logits.to(torch.promote_types(torch.float32, logits.dtype)).flatten(0, 1),
                           batch.targets.flatten())  # fmt: skip


def logits_of(out: Any) -> Tensor:
    """Taken out of whatever container."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, dict):
        found: Tensor = out["hidden"]
    elif isinstance(out, tuple | list):
        found = out[0]
    else:
        found = out.hidden
    return found
