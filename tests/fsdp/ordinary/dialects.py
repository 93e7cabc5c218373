"""The same programs under the names of other engines, as their users would type them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness.engines.adapters import megatron_on_cpu
from tests.fsdp.ordinary.program import Program
from tests.fsdp.ordinary.running import DTYPES, RANKS, Outcome, World, execute, ours, raised, whole_weights
from tests.fsdp.ordinary.source import text_of

OURS = "ours"
WRAPS = re.compile(r"^(?P<model>\w+)(, (?P<optimizer>\w+))? = fully_shard\w*\(.*\)$", re.M)
UNUSED = {"Unused", "InTurns", "DroppedTogether", "DroppedApart", "Experts", "Recurrent", "Attention", "Encoder"}
"""Pieces for whose sake users of DDP type `find_unused_parameters=True`."""
CLIPS = (
    ("model.clip_grad_norm_(0.5)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)"),
    ("model.clip_grad_norm_(0.05, norm", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm"),
    ("with model.unsharded():", "with torch.no_grad():"),
)


@dataclass(frozen=True)
class Dialect:
    """write: a program's text. names: of the engine. weights: a model's whole ones. like: what our text is held to."""

    write: Callable[[Program], str]
    names: Callable[[], dict[str, Any]]
    weights: Callable[[Any], dict[str, Tensor]]
    like: Callable[[Program], Program] = lambda program: program


def _common(text: str) -> str:
    for mine, theirs in CLIPS:
        text = text.replace(mine, theirs)
    return text.replace("second = fully_shard_optimizer(model, second)\n", "")


def _ddp(program: Program) -> str:
    more = ", find_unused_parameters=True" if UNUSED & set(program.pieces) or program.freezing == "later" else ""
    return _common(WRAPS.sub(rf"\g<model> = DistributedDataParallel(\g<model>{more})", _by_module(program)))


def _by_module(program: Program) -> str:
    """With the module's own attributes reached by `module` where the wrapper does not pass them on."""
    before, wrap, after = text_of(replace(program, order="wrapped")).partition("model, optimizer = fully_shard(model")
    for inner in ("pieces", "norm", "head", "embed", "named_parameters"):
        after = after.replace(f"model.{inner}", f"model.module.{inner}")
    return before + wrap + after


def _after(program: Program) -> Program:
    return replace(program, order="after")


def _fsdp2(program: Program) -> str:
    """Units first, then the model, then the optimizer; every backward reduces, with `no_sync` or without."""
    layers = "for linear in [m for m in model.modules() if isinstance(m, nn.Linear)]:\n    fully_shard(linear)\n"
    pieces = "for piece in model.pieces:\n    fully_shard(piece)\n"
    units = {"pieces": pieces, "none": "", "linear": layers}[program.units]
    text = re.sub(r"^(second = .*critic.*\n)(critic, .*\n)", r"\2\1", text_of(_after(program)), flags=re.M)
    text = WRAPS.sub(lambda m: ("" if m["optimizer"] else units) + f"fully_shard({m['model']})", text)
    rhythm = r"\1model.set_requires_gradient_sync(batch.last)\n\1if True:\n"
    text = _common(re.sub(r"^( *)with nullcontext.*no_sync\(\):\n", rhythm, text, flags=re.M))
    return text.replace("with model.no_sync():", "if True:").replace("model.module.zero_grad", "model.zero_grad")


def _megatron(program: Program) -> str:
    units = {"pieces": "[Piece]", "none": "None", "linear": "[nn.Linear]"}[program.units]
    given = f'fsdp_unit_modules={units}, zero_dp_strategy="optim_grads_params", **mesh'
    wrapped = rf"\g<model>, \g<optimizer> = fully_shard(\g<model>, \g<optimizer>, {given})"
    return _common(WRAPS.sub(wrapped, _by_module(program)))


def _megatron_names() -> dict[str, Any]:
    megatron_on_cpu.install()
    package = import_module("megatron_fsdp")
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))
    given = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu")}
    return {"fully_shard": package.fully_shard, "mesh": given}


def _megatron_weights(model: Any) -> dict[str, Tensor]:
    with suppress(AttributeError):
        model._replace_param_with_raw_if_needed()
    storage, found = model.param_and_grad_buffer, {}
    for group in storage.parameter_groups:
        buffer = group.main_weight_buffer or group.model_weight_buffer
        mine = buffer.get_shard_from_local_buffer().contiguous()
        pieces = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(pieces, mine, group=buffer.data_parallel_group)
        for item, param in enumerate(group.params):
            index, name = buffer.item_index_map[item], storage.param_to_name[param].removeprefix("module.")
            flat = torch.cat(pieces)[index.global_data_index :][: index.size]
            found[name] = flat.reshape(param.shape).clone()
    return found


def _full(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


PEERS = {
    "DDP": Dialect(
        _ddp, lambda: {"DistributedDataParallel": DistributedDataParallel}, lambda model: whole_weights(model.module)
    ),
    "FSDP2": Dialect(_fsdp2, lambda: {"fully_shard": fsdp2}, _full, _after),
    "megatron-fsdp": Dialect(_megatron, _megatron_names, _megatron_weights),
}


def attempt_as(rank: int, case: tuple[str, Program]) -> Outcome:
    """A program on a rank under an engine, by name."""
    engine, program = case
    world = World(program, (rank,), DTYPES[program.dtype])
    try:
        if engine == OURS:
            return execute(text_of(program), program, world, ours(program))
        dialect = PEERS[engine]
        return execute(dialect.write(program), program, world, dialect.names(), dialect.weights)
    except Exception as error:
        return raised(error)


def changed_lines(engine: str, program: Program) -> int:
    """Lines of an engine's program that are others in ours."""
    before = PEERS[engine].write(program).splitlines()
    after = text_of(PEERS[engine].like(program)).splitlines()
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(end - begin, last - first) for kind, begin, end, first, last in codes if kind != "equal")
