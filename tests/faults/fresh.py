"""Edition 5: faults written by somebody who had read neither judges nor checks, for the classes of `benchmarks.power`.

Each has a twin `NAME_once` that acts in the step `fault.begins_at` and in no other. A row of `FAULTS` is a fault: what
it is called, what happens, and a change of what passes by: an output, a gradient, a loss, what is fed, a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data.order import sequence_at
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update import norms
from harness.models.llama import rotary_tables
from tests.faults.corpus import DECLARED, K2, ZERO1, ZERO2, ZERO3, Fault
from tests.faults.layers import on_criterion
from tests.faults.resume import on_load
from tests.faults.site import Injector, Site, rounded, share, spoiling
from tests.faults.sums import on_taken
from tests.faults.update import Rows, on_state, on_update, rows_of
from tests.faults.weights import on_landed


def _instead(of: Callable[[Site], Any], method: str, change: Callable[..., Any], always: bool = False) -> Injector:
    """Call `change(site, method, *arguments)` in place of a method."""
    return lambda site: site.around(of(site), method, partial(change, site), always=always)


def _last_rank(put: Injector) -> Injector:
    return lambda site: put(site) if site.rank == site.size - 1 else None


def _eight_bits(tensor: Tensor) -> Tensor:
    """Whole numbers up to 127 of one scale."""
    scale = tensor.abs().amax().clamp(min=1e-30) / 127 if tensor.numel() else 1.0
    return torch.round(tensor / scale) * scale


# -- what is computed --------------------------------------------------------------------------------------------------


def _at(path: str) -> Callable[[Site], Any]:
    """A module of the model."""
    return lambda site: site.model.module.get_submodule(path)


def _output(path: str, change: Callable[[Site, Any, Tensor, Tensor], Tensor]) -> Injector:
    """Replace a module's output, given its input."""
    return lambda site: _at(path)(site).register_forward_hook(
        lambda module, args, output: change(site, module, args[0], output) if site.acts else output
    )


def _backward(path: str, change: Callable[[Tensor, Tensor], Tensor]) -> Injector:
    """Change the gradient of a module's output, given the module's input and it; the output is right."""

    def changed(_site: Site, _module: nn.Module, given: Tensor, output: Tensor) -> Tensor:
        same = output.view_as(output)
        if same.requires_grad:
            same.register_hook(lambda gradient: change(given, gradient))
        return same

    return _output(path, changed)


def _attending(block: int, attend: Callable[[Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor]) -> Injector:
    """Replace what one block does with queries, keys and values, each [B, heads, S, E]."""
    plain = F.scaled_dot_product_attention

    def changed(_site: Site, forward: Callable[..., Tensor], *args: Tensor) -> Tensor:
        with mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: attend(plain, q, k, v)):
            return forward(*args)

    return _instead(_at(f"blocks.{block}.attention"), "forward", changed)


def _causal(queries: Tensor) -> Tensor:
    return torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool).tril()


def _one_of_a_group(plain: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    keys = torch.stack([k, *[k.detach()] * (groups - 1)], 2).flatten(1, 2)
    return plain(q, keys, v.repeat_interleave(groups, 1), is_causal=True)


def _turned_by_neighbours(site: Site) -> None:
    """Queries and keys are laid out as by a model that rotates channels 2i and 2i + 1."""
    half = site.config.model.dim // site.config.model.num_heads // 2
    for path in ("blocks.0.attention.wq", "blocks.0.attention.wk"):
        _output(path, lambda s, m, x, y: y.unflatten(-1, (-1, half, 2)).transpose(-1, -2).flatten(-3))(site)


def _other_base(site: Site, forward: Callable[..., Tensor], x: Tensor, cos: Tensor, _sin: Tensor) -> Tensor:
    tables = rotary_tables(replace(site.config.model, rope_theta=500_000.0), cos.dtype, cos.device)
    return forward(x, *(table[: len(cos)] for table in tables))


def _feed_forward(site: Site) -> Any:
    ffn = site.model.module.blocks[1].ffn
    return ffn.experts[0] if hasattr(ffn, "experts") else ffn


def _gate_exchanged(site: Site, _forward: Callable[..., Tensor], x: Tensor) -> Any:
    ffn = _feed_forward(site)
    return ffn.w_down(F.silu(ffn.w_up(x)) * ffn.w_gate(x))


def _normed(norm: Any, x: Tensor, dims: tuple[int, ...], scaled: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
    """As a norm normalises, but for the dimensions of its mean, and a change of its scale."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * scaled(torch.rsqrt(wide.square().mean(dims, True) + norm.eps))).to(x.dtype)


def _gain_of_half(_site: Site, norm: Any, x: Tensor, output: Tensor) -> Tensor:
    late = _normed(norm, x.detach(), (-1,))[:, x.shape[1] // 2 :] * norm.weight
    return output + F.pad(late.detach() - late, (0, 0, x.shape[1] // 2, 0))  # zeros, whose gradient is what is lost


def _read(change: Callable[[Site, int, Callable[[int], Any]], Any]) -> Injector:
    """What the last rank's loader reads at a position; of steps read ahead, by the position's own."""

    def changed(site: Site, read: Callable[[int], Any], position: int) -> Any:
        step, begins = position // site.config.train.global_batch_size + 1, site.config.fault.begins_at
        due = step == begins if site.only else step >= begins
        return change(site, position, read) if due else read(position)

    return _last_rank(_instead(lambda site: site.loader, "_sequence", changed, always=True))


def _fed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Injector:
    """Change tokens and targets on their way into the engine, behind the loop that hashes them."""

    return _instead(lambda site: site.engine, "forward_backward", lambda site, method, batch, *, last: (
        method(type(batch)(*change(*batch)), last=last)))  # fmt: skip


def _both(change: Callable[[Tensor], Tensor]) -> Injector:
    return _fed(lambda tokens, targets: (change(tokens), change(targets)))


# -- sums, and clipping ------------------------------------------------------------------------------------------------


def _taken(change: Callable[[Site, dict[str, Tensor], Tensor, Tensor], object]) -> Injector:
    """Change a rank's gradients of a bucket before they are summed: views by name, the whole, and the last one."""

    def put(site: Site) -> None:
        past: dict[str, Tensor] = {}

        def changed(bucket: ParamGroup, source: Tensor) -> None:
            fresh = source.clone()
            if site.acts:
                views = {name.rpartition("attention.")[2]: view for name, view in bucket.named_slices(source)}
                change(site, views, source, past.get(bucket.name, fresh))
            past[bucket.name] = fresh

        on_taken(site, changed, always=True)

    return put


def _keys_for_values(_site: Site, views: dict[str, Tensor], _source: Tensor, _past: Tensor) -> None:
    if "wk.weight" in views:
        keys, values = views["wk.weight"], views["wv.weight"].clone()
        views["wv.weight"].copy_(keys)
        keys.copy_(values)


def _last_not_sent(site: Site) -> None:
    at = [0]
    site.each_microbatch(lambda number: at.__setitem__(0, number))
    _taken(lambda site, views, source, past: source.mul_(at[0] < site.k))(site)


def _clips(change: Callable[..., object], function: str = "clip_gradients") -> Injector:
    return _instead(lambda site: norms, function, change)


def _gains_unclipped(site: Site, clip: Any, buckets: list[ParamGroup], norm: Tensor, bound: float) -> None:
    kept = [(rows.grad, rows.grad.clone()) for rows in rows_of(site) if rows.group]
    clip(buckets, norm, bound)
    for gradient, before in kept:
        gradient.copy_(before)


def _by_unit(_site: Site, clip: Any, buckets: list[ParamGroup], norm: Tensor, bound: float) -> None:
    for bucket in buckets:
        squares = norm.new_zeros(()) + sum(piece.double().square().sum() for piece in bucket.grad_shards)
        torch.distributed.all_reduce(squares)
        clip([bucket], squares.sqrt(), bound)


# -- the optimizer, and weights on their way ---------------------------------------------------------------------------


def _stepping(change: Callable[[Site, Callable[..., Any]], Any]) -> Injector:
    return _instead(lambda site: site.engine.optimizer, "step", change)


def _updated(change: Callable[[Rows, Tensor, Tensor], object]) -> Injector:
    return lambda site: on_update(site, rows_of(site), change)


def _betas_exchanged(site: Site, step: Callable[..., Any]) -> None:
    group = site.engine.optimizer.param_groups[0]
    with mock.patch.dict(group, betas=group["betas"][::-1]):
        step()


def _largest_so_far(site: Site, step: Callable[..., Any]) -> None:
    moments = [rows.state("exp_avg_sq") for rows in rows_of(site)]
    before = [moment.clone() for moment in moments]
    step()
    for moment, old in zip(moments, before, strict=True):
        moment.copy_(torch.maximum(moment, old))


def _uncorrected(rows: Rows, weight: Tensor, old: Tensor) -> None:
    first, second = (rows.state(entry).view_as(old) for entry in ("exp_avg", "exp_avg_sq"))
    lr, decay, epsilon = (rows.settings[key] for key in ("lr", "weight_decay", "eps"))
    weight.copy_(old * (1.0 - lr * decay) - lr * first / (second.sqrt() + epsilon))


def _between(change: Callable[[Site], object]) -> Injector:
    def changed(site: Site) -> None:
        change(site)
        site.model.install_weights()

    return lambda site: site.once(lambda: changed(site), earliest=2)


def _gathered(change: Callable[[Tensor], object], which: slice = slice(None), backward: bool = False) -> Injector:
    """Change what other ranks own of gathered weights; in backwards alone."""

    def put(site: Site) -> None:
        def changed(bucket: ParamGroup, others: list[Tensor]) -> None:
            if bucket in site.buckets[which] and (not backward or torch._C._current_graph_task_id() != -1):
                for target in others:
                    change(target)

        on_landed(site, changed)

    return put


# -- the faults --------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[tuple[str, str, Injector], ...]] = {
    "data": (
        ("another_seed", "one rank reads in the order of another seed", _read(lambda s, at, read: s.loader.source[
            sequence_at(at, s.loader.source.num_sequences, s.config.data.order_seed + 1)])),
        ("first_batch_again", "one rank begins its data anew at each step", _read(
            lambda s, at, read: read(at % s.config.train.global_batch_size))),
        ("spliced", "a sequence goes on with the one after it", _read(
            lambda s, at, read: np.concatenate([read(at)[:20], read(at + 1)[20:]]))),
    ),
    "forward": (
        ("tokens_masked", "every eighth token is hidden", _fed(
            lambda x, t: (x.index_fill(1, torch.arange(7, x.shape[1], 8), 3), t))),
        ("lower_case", "capitals are read as small letters", _both(lambda x: x.where((x < 65) | (x > 90), x + 32))),
        ("shifted_right", "a token is put before a sequence, whose last is lost", _last_rank(_fed(
            lambda x, t: (F.pad(x[:, :-1], (1, 0), value=1), t)))),
        ("cut_short", "sequences end after three quarters", _both(lambda x: x[:, :24].contiguous())),
        ("padded_left", "sequences begin with padding", _last_rank(_both(lambda x: F.pad(x[:, :-4], (4, 0))))),
        ("zigzag", "quarters of sequences are in another order", _both(
            lambda x: x.unflatten(1, (4, -1))[:, [0, 3, 1, 2]].flatten(1))),
        ("row_again", "a batch is filled up with its first sequence", _last_rank(_both(
            lambda x: torch.cat([x[:-1], x[:1]])))),
        ("transposed", "tokens are read across sequences", _last_rank(_both(lambda x: x.T.reshape(x.shape)))),
        ("window", "attention sees the last eight positions alone", _attending(0, lambda plain, q, k, v: plain(
            q, k, v, attn_mask=_causal(q).triu(-7), enable_gqa=True))),
        ("sink", "a softmax over keys has a one in its divisor", _attending(1, lambda plain, q, k, v: plain(
            q, *(F.pad(each, (0, 0, 1, 0)) for each in (k, v)), attn_mask=F.pad(_causal(q), (1, 0), value=True),
            enable_gqa=True))),
        ("turned_by_neighbours", "channels are turned with neighbours, not half a head away", _turned_by_neighbours),
        ("other_base", "angles have the base of a model of longer sequences", _instead(
            _at("blocks.1.attention"), "forward", _other_base)),
        ("gate_exchanged", "the gate and what it lets pass change places", _instead(
            _feed_forward, "forward", _gate_exchanged)),
        ("norm_over_sequence", "a norm's mean is over positions, too", _output(
            "blocks.1.ffn_norm", lambda s, m, x, y: _normed(m, x, (1, 2)) * m.weight)),
        ("over_capacity", "the last tokens of a microbatch skip a branch", _output(
            "blocks.0.ffn", lambda s, m, x, y: F.pad(y.flatten(0, 1)[:-16], (0, 0, 0, 16)).view_as(y))),
        ("embedding_scaled", "embeddings are scaled by the root of the width", _output(
            "embedding", lambda s, m, x, y: y * y.shape[-1] ** 0.5)),
        ("padded_vocabulary", "ids that pad the vocabulary are in the softmax", partial(
            on_criterion, criterion=lambda y, t: F.cross_entropy(F.pad(y, (0, 16)).mT, t))),
        ("uneven_chunks", "the loss is a mean over chunks, of which the last is short", partial(
            on_criterion, criterion=lambda y, t: torch.stack([F.cross_entropy(a.mT, b) for a, b in zip(
                y.split(12, 1), t.split(12, 1), strict=True)]).mean())),
    ),
    "gradient": (
        ("one_of_a_group", "keys learn from one query head of those that share them", _attending(0, _one_of_a_group)),
        ("attended_alone", "a block's values have no gradient", _backward(
            "blocks.1.attention.wv", lambda x, g: torch.zeros_like(g))),
        ("constant_scale", "a norm's scale is a constant to its backward", _output(
            "blocks.1.attention_norm", lambda s, m, x, y: _normed(m, x, (-1,), Tensor.detach) * m.weight)),
        ("gain_of_half", "a norm's gain learns from half of the positions", _output(
            "blocks.0.ffn_norm", _gain_of_half)),
        ("by_frequency", "embeddings' gradients are divided by how often a token comes", _backward(
            "embedding", lambda x, g: g / (x.reshape(-1, 1) == x.reshape(-1)).sum(1).view(*x.shape, 1))),
        ("unscaled_cast", "a gradient is cast to E5M2 without a scale", _backward(
            "blocks.1.attention", lambda x, g: g.to(torch.float8_e5m2).to(g.dtype))),
        ("filtered_logits", "logits of small probability have no gradient", _backward(
            "head.output", lambda x, g: g.masked_fill(g.abs() < g.abs().amax() / 400, 0.0))),
        ("history_cut", "a branch's early positions have no gradient", _backward(
            "blocks.0.ffn", lambda x, g: F.pad(g[:, 16:], (0, 0, 16, 0)))),
    ),
    "reduction": (
        ("rank_behind", "one rank sends what it had a step before", _last_rank(_taken(
            lambda s, views, source, past: source.copy_(past)))),
        ("gains_of_one_rank", "norms learn from the first rank alone", _taken(lambda s, views, source, past: [
            view.mul_(0 if s.rank else s.size) for name, view in views.items() if "norm" in name])),
        ("turned_over", "gradients of square matrices are transposed", _taken(lambda s, views, source, past: [
            view.copy_(view.T.clone()) for view in views.values() if view.dim() == 2 and len({*view.shape}) == 1])),
        ("keys_for_values", "gradients of keys and values change places", _taken(_keys_for_values)),
        ("last_not_sent", "one rank's last microbatch is not in the sum", _last_rank(_last_not_sent)),
        ("signs_sent", "one rank sends signs and a mean size", lambda site: site.on_contributions(
            lambda all: [all[0].sign() * all[0].abs().mean(), *all[1:]])),
        ("largest_taken", "the largest is taken instead of a sum", lambda site: site.on_contributions(
            lambda all: [torch.stack(all).amax(0), *(torch.zeros_like(each) for each in all[1:])])),
    ),
    "clipping": (
        ("norms_added", "norms of buckets are added instead of their squares", _clips(
            lambda s, norm, buckets, *args: sum(norm([each], *args) for each in buckets), "gradient_norm")),
        ("narrow_norm", "the norm that is clipped by has 8 bits", _clips(
            lambda s, clip, buckets, norm, bound: clip(buckets, rounded(norm, 8), bound))),
        ("gains_unclipped", "vectors are not clipped", _clips(_gains_unclipped)),
        ("clipped_too_late", "gradients are clipped when they have been used", _clips(lambda *_: None)),
        ("clipped_by_unit", "each unit is clipped by its own norm", _clips(_by_unit)),
    ),
    "optimizer": (
        ("uncorrected", "moments' bias is not corrected", _updated(_uncorrected)),
        ("largest_so_far", "the second moment never falls", _stepping(_largest_so_far)),
        ("rate_kept_up", "the learning rate stays at its peak", _instead(
            lambda s: s.engine, "step", lambda s, step, lr: step(s.config.optimizer.lr))),
        ("vectors_frozen", "the optimizer has no vectors", _updated(
            lambda rows, weight, old: weight.copy_(old) if rows.group else None)),
        ("decay_without_rate", "decay is not multiplied by the learning rate", _updated(lambda rows, weight, old: (
            weight.sub_(old, alpha=rows.settings["weight_decay"] * (1.0 - rows.settings["lr"]))))),
        ("betas_exchanged", "Adam's betas change places", _stepping(_betas_exchanged)),
        ("by_own_size", "updates are scaled by a weight's own size", _updated(
            lambda rows, weight, old: weight.copy_(old + (weight - old) * old.square().mean().sqrt()))),
        ("momentum_in_8_bits", "momentum is kept in 8 bits", lambda site: on_state(
            site, "exp_avg", lambda moment: moment.copy_(_eight_bits(moment)))),
        ("second_underflows", "second moments that fp16 does not hold are zero", lambda site: on_state(
            site, "exp_avg_sq", lambda moment: moment.masked_fill_(moment < 2.0**-24, 0.0))),
    ),
    "weights": (
        ("row_lost", "the row of a space is zero between steps", _between(lambda s: s.buckets[0].main_shards[0][
            32 * s.config.model.dim : 33 * s.config.model.dim].zero_())),
        ("pruned", "small weights are set to zero between steps", _between(lambda s: [
            each.masked_fill_(each.abs() < each.abs().amax() / 100, 0.0) for b in s.buckets
            for each in b.main_shards])),
    ),
    "gather": (
        ("gathered_coarse", "weights are gathered in 8 bits of one scale", _gathered(
            lambda w: w.copy_(_eight_bits(w)) if w.itemsize > 1 else None)),
        ("gathered_twice", "the beginning of what arrives is there twice", _gathered(
            lambda w: w[(w.numel() + 1) // 2 :].copy_(w[: w.numel() // 2].clone()), slice(1, -1))),
        ("freed_for_backward", "a backward finds the end of weights freed", _gathered(
            lambda w: share(w, 1 / 16).zero_(), backward=True)),
    ),
    "checkpoint": (
        ("keys_interleaved", "rows of keys come back interleaved", partial(
            on_load, chosen=lambda key: key.endswith("attention.wk.weight"),
            change=lambda new, old: new.copy_(new.reshape(2, -1).T.reshape(new.shape)))),
        ("narrow_squares", "second moments come back in 8 bits", partial(
            on_load, chosen=lambda key: key.endswith("exp_avg_sq"),
            change=lambda new, old: new.copy_(rounded(new, 8)))),
    ),
}  # fmt: skip
IN_ZERO1 = ["another_seed", "cut_short", "row_again", "sink", "gate_exchanged", "padded_vocabulary", "gain_of_half"]
IN_ZERO1 += ["history_cut", "keys_for_values", "uncorrected", "vectors_frozen", "row_lost"]
LIMITS: dict[str, Any] = {"gather": {"strategies": ("optim_grads_params",)}, "checkpoint": {"resumes": True}}

for stage, rows in FAULTS.items():
    usual = (ZERO3, "optimizer.clip_norm=0.1") if stage == "clipping" else (ZERO3,)
    for name, does, put in rows:
        cell = (ZERO2, *K2) if name == "last_not_sent" else (ZERO1,) if name in IN_ZERO1 else usual
        declared = Fault(name, f"{__name__}:{name}", does, stage, cell, edition=5, **LIMITS.get(stage, {}))
        DECLARED.append(declared)
        globals()[name], globals()[f"{name}_once"] = (spoiling(declared, put, only=only) for only in (False, True))
