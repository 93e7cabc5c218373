"""A language model in which everything is awkward that sharding engines get wrong, and nothing is random.

It learns next tokens as the decoder does, so that any engine and any verdict can be tried on it unchanged. What it has:

    prime sizes           no dimension is a multiple of a rank count or of an alignment (conf/model/odd.yaml)
    tiny parameters       gains of one element and mixtures of three: fewer elements than ranks
    1-D, 3-D, 4-D         biases and gains, a convolution's weight, a table of positional cells
    tied weights          `output.weight` *is* `embedding.weight`, one parameter under two names
    frozen weights        a whole unit (`Frozen`) that gradients pass through, and one parameter inside trained units
    shared calls          a feed-forward called twice in each block; with `model.repeat_unit`, a whole unit called twice
    unused parameters     a side branch for sequences of some kind only: a microbatch without one leaves its parameters
                          without a gradient, on some ranks and not on others, inside a unit that is otherwise used
    root parameters       the embedding, a bias, a gain, a norm and the cells lie in no unit
    buffers               a constant in each block's state, and a table of positions that is not kept

The side branch is chosen per sequence, not per microbatch, and nothing else mixes sequences: the mean gradient does not
depend on how sequences are cut into microbatches.

Shapes are suffixes of tensor names: B sequences, S positions, D width of the stream, F of the feed-forward, V token
ids, R sequences that take the side branch, Q width of the low-rank path.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.config.derived import ODD_KERNEL, ODD_RANK, ODD_SIDE_MODULUS, ODD_TAPS
from harness.config.schema import ModelConfig
from harness.models.llama import Embedding, Linear, RMSNorm, Unfilled, wide
from harness.models.workload import TokenWorkload

CELLS = (1, 3, 5)
"""Leading sizes of the positional cells, indexed by position modulo 3 and modulo 5."""

Device = torch.device | str


class CausalConv(Unfilled, nn.Conv1d):
    """Each position sees itself and the ODD_KERNEL - 1 before it."""

    def __init__(self, dim: int, device: Device, dtype: torch.dtype) -> None:
        super().__init__(dim, dim, ODD_KERNEL, device=device, dtype=dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        padded_BDS = F.pad(x_BSD.transpose(1, 2), (ODD_KERNEL - 1, 0))
        mixed_BDS: Tensor = super().forward(padded_BDS)
        return mixed_BDS.transpose(1, 2)


class FeedForward(nn.Module):
    """w_down(gelu(w_up x)): only the first projection has a bias."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        self.w_up = Linear(config.dim, config.ffn_dim, device, dtype, bias=True)
        self.w_down = Linear(config.ffn_dim, config.dim, device, dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.w_down(F.gelu(self.w_up(x_BSD), approximate="tanh"))
        return out_BSD


class Block(nn.Module):
    """A trained unit: mixes positions, then features twice with the same weights, then some sequences once more."""

    shift_D: Tensor

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.recompute = config.activation_checkpointing
        self.skip_idle = config.skip_idle
        self.norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
        self.conv = CausalConv(config.dim, device, dtype)
        self.fixed_QD = nn.Parameter(torch.empty(ODD_RANK, config.dim, **empty), requires_grad=False)
        self.lift_DQ = nn.Parameter(torch.empty(config.dim, ODD_RANK, **empty))
        self.taps = nn.Parameter(torch.empty(ODD_TAPS, **empty))
        self.ffn = FeedForward(config, device, dtype)
        self.gain = nn.Parameter(torch.empty(1, **empty))
        self.side = Linear(config.dim, config.dim, device, dtype, bias=True)
        self.register_buffer("shift_D", shift(config, wide(dtype), device))

    def forward(self, x_BSD: Tensor, takes_side_B: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out_BSD: Tensor = checkpoint(self._body, x_BSD, takes_side_B, use_reentrant=False, preserve_rng_state=False)
            return out_BSD
        return self._body(x_BSD, takes_side_B)

    def _body(self, x_BSD: Tensor, takes_side_B: Tensor) -> Tensor:
        x_BSD = x_BSD + self._mix(self.norm(x_BSD))
        x_BSD = x_BSD + self.gain * self.ffn(self.ffn(x_BSD))
        rows_R = takes_side_B.nonzero().squeeze(-1)
        if self.skip_idle and rows_R.numel() == 0:
            return x_BSD
        return x_BSD.index_add(0, rows_R, torch.tanh(self.side(x_BSD[rows_R])))

    def _mix(self, x_BSD: Tensor) -> Tensor:
        low_BSD = F.linear(F.linear(x_BSD, self.fixed_QD), self.lift_DQ)
        shift_D = self.shift_D.to(x_BSD.dtype)
        mixed_BSD: Tensor = self.taps[0] * self.conv(x_BSD) + self.taps[1] * low_BSD + self.taps[2] * shift_D
        return mixed_BSD


class Frozen(nn.Module):
    """A unit without trained parameters, whose weights the backward still needs."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear(config.dim, config.dim, device, dtype, bias=True).requires_grad_(False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + torch.tanh(self.linear(x_BSD))


class Odd(nn.Module):
    positions_SD: Tensor

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype) -> None:
        super().__init__()
        empty: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim, **empty)
        self.cells = nn.Parameter(torch.empty(*CELLS, config.dim, **empty))
        self.taps = nn.Parameter(torch.empty(ODD_TAPS, **empty))
        self.blocks = nn.ModuleList(Block(config, device, dtype) for _ in range(config.num_layers))
        self.frozen = Frozen(config, device, dtype)
        self.norm = RMSNorm(config.dim, config.norm_eps, device, dtype)
        self.output = Linear(config.dim, config.vocab_size, device, dtype, bias=True)
        self.output.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.empty(1, **empty))
        self.register_buffer("positions_SD", positions(config, wide(dtype), device), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits [B, S, V] in the compute dtype of tokens [B, S] (int64), S at most max_seq_len."""
        takes_side_B = tokens_BS[:, 0] % ODD_SIDE_MODULUS == 0
        x_BSD = self._embed(tokens_BS)
        first, *rest = self.blocks
        x_BSD = self.frozen(first(x_BSD, takes_side_B))
        for block in [*rest, first] if self.config.repeat_unit else rest:
            x_BSD = block(x_BSD, takes_side_B)
        logits_BSV: Tensor = self.output(self.norm(x_BSD)) * self.temperature
        return logits_BSV

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        seq_len = tokens_BS.shape[1]
        place_S = torch.arange(seq_len, device=tokens_BS.device)
        cells_SD = self.cells[0, place_S % CELLS[1], place_S % CELLS[2]]
        positions_SD = self.positions_SD[:seq_len].to(cells_SD.dtype)
        x_BSD: Tensor = self.taps[0] * self.embedding(tokens_BS) + self.taps[1] * cells_SD + self.taps[2] * positions_SD
        return x_BSD


def shift(config: ModelConfig, dtype: torch.dtype, device: Device) -> Tensor:
    """Constant vector [D] of both signs, equal on every device."""
    return torch.linspace(-0.1, 0.1, config.dim, dtype=torch.float64, device="cpu").to(device, dtype)


def positions(config: ModelConfig, dtype: torch.dtype, device: Device) -> Tensor:
    """Sines of every position at D frequencies, [max_seq_len, D], small beside ten times the embedding's scale."""
    rate_D = 2 * math.pi / torch.arange(2, config.dim + 2, dtype=torch.float64, device="cpu")
    angle_SD = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float64, device="cpu"), rate_D)
    return (config.init_std * angle_SD.sin()).to(device, dtype)


class OddWorkload(TokenWorkload):
    """Units are the blocks and the frozen module; the root owns the rest, with the tied matrix."""

    unit_classes = (Block, Frozen)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        return Odd(self.model_config, device, dtype)

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Compute the positions and each block's constant, in their declared dtype."""
        assert isinstance(model, Odd)
        model.positions_SD = positions(self.model_config, model.positions_SD.dtype, device)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.shift_D = shift(self.model_config, block.shift_D.dtype, device)

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        """Gains and norms start from one, mixtures from distinct values near it, all else from a normal draw.

        Matrices of blocks are drawn with 1 / sqrt(row length), so that no branch vanishes beside the residual stream.
        Frozen values are multiples of 1/128, exact in every format: some engines keep no wider copy of them.
        """
        if name.endswith("taps"):
            value = torch.linspace(0.7, 1.3, shape.numel(), dtype=torch.float32, device="cpu")
        elif name.endswith("bias"):
            value = self._normal(name, shape, self.model_config.init_std)
        elif len(shape) > 1 and ("blocks." in name or "frozen." in name):
            value = self._normal(name, shape, 1 / math.sqrt(shape[1:].numel()))
        else:
            value = super().initial_weight(name, shape)
        return (value * 128).round() / 128 if name.endswith("fixed_QD") or name.startswith("frozen.") else value
