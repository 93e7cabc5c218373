"""Training loops that know nothing of this package but `watch`: one model under several of torch's parallelisms."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.capture import watch
from tests.support.spawn import run_ranks

WORDS, WIDTH, ROWS, LENGTH = 32, 16, 8, 9
STEPS = 12

Event = Callable[[int, nn.Module, torch.optim.Optimizer], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Layout:
    ranks: int
    shards: Callable[[Net], nn.Module]
    readers: int = 0
    """Ranks with rows of their own; the others repeat them. 0: all."""
    needs: str = ""
    """Package without which there is no such layout."""
    finish: Callable[[nn.Module, Any], tuple[nn.Module, Any]] = lambda model, optimizer: (model, optimizer)
    """Model and optimizer of which a program makes others, once both are there."""


def _ddp(model: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: Net, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _hsdp(model: Net) -> nn.Module:
    return _fsdp2(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))


def _fsdp2_and_tp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _fsdp2(model, mesh=mesh["data"])


def _ours(model: Net) -> nn.Module:
    from harness.fsdp import fully_shard as ours

    return ours(model, unit_modules=[Block])


def _fsdp1(model: Net, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy([Block])
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def _zero(model: nn.Module, optimizer: Any, *, stage: int, **options: Any) -> tuple[nn.Module, Any]:
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu")
    import deepspeed

    zero = {"stage": stage, "reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": ROWS // 2, "zero_optimization": zero, "steps_per_print": None}
    with redirect_stdout(io.StringIO()):
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config | options)[0]
    return engine, engine.optimizer


def _megatron(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    from harness.engines.adapters import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    return fully_shard(  # type: ignore[no-any-return] # of a package without types
        model,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="data",
        tp_dim="tensor",
        expt_device_mesh=mesh,
        fsdp_unit_modules=[Block],
        device=torch.device("cpu"),
        preproc_state_dict_for_dcp_ckpt=False,
    )


LAYOUTS = {
    "single": Layout(1, lambda model: model),
    "ddp": Layout(2, _ddp),
    "fsdp2": Layout(2, _fsdp2),
    "hsdp": Layout(4, _hsdp),
    "fsdp2_tp": Layout(4, _fsdp2_and_tp, readers=2),
    "ours": Layout(2, _ours),
}
FLAT = {
    "fsdp1": Layout(2, partial(_fsdp1, use_orig_params=True)),
    "fsdp1_flat": Layout(2, _fsdp1),
    **{f"zero_{n}": Layout(2, lambda net: net, needs="deepspeed", finish=partial(_zero, stage=n)) for n in range(4)},
    "megatron": Layout(2, lambda net: net, needs="megatron_fsdp", finish=_megatron),
}
"""Layouts of programs that keep parameters in flat buffers."""


def batches(steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(steps)]


def train(
    rank: int,
    layout: str,
    path: Path | None,
    *,
    steps: int = STEPS,
    fed: bool = True,
    tied: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    build: Callable[[Net], None] = lambda model: None,
    before_update: Event = lambda step, model, optimizer: None,
    after_update: Event = lambda step, model, optimizer: None,
    seed: int = 1,
    told: bool = True,
    by_closure: bool = False,
    begin: int = 0,
    kept: Path | None = None,
    forgets: bool = False,
    captures: Sequence[int] | None = None,
    **options: Any,
) -> list[bytes]:
    """Train, watched if there is a path. Returns this rank's last weights, and the state of torch's generator.

    Args: told: `watch` is given the optimizer. by_closure: forward and backward lie within the optimizer's step, as in
    Lightning and L-BFGS. begin: step whose checkpoint is gone on from. kept: folder of checkpoints of step 6, of a run
    that is killed before its last step. forgets: the optimizer's state is not loaded. captures, options: of `watch`,
    which looks at all steps of a busy machine, too.
    """
    chosen = {**LAYOUTS, **FLAT}[layout]
    torch.manual_seed(0)
    net = Net(tied=tied)
    build(net)
    model = chosen.shards(net)
    params = [param for param in model.parameters() if param.requires_grad]
    model, stepping = chosen.finish(model, optimizer(params, lr=1e-3))
    given = stepping if told else None
    file = kept and kept / f"{layout}-{rank}.pt"
    if begin:
        weights, state = torch.load(file, weights_only=False)
        model.load_state_dict(weights)
        if not forgets:
            stepping.load_state_dict(state)
    watched = {"share": 1.0, "steps": captures, "done": begin, **options}
    run = None if path is None else watch(model, given, path, **watched)

    def computed(number: int, rows: Tensor) -> Tensor:
        if by_closure:
            stepping.zero_grad()
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        getattr(model, "backward", Tensor.backward)(loss)
        before_update(number, model, stepping)
        return loss

    readers = chosen.readers or chosen.ranks
    for number, batch in enumerate(batches(steps, seed)[begin:], start=begin + 1):
        rows = batch.chunk(readers)[rank * readers // chosen.ranks]
        if by_closure:
            loss = stepping.step(partial(computed, number, rows))
        else:
            loss = computed(number, rows)
            _update(model, stepping)
        after_update(number, model, stepping)
        if run is not None:
            run.step(loss=loss, data=rows if fed else None)
        if number == 6 and file:
            torch.save((model.state_dict(), stepping.state_dict()), file)
    if run is not None and not (kept and steps < STEPS):
        run.close()
    return [*(_bytes(param) for param in model.parameters()), torch.get_rng_state().numpy().tobytes()]


def made(path: Path, layout: str = "single", **keywords: Any) -> Path:
    """A watched training on the layout's ranks; its folder."""
    run_ranks(partial(train, **keywords), LAYOUTS[layout].ranks, layout, path)
    return path


def _update(model: Any, optimizer: Any) -> None:
    if hasattr(model, "backward"):  # DeepSpeed's engine
        model.step()
    else:
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    """One of two stages of `Net`, under the names that its modules have there."""

    def __init__(self, net: Net, index: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): net.blocks[index]})
        if index:
            self.head = net.head
        else:
            self.embedding = net.embedding

    def forward(self, x: Tensor) -> Tensor:
        x = x if hasattr(self, "head") else self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def piped(rank: int, schedule: str, path: Path | None, microbatches: int = 4) -> list[bytes]:
    """Train over two pipeline stages. Returns this rank's last weights."""
    from torch.distributed import pipelining

    torch.manual_seed(0)
    stage = Stage(Net(), rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    run = None if path is None else watch([stage], optimizer, path, share=1.0)
    pipe = getattr(pipelining, f"Schedule{schedule}")(
        pipelining.PipelineStage(stage, rank, 2, torch.device("cpu")),
        microbatches,
        loss_fn=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
    )
    for batch in batches(STEPS):
        losses: list[Tensor] = []
        words = () if rank else (batch[:, :-1],)
        pipe.step(*words, target=batch[:, 1:] if rank else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step(loss=torch.stack(losses).mean() if losses else None, data=None if rank else batch)
    if run is not None:
        run.close()
    return [_bytes(param) for param in stage.parameters()]


def _bytes(param: Tensor) -> bytes:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.detach().contiguous().numpy().tobytes()


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def moved(end: str, at: int, step: int, model: nn.Module, optimizer: Any) -> None:
    """Change a weight, as a wrong update or something between two steps would."""
    if step == at:
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name.endswith(end):
                    getattr(param, "_local_tensor", param).mul_(1.01)


def gradient_of(model: nn.Module, end: str) -> Tensor:
    """This rank's part of a gradient, by the end of the parameter's name."""
    (param,) = [param for name, param in model.named_parameters() if name.endswith(end)]
    assert param.grad is not None
    return param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad


def everywhere(rank: int, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several calls in one set of ranks: function, arguments, keywords."""
    found = []
    for function, arguments, keywords in jobs:
        found.append(function(rank, *arguments, **keywords))
        if dist.is_initialized():
            dist.barrier()
    return found
