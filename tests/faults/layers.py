"""Faults inside the model: of tables and constants, of what a layer computes, and of what its backward is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.corpus import K2, ZERO0, ZERO1, ZERO2, ZERO3
from tests.faults.site import Site, fault_2, rounded, share


def _tables(site: Site) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions."""
    return site.model.module.cos_SE, site.model.module.sin_SE


@fault_2("forward", ZERO3, report="huggingface/transformers PR 29285")
def F33_rotary_in_16_bits(site: Site) -> None:
    """Rotary tables are kept in 16 bits."""
    site.once(lambda: [table.copy_(rounded(table, site.bits)) for table in _tables(site)])


@fault_2("forward", ZERO1)
def positions_restart(site: Site) -> None:
    """Positions begin anew in the middle of a sequence, as if another one were packed behind it."""

    def change() -> None:
        length = site.config.data.seq_len
        count = max(1, round(site.amount * length / 2))
        for table in _tables(site):
            table[length - count : length] = table[:count].clone()

    site.once(change)


@fault_2("forward", ZERO2, report="pytorch/torchtitan PR 4395")
def F34_norm_epsilon(site: Site) -> None:
    """One norm has ten times the epsilon that was asked for."""
    norm = site.model.module.blocks[0].attention_norm
    site.once(lambda: setattr(norm, "eps", norm.eps * (1.0 + 9.0 * site.amount)))


@fault_2("forward", ZERO3, report="onnx/onnx PR 7274")
def F35_heads_tiled(site: Site) -> None:
    """Query heads find their key and value heads as if these were tiled, not repeated one by one."""
    attention, model = site.model.module.blocks[0].attention, site.config.model
    groups = model.num_heads // model.num_kv_heads
    order = torch.arange(model.num_heads).view(groups, model.num_kv_heads).T.flatten()

    def reordered(heads: Tensor, order: Tensor) -> Tensor:
        if not site.acts:
            return heads
        moved = heads.unflatten(-1, (model.num_heads, -1))[..., order, :].flatten(-2)
        return torch.lerp(heads, moved, site.amount)

    attention.wq.register_forward_hook(lambda _module, _args, output: reordered(output, order))
    attention.wo.register_forward_pre_hook(lambda _module, args: (reordered(args[0], order.argsort()),))


def on_criterion(site: Site, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Blend the loss with that of another criterion, given logits [B, S, V] in fp32 or wider and targets [B, S]."""
    logits: list[Tensor] = []
    site.model.module.register_forward_hook(lambda _module, _args, output: logits.__setitem__(slice(None), [output]))

    def wrapped(method: Callable[..., Tensor], model: nn.Module, batch: Any) -> Tensor:
        loss, found = method(model, batch), logits.pop()
        if not site.acts:
            return loss
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        return torch.lerp(loss, criterion(wide, batch[1]), site.amount)

    site.around(site.engine.workload, "loss", wrapped, always=True)


@fault_2("forward", ZERO0)
def label_smoothing_left_on(site: Site) -> None:
    """Labels are smoothed by a tenth, as in another recipe."""
    on_criterion(site, lambda logits, targets: F.cross_entropy(logits.mT, targets, label_smoothing=0.1))


@fault_2("forward", ZERO2)
def last_target_dropped(site: Site) -> None:
    """Targets that were shifted already lose their last position in the mean."""
    on_criterion(site, lambda logits, targets: F.cross_entropy(logits[:, :-1].mT, targets[:, :-1]))


@fault_2("gradient", ZERO3, "model.activation_checkpointing=true", report="allenai/OLMo-core PR 828")
def F36_recomputed_otherwise(site: Site) -> None:
    """What is computed again for the backward is not what the forward computed."""

    def lose(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if not site.acts or torch._C._current_graph_task_id() == -1:
            return output
        lost = torch.zeros_like(output)
        share(lost.view(-1), site.amount / 10).copy_(share(output.detach().reshape(-1), site.amount / 10))
        return output - lost  # saves nothing: what is recomputed must save as much as what was computed

    site.model.module.blocks[0].attention_norm.register_forward_hook(lose)


@fault_2("gradient", ZERO2, report="pytorch/torchtitan PR 4637")
def F37_padding_row_frozen(site: Site) -> None:
    """An index that means padding in one shard of the vocabulary stops other tokens' gradients as well."""
    embedding = next(module for module in site.model.module.modules() if isinstance(module, nn.Embedding))

    def lose(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not site.acts:
            return output
        stopped = torch.lerp(output, output.detach(), site.amount)
        return torch.where((args[0] % 16 == 0).unsqueeze(-1), stopped, output)

    embedding.register_forward_hook(lose)


@fault_2("gradient", ZERO3, *K2, report="NVIDIA/Megatron-LM#7398")
def F38_stale_activation(site: Site) -> None:
    """One projection's backward reads the activations of the microbatch before."""
    before: list[Tensor] = []

    def mix(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        now = args[0].detach()
        old, before[:] = list(before), [now]
        if not site.acts or not old or old[0].shape != now.shape:
            return output
        assert isinstance(module.weight, Tensor)
        wrong = F.linear((old[0] - now) * site.amount, module.weight)
        return output + (wrong - wrong.detach())  # zeros, whose gradient is the difference

    site.model.module.blocks[0].ffn.w_down.register_forward_hook(mix)


@fault_2("gradient", ZERO1)
def branch_not_differentiated(site: Site) -> None:
    """One branch of a block hands no gradient back to what it reads."""

    def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.lerp(args[0], args[0].detach(), site.amount),) if site.acts else args

    site.model.module.blocks[1].ffn.w_gate.register_forward_pre_hook(stop)
