"""Edition 4: faults written by somebody who had read neither judges nor checks, for the classes of `benchmarks.power`.

Each has a twin `NAME_once` that acts in the step `fault.begins_at` and in no other. A row of the file is a fault: what
it is called, what happens, and a change of what passes by: an output, a gradient, a loss, what is fed, a message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.derived import lr_at
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update import norms
from tests.faults.corpus import DECLARED, K2, ZERO1, ZERO2, ZERO3, Fault
from tests.faults.layers import on_criterion
from tests.faults.resume import on_load
from tests.faults.site import Injector, Site, rounded, share, spoiling
from tests.faults.update import Rows, on_state, on_update, rows_of
from tests.faults.weights import others_of

CLIP, TWO = (ZERO3, "optimizer.clip_norm=0.1"), (ZERO2, *K2)
Of = Callable[[Any], nn.Module]


def _add(name: str, does: str, stage: str, put: Injector, cell: tuple[str, ...] = (ZERO3,), **limits: Any) -> None:
    declared = Fault(name, f"{__name__}:{name}", does, stage, cell, edition=4, **limits)
    DECLARED.append(declared)
    globals()[name], globals()[f"{name}_once"] = (spoiling(declared, put, only=only) for only in (False, True))


# -- outputs of modules: what a forward computes -----------------------------------------------------------------------


def _output(of: Of, change: Callable[[Site, nn.Module, Tensor, Tensor], Tensor]) -> Injector:
    """Replace a module's output, given its input."""

    def put(site: Site) -> None:
        of(site.model.module).register_forward_hook(
            lambda module, args, output: change(site, module, args[0], output) if site.acts else output
        )

    return put


def _at(block: int, path: str) -> Of:
    return lambda model: model.blocks[block].get_submodule(path)  # type: ignore[no-any-return] # blocks are of any kind


def _as_if(output: Tensor, wrong: Tensor) -> Tensor:
    """Another value, and the output's gradient."""
    return output + (wrong - output).detach()


def _kept(site: Site, output: Tensor, rate: float) -> Tensor:
    generator = torch.Generator().manual_seed(site.rank * 1_000 + site.step)
    return output * (torch.rand(output.shape, generator=generator) > rate) / (1.0 - rate)


for name, does, of, change in (
    ("late_keys", "keys are those of the position before", _at(0, "attention.wk"), lambda s, m, x, y: y.roll(1, 1)),
    ("scaled_by_width", "scores are divided by a head's width", _at(1, "attention.wq"), lambda s, m, x, y: y / 4),
    ("other_values", "values are another sequence's", _at(1, "attention.wv"), lambda s, m, x, y: y.roll(1, 0)),
    ("gain_twice", "a norm's gain counts twice", _at(1, "attention_norm"), lambda s, m, x, y: y * m.weight),
    ("input_added", "attention adds its input once more", _at(0, "attention"), lambda s, m, x, y: y + x),
    ("stream_rounded", "a normed stream has 8 bits", _at(0, "ffn_norm"), lambda s, m, x, y: _as_if(y, rounded(y, 8))),
    ("dropout_left_on", "a tenth of a branch is dropped", _at(0, "attention"), lambda s, m, x, y: _kept(s, y, 0.1)),
    ("saturated", "a branch saturates", _at(1, "ffn"), lambda s, m, x, y: y.clamp(max=y.detach().amax().item() / 2)),
    ("logits_capped", "logits are capped", lambda model: model.head.output, lambda s, m, x, y: 2 * torch.tanh(y / 2)),
    ("future_leaks", "attention mixes in the next", _at(0, "attention"), lambda s, m, x, y: y.lerp(y.roll(-1, 1), 0.1)),
    ("centred_norm", "a norm subtracts the mean", _at(0, "attention_norm"), lambda s, m, x, y: y - y.mean(-1, True)),
    ("first_lost", "the first position has no embedding", lambda model: model.embedding, lambda s, m, x, y: torch.cat(
        [torch.zeros_like(y[:, :1]), y[:, 1:]], 1)),
):  # fmt: skip
    _add(name, does, "forward", _output(of, change))


# -- gradients that pass by: what a backward computes ------------------------------------------------------------------


def _backward(change: Callable[[Site, Tensor, Tensor], Tensor]) -> Callable[[Site, nn.Module, Tensor, Tensor], Tensor]:
    """Change the gradient of an output, given it and the module's input; the output is right."""

    def changed(site: Site, _module: nn.Module, given: Tensor, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        same = output.view_as(output)
        same.register_hook(lambda gradient: change(site, given, gradient))
        return same

    return changed


def _of_first_use(tokens: Tensor, gradient: Tensor) -> Tensor:
    repeated = (tokens.unsqueeze(1) == tokens.unsqueeze(2)).tril(-1).any(-1)
    return gradient.masked_fill(repeated.unsqueeze(-1), 0.0)


for name, does, of, changed in (
    ("keys_turned", "the keys' gradient has the other sign", _at(0, "attention.wk"), lambda s, x, g: -g),
    ("branch_halved", "a branch's gradient is halved", _at(1, "ffn"), lambda s, x, g: g / 2),
    ("cut_off", "large gradients are cut off", _at(1, "attention"), lambda s, x, g: g.clamp(*_half(g))),
    ("backward_rounded", "a backward has 8 bits", _at(1, "ffn_norm"), lambda s, x, g: rounded(g, 8)),
    ("repeats_lost", "a token that comes again has no gradient", lambda m: m.embedding, lambda s, x, g: _of_first_use(
        x, g)),
    ("last_row_lost", "the last sequence has no gradient", _at(0, "attention"), lambda s, x, g: torch.cat(
        [g[:-1], torch.zeros_like(g[-1:])])),
    ("heads_turned", "heads change places in a backward", _at(1, "attention.wq"), lambda s, x, g: g.roll(
        g.shape[-1] // 4, -1)),
):  # fmt: skip
    _add(name, does, "gradient", _output(of, _backward(changed)))


def _half(gradient: Tensor) -> tuple[float, float]:
    bound = gradient.abs().amax().item() / 2
    return -bound, bound


# -- losses ------------------------------------------------------------------------------------------------------------


def _mean(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    each = F.cross_entropy(logits.mT, targets, reduction="none")
    return (each * weights).sum() / weights.sum()


def _zipped(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, targets) + 0.01 * logits.logsumexp(-1).square().mean()


for name, does, criterion, cell in (
    ("z_loss", "the loss has a z-loss beside it", _zipped, (ZERO3,)),
    ("ignored_ids", "a sixteenth of the labels is ignored", lambda y, t: _mean(y, t, (t % 16 != 0).float()), (ZERO1,)),
    ("prompt_masked", "the first positions have no loss", lambda y, t: _mean(y, t, (
        torch.arange(t.shape[1]) >= 8).float().expand_as(t)), (ZERO3,)),
    ("ramp", "later positions weigh more", lambda y, t: _mean(y, t, torch.linspace(
        0.5, 1.5, t.shape[1]).expand_as(t)), (ZERO3,)),
    ("narrow_logits", "logits have 8 bits", lambda y, t: F.cross_entropy(_as_if(y, rounded(y, 8)).mT, t), (ZERO1,)),
    ("one_token_less", "the mean is over a token less a sequence", lambda y, t: F.cross_entropy(y.mT, t) * (
        t.shape[1] / (t.shape[1] - 1)), (ZERO3,)),
):  # fmt: skip
    _add(name, does, "forward", partial(on_criterion, criterion=criterion), cell)


# -- what is fed, behind the loop that hashes it -----------------------------------------------------------------------


def _fed(change: Callable[[Tensor, Tensor, list[Any]], tuple[Tensor, Tensor]], last_alone: bool = False) -> Injector:
    """Change tokens and targets on their way into the engine, given what was fed before; on the last rank alone."""

    def put(site: Site) -> None:
        before: list[Any] = []

        def wrap(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def wrapped(batch: Any, *, last: bool) -> Tensor:
                tokens, targets = (each.clone() for each in batch)
                changed = change(tokens, targets, before) if site.acts else batch
                before[:] = [batch]
                return method(type(batch)(*changed), last=last)

            return wrapped

        if not last_alone or site.rank == site.size - 1:
            site.around(site.engine, "forward_backward", wrap, always=True)

    return put


def _replaced(rows: Tensor, place: Any, value: Any) -> Tensor:
    rows[place] = value
    return rows


for name, does, fed, last_alone in (
    ("rows_exchanged", "sequences meet the targets of others", lambda x, t, old: (x.flip(0), t), False),
    ("ids_folded", "ids from 64 on lose a bit", lambda x, t, old: (x & 63, t), False),
    ("batch_again", "a rank trains on the batch before", lambda x, t, old: (old[0] if old else (x.flip(0), t)), True),
    ("row_reversed", "a sequence is read backwards", lambda x, t, old: (_replaced(x, -1, x[-1].flip(0)), t), True),
    ("neighbours", "two tokens change places", lambda x, t, old: (_replaced(x, (slice(None), [9, 10]), x[:, [10, 9]]),
                                                                  t), False),
    ("end_padded", "the end of the tokens is padding", lambda x, t, old: (_replaced(x, (..., slice(-8, None)), 0), t),
     False),
    ("next_but_one", "targets are those after the next", lambda x, t, old: (x, t.roll(-1, 1)), True),
    ("a_token_wrong", "one token is another", lambda x, t, old: (_replaced(x, (0, 5), (x[0, 5] + 1) % 200), t), True),
):  # fmt: skip
    _add(name, does, "forward", _fed(fed, last_alone), TWO if name in ("batch_again", "row_reversed") else (ZERO3,))


# -- what is read ------------------------------------------------------------------------------------------------------


def _read(change: Callable[[Site, int, Callable[[int], Any]], Any]) -> Injector:
    """What the last rank's loader reads at a position; of steps read ahead, by the position's own."""

    def put(site: Site) -> None:
        begins, size = site.config.fault.begins_at, site.config.train.global_batch_size

        def wrap(read: Callable[[int], Any]) -> Callable[[int], Any]:
            def wrapped(position: int) -> Any:
                step = position // size + 1
                due = step == begins if site.only else step >= begins
                return change(site, position, read) if due else read(position)

            return wrapped

        if site.rank == site.size - 1:
            site.around(site.loader, "_sequence", wrap, always=True)

    return put


_add("unshuffled", "one rank reads in the order of the file", "data", _read(
    lambda site, at, read: site.loader.source[at]))  # fmt: skip
_add("read_ahead", "one rank reads the batch of the next step", "data", _read(
    lambda site, at, read: read(at + site.config.train.global_batch_size)))  # fmt: skip
_add("ids_shifted", "ids are one too large", "data", _read(
    lambda site, at, read: (read(at) + 1) % site.config.model.vocab_size), (ZERO1,))  # fmt: skip


# -- messages and sums -------------------------------------------------------------------------------------------------


def _sent(rank: int, change: Callable[[Tensor], Tensor]) -> Injector:
    """Change what one rank contributes to every sum."""

    def change_one(contributions: list[Tensor]) -> list[Tensor]:
        contributions[rank] = change(contributions[rank].clone())
        return contributions

    return lambda site: site.on_contributions(change_one)


def _scaled(flat: Tensor, part: slice, factor: float) -> Tensor:
    flat[part] *= factor
    return flat


def _in_eight_bits(flat: Tensor) -> Tensor:
    scale = flat.abs().amax().clamp(min=1e-30) / 127
    return torch.round(flat / scale) * scale


for name, does, put, cell in (
    ("truncated", "the end of a message is lost", _sent(-1, lambda g: _scaled(g, slice(-(g.numel() // 8), None), 0.0)),
     (ZERO3,)),
    ("eight_bit_wire", "messages have 8 bits", _sent(0, _in_eight_bits), (ZERO3,)),
    ("halves_exchanged", "halves of a message change places", _sent(-1, lambda g: g.roll(g.numel() // 2)), TWO),
    ("overflow_lost", "what is large is zero in a message", _sent(0, lambda g: g.masked_fill(
        g.abs() > g.abs().amax() / 2, 0.0)), (ZERO3,)),
    ("unequal_ranks", "one rank weighs a tenth more", _sent(-1, lambda g: g * 1.1), (ZERO1,)),
):  # fmt: skip
    _add(name, does, "reduction", put, cell)


def _reduced(change: Callable[[Tensor, Tensor], object], which: slice = slice(None)) -> Injector:
    """Change pieces of summed gradients, given what they were a step ago."""

    def put(site: Site) -> None:
        past: dict[tuple[int, int], Tensor] = {}

        def then(buckets: list[ParamGroup]) -> None:
            for number, bucket in [*enumerate(buckets)][which]:
                for index, piece in enumerate(bucket.grad_shards):
                    fresh = piece.clone()
                    if site.acts and piece.numel():
                        change(piece, past.get((number, index), torch.zeros_like(piece)))
                    past[number, index] = fresh

        site.on_reduced(then, always=True)

    return put


for name, does, then, which in (
    ("smoothed", "gradients are averaged with those before", lambda g, old: g.lerp_(old, 0.1), slice(None)),
    ("sparse", "small gradients are dropped", lambda g, old: g.masked_fill_(g.abs() < g.abs().amax() / 100, 0.0),
     slice(None)),
    ("an_element_on", "a gradient lies an element further on", lambda g, old: g.copy_(g.roll(1)), slice(1, 2)),
    ("centred", "a bucket's gradient has no mean", lambda g, old: g.sub_(g.mean()), slice(0, 1)),
):  # fmt: skip
    _add(name, does, "reduction", _reduced(then, which))


# -- clipping ----------------------------------------------------------------------------------------------------------

Clip = Callable[[list[ParamGroup], Tensor, float], object]


def _clips(change: Callable[[Clip, list[ParamGroup], Tensor, float], object]) -> Injector:
    def wrap(clip: Clip) -> Clip:
        return lambda buckets, norm, max_norm: change(clip, buckets, norm, max_norm)

    return lambda site: site.around(norms, "clip_gradients", wrap)


def _largest(buckets: list[ParamGroup]) -> Tensor:
    found = torch.stack([g.abs().amax().double() for b in buckets for g in b.grad_shards if g.numel()]).amax()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found


_add("clipped_by_value", "elements are clipped instead of the norm", "clipping", _clips(
    lambda clip, buckets, norm, bound: [g.clamp_(-bound / 100, bound / 100) for b in buckets for g in b.grad_shards]
    ), CLIP)  # fmt: skip
_add("bucket_unclipped", "one bucket is not clipped", "clipping", _clips(
    lambda clip, buckets, norm, bound: clip(buckets[1:], norm, bound)), CLIP)  # fmt: skip
_add("clipped_by_largest", "the largest element is taken for the norm", "clipping", _clips(
    lambda clip, buckets, norm, bound: clip(buckets, _largest(buckets), bound)), CLIP)  # fmt: skip
_add("large_epsilon", "0.01 is added to the norm", "clipping", _clips(
    lambda clip, buckets, norm, bound: clip(buckets, norm + 0.01, bound)), CLIP)  # fmt: skip


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _set(key: str, value: Callable[[Any], Any]) -> Injector:
    """Another setting of the first group of parameters while the optimizer steps."""

    def wrap_of(site: Site) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                group = site.engine.optimizer.param_groups[0]
                kept = group[key]
                group[key] = value(kept)
                result = step(*args, **kwargs)
                group[key] = kept
                return result

            return wrapped

        return wrap

    return lambda site: site.around(site.engine.optimizer, "step", wrap_of(site))


def _updated(change: Callable[[Rows, Tensor, Tensor], object], first_bucket: bool = False) -> Injector:
    def put(site: Site) -> None:
        found = [rows for rows in rows_of(site) if not first_bucket or rows.bucket is site.buckets[0]]
        on_update(site, found, change)

    return put


def _rate_ahead(site: Site) -> None:
    ahead = lambda: lr_at(site.config, min(site.step + 1, site.config.train.steps))  # noqa: E731
    site.around(site.engine, "step", lambda step: lambda lr: step(ahead()))


def _capped(_rows: Rows, weight: Tensor, old: Tensor) -> None:
    change = weight - old
    bound = change.abs().amax() / 2
    weight.copy_(old + change.clamp(-bound, bound))


def _not_counted(rows: Rows, _weight: Tensor, _old: Tensor) -> None:
    rows.state("step").sub_(1)


for name, does, put, cell in (
    ("first_beta", "Adam's first beta is 0.8", _set("betas", lambda betas: (0.8, betas[1])), (ZERO3,)),
    ("epsilon", "Adam's epsilon is 1e-5", _set("eps", lambda eps: 1e-5), (ZERO1,)),
    ("no_decay", "weights do not decay", _set("weight_decay", lambda decay: 0.0), (ZERO3,)),
    ("uphill", "the loss is maximized", _set("maximize", lambda maximize: True), (ZERO3,)),
    ("rate_ahead", "the learning rate is that of the next step", _rate_ahead, (ZERO3,)),
    ("capped", "updates are capped", _updated(_capped), (ZERO3,)),
    ("stepped_twice", "a bucket is updated twice", _updated(lambda rows, w, old: w.add_(w - old), True), TWO),
    ("second_forgets", "the second moment forgets more", lambda site: on_state(
        site, "exp_avg_sq", lambda moment: moment.mul_(0.99)), (ZERO3,)),
    ("momentum_turned", "a tenth of the momentum changes its sign", lambda site: on_state(
        site, "exp_avg", lambda moment: share(moment.view(-1), 0.1).neg_() if moment.numel() else None), (ZERO1,)),
    ("not_counted", "a step is not counted in a bucket", _updated(_not_counted, True), (ZERO3,)),
    ("decay_twice", "weights decay twice", _updated(lambda rows, w, old: w.sub_(
        old, alpha=rows.settings["lr"] * rows.settings["weight_decay"])), (ZERO3,)),
    ("mean_of_squares", "the second moment is its mean", lambda site: on_state(
        site, "exp_avg_sq", lambda moment: moment.fill_(moment.mean()) if moment.numel() else None), (ZERO3,)),
):  # fmt: skip
    _add(name, does, "optimizer", put, cell)


# -- weights between steps, and on their way into a forward ------------------------------------------------------------


def _between(change: Callable[[Site], object]) -> Injector:
    def put(site: Site) -> None:
        def changed() -> None:
            change(site)
            site.model.install_weights()

        site.once(changed, earliest=2)

    return put


_add("bit_flipped", "a weight changes its sign between steps", "weights", _between(
    lambda site: share(site.buckets[1].main_shards[0], 1e-9).neg_()), (ZERO1,))  # fmt: skip
_add("moment_grown", "second moments grow between steps", "weights", _between(
    lambda site: [rows.state("exp_avg_sq").mul_(1.5) for rows in rows_of(site)]))  # fmt: skip


def _gathered(change: Callable[[Tensor], object], which: slice = slice(None), backward: bool = False) -> Injector:
    """Change what other ranks own of gathered weights; in backwards alone."""

    def put(site: Site) -> None:
        chosen = site.buckets[which]

        def wrap(land: Callable[..., None]) -> Callable[..., None]:
            def wrapped(unit: Any) -> None:
                land(unit)
                if backward and torch._C._current_graph_task_id() == -1:
                    return
                with torch.no_grad():
                    for bucket in unit.buckets:
                        if bucket in chosen and not bucket.is_resident:
                            for target in others_of(bucket):
                                if target.itemsize > 1 and target.numel():
                                    change(target)

            return wrapped

        site.around(site.model._parts.gather, "_wait_for_unshard", wrap)

    return put


for name, does, put in (
    ("gathered_narrow", "gathered weights have 8 bits", _gathered(lambda w: w.copy_(rounded(w, 8)))),
    ("gathered_further", "gathered weights lie an element on", _gathered(lambda w: w.copy_(w.roll(1)), slice(1, 2))),
    ("gathered_hole", "a gathered element is zero", _gathered(lambda w: w[w.numel() // 2].zero_())),
    ("gathered_grown", "a backward's weights are 0.1 % longer", _gathered(lambda w: w.mul_(1.001), backward=True)),
):  # fmt: skip
    _add(name, does, "gather", put, strategies=("optim_grads_params",))


# -- checkpoints -------------------------------------------------------------------------------------------------------

for name, does, chosen, restored in (
    ("moments_rolled", "momentum comes back an element on", lambda key: key.endswith("exp_avg"),
     lambda new, old: new.copy_(new.reshape(-1).roll(1).view_as(new))),
    ("gains_not_loaded", "gains of norms stay as they are made", lambda key: "optimizer" not in key and "norm" in key,
     lambda new, old: new.copy_(old)),
):  # fmt: skip
    _add(name, does, "checkpoint", partial(on_load, chosen=chosen, change=restored), resumes=True)
