"""Damage to one file of a finished run."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from harness.store import checksums

SILENT = "diff.patch"
"""What no verdict is made of."""

Dice = random.Random
Damage = Callable[[Path, Path, Dice], object]
"""A file of a run, the same file of the other run, chance."""


def flip(path: Path, other: Path, dice: Dice) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def flip_in_secret(path: Path, other: Path, dice: Dice) -> None:
    """As a disk does: no date tells."""
    dates = path.stat()
    flip(path, other, dice)
    os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))


def cut(path: Path, other: Path, dice: Dice) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])


def swap(path: Path, other: Path, dice: Dice) -> None:
    """With a file of the same run."""
    if path.name == SILENT:  # it has nobody to swap with
        return flip(path, other, dice)
    alike: tuple[str, ...] = ("provenance.json", "metrics.jsonl", "summary.json")
    if path.parent.name in checksums.FOLDERS:
        there = sorted(os.listdir(path.parent))
        alike = tuple(name for name in there if name.endswith(path.suffix) and name != path.name) or tuple(there)
    chosen = dice.choice(
        [path.with_name(name) for name in alike if path.with_name(name).read_bytes() != path.read_bytes()]
    )
    first, second = path.read_bytes(), chosen.read_bytes()
    path.write_bytes(second)
    chosen.write_bytes(first)


def without_a_line(path: Path, other: Path, dice: Dice) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.pop(dice.randrange(len(lines)))
    path.write_bytes(b"".join(lines))


def with_a_line_twice(path: Path, other: Path, dice: Dice) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    place = dice.randrange(len(lines))
    path.write_bytes(b"".join([*lines[:place], lines[place], *lines[place:]]))


DAMAGES: dict[str, Damage] = {
    "a flipped bit": flip,
    "a flipped bit under the old date": flip_in_secret,
    "cut off": cut,
    "empty": lambda path, *_: path.write_bytes(b""),
    "removed": lambda path, *_: path.unlink(),
    "renamed": lambda path, *_: path.rename(path.with_name(f"{path.name}.bak")),
    "swapped": swap,
    "of the other run": lambda path, other, _: shutil.copyfile(other, path),
    "a line less": without_a_line,
    "a line twice": with_a_line_twice,
    "other JSON": lambda path, *_: path.write_text("{}"),
    "a byte more": lambda path, *_: path.write_bytes(path.read_bytes() + b"\n"),
}


def flip_letter(path: Path) -> None:
    """Another number or letter: it reads as well as before."""
    data = path.read_text()
    for word, other in (("lr: 0.001", "lr: 0.002"), ("platform", "platforn")):
        data = data.replace(word, other, 1)
    path.write_text(data)
