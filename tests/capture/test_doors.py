"""Guides of docs/foreign.md on released packages, run as they are printed: on one process, and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.capture import doors, watch
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import load
from harness.store.metrics import read_metrics
from tests.capture import loops
from tests.support.mutants import finds

ROOT = Path(__file__).parents[2]
GUIDES = {
    found.group(1): block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "foreign.md").read_text(encoding="utf-8"), re.S)
    if (found := re.search(r'f"runs/(\w+)/', block))
}
WEIGHTS = """
import hashlib
digest = hashlib.sha256()
for param in locals().get("net", locals().get("model")).parameters():
    digest.update(param.detach().numpy().tobytes())
print(digest.hexdigest())
"""


def _door(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}: make models"))


def run(script: str, folder: Path, ranks: int) -> str:
    (folder / "script.py").write_text(script, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if "deepspeed" in script and ranks == 1:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    command = [sys.executable, *torchrun, "script.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_door_has_a_guide() -> None:
    assert GUIDES.keys() == {"transformers", "lightning", "accelerate", "deepspeed"}


@pytest.mark.parametrize("name", map(_door, GUIDES))
def test_a_guide_runs_as_printed(name: str, tmp_path: Path) -> None:
    """Two ranks are EQUIVALENT to one, and the program trains the same bits without its watch."""
    run(GUIDES[name], tmp_path, 2)
    watched = run(GUIDES[name] + WEIGHTS, tmp_path, 1)
    off = re.sub(r"^run = watch\(.*$", "from unittest.mock import Mock; run = Mock()", GUIDES[name], flags=re.M)
    off = re.sub(r"callbacks=\[.*?\]", "callbacks=[]", off)
    assert run(off + WEIGHTS, tmp_path, 1).split()[-1] == watched.split()[-1]
    one, two = (load(tmp_path / "runs" / name / ranks) for ranks in ("1", "2"))
    assert one.problems == two.problems == ()
    assert one.length == two.length == 12
    assert one.captures.keys() == {1, 10}
    verdict = compare(two.path, one.path)
    assert verdict.outcome in (Outcome.EQUIVALENT, Outcome.EQUAL), verdict.sentence
    assert "not known" not in verdict.sentence


# -- what a program calls, without the program -------------------------------------------------------------------------


class Words(loops.Net):
    """As a model of transformers: it is given targets, and returns its loss."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> dict[str, Tensor]:
        scores = super().forward(input_ids).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(scores, labels.flatten(), reduction="sum") / num_items_in_batch}


Call = Callable[..., None]


def updates(net: nn.Module, optimizer: Any, ended: Call, microbatch: Call) -> None:
    """Four steps of two microbatches; before the second one's end the model is evaluated on other data."""
    for batch in loops.batches(4):
        for number, rows in enumerate(batch.chunk(2)):
            fed = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
            loss = net(**fed, num_items_in_batch=torch.tensor(batch[:, 1:].numel()))["loss"]
            loss.backward()
            if number:
                optimizer.step()
                optimizer.zero_grad()
            net.eval()
            net(input_ids=batch[:, 1:], labels=batch[:, :-1], num_items_in_batch=torch.tensor(1))
            net.train()
            (ended if number else microbatch)(fed, loss.detach())


def begun() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Words()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def by_hand(path: Path) -> None:
    net, optimizer = begun()
    with watch(net, optimizer, path, share=1.0) as run:
        told = lambda fed, loss: run.step(loss=2 * loss, data=fed)  # noqa: E731 - a mean over this microbatch
        updates(net, optimizer, told, told)


def by_transformers(path: Path) -> None:
    net, optimizer = begun()
    callback, given = doors._Transformers(path, {"share": 1.0}), (SimpleNamespace(), SimpleNamespace())
    arguments = SimpleNamespace(world_size=1, gradient_accumulation_steps=2)
    callback.on_train_begin(arguments, *given, model=net, optimizer=optimizer)
    ended, microbatch = (
        lambda fed, loss, name=name: getattr(callback, name)(arguments, *given)
        for name in ("on_step_end", "on_substep_end")
    )
    updates(net, optimizer, ended, microbatch)
    callback.on_train_end(arguments, *given)


def by_lightning(path: Path) -> None:
    net, optimizer = begun()
    callback = doors._Lightning(path, {"share": 1.0})
    trainer = SimpleNamespace(model=net, optimizers=[optimizer], accumulate_grad_batches=2)
    callback.on_train_start(trainer, net)
    ended = lambda fed, loss: callback.on_train_batch_end(trainer, net, {"loss": loss}, fed, 0)  # noqa: E731
    updates(net, optimizer, ended, ended)
    callback.on_train_end(trainer, net)


def seen(path: Path) -> Iterator[tuple[Any, ...]]:
    assert load(path).problems == ()
    for line in read_metrics(path / "metrics.jsonl"):
        yield pytest.approx(line["loss"], rel=1e-6), line["data_digest"], line["tokens"]


@pytest.mark.parametrize("door", [by_transformers, by_lightning])
def test_a_door_records_what_a_loop_by_hand_does(door: Callable[[Path], None], tmp_path: Path) -> None:
    """A door tells losses and data of every microbatch as a loop by hand does."""
    by_hand(tmp_path / "study" / "hand")
    door(tmp_path / "study" / "door")
    assert [*seen(tmp_path / "study" / "door")] == [*seen(tmp_path / "study" / "hand")]


test_a_mutant_is_found = finds(
    "Capture of another program",
    test_a_door_records_what_a_loop_by_hand_does="""
        door: evaluation: What is evaluated is taken for a batch
            capture.doors._Transformers._ended: not module.training => False
            (door=by_transformers)
        door: sum of losses: A part of a mean is a loss
            capture.doors._Transformers._ended: self._loss * self._terms => self._loss
            (door=by_transformers)
        door: microbatches: The last microbatch is taken for the batch
            capture.doors._Transformers.on_substep_end: lambda *args, **given: None
            (door=by_transformers)
        door: end: A trained run is never ended
            capture.doors._Transformers.on_train_end: self.run.close() => pass
            (door=by_transformers)
        door: accumulated: A loss is divided
            capture.doors._Lightning.on_train_batch_end:  * trainer.accumulate_grad_batches =>
            (door=by_lightning)
        door: batch: What is trained on is not told
            capture.doors._Lightning.on_train_batch_end: data=batch => data=None
            (door=by_lightning)
    """,
)
