"""Rules of tensor parallelism (mesh.tp): engine, model and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.config.capabilities import ENGINES
from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import EngineName, ModelFamily

PLANNED = (ModelFamily.llama,)


@rule("mesh.tp", "mesh.world_size")
def tensor_axis_divides_the_ranks(request: Request) -> Iterator[Violation]:
    mesh = request.config.mesh
    if mesh.world_size % mesh.tp:
        yield Violation(
            request.show("mesh.tp"),
            f"does not divide mesh.world_size={mesh.world_size}",
            ", ".join(str(n) for n in range(1, mesh.world_size + 1) if mesh.world_size % n == 0),
            f"mesh.world_size={max(mesh.world_size // mesh.tp, 1) * mesh.tp}",
        )


@rule("mesh.tp")
def tensor_parallelism_is_built(request: Request) -> Iterator[Violation]:
    config = request.config
    if config.mesh.tp == 1:
        return
    engine, family = config.engine.name, config.model.family
    if not ENGINES[engine].tensor_parallel:
        able = [each.name for each in EngineName if ENGINES[each].tensor_parallel]
        yield Violation(
            request.show("mesh.tp"),
            f"engine={engine.name} does not support tensor parallelism",
            "mesh.tp=1; engines that do: " + ", ".join(able),
            f"mesh.tp=1, or engine={able[0]}",
        )
    if family not in PLANNED:
        yield Violation(
            request.show("mesh.tp"),
            f"model.family={family.name} has no tensor-parallel plan",
            "mesh.tp=1; families that do: " + ", ".join(each.name for each in PLANNED),
            "mesh.tp=1, or model=tiny",
        )
    if config.sharp.group.is_asked:
        yield Violation(
            request.show("sharp.group"),
            f"is not implemented with mesh.tp={config.mesh.tp}: no communicator of three axes is given SHARP",
            "none",
            "sharp=none",
        )


@rule("mesh.tp", "model.vocab_size")
def every_rank_has_tokens(request: Request) -> Iterator[Violation]:
    """Embedding and output projection are cut into equal parts and a rest, as in torch.

    torch's lookup fails on a rank with an empty part.
    """
    tp, vocab = request.config.mesh.tp, request.config.model.vocab_size
    if tp == 1 or request.config.model.family not in PLANNED or -(-vocab // tp) * (tp - 1) < vocab:
        return
    yield Violation(
        request.show("model.vocab_size"),
        f"leaves the last of mesh.tp={tp} ranks no token, in parts of {-(-vocab // tp)}",
        f"more than {tp - 1} parts",
        f"model.vocab_size={-(-vocab // tp) * tp}, or mesh.tp=1",
    )


@rule("mesh.tp", "model.num_heads", "model.num_kv_heads", "model.ffn_dim", "data.seq_len")
def parts_are_even(request: Request) -> Iterator[Violation]:
    config, tp = request.config, request.config.mesh.tp
    if tp == 1 or config.model.family not in PLANNED:
        return
    sizes = {path: int(request.value(path)) for path in ("model.num_heads", "model.num_kv_heads", "model.ffn_dim")}
    if config.mesh.sequence_parallel:
        sizes["data.seq_len"] = config.data.seq_len
    common = _common((config.mesh.world_size, *sizes.values()), tp)
    for path, size in sizes.items():
        if size % tp:
            yield Violation(
                request.show(path),
                f"is not divisible by mesh.tp={tp}",
                f"multiples of {tp}",
                f"{path}={max(size // tp, 1) * tp}, or mesh.tp={common}",
            )


def _common(sizes: Sequence[int], most: int) -> int:
    return max(n for n in range(1, most + 1) if not any(size % n for size in sizes))


RULES: tuple[Rule, ...] = (
    tensor_axis_divides_the_ranks,
    tensor_parallelism_is_built,
    every_rank_has_tokens,
    parts_are_even,
)
