"""What each engine can do, as a table without torch: what rules refuse before an engine is ever built."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.schema import EngineName, Numerics, Strategy


@dataclass(frozen=True)
class Capabilities:
    """One engine's reach. Whatever the table allows, the engine's adapter honours."""

    strategies: tuple[Strategy, ...]
    """What it can split."""
    numerics: tuple[Numerics, ...]
    """Promises it keeps about the order of arithmetic."""
    max_world_size: int | None
    """Most ranks; None is any number."""
    free_gradient_dtypes: bool
    """Whether stored gradients, wire and sums may each have a dtype of their own, apart from the main weights'."""
    settings: tuple[str, ...]
    """Settings of the group `engine`, beyond the name, that it takes."""


ENGINES: dict[EngineName, Capabilities] = {
    EngineName.native: Capabilities(
        strategies=tuple(Strategy),
        numerics=tuple(Numerics),
        max_world_size=None,
        free_gradient_dtypes=True,
        settings=("engine.prefetch",),
    ),
    EngineName.ddp: Capabilities(
        strategies=(Strategy.no_shard,),
        numerics=(Numerics.fast, Numerics.deterministic),
        max_world_size=None,
        free_gradient_dtypes=False,
        settings=(),
    ),
    EngineName.single: Capabilities(
        strategies=(Strategy.no_shard,),
        numerics=tuple(Numerics),
        max_world_size=1,
        free_gradient_dtypes=False,
        settings=(),
    ),
}
"""Every engine that is built."""
