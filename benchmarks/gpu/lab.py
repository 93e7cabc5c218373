"""What a piece of the acceptance works with: cells that are run as a user runs them, verdicts, and a deadline."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 1500
"""Characters of a command's output that are kept where it failed."""
HANG_S = "launch.hang_timeout_s"
HANG_LIMIT_S = 120
"""How long a run may make no step: less than a piece's limit, so that one which hangs does not take it all."""

Facts = dict[str, Any]


class OutOfTime(RuntimeError):
    """A piece reached its limit; what it has run is kept, and its next call goes on from there."""


@dataclass(frozen=True)
class Setting:
    """Where and how large.

    device: cuda, or cpu to rehearse. tiny: few steps of a model that a CPU trains in milliseconds. ranks: how many
    share the device where several are asked for. limit_s: longest time of one piece. store: where its runs lie. until:
    when the whole call has to end, by the monotonic clock.
    """

    device: str
    tiny: bool
    ranks: int
    limit_s: float
    store: Path
    until: float = math.inf

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass
class Lab:
    """The store of one piece, and every command that was run for it."""

    piece: str
    setting: Setting
    commands: list[str] = field(default_factory=list)
    failed: list[Facts] = field(default_factory=list)
    """Commands that failed, with their last words."""
    so_far: Callable[[], Facts] = dict
    """Tells what is known already, where the piece is cut off; nothing where it is not worth telling."""
    began: float = field(default_factory=time.monotonic)

    def call(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of this project, and note it. Raises `OutOfTime`: the piece has, or had, none left."""
        now = time.monotonic()
        left = min(self.began + self.setting.limit_s, self.setting.until) - now
        if left <= 0:
            raise OutOfTime
        shown = [f"{name}={value}" for name, value in (environment or {}).items()]
        self.commands.append(" ".join([*shown, "python", *words]))
        try:
            return subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env={**self._environment(os.environ), **(environment or {})},
                capture_output=True,
                text=True,
                check=False,
                timeout=left,
            )
        except subprocess.TimeoutExpired as error:
            raise OutOfTime from error

    def _environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """What was put on the path beside the image's packages stays there; of several devices the first is accepted,
        also where the driver's files cannot be seen."""
        path = os.pathsep.join(filter(None, (str(ROOT), ours.get("PYTHONPATH"))))
        device = {"CUDA_VISIBLE_DEVICES": "0"} if self.setting.on_cuda else {}
        return {**device, **ours, "PYTHONPATH": path}

    def train(self, *overrides: str, must: bool = True, environment: Mapping[str, str] | None = None) -> int:
        """Run a cell, or with comma lists a set of them, but for what is done already; returns the exit code.

        Args: overrides: beside the piece's own. must: a failure is a finding. environment: further variables of ranks.
        """
        several = any("," in word and "[" not in word for word in overrides)
        limit = [] if any(word.startswith(HANG_S) for word in overrides) else [f"{HANG_S}={HANG_LIMIT_S}"]
        setting = self.setting
        where = [f"launch.root={setting.store}", f"cluster.device={setting.device}", "launch.rerun=stale"]
        words = (*(["-m"] if several else []), f"study.name={self.piece}", *where, *limit, *overrides)
        done = self.call("run.py", *words, environment=environment)
        if done.returncode and must:
            last = (done.stderr.strip() or done.stdout.strip())[-TAIL:]
            self.failed.append({"command": self.commands[-1], "exit_code": done.returncode, "words": last})
        return done.returncode

    def runs(self, **wanted: Any) -> list[Path]:
        """Directories of this piece's runs whose configuration has these values, as `group__key=value`."""
        return sorted(path for path, config in self._configs() if all(_has(config, k, v) for k, v in wanted.items()))

    def _configs(self) -> Iterator[tuple[Path, Facts]]:
        import yaml  # an image without it has to be told so by the first piece

        for file in (self.setting.store / self.piece).glob("*/config.yaml"):
            yield file.parent, yaml.safe_load(file.read_text(encoding="utf-8"))

    def verdicts(self, control: Path, arms: Sequence[Path], *, wanted: Sequence[str]) -> list[Facts]:
        """Every arm against the control: its outcome, and the verdict's sentence. An outcome that is not among the
        wanted ones is a finding."""
        if not arms:
            self.failed.append({"command": self.commands[-1], "words": "no run to judge"})
            return []
        store = str(self.setting.store)
        names = [f"{arm.parent.name}/{arm.name}" for arm in arms]
        named = [str(arm) for arm in arms]
        done = self.call("-m", "harness", "verdict", "--root", store, "--control", str(control), *named, "--json")
        try:
            told = json.loads(done.stdout)["arms"]
        except (ValueError, KeyError):
            self.failed.append({"command": self.commands[-1], "words": (done.stderr or done.stdout)[-TAIL:]})
            return []
        rows = [
            {"run": name, "outcome": each["outcome"], "sentence": each["sentence"]}
            for name, each in zip(names, told, strict=True)
        ]
        bad = [row for row in rows if row["outcome"] not in wanted]
        self.failed += [{"command": self.commands[-1], "words": row["sentence"]} for row in bad]
        return rows

    def told(self, run: Path, name: str) -> Facts:
        """A JSON file of a run; empty where it has none."""
        path = run / name
        found: Facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found


def last_object(text: str) -> Facts:
    """The JSON object in the last line that is one: libraries may speak before it. Empty where there is none."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{")), "{}")
    told: Facts = json.loads(line)
    return told


def _has(config: Mapping[str, Any], key: str, value: Any) -> bool:
    group, _, name = key.partition("__")
    return bool(config[group][name] == value)
