"""Torch calls on a parameter at rest, `p`, and on another tensor of its shape, `q`, each an expression.

READS give a value. EDITS change `p`. REFUSED say on
every rank that an edit would be lost, and change nothing. `F`, `nn` and `torch` are torch's; `whole(t)` makes of a
plain tensor what may meet `p`: a replicated DTensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like


class Layout(NamedTuple):
    """mesh: sizes of its axes, the last of which cuts rows. shares: how many of eight rows each of its ranks has.
    others: placements on the other axes. begins: first row of each rank, where they do not follow one another."""

    mesh: tuple[int, ...]
    shares: tuple[int, ...]
    others: tuple[str, ...] = ()
    begins: tuple[int, ...] | None = None

    def spans(self, rows: int) -> list[tuple[int, int]]:
        """Rows of each rank of the last axis, of a tensor with that many rows there."""
        begins = self.begins or tuple(sum(self.shares[:rank]) for rank in range(len(self.shares)))
        total = sum(self.shares)
        ends = [begin + share for begin, share in zip(begins, self.shares, strict=True)]
        return [(begin * rows // total, end * rows // total) for begin, end in zip(begins, ends, strict=True)]


HALVES = Layout((2,), (4, 4))
LAYOUTS = {
    "halves": HALVES,
    "uneven": Layout((2,), (3, 5)),
    "first": Layout((2,), (8, 0)),
    "second": Layout((2,), (0, 8)),
    "turned": Layout((2,), (5, 3), begins=(3, 0)),
    "three": Layout((3,), (1, 0, 7)),
    "hsdp": Layout((2, 2), (3, 5), ("replicate",)),
    "tp_rows": Layout((2, 2), (3, 1), ("0",)),
    "tp_columns": Layout((2, 2), (3, 5), ("1",)),
}


def mesh_of(layout: Layout) -> DeviceMesh:
    """The mesh, over all ranks. Collective."""
    return init_device_mesh("cpu", layout.mesh)


def cut(whole: Tensor, layout: Layout, mesh: DeviceMesh, name: str = "blocks.0.weight") -> RaggedTensor:
    """A copy of a whole tensor, cut by the layout."""
    others: list[Placement] = [Replicate() if each == "replicate" else Shard(int(each)) for each in layout.others]
    rows = whole.shape[0] if whole.dim() else 1
    rows //= layout.mesh[0] if layout.others == ("0",) else 1
    placements = (*others, RaggedShard(layout.spans(rows), name))
    spec = spec_like(whole, mesh, placements)
    like = RaggedTensor.of(torch.empty(0, dtype=whole.dtype), spec)
    return RaggedTensor.of(like.rows_of(whole).clone(), spec)


READS = """
p.sum()
p.sum(dtype=torch.float64)
p.sum(1)
p.sum(-1, keepdim=True)
p.sum(0)
p.sum((0, 1), keepdim=True)
p.mean()
p.mean(1)
p.mean(0)
p.mean((0, 1))
p.bfloat16().mean()
p.bfloat16().sum()
p.max()
(p - 9).max()
p.min()
p.amax()
p.amin((0, 1), keepdim=True)
p.amax(1)
p.amax(0)
tuple(p.max(1))
tuple(torch.frexp(p))
tuple(p.min(0))
p.argmax()
p.argmin(1)
p.median()
p.var()
p.var(0)
p.var(1, correction=0)
p.std()
p.prod()
p.prod(1)
p.norm()
p.norm(1)
p.norm(3)
p.norm(0)
p.norm(float("inf"))
p.norm(-float("inf"))
p.norm(dim=1)
p.norm(dim=0)
p.norm(dim=(0, 1), keepdim=True)
torch.linalg.vector_norm(p, 2, dtype=torch.float64)
torch.linalg.matrix_norm(p)
p.bfloat16().norm()
p.count_nonzero()
(p > 1.0).any()
(p > -9.0).all()
(p > 1.0).any(1)
p.isfinite().all()
p.isnan().any()
p.sum().item()
p.norm().item()
p[1, 2].item()
p.numel()
torch.equal(p, p.clone())
torch.equal(p, q)
torch.equal(p, p.double())
torch.allclose(p, p + 1e-9)
p * 2
2 / p
-p
p + p
p + q
q * p
p + whole(torch.arange(3.0))
p * whole(torch.arange(8.0)[:, None])
p - whole(torch.arange(24.0).view(8, 3))
whole(torch.ones(8, 3)) - p
whole(torch.tensor(2.0)) * p
p.sum(1, keepdim=True) * p
p.sum(0) * p
p.amax(1) + q.amax(1)
torch.where(p > 0, p, q)
torch.lerp(p, q, 0.3)
p.clamp(-0.5, 0.5)
p.half()
p.to(torch.float64)
p.clone()
p.detach()
p.contiguous()
p.bool()
torch.zeros_like(p)
torch.ones_like(p, dtype=torch.bfloat16)
torch.full_like(p, 3)
p.new_zeros(p.shape)
p.new_zeros(3)
p.cumsum(1)
p.softmax(1)
p.softmax(0)
tuple(p.sort(1))
p.quantile(0.5)
p.histc()
p.view(-1)
p.view(8, 1, 3)
p.view(24, 1)
p.reshape(4, 6)
p.flatten().norm()
p.t()
p.T
p.mT @ p
whole(torch.ones(2, 3)) @ p.t()
F.linear(whole(torch.ones(2, 3)), p)
F.embedding(whole(torch.tensor([0, 7])), p)
p[0]
p[1:3]
p[:, 0]
p[whole(torch.tensor([0, 5]))]
p.unsqueeze(0)
p.split(3)
p.chunk(2)
p.unbind()
p.expand(2, 8, 3)
torch.cat([p, q])
torch.stack([p, q])
torch.dist(p, q)
torch.dot(p.view(-1), q.view(-1))
F.mse_loss(p, q)
F.cosine_similarity(p, q, dim=1)
p.diag()
p.tril()
torch.svd(p).S
nn.utils.parameters_to_vector([p, q])
torch._foreach_norm([p, q])
torch._foreach_norm([p, q], float("inf"))
torch._foreach_max([p, q])
torch._foreach_mul([p, q], 2.0)
torch._foreach_add([p, q], [q, p], alpha=2.0)
copy.deepcopy(p)
""".strip().splitlines()

EDITS = """
p.add_(0.5)
p.add_(q, alpha=0.5)
p.lerp_(q, 0.3)
p.lerp_(q, torch.tensor(0.3))
p.addcmul_(q, q, value=0.1)
p.clamp_(-0.5, 0.5)
p.data.clamp_(-0.5, 0.5)
p.detach().mul_(3)
setattr(p, "data", q * 2)
setattr(p, "data", whole(torch.arange(24.0).view(8, 3)))
p.zero_()
p.fill_(3)
p.masked_fill_(p > 0, 0.0)
torch.add(p, q, out=p)
p.copy_(q)
p.copy_(torch.arange(24.0).view(8, 3))
p.copy_(torch.arange(3.0))
p.copy_(whole(torch.arange(24.0).view(8, 3)))
(lambda own: (own.lerp_(p, 0.5), p.copy_(own)))(whole(torch.ones(8, 3)))
(lambda own: (torch._foreach_lerp_([own], [p], 0.5), p.copy_(own)))(whole(torch.ones(8, 3)))
p.div_(p.norm())
p.mul_(2 / (p.norm() + 1e-6))
p.sub_(p.max())
torch._foreach_add_([p], [q], alpha=0.2)
torch._foreach_lerp_([p], [q], 0.2)
torch._foreach_mul_([p], torch.tensor(2.0))
torch._foreach_div_([p], q.norm())
nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p, q]) * 2, [p])
p.normal_()
p.uniform_(-1, 1)
p.bernoulli_(0.5)
p.exponential_()
p.copy_(torch.randn_like(p))
p.mul_(F.dropout(torch.ones_like(p), 0.5))
nn.init.normal_(p)
nn.init.kaiming_uniform_(p)
nn.init.xavier_normal_(p)
nn.init.trunc_normal_(p)
nn.init.orthogonal_(p)
nn.init.constant_(p, 2.0)
""".strip().splitlines()

REFUSED = """
p[0].zero_()
p[0] = 1.0
p[1:3].copy_(q[1:3])
p.__setitem__(p > 0, 0.5)
p.t().mul_(2)
p.view(-1).mul_(2)
p.unbind()[0].add_(1)
p.index_fill_(0, torch.tensor([0]), 1.0)
p.masked_scatter_(p > 0, q)
nn.init.eye_(p)
torch.cumsum(p, 1, out=p)
torch.ones(8, 3) + p
torch.ones(8, 3).lerp_(p, 0.1)
torch.distributed.all_reduce(p)
""".strip().splitlines()
