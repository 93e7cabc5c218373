"""Every verb over run directories that somebody damaged: a documented exit code, one message, no traceback, no hang."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli.main import main
from harness.launch.terminal import Terminal
from harness.store import check_stream, checksums, screen, status
from harness.store.rundir import Store
from tests.bench import lab as timed
from tests.cli.damages import RANDOM, Dice
from tests.parity.arms import Arm
from tests.parity.edits import edit_json
from tests.parity.lab import as_study, write
from tests.support.mutants import kills

CODES = {0, 1, 2, 3, 4, 69}
"""Exit codes of README.md that a verb which starts nothing can end with."""
LIMIT_S = 120
"""Of all verbs over one damaged store, on a machine with much else to do; none waits for anything."""

MEMORY = 6 * 2**30
"""Address space of whoever asks: less than a `HOLE`."""

FILES = (
    *("config.yaml", "overrides.txt", "status.json", "metrics.jsonl", "summary.json", "provenance.json", "diff.patch"),
    *("attempts", "attempts/0", "attempts/0/error.txt", ".lock", ".status.lock", "ckpt", "capture"),
    *("capture/step-000001.safetensors", "capture/rounding-000001.json", "step_checks/stream.json"),
    *("step_checks/steps.f64", "step_checks/tensors.f64", "../study.json", "../.lock", "../../.last", "../../.store"),
)

LIST = "checksums.json"
"""A file that not every store has."""

# -- one damaged store -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two runs of one study, one held against the other, every file there may be; and a timed study."""
    root = tmp_path_factory.mktemp("whole")
    arm = Arm(steps=6, witnessed=True, checked=True)
    control, other = write(root, arm), write(root, replace(arm, seed=1))
    as_study(root, {control: None, other: control}, "any?")
    store = Store(root)
    for run in store.runs():
        for name, text in {"overrides.txt": "a=1\n", "diff.patch": "+x\n", "attempts/0/error.txt": "rank 0\n"}.items():
            (run.path / name).write_text(text)
        (run.path / ".lock").touch()
        edit_json(run.summary, restored={"step": 2, "wrong": ["w"], "layout": {}}, engine={"name": "native"})
        moved = {"": {"distance": 0.1, "scale": 0.1, "loss": 0.1}}
        (run.capture / "rounding-000001.json").write_text(json.dumps({"draws": 2, "moves": {"fp32": moved}}))
        check_stream.write_forward(run.path, 8, (2, 4), {"embedding": [1.0, -1.0, 0.5, 2.0, 4.0], "": [0.0] * 5})
        (run.ckpt / "step-000006").mkdir(parents=True)
    (root / "lab" / ".lock").touch()
    _timed(root)
    store.remember(store.runs()[0])
    return root


def _timed(root: Path) -> None:
    """A study of two engines in two blocks, as `bench` reads it."""
    configs = [timed.config(engine, "no_shard", block) for block in (0, 1) for engine in ("ddp", "native")]
    for values in configs:
        values["study"]["name"] = "timed"
        timed.write(root, values, [0.1 + 0.001 * step for step in range(timed.TIMED)])
    timed.record(root, configs)


Verbs = Callable[[Path], list[list[str]]]

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
"""Characters that no verb prints where its output is no terminal."""


def _verbs(root: Path) -> list[list[str]]:
    study = root / "lab"
    first, second = (str(path) for path in sorted(study.iterdir()) if path.is_dir() and not path.name.startswith("."))
    signature = first.rpartition("-")[2]
    said = [["watch"], ["show", first], ["show", "@last"], ["show", signature], ["diff", first, second]]
    said += [["compare", first, second], ["compare", second, first, "--json"], ["verdict", study.name]]
    said += [["bench", study.name], ["bench", "timed"], ["cancel", first], ["gc", "--checkpoints", "--yes"]]
    said += [["watch", study.name]]
    return [[*words, "--root", str(root)] for words in said]


def _asked(root: Path, told: Path, verbs: Verbs) -> None:
    """In a process of its own: ask every verb, and write down how each ended."""
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    wrong = []
    for words in verbs(root):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        told.write_text(f"hangs or dies: {words[:2]}")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code: object = main(words)
            except SystemExit as end:
                code = end.code
            except BaseException:
                code = traceback.format_exc()
        if code not in CODES:
            wrong.append(f"{words[:2]}: {code}")
        out.flush()
        printed = out.buffer.getvalue().decode()
        if obeyed := OBEYED.findall(printed):
            wrong.append(f"{words[:2]}: a terminal would obey {sorted(set(obeyed))!r} in {printed!r}")
    told.write_text("\n".join(wrong))


def damaged(whole: Path, folder: Path, dice: Dice, kind: str, name: str, verbs: Verbs = _verbs) -> str:
    """What is wrong with how the verbs end over one damaged store; empty if nothing is."""
    root, told = folder / "runs", folder / "told"
    shutil.copytree(whole, root, symlinks=True)
    for path in root.rglob("config.yaml"):  # the copy's own root
        if str(whole) in (text := path.read_text()):
            path.write_text(text.replace(str(whole), str(root)))
    for run in Store(root).runs():
        checksums.renew(run.path)
    target = dice.choice(Store(root).runs()).path / name
    try:
        with contextlib.suppress(OSError, ValueError):  # what is no file, or damaged before
            RANDOM[kind](target, target, dice)
        return forked(root, told, verbs)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def forked(root: Path, told: Path, verbs: Verbs) -> str:
    """What is wrong with how verbs end in a process of their own."""
    child = os.fork()
    if child == 0:
        gc.disable()  # what earlier tests left behind would wait for threads that a fork lacks
        try:
            _asked(root, told, verbs)
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return told.read_text() + ("" if status == 0 else f" (ended by {status})")


def found_wrong(whole: Path, folder: Path, seeds: Sequence[int], files: Sequence[str] = FILES) -> list[str]:
    """How verbs end badly, each with the seed, damage and file that make them."""
    wrong = []
    for seed in seeds:
        dice = random.Random(seed)
        kind, name = dice.choice(sorted(RANDOM)), dice.choice(files)
        if text := damaged(whole, folder, dice, kind, name):
            wrong.append(f"seed {seed}, {kind} {name}: {text}")
    return wrong


def test_the_fuzzer_sees_a_traceback(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM, "broken code", lambda *_: monkeypatch.setattr("harness.cli.runs.show", None))
    text = damaged(whole, tmp_path, random.Random(0), "broken code", "config.yaml")
    assert "TypeError: 'NoneType' object is not callable" in text


def test_no_damage_makes_a_verb_fall(whole: Path, tmp_path: Path) -> None:
    assert not found_wrong(whole, tmp_path, range(16))


@pytest.mark.parametrize("kind", ["cut off", "reshaped"])
def test_a_configuration_that_lost_a_setting_makes_no_verb_fall(kind: str, whole: Path, tmp_path: Path) -> None:
    """Tables and verdicts read settings by name."""
    assert not [text for seed in (1, 2) if (text := damaged(whole, tmp_path, Dice(seed), kind, "config.yaml"))]


@pytest.fixture(scope="module")
def listed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and every run with a list of what it recorded."""
    root = tmp_path_factory.mktemp("listed") / "runs"
    shutil.copytree(whole, root, symlinks=True)
    for run in Store(root).runs():
        status.note(run.path, checksums=checksums.write(run.path))
    return root


def test_no_damage_of_what_was_listed_makes_a_verb_fall(listed: Path, tmp_path: Path) -> None:
    assert all(checksums.damage(run.path) == {} for run in Store(listed).runs())
    assert not found_wrong(listed, tmp_path, range(6), (LIST, *FILES[:6]))


ESCAPES = "\x1b[2J\x1b]0;mine\x07\x9b1m\r\u202e\x1b[8m"
TEXTS = {
    "facts": ["status.json", "overrides.txt", "attempts/0/error.txt", "provenance.json", "summary.json", "../../.last"],
    "settings": ["config.yaml", "../study.json", "metrics.jsonl", "step_checks/stream.json"],
}
"""Every file of a store that holds text, by what is planted together."""
READ_BY_CODE = ("state", "keeper", "sources_digest", "signature", "directory", "control", "capture_steps")
"""Entries of which another value hides what stands beside it."""


def _planted(value: Any, key: str = "") -> Any:
    """A value with escapes in every text, also in names of entries that nobody looks up."""
    if isinstance(value, dict):
        inside = {name: _planted(each, name) for name, each in value.items()}
        return inside | ({f"x{ESCAPES}": ESCAPES} if key in ("environment", "versions", "engine") else {})
    if isinstance(value, list):
        return [_planted(each, key) for each in value]
    return f"{value}{ESCAPES}" if isinstance(value, str) and key not in READ_BY_CODE else value


def _plant(path: Path) -> None:
    if path.suffix == ".jsonl":
        lines = [json.dumps(_planted(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{line}\n" for line in lines))
    elif path.suffix in (".json", ".yaml"):
        found = yaml.safe_load(path.read_text())
        if path.name == "status.json":
            found |= {"state": "failed", "reason": "why", "wandb": "m", "host": "h", "job": "7"}
        path.write_text(json.dumps(_planted(found)))
    else:
        path.write_text(f"{path.read_text() if path.exists() else ''}{ESCAPES}x={ESCAPES}\n")


def _shown(root: Path) -> list[list[str]]:
    return [["show", str(Store(root).runs("lab")[0].path), "--root", str(root)]]


def _readers(root: Path) -> list[list[str]]:
    return [*_verbs(root), *_shown(root), ["report", "lab", "--root", str(root)]]


def obeyed(whole: Path, folder: Path, part: str, verbs: Verbs = _readers) -> str:
    """Planted texts that verbs print and a terminal would obey, and verbs that end badly."""
    shutil.copytree(whole, root := folder / "runs", symlinks=True)
    for run in Store(root).runs("lab"):
        for name in TEXTS[part]:
            _plant(run.path / name)
    if part == "facts":
        shutil.copytree(root / "timed", root / "x\x1b[31mx")
    try:
        return forked(root, folder / "told", verbs)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("part", TEXTS)
def test_no_text_of_a_store_moves_a_terminal(part: str, whole: Path, tmp_path: Path) -> None:
    assert not obeyed(whole, tmp_path, part)


@kills("The terminal", "escapes of a store", "A run's reason may clear the terminal, rename its window or hide text")
def test_a_terminal_that_is_moved_is_found(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "visible", lambda text: text)
    assert "a terminal would obey" in obeyed(whole, tmp_path, "facts", _shown)


def test_a_terminal_obeys_our_own_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    Terminal(out).line(f"failed{ESCAPES}")
    with screen.filtered():
        print(ESCAPES)
        with screen.unfiltered():
            print("\x1b[1mmine")
    assert out.getvalue() == f"failed{screen.visible(ESCAPES)}\n{screen.visible(ESCAPES)}\n\x1b[1mmine\n"
    assert not OBEYED.search(screen.visible(ESCAPES))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_no_damage_at_all_makes_a_verb_fall(part: int, whole: Path, listed: Path, tmp_path: Path) -> None:
    seeds = range(100 + 120 * part, 220 + 120 * part)
    assert not found_wrong(whole, tmp_path, seeds)
    assert not found_wrong(listed, tmp_path, seeds, (LIST, *FILES))
