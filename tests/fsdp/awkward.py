"""A model built to break sharding, its plain-torch training, and the same through `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.trial import transport_of

VOCAB, DIM, LENGTH = 13, 7, 5


class Odd(nn.Module):
    """A unit of prime sizes: matrices of three row lengths, vectors, a scalar, a frozen matrix, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 11)
        self.down = nn.Linear(11, DIM, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.frozen = nn.Parameter(torch.randn(DIM, DIM) / 3, requires_grad=False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, DIM))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> dict[str, Tensor]:
        mixed = self.conv(x.transpose(1, 2)).transpose(1, 2) @ self.frozen
        return {"x": x + gain * self.scale * self.down(torch.tanh(self.up(mixed + self.shift)))}


class Awkward(nn.Module):
    """Tied weights, root parameters, and units run never, at times, twice, or not in definition order.

    diverging=True: which units run differs between the ranks; they then run in definition order and once.
    """

    def __init__(self, diverging: bool) -> None:
        super().__init__()
        self.diverging = diverging
        self.embed = nn.Embedding(VOCAB, DIM)
        self.second = Odd()
        self.first = Odd()
        self.never = Odd()
        self.sometimes = Odd()
        self.twice = Odd()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 4))

    def forward(self, tokens: Tensor, use: bool) -> Tensor:
        x = self.embed(tokens)
        for unit in self.path(use):
            x = unit(x, gain=0.5)["x"]
        logits: Tensor = self.head(x) / self.temperature
        return logits

    def path(self, use: bool) -> list[Odd]:
        if self.diverging:
            return [self.second, self.first, *([self.sometimes] if use else []), self.twice]
        return [self.first, self.twice, self.second, *([self.sometimes] if use else []), self.twice]


def make_model(diverging: bool, dtype: torch.dtype = torch.float32) -> Awkward:
    torch.manual_seed(5)
    return Awkward(diverging).to(dtype)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with their own learning rate and decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1.0, eps=1e-4)


def batch(step: int, index: int, k: int, diverging: bool) -> tuple[Tensor, Tensor, bool]:
    """Global microbatch `index` of a step, and whether the model uses the unit it uses at times."""
    generator = torch.Generator().manual_seed(77 * step + index)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    targets = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    return tokens, targets, index % 3 == 1 if diverging else (step + index % k) % 2 == 1


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, use: bool) -> Tensor:
    logits = model(tokens, use)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), targets.flatten())


@dataclass
class Outcome:
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    strategy: str
    k: int
    diverging: bool
    optimizer: str = "adamw"
    clip: float = 0.05
    numerics: str = "fast"
    units: bool = True
    prefetch: int = 1
    compute: torch.dtype = torch.float32
    steps: int = 3


def train_plain(world_size: int, setup: Setup, dtype: torch.dtype) -> Outcome:
    """Plain torch on one process: what must come out."""
    num_microbatches = world_size * setup.k
    model = make_model(setup.diverging, dtype)
    optimizer = make_optimizer(setup.optimizer, model)
    outcome = Outcome()
    for step in range(setup.steps):
        optimizer.zero_grad()
        for index in range(num_microbatches):
            loss = loss_of(model, *batch(step, index, setup.k, setup.diverging))
            (loss / num_microbatches).backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if step == 0:
            outcome.gradients = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()
            }
        outcome.norms.append(nn.utils.clip_grad_norm_(list(trained.values()), setup.clip).item())
        optimizer.step()
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def train_sharded(rank: int, setups: list[Setup]) -> list[Outcome]:
    """The same through the engine's plain-loop entry, default divisor, loss scaled by 1/k."""
    return [_train_sharded(rank, setup) for setup in setups]


def _train_sharded(rank: int, setup: Setup) -> Outcome:
    model = make_model(setup.diverging, setup.compute)
    optimizer = make_optimizer(setup.optimizer, model)
    main = torch.float64 if setup.compute is torch.float64 else torch.float32
    wrapped, optimizer = fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[Odd] if setup.units else None,
        zero_dp_strategy=setup.strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main),
        numerics=setup.numerics,
        prefetch=setup.prefetch,
        transport=transport_of(setup),
    )
    outcome = Outcome()
    for step in range(setup.steps):
        optimizer.zero_grad()
        for j in range(setup.k):
            tokens, targets, use = batch(step, rank * setup.k + j, setup.k, setup.diverging)
            if j == setup.k - 1:
                (loss_of(wrapped, tokens, targets, use) / setup.k).backward()
            else:
                with wrapped.no_sync():
                    (loss_of(wrapped, tokens, targets, use) / setup.k).backward()
        if step == 0:
            outcome.gradients = dict(wrapped.full_gradients())
        outcome.norms.append(float(wrapped.clip_grad_norm_(setup.clip)))
        optimizer.step()
    outcome.weights = dict(wrapped.full_weights())
    whole = torch.cat([w.double().flatten() for w in outcome.weights.values()]).norm().item()
    assert abs(wrapped.weight_norm() / whole - 1) < 1e-12, "frozen, tied, whole and split weights count once"
    assert model.head.weight is model.embed.weight, "tied weights must stay one parameter"
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad), "frozen weights get no gradient"
    wrapped.close()
    return outcome
