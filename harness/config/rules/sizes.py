"""Rules of sizes: model, batch, ranks, steps, tensor parallelism and data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import astuple, replace

from harness.config.data_source import count_sequences, describe
from harness.config.derived import data_ranks
from harness.config.doc import settings
from harness.config.errors import Violation
from harness.config.own import described
from harness.config.rules.request import STEP_LISTS, Request, Rule, refusal, rule
from harness.config.schema import DataConfig, DataKind, ModelFamily

DECODERS = (ModelFamily.llama, ModelFamily.moe)


@rule("model.dim", "model.num_heads")
def heads_divide_the_width(request: Request) -> Iterator[Violation]:
    """Heads have equal, even widths, because rotary embeddings rotate pairs."""
    m = request.config.model
    if m.family in DECODERS and m.dim % (2 * m.num_heads):
        lower = max(m.dim // (2 * m.num_heads), 1) * 2 * m.num_heads
        problem = f"is not an even multiple of model.num_heads={m.num_heads}: rotary embeddings need even heads"
        yield request.wrong("model.dim", problem, f"multiples of {2 * m.num_heads}", f"model.dim={lower}")


@rule("model.num_heads", "model.num_kv_heads")
def groups_divide_the_heads(request: Request) -> Iterator[Violation]:
    m = request.config.model
    if m.family in DECODERS and m.num_heads % m.num_kv_heads:
        valid = [d for d in range(1, m.num_heads + 1) if m.num_heads % d == 0]
        best = max(d for d in valid if d <= max(m.num_kv_heads, 1))
        problem = f"does not divide model.num_heads={m.num_heads}"
        yield request.wrong("model.num_kv_heads", problem, ", ".join(map(str, valid)), f"model.num_kv_heads={best}")


def _at_most(path: str, limit: str, words: str, why: str = "") -> Rule:
    """Rule that a setting does not exceed another, where it has an effect."""

    @rule(path, limit)
    def within(request: Request) -> Iterator[Violation]:
        setting, value, most = settings()[path], request.value(path), request.value(limit)
        acts = all(only.holds(request.value(only.path)) for only in setting.only)
        if acts and setting.range and None not in (value, most) and value > most:
            fix = f"{path}={most}, or {limit}={value}"
            problem, choices = f"{words} {limit}={most}{why}", f"{setting.range.low} to {most}"
            yield request.wrong(path, problem, choices, fix)

    return within


LIMITS = (
    _at_most("model.experts_per_token", "model.num_experts", "is more than", ": a token goes to distinct experts"),
    _at_most("data.seq_len", "model.max_seq_len", "is longer than"),
    _at_most("train.warmup_steps", "train.steps", "is longer than the run,"),
    _at_most("ckpt.every", "train.steps", "is beyond the last step,"),
    _at_most("fault.begins_at", "train.steps", "begins after the run has ended,"),
)


@rule("train.global_batch_size", "train.microbatch_size", "mesh.world_size", "mesh.tp")
def batch_is_whole_microbatches(request: Request) -> Iterator[Violation]:
    t, ranks = request.config.train, data_ranks(request.config)
    unit = t.microbatch_size * ranks
    if t.global_batch_size % unit == 0:
        return
    below = t.global_batch_size // unit * unit
    smaller = "" if t.global_batch_size % ranks else f", or train.microbatch_size={t.global_batch_size // ranks}"
    named = "mesh.world_size" if request.config.mesh.tp == 1 else "mesh.world_size / mesh.tp"
    yield request.wrong(
        "train.global_batch_size",
        f"is not divisible by {named} * train.microbatch_size = {ranks} * {t.microbatch_size} = {unit}",
        ", ".join(str(n) for n in (below, below + unit, below + 2 * unit) if n),
        f"train.global_batch_size={below or unit}{smaller}",
    )


@rule("mesh.world_size", "cluster.nodes")
def ranks_are_even_over_machines(request: Request) -> Iterator[Violation]:
    ranks, nodes = request.config.mesh.world_size, request.config.cluster.nodes
    if ranks % nodes:
        problem, fix = f"is not divisible by cluster.nodes={nodes}", f"mesh.world_size={max(ranks // nodes, 1) * nodes}"
        yield request.wrong("mesh.world_size", problem, f"multiples of {nodes}", fix)


@rule("train.steps", *STEP_LISTS)
def listed_steps_are_reached(request: Request) -> Iterator[Violation]:
    steps = request.config.train.steps
    for path in STEP_LISTS:
        wanted = request.value(path) or ()
        missed = [s for s in wanted if s > steps]
        if missed:
            kept = [s for s in wanted if s <= steps]
            problem = f"names steps that train.steps={steps} never reaches: {missed}"
            yield request.wrong(path, problem, f"steps from 1 to {steps}", f"{path}={kept}".replace(" ", ""))


@rule("mesh.tp", "mesh.world_size")
def tensor_axis_divides_the_ranks(request: Request) -> Iterator[Violation]:
    mesh = request.config.mesh
    if mesh.world_size % mesh.tp:
        choices = ", ".join(str(n) for n in range(1, mesh.world_size + 1) if mesh.world_size % n == 0)
        fix = f"mesh.world_size={max(mesh.world_size // mesh.tp, 1) * mesh.tp}"
        yield request.wrong("mesh.tp", f"does not divide mesh.world_size={mesh.world_size}", choices, fix)


tensor_parallelism_has_a_plan = refusal(
    lambda c: c.mesh.tp > 1 and c.model.family is not ModelFamily.llama,
    "mesh.tp",
    "model.family={model.family.name} has no tensor-parallel plan",
    "mesh.tp=1, or model=tiny",
    choices="mesh.tp=1; families that do: llama",
    reads="mesh.tp",
)
tensor_parallelism_has_no_switch = refusal(
    lambda c: c.mesh.tp > 1 and c.sharp.group.is_asked,
    "sharp.group",
    "is not implemented with mesh.tp={mesh.tp}: no communicator of three axes is given SHARP",
    "sharp=none",
    reads="mesh.tp",
)


@rule("mesh.tp", "model.num_heads", "model.num_kv_heads", "model.ffn_dim", "data.seq_len")
def parts_are_even(request: Request) -> Iterator[Violation]:
    config, tp = request.config, request.config.mesh.tp
    if tp == 1 or config.model.family is not ModelFamily.llama:
        return
    sizes = {path: int(request.value(path)) for path in ("model.num_heads", "model.num_kv_heads", "model.ffn_dim")}
    if config.mesh.sequence_parallel:
        sizes["data.seq_len"] = config.data.seq_len
    cut = (config.mesh.world_size, *sizes.values())
    common = max(n for n in range(1, tp + 1) if not any(size % n for size in cut))
    for path, size in sizes.items():
        if size % tp:
            fix = f"{path}={max(size // tp, 1) * tp}, or mesh.tp={common}"
            yield request.wrong(path, f"is not divisible by mesh.tp={tp}", f"multiples of {tp}", fix)


_counted = functools.lru_cache(maxsize=64)(lambda *settings: count_sequences(DataConfig(*settings)))


@rule("data.seq_len", "data.header_bytes", "data.num_sequences", "train.global_batch_size")
def source_fills_a_batch(request: Request) -> Iterator[Violation]:
    data, batch = request.config.data, request.config.train.global_batch_size
    try:
        if data.kind is DataKind.ext:
            found = described("data", request.config)
            count = None if found is None else int(found.answer["num_sequences"])
        else:
            count = _counted(*astuple(replace(data, order_seed=0)))
    except (ValueError, OSError) as error:
        choices = "" if data.path else "stdlib, text, tokens, synthetic, ext"
        yield Violation(describe(data), str(error), choices, "data=stdlib needs no file")
        return
    if count is not None and count < batch:
        more = f"data.num_sequences={batch}" if data.kind is DataKind.synthetic else "more data"
        yield Violation(
            describe(data),
            f"has {count:,} sequences of data.seq_len={data.seq_len}, "
            f"fewer than one global batch, train.global_batch_size={batch}",
            fix=f"{more}, a shorter data.seq_len or a smaller train.global_batch_size",
        )
