"""Random cells of docs/checkpoints.md, other ones in each run; and dtypes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint.folder import path_of
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.storage import whole_tensor
from harness.engines.protocol import TORCH_DTYPES
from tests.support.layouts import (
    LAYOUTS,
    SAVED,
    TP_LAYOUTS,
    Layout,
    build,
    checkpoints_of,
    draw,
    run_cells,
    write_reference,
    written_right,
)
from tests.support.spawn import run_ranks

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "count"),
    [("", 6), pytest.param("", 40, marks=FULL), *(pytest.param(family, 6, marks=FULL) for family in TP_LAYOUTS)],
)
def test_any_layout_takes_what_any_other_wrote(family: str, count: int, tmp_path: Path) -> None:
    """Also under tensor parallelism, in fp64 and under each FP8 recipe."""
    seed, layouts = random.SystemRandom().randrange(1 << 30), TP_LAYOUTS.get(family, LAYOUTS)
    pairs = draw(count, seed, layouts)
    cells = run_cells(tmp_path, pairs, layouts[0])
    assert len(cells) == len(pairs)
    wrong = [
        f"{cell.source} -> {cell.target}: {cell.next_step:.1e} {cell.problems[:3]}" for cell in cells if not cell.holds
    ]
    wrong += [f"{layout}: {told[:3]}" for layout, _ in pairs if (told := written_right(tmp_path, layout))]
    assert not wrong, f"draw({count}, {seed}) of {layouts[0]}: " + "\n".join(wrong)


# -- dtypes ------------------------------------------------------------------------------------------------------------

WIDE, NARROW = Layout("native", "optim", 2), Layout("native", "optim_grads_params", 2, dtype="bf16")


def loaded_otherwise(rank: int, folder: Path, layout: Layout) -> list[str]:
    """Weights that are not what a checkpoint holds, each rounded once, to nearest, ties to even: to the main dtype, or
    what is frozen to the one it is computed with."""
    config = layout.config()
    engine: Any = build(config, rank)
    loaded = checkpoints_of(folder, config, rank).load_newest(engine)
    assert loaded is not None
    path, wrong = path_of(folder, SAVED), list(loaded.wrong)
    frozen = {name for name, param in engine.model.module.named_parameters() if not param.requires_grad}
    entries = Manifest.read(path).tensors
    for name, held in engine.named_weights():
        stored = TORCH_DTYPES[config.dtype.compute] if name in frozen else held.dtype
        if not torch.equal(held, whole_tensor(path, entries[f"weights/{name}"]).to(stored).to(held.dtype)):
            wrong.append(name)
    engine.close()
    return wrong


def test_another_dtype_rounds_once(tmp_path: Path) -> None:
    run_ranks(write_reference, 1, tmp_path)
    assert run_ranks(loaded_otherwise, 2, tmp_path, NARROW) == [[], []]


def save_narrow(rank: int, root: Path) -> None:
    config = Layout("native", "optim_grads", 2, dtype="fp32").config()
    engine = build(config, rank)
    checkpoints_of(root / "narrow", config, rank).save(engine, SAVED, "")
    engine.close()


def test_a_wider_dtype_loses_nothing(tmp_path: Path) -> None:
    run_ranks(save_narrow, 2, tmp_path)
    assert run_ranks(loaded_otherwise, 2, tmp_path / "narrow", WIDE) == [[], []]
