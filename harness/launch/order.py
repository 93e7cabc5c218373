"""Order of starts: timed cells in blocks, so that drift affects every arm alike.

A block is one repetition of each arm, in a random order of its own; arms of one workload are adjacent, because they are
compared. A cell's place follows from its configuration and the seed, so that a resumed study keeps its order.
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
    others = [cell for cell in cells if not is_timed(cell)]
    return (*others, *sorted((cell for cell in cells if is_timed(cell)), key=_place))


def is_timed(cell: Cell) -> bool:
    return bool(cell.config["measure"]["mode"] == MeasureMode.bench.name)


def _place(cell: Cell) -> tuple[int, str, str]:
    config, block = deepcopy(cell.config), int(cell.config["train"]["replicate"])
    config["train"]["replicate"] = 0
    workload = {key: value for key, value in config.items() if key not in ENGINE_GROUPS}
    seed = int(cell.config["study"]["order_seed"])
    return block, _draw(seed, block, workload), _draw(seed, block, config)


def _draw(seed: int, block: int, config: dict[str, Any]) -> str:
    return hashlib.sha256(f"{seed} {block} {canonical(config)}".encode()).hexdigest()
