"""Steps of a small Llama under the engine and under FSDP2, recorded: how often work is launched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.config.schema import Config
from harness.fsdp import FSDPModule, Groups, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from harness.models.llama import Block, Llama
from tests.streams.cost import Counts, counts_of, step_of
from tests.streams.fsdp2 import fsdp2_believing_in, sharded
from tests.streams.group import new_group
from tests.streams.recorder import Recorder, believing_in, recording

WIDTH, TOKENS = 64, 128
STEPS = 2
MAX_NORM = 0.5


@dataclass(frozen=True)
class Arm:
    """engine: "native" or "fsdp2", whose strategies are the same two of the four. wire: what gradients travel in."""

    engine: str
    strategy: str
    wire: torch.dtype = torch.float32
    clips: bool = True

    def __str__(self) -> str:
        return f"{self.engine} {self.strategy} {str(self.wire).removeprefix('torch.')}{' clipped' * self.clips}"


def llama(num_layers: int) -> Llama:
    """In the proportions of the 8B shape: feed-forward 3.5 times as wide, a quarter of the heads for keys and values, a
    vocabulary 31 times the width."""
    config = Config().model
    config.dim, config.num_layers, config.ffn_dim = WIDTH, num_layers, WIDTH * 7 // 2
    config.num_heads, config.num_kv_heads = 4, 1
    config.vocab_size, config.max_seq_len = WIDTH * 31, TOKENS
    module = Llama(config, "cpu", torch.float32)
    torch.manual_seed(0)
    for each in module.modules():
        reset = getattr(each, "reset_parameters", None)
        if reset is not None:
            reset()
    return module


class Trainee:
    def __init__(self, rank: int, world: int, arm: Arm, num_layers: int) -> None:
        self.rank, self.arm = rank, arm
        module, every = llama(num_layers), list(range(world))
        if arm.engine == "fsdp2":
            reshards = arm.strategy == "optim_grads_params"
            sharded(module, list(module.blocks), new_group(every, "fsdp2"), arm.wire, reshard_after_forward=reshards)
            self.model: nn.Module = module
            self.optimizer = _adamw(module)
            return
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, arm.wire)
        self.model = fully_shard(
            module.to(torch.bfloat16),
            groups=Groups(new_group(every, "reduce"), gather=new_group(every, "gather")),
            unit_modules=[Block],
            strategy=arm.strategy,
            mp_policy=policy,
            watchdog_timeout_s=600.0,
        )
        self.optimizer = fully_shard_optimizer(self.model, _adamw(self.model.module))

    def train(self, recorder: Recorder) -> None:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            with recorder.paused():
                tokens = torch.randint(0, WIDTH * 31, (1, TOKENS), generator=generator)
            recorder.phase("forward")
            loss = _loss(self.model, tokens)
            recorder.phase("backward")
            loss.backward()
            recorder.phase("step")
            if self.arm.clips:
                self._clip()
            self.optimizer.step()
            recorder.phase("end")
            self.optimizer.zero_grad()

    def _clip(self) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def measured(rank: int, world: int, arms: Sequence[Arm], num_layers: int) -> list[Counts]:
    """What arms launch in their second step; the first rank alone records and answers."""
    found = []
    for arm in arms:
        with ExitStack() as stack:
            recorder = Recorder()
            stack.enter_context(believing_in(recorder.cuda))
            if rank == 0:
                recorder = stack.enter_context(recording())
            stack.enter_context(fsdp2_believing_in(recorder.cuda))
            with recorder.paused():  # streams are those of the recorder from the beginning
                trainee = Trainee(rank, world, arm, num_layers)
            trainee.train(recorder)
        if rank == 0:
            found.append(counts_of(step_of(recorder.log, STEPS - 1)))
    return found
