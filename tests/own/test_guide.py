"""docs/own.md from a folder of one's own: its files as printed, its commands, and what is said of each mistake."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from harness.config import catalog
from harness.config.compose import composed
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from harness.store import provenance
from harness.worker.describe import Unusable, described
from tests.own.guide import COMMANDS, FILES, ROOT, typed, written
from tests.support.mutants import kills

pytestmark = pytest.mark.timeout(900)
SMALL = ("train.steps=2", "train.global_batch_size=4", "train.microbatch_size=2", "train.warmup_steps=0")

SWITCHES = """\
import torch
from harness.train.callbacks import Callback


class Switches(Callback):
    def step(self, step, record, engine):
        torch.backends.mkldnn.enabled = False
        return {}
"""


def test_everything_of_ones_own_trains_at_once(tmp_path: Path) -> None:
    """The guide's experiment: model, data, optimizer, callback and options, in one process; beside them a callback that
    moves one of torch's switches, which the run records."""
    folder = written(tmp_path)
    (folder / "mine.py").write_text(SWITCHES, encoding="utf-8")
    words = ["experiment=words", "measure.callbacks=[mine:Switches,my_callbacks:Sparsity]", "mesh=one", *SMALL]
    done = typed(folder, str(ROOT / "run.py"), "launch.inline=true", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs" / "adhoc").glob("mixer-native-*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [0 < line["own"]["sparsity"] < 1 for line in lines] == [True, True]
    assert json.loads((run / "summary.json").read_text())["parameters"] == 2 * 24 * 256 + 256 + 2 * (4 * 24 * 24 + 120)
    recorded = json.loads((run / "provenance.json").read_text())
    own = recorded["own"]
    assert recorded["kernels"]["mkldnn"] == "True, then False"
    assert {each["kind"]: each["files"] for each in own} == {
        "model": ["my_model.py"],
        "data": ["my_data.py"],
        "optimizer": ["my_optimizer.py"],
        "callback": ["my_callbacks.py"],
    }
    assert not provenance.is_stale(run)
    (folder / "my_data.py").write_text(FILES["my_data.py"] + "\n# edited\n")
    assert provenance.is_stale(run)


@pytest.mark.full
def test_the_guides_commands_do_what_it_says(tmp_path: Path) -> None:
    folder = written(tmp_path)
    shutil.copytree(folder / "conf", folder / "elsewhere" / "conf")
    shutil.rmtree(folder / "elsewhere" / "conf" / "experiment")
    for command in COMMANDS:
        program, *words = shlex.split(command.replace("RUN RUN", "ARM CONTROL"))[1:]
        if program == "run.py":
            beside = folder / ("conf" if "--config-dir" in words else "none")
            aside = beside.rename(folder / "no-conf") if beside.exists() else None
            done = typed(folder, str(ROOT / "run.py"), *words, *SMALL)
            if aside:
                aside.rename(beside)
        elif "compare" not in words:
            done = typed(folder, program, *words)
            assert "EQUAL: " in done.stdout or "EQUIVALENT: " in done.stdout
        else:
            both = folder.glob("runs/adhoc/my_model.workload-*dp2*")
            control, arm = sorted(both, key=lambda path: "ddp" in path.name)
            done = typed(folder, program, *[{"ARM": str(arm), "CONTROL": str(control)}.get(w, w) for w in words])
            assert "EQUIVALENT" in done.stdout
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    shutil.rmtree(next(folder.glob("runs/adhoc/my_model.workload-single*")))
    refused = typed(folder, "-m", "harness", "compare", str(arm), str(control))
    assert refused.returncode == 4
    assert "nothing says how far rounding moves my_model:Workload" in refused.stdout
    again = shlex.split(refused.stdout.rpartition("next: python ")[2])
    assert typed(folder, *again).returncode == 0
    assert typed(folder, "-m", "harness", "compare", str(arm), str(control)).returncode == 0


BUILT = """\
        return Model(self.model_config, device=device, dtype=dtype)  # "meta" must allocate nothing

    def materialise_buffers(self, model, device) -> None:
        \"""This model has no buffers.\"""
"""
BUFFERED = """\
        model = Model(self.model_config, device=device, dtype=dtype)
        model.register_buffer("shift", nn.Embedding(1, 3, device=device).weight.detach().zero_())
        return model

    def materialise_buffers(self, model, device) -> None:
        """
WRONG = {
    "build('meta', ...) puts head.weight on the cpu": (
        "model",
        "config.vocab_size, **where)\n\n    def",
        "config.vocab_size)\n\n    def",
    ),
    "unit_classes names Other, which the model does not contain": (
        "model",
        "(Block,)",
        "(type('Other', (nn.Module,), {}),)",
    ),
    "lacks materialise_buffers": ("model", "    def materialise_buffers", "    def materialize_buffers"),
    "is int64 (16,)": ("data", "+ self.seq_len + 1]", "+ self.seq_len]"),
    "AttributeError: 'NoneType' object has no attribute 'named_parameters'": ("model", "return Model(", "Model("),
    "materialise_buffers leaves shift without a value": ("model", BUILT, BUFFERED + "pass"),
    "materialise_buffers gives shift another value than build('cpu', ...) does": (
        "model",
        BUILT,
        BUFFERED + "model.shift = nn.Embedding(1, 3, device=device).weight.detach().fill_(1.0)",
    ),
    "lacks __getitem__, so it can only be read in order": ("data", "def __getitem__", "def __iter__"),
    "has no attribute 'num_sequences'": ("data", "self.num_sequences", "self.number"),
    "with its entries set to zeros of the weight's shape": (
        "optimizer",
        "torch.zeros_like(weight))",
        "torch.zeros_like(weight).flatten()).unflatten(0, weight.shape)",
    ),
    "has num_sequences=0": ("data", "(len(self.ids) - 1) // data.seq_len", "0"),
    "keeps 'exp_avg' of a weight, and declares nothing": ("optimizer", '("exp_avg",)', "()"),
    "is no torch.optim.optimizer.Optimizer": ("optimizer", "Lion(torch.optim.Optimizer)", "Lion(list)"),
}
"""What is said, of which class, after which change."""
NAMES = {
    "model": "my_model:Workload",
    "data": "my_data:Words",
    "optimizer": "my_optimizer:Lion",
    "callback": "my_callbacks:Sparsity",
}


@pytest.mark.parametrize("said", [None, *WRONG])
def test_a_class_is_tried_before_ranks_start(said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, before, after = WRONG[said] if said else ("", "", "")
    folder = written(tmp_path)
    monkeypatch.syspath_prepend(folder)
    shaping = {
        "model": {"family": "ext", "target": NAMES["model"], "dim": 8, "num_layers": 1},
        "data": {"kind": "ext", "target": NAMES["data"], "path": str(folder / "text.txt"), "seq_len": 16},
        "optimizer": {"name": "ext", "target": NAMES["optimizer"], "options": {"beta2": 0.5}},
    }
    for each, name in NAMES.items():
        path = folder / f"{name.partition(':')[0]}.py"
        text = path.read_text()
        assert each != kind or before in text
        path.write_text(text.replace(before, after) if each == kind else text)
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        if each == kind:
            with pytest.raises(Unusable) as caught:
                described(each, "setting", name, shaping)
            assert str(said) in caught.value.reply["problem"]
        elif said is None:
            described(each, "setting", name, shaping)
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@kills("own classes", "buffers unchecked", "A model is trained whose buffers depend on how an engine builds it")
def test_unchecked_buffers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.worker.describe._check_buffers", lambda *_: None)
    said = next(each for each in WRONG if each.startswith("materialise_buffers gives"))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_class_is_tried_before_ranks_start(said, tmp_path, monkeypatch)


def test_options_lie_in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(tmp_path))
    assert "mixer" in catalog.load_catalog()["model"]
    assert composed(["model=mixer"]).model.target == "my_model:Workload"
    assert composed(["experiment=words"]).optimizer.target == "my_optimizer:Lion"
    assert catalog.file_of("study", "shards") == tmp_path / "conf" / "study" / "shards.yaml"
    assert catalog.file_of("study", "parity_pair") == catalog.ROOT / "sweeps" / "parity_pair.yaml"
    assert [catalog.study_of(f"study={name}") for name in ("shards", "parity")] == ["shards", None]
    assert [word.values for word in check_overrides(["study=shards"], multirun=True)] == [("shards",)]
    (tmp_path / "hides" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "hides" / "conf" / "model" / "tiny.yaml").write_text("family: llama\n")
    monkeypatch.chdir(tmp_path / "hides")
    with pytest.raises(BadRequest, match="model=tiny, which would mean two things"):
        catalog.load_catalog()
    (tmp_path / "hides" / "conf" / "config.yaml").touch()
    catalog._beside.cache_clear()
    assert catalog.own_folder() is None, "another program's"
    catalog._beside.cache_clear()


def test_a_folder_without_options_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="holds no option of any group"):
        catalog.choose_own_folder(str(tmp_path))
    with pytest.raises(BadRequest, match="is no folder"):
        catalog.choose_own_folder(str(tmp_path / "none"))
