"""In which order cells are started: timed ones in blocks, so that whatever drifts, drifts for every arm alike.

A block is one repetition of everything: each arm once, in an order drawn for that block alone. Arms that train the same
thing stand together within it, since these are compared. The place of a cell follows from its own configuration and the
seed, so that a study asked for again goes on in the order it began with, whatever is done already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from harness.config.compose import Cell
from harness.config.schema import MeasureMode
from harness.store.identity import canonical

ENGINE_GROUPS = ("engine", "sharding")


def in_blocks(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Cells that are not timed, as they stand; then the timed ones, block after block."""
    others = [cell for cell in cells if not is_timed(cell)]
    return (*others, *sorted((cell for cell in cells if is_timed(cell)), key=_place))


def is_timed(cell: Cell) -> bool:
    return bool(cell.config["measure"]["mode"] == MeasureMode.bench.name)


def _place(cell: Cell) -> tuple[int, str, str]:
    """Block, workload and arm, the last two in the order this block's draw gives them."""
    config, block = deepcopy(cell.config), int(cell.config["train"]["replicate"])
    config["train"]["replicate"] = 0
    workload = {key: value for key, value in config.items() if key not in ENGINE_GROUPS}
    seed = int(cell.config["study"]["order_seed"])
    return block, _draw(seed, block, workload), _draw(seed, block, config)


def _draw(seed: int, block: int, config: dict[str, Any]) -> str:
    return hashlib.sha256(f"{seed} {block} {canonical(config)}".encode()).hexdigest()
