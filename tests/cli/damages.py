"""Damage to one file of a run: what a verdict has to name, and what no verb may fall over."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

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


# -- whatever a disk, a copy that ended early or a person may leave ----------------------------------------------------

VALUES: tuple[Any, ...] = (None, True, -1, 2**70, 1e308, "", "\x1b[2J\ud800", [], {}, [[]], {"a": None}, "nan")
HOLE = 10 * 2**30
"""Bytes of nothing: more than the process that looks may have."""


def _changed(value: Any, dice: Dice) -> Any:
    """A JSON value with one leaf, or one branch, replaced or taken away."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(sorted(value))
        if dice.random() < 0.3:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        return [*value[:place], _changed(value[place], dice), *value[place + 1 :]]
    return dice.choice(VALUES)


def reshape(path: Path, _: Path, dice: Dice) -> None:
    """Other values somewhere inside; of text that is no JSON, another value altogether (JSON is YAML, too)."""
    for _again in range(dice.choice((1, 3))):
        if path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            place = dice.randrange(len(lines))
            lines[place] = json.dumps(_changed(json.loads(lines[place]), dice))
            path.write_text("\n".join([*lines, ""]))
        elif path.suffix in (".json", ".yaml"):
            path.write_text(json.dumps(_changed(yaml.safe_load(path.read_text()), dice)))
        else:
            path.write_text(json.dumps(dice.choice(VALUES)))


def _replaced(make: Callable[[Path], object]) -> Damage:
    def act(path: Path, *_: Any) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return act


def _linked(target: str) -> Damage:
    return _replaced(lambda path: path.symlink_to(target))


def _in_bytes(edit: Callable[[bytes], bytes]) -> Damage:
    return lambda path, *_: path.write_bytes(edit(path.read_bytes()))


def _number(new: str) -> Damage:
    return lambda path, *_: path.write_text(re.sub(r": ([0-9.e-]+)", rf": {new}", path.read_text()))


def _with_a_hole(path: Path, _: Path, dice: Dice) -> None:
    """What a machine that went down, or a copy that was cut off, leaves: zeros at the end or before it."""
    data = path.read_bytes()
    begins = len(data) if dice.random() < 0.5 else dice.randrange(len(data) + 1)
    with path.open("r+b") as file:
        file.seek(HOLE)
        file.write(data[begins:])
        file.truncate(HOLE)


RANDOM: dict[str, Damage] = {
    **{name: DAMAGES[name] for name in ("a flipped bit", "cut off", "empty", "a line twice")},
    "reshaped": reshape,
    "missing": _replaced(lambda _: None),
    "not UTF-8": lambda path, *_: path.write_bytes(b"\xff\xfe{}\n"),
    "UTF-16": _in_bytes(lambda data: data.decode().encode("utf-16")),
    "deep lists": lambda path, *_: path.write_text("- " * 50_000 + "x"),
    "deep tables": lambda path, *_: path.write_text('{"a":' * 50_000),
    "itself": lambda path, *_: path.write_text("a: &a {b: *a}\n"),
    "nulls inside": _in_bytes(lambda data: data[:20] + bytes(4096) + data[20:]),
    "a folder": _replaced(Path.mkdir),
    "a FIFO": _replaced(os.mkfifo),
    "a loop": _replaced(lambda path: path.symlink_to(path)),
    "a device": _linked("/dev/zero"),
    "a link to nowhere": _linked("nowhere"),
    "another file": _linked("config.yaml"),
    "its folder": _linked(".."),
    "this process": _linked("/proc/self/mem"),
    "unreadable": lambda path, *_: path.chmod(0),
    "a hole": _with_a_hole,
    "a long line": _in_bytes(lambda data: b'{"a":"' + b"x" * 2**25 + b'"}\n' + data),
    "line ends of Windows": _in_bytes(lambda data: data.replace(b"\n", b"\r\n")),
    "endless digits": _number("9" * 5000),
    "no numbers": _number("NaN"),
    "numbers as texts": _number(r'"\1"'),
    "of the future": lambda path, *_: os.utime(path, (2**33, 2**33)),
}
