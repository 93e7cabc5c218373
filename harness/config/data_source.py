"""Sizes and counts of a data source, without reading it.

Runs before any rank starts, without torch. Every fault is a ValueError that names the value, the setting and
the fix.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.config.schema import Config, DataConfig, DataKind, TokenDtype
from harness.store.screen import counted

TOKEN_BYTES = {TokenDtype.uint16: 2, TokenDtype.uint32: 4}

NOT_EVERYWHERE = frozenset(
    """site-packages dist-packages lib-dynload __pycache__ test tests idle_test idlelib tkinter turtledemo turtle.py
    lib2to3 distutils ensurepip sitecustomize.py usercustomize.py""".split()  # noqa: SIM905 - reads better than 16 lines
)


@dataclass(frozen=True)
class Piece:
    """One file of a source: `num_tokens` tokens of `token_bytes` bytes each, from byte `offset` on."""

    path: Path
    offset: int
    num_tokens: int
    token_bytes: int


def count_sequences(data: DataConfig) -> int:
    """Sequences of seq_len + 1 tokens, of which neighbours share one.

    Raises `ValueError`: the source is missing, unreadable, empty, shorter than one sequence, or not of whole tokens.
    """
    if data.kind is DataKind.synthetic:
        return data.num_sequences
    num_tokens = sum(piece.num_tokens for piece in pieces(data))
    count = (num_tokens - 1) // data.seq_len
    if count < 1:
        raise ValueError(
            f"{describe(data)} holds {num_tokens} tokens, too few for one sequence of data.seq_len={data.seq_len} "
            f"(it needs {data.seq_len + 1}): give more text or lower data.seq_len"
        )
    return count


def describe(data: DataConfig) -> str:
    of = f" data.target={data.target}" if data.kind is DataKind.ext else ""
    return f"data={data.kind.name}{of}" + (f" data.path={data.path}" if data.path else "")


def pieces(data: DataConfig) -> list[Piece]:
    """Files of a source in the order of their tokens, without empty ones. Raises `ValueError`, as `count_sequences`."""
    if data.kind is DataKind.stdlib:
        found = list(_stdlib_pieces())
    else:
        width, header = (TOKEN_BYTES[data.token_dtype], data.header_bytes) if data.kind is DataKind.tokens else (1, 0)
        found = [_piece(path, width, header) for path in _chosen_files(data)]
    if kept := [piece for piece in found if piece.num_tokens]:
        return kept
    files = counted(len(found), "file")
    raise ValueError(f"{describe(data)} is empty ({files}, no tokens): point data.path at some text")


def _piece(path: Path, width: int, header: int) -> Piece:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if not os.access(path, os.R_OK):
        fix = "make it readable (chmod +r) or choose another data.path"
        raise ValueError(f"cannot read {path}: permission denied; {fix}")
    if width > 1 and size < header:
        raise ValueError(f"{path} has {size} bytes, fewer than data.header_bytes={header}: check the header's length")
    if (size - header) % width:
        raise ValueError(
            f"{path}: {size} bytes less data.header_bytes={header} is not a whole number of {width}-byte tokens; "
            "check data.token_dtype (uint16, uint32) and data.header_bytes, or the file is cut short"
        )
    return Piece(path, header, (size - header) // width, width)


@cache
def _stdlib_pieces() -> tuple[Piece, ...]:
    root = sysconfig.get_path("stdlib")
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_EVERYWHERE]
        sources = (name for name in names if name.endswith(".py") and name not in NOT_EVERYWHERE)
        # _sysconfigdata*.py holds the paths of the machine that built this Python.
        found += [Path(folder, name) for name in sources if not name.startswith("_sysconfigdata")]
    if not found:
        raise ValueError(f"data=stdlib: {root} holds no *.py files on this Python; use data=text data.path=FILE")
    return tuple(_piece(path, width=1, header=0) for path in sorted(found, key=Path.as_posix))


def _chosen_files(data: DataConfig) -> list[Path]:
    if not data.path:
        raise ValueError(f"data={data.kind.name} needs data.path: a file or a folder")
    path = Path(data.path).expanduser()
    if not path.exists():
        raise ValueError(f"data.path={data.path} does not exist (looked at {path.absolute()})")
    if not path.is_dir():
        return [path]
    pattern = "*.bin" if data.kind is DataKind.tokens else "*"
    files = sorted((each for each in path.rglob(pattern) if each.is_file()), key=Path.as_posix)
    files = [each for each in files if not any(part.startswith(".") for part in each.relative_to(path).parts)]
    if not files:
        raise ValueError(f"data.path={data.path} is a folder without {pattern} files: point it at a file, or fill it")
    return files


def held_out_batches(config: Config, num_sequences: int) -> range:
    """Numbers of batches that training never has.

    num_sequences: of the source that they are read from.

    Raises `ValueError`: too few are left, with the fix.
    """
    count, batch, steps = config.measure.validation_batches, config.train.global_batch_size, config.train.steps
    there, separate = num_sequences // batch, config.measure.validation_path is not None
    if there - (0 if separate else steps) >= count:
        return range(1, count + 1) if separate else range(there - count + 1, there + 1)
    of = f"measure.validation_path={config.measure.validation_path}" if separate else describe(config.data)
    used = "" if separate else f", of which train.steps={steps} uses {min(steps, there)}"
    raise ValueError(
        f"{of} has {there} batches of train.global_batch_size={batch}{used}, and measure.validation_batches={count} are"
        " to be held out: fewer of them, fewer steps, more data, or measure.validation_path=FILE"
    )
