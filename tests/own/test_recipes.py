"""The recipes of docs/own.md, run as printed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.own.guide import FILES, ROOT, typed

RANKS = 2


def printed(folder: Path, name: str) -> dict[str, list[float]]:
    """What each rank printed of a file of the guide: words and numbers."""
    (folder / name).write_text(FILES[name], encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["--log-dir=logs", "--redirects=1"]  # a file for each rank: in one, their lines run into each other
    done = typed(folder, *command, name)
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, list[float]] = {}
    for log in folder.glob("logs/*/attempt_0/*/stdout.log"):
        for word, value in re.findall(r"^(\w+) ([-.e\d]+)$", log.read_text(), re.M):  # a library may say more
            told.setdefault(word, []).append(float(value))
    return told


def test_each_recipe_trains(tmp_path: Path) -> None:
    told = printed(tmp_path, "my_recipes.py")
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(
        ("average", "judge", "scale", "preferences", "adapters"), RANKS
    )
    assert len(set(told["average"])) == 1  # of ones, through the same weights on both ranks
    assert told["scale"] == [2.0**16] * RANKS
    assert all(value < 0.6931 for value in told["preferences"])  # log 2 before the first step
    assert len(set(told["adapters"])) == 1
    assert 0 < told["adapters"][0] < 0.5


def test_the_gpt_trains_in_our_loop(tmp_path: Path) -> None:
    """Small, and on one rank; the guide's own command is among those of `test_guide.py`."""
    (tmp_path / "my_gpt.py").write_text(FILES["my_gpt.py"], encoding="utf-8")
    (tmp_path / "text.txt").write_text(FILES["my_gpt.py"] * 20, encoding="utf-8")
    words = ["model=ext", "model.target=my_gpt:Workload", "model.max_seq_len=16", "model.dim=16", "model.num_layers=1"]
    words += ["data=text", "data.path=text.txt", "data.seq_len=16", "mesh=one", "launch.inline=true", "train.steps=30"]
    words += ["train.global_batch_size=8", "train.microbatch_size=8", "optimizer.lr=0.01", "run.name=gpt"]
    done = typed(tmp_path, str(ROOT / "run.py"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs" / "adhoc").glob("gpt-*")
    losses = [float(line.partition('"loss":')[2].partition(",")[0]) for line in (run / "metrics.jsonl").open()]
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.full
def test_the_hugging_face_model_trains_and_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = printed(tmp_path, "my_llama.py")
    assert all(value < math.log(64) - 0.5 for value in told["llama"])
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    assert all(value.isfinite().all() for value in model.state_dict().values())
