"""Kinds of random damage to one file of a store, for the fuzzer of damaged runs."""

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

Dice = random.Random


def _replaced(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def _flipped(path: Path, dice: Dice) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(min(len(data), 8)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    path.write_bytes(data)


def _cut(path: Path, dice: Dice) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data) + 1)])


VALUES: tuple[Any, ...] = (None, True, -1, 2**70, 1e308, "", "\x1b[2J\ud800", [], {}, [[]], {"a": None}, "nan")


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


def _reshaped(path: Path, dice: Dice) -> None:
    """Another value somewhere inside; of text that is no JSON, another value altogether (JSON is YAML, too)."""
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        place = dice.randrange(len(lines))
        lines[place] = json.dumps(_changed(json.loads(lines[place]), dice))
        path.write_text("\n".join([*lines, ""]))
    elif path.suffix in (".json", ".yaml"):
        path.write_text(json.dumps(_changed(yaml.safe_load(path.read_text()), dice)))
    else:
        path.write_text(json.dumps(dice.choice(VALUES)))


DAMAGE: dict[str, Callable[[Path, Dice], object]] = {
    "missing": lambda path, _: _replaced(path, lambda _: None),
    "empty": lambda path, _: path.write_bytes(b""),
    "cut": _cut,
    "flipped": _flipped,
    "not UTF-8": lambda path, _: path.write_bytes(b"\xff\xfe{}\n"),
    "deep brackets": lambda path, _: path.write_text("[" * 50_000),
    "deep lists": lambda path, _: path.write_text("- " * 50_000 + "x"),
    "deep tables": lambda path, _: path.write_text('{"a":' * 50_000),
    "itself": lambda path, _: path.write_text("a: &a {b: *a}\n"),
    "nulls": lambda path, _: path.write_bytes(b"\0" * 1000),
    "a folder": lambda path, _: _replaced(path, Path.mkdir),
    "a FIFO": lambda path, _: _replaced(path, os.mkfifo),
    "a loop": lambda path, _: _replaced(path, lambda p: p.symlink_to(p)),
    "a device": lambda path, _: _replaced(path, lambda p: p.symlink_to("/dev/zero")),
    "a link to nowhere": lambda path, _: _replaced(path, lambda p: p.symlink_to("nowhere")),
    "unreadable": lambda path, _: path.chmod(0),
    "reshaped": _reshaped,
    "reshaped more": lambda path, dice: [_reshaped(path, dice) for _ in range(3)],
}
HOLE = 10 * 2**30
"""Bytes of nothing: more than the process that looks may have."""


def _in_text(edit: Callable[[str], str]) -> Callable[[Path, Dice], object]:
    return lambda path, _: path.write_text(edit(path.read_text()))


def _in_bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path, Dice], object]:
    return lambda path, _: path.write_bytes(edit(path.read_bytes()))


def _with_a_hole(path: Path, dice: Dice) -> None:
    """What a machine that went down, or a copy that was cut off, leaves: zeros at the end or before it."""
    data = path.read_bytes()
    begins = len(data) if dice.random() < 0.5 else dice.randrange(len(data) + 1)
    with path.open("r+b") as file:
        file.seek(HOLE)
        file.write(data[begins:])
        file.truncate(HOLE)


MORE_DAMAGE: dict[str, Callable[[Path, Dice], object]] = {
    "a hole": _with_a_hole,
    "a long line": _in_bytes(lambda data: b'{"a":"' + b"x" * 2**25 + b'"}\n' + data),
    "line ends of Windows": _in_bytes(lambda data: data.replace(b"\n", b"\r\n")),
    "line ends of a Macintosh": _in_bytes(lambda data: data.replace(b"\n", b"\r")),
    "a mark before": _in_bytes(lambda data: b"\xef\xbb\xbf" + data),
    "UTF-16": _in_bytes(lambda data: data.decode().encode("utf-16")),
    "twice": _in_bytes(lambda data: data * 2),
    "nulls inside": _in_bytes(lambda data: data[:20] + bytes(4096) + data[20:]),
    "empty lines": _in_bytes(lambda data: data.replace(b"\n", b"\n\n")),
    "endless digits": _in_text(lambda text: re.sub(r"\d+", "9" * 5000, text, count=1)),
    "no numbers": _in_text(lambda text: re.sub(r": [0-9.e-]+", ": NaN", text)),
    "endless numbers": _in_text(lambda text: re.sub(r": [0-9.e-]+", ": -Infinity", text)),
    "numbers as texts": _in_text(lambda text: re.sub(r": ([0-9.e-]+)", r': "\1"', text)),
    "fractions": _in_text(lambda text: re.sub(r": ([0-9]+)\b", r": \1.5", text)),
    "negative": _in_text(lambda text: re.sub(r": ([0-9.]+)", r": -\1", text)),
    "another file": lambda path, _: _replaced(path, lambda p: p.symlink_to("config.yaml")),
    "its folder": lambda path, _: _replaced(path, lambda p: p.symlink_to("..")),
    "this process": lambda path, _: _replaced(path, lambda p: p.symlink_to("/proc/self/mem")),
    "of the future": lambda path, _: os.utime(path, (2**33, 2**33)),
}
"""Kinds that came later, apart: seeds mean what they meant."""
