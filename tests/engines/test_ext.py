"""engine=ext, as its user meets it: a file in a folder of one's own, run from there; and every way it can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from harness.config.capabilities import ENGINES, Capabilities
from harness.config.derived import accumulate_dtype
from harness.config.errors import BadRequest
from harness.config.own import Own, capabilities_of, describe_engine
from harness.config.schema import Dtype, Strategy
from harness.store import provenance
from tests.support.composing import compose
from tests.support.programs import fork_trials

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = (Path(__file__).parent / "adapter.py").read_text(encoding="utf-8")
SMALL = ["model.dim=16", "model.num_layers=1", "model.ffn_dim=16", "data=synthetic", "data.seq_len=8", "train.steps=2"]
SMALL += ["train.global_batch_size=4", "train.microbatch_size=2", "train.warmup_steps=0"]


def project(folder: Path, text: str = EXAMPLE, name: str = "mine") -> Path:
    """A user's folder with one adapter in it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def run_py(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "run.py"), "engine=ext", "sharding=optim", *SMALL, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def test_a_users_engine_trains_goes_stale_and_is_checked(tmp_path: Path) -> None:
    folder = project(tmp_path / "work")
    dry = run_py(folder, "engine.adapter=mine:Adapter", "launch.dry_run=true")
    assert dry.returncode == 0, dry.stderr
    assert not (folder / "runs").exists()

    done = run_py(folder, "engine.adapter=mine:Adapter")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs" / "adhoc").glob("*-ext-*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["time"]["exposed_comm_s"] > 0 for line in lines] == [True, True], "as the adapter announces"
    sent = json.loads((run / "summary.json").read_text())["collectives"]
    assert {(row["kind"], row["bucket"]) for row in sent} == {
        ("all_gather", "main weights"),
        ("all_reduce", "gradients"),
    }
    (recorded,) = json.loads((run / "provenance.json").read_text())["own"]
    assert (recorded["kind"], recorded["root"], recorded["files"]) == ("engine", str(folder), ["mine.py"])
    assert not provenance.is_stale(run)

    (folder / "mine.py").write_text(EXAMPLE + "\n# edited\n")
    assert provenance.is_stale(run)
    again = run_py(folder, "engine.adapter=mine:Adapter")
    assert "stale" in again.stdout + again.stderr
    (folder / "mine.py").unlink()
    assert provenance.is_stale(run), "a file that is gone is a change"


WRONG = {
    "there is no module nowhere": ("nowhere:Adapter", None),
    "mine has no Adaptor": ("mine:Adaptor", None),
    "is no harness.engines.protocol.Engine": ("mine:Flat", None),
    "names no class": ("mine.Adapter", None),
    "lacks state": ("mine:Adapter", ("    def state(self)", "    def state_dict(self)")),
    "declares no capabilities": ("mine:Adapter", ("    capabilities = ", "    can = ")),
    "importing mine failed: ZeroDivisionError": ("mine:Adapter", ("class Flat:", "1 / 0\n\n\nclass Flat:")),
    "importing mine failed: SyntaxError": ("mine:Adapter", ("class Flat:", "class Flat")),
    "importing mine failed: ModuleNotFoundError": ("mine:Adapter", ("import torch\n", "import tortch\n")),
    "trying it ended the process": ("mine:Adapter", ("class Flat:", "import os; os._exit(3)\n\n\nclass Flat:")),
}
"""What is said, of which adapter, in a module with which change."""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that imports an adapter is a fork of one that has imported torch; the first test starts it whole."""
    fork_trials(monkeypatch)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_used_is_refused_before_ranks_start(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, change = WRONG[said]
    assert change is None or change[0] in EXAMPLE
    monkeypatch.chdir(project(tmp_path, EXAMPLE.replace(*change) if change else EXAMPLE))
    with pytest.raises(BadRequest) as caught:
        compose(["engine=ext", f"engine.adapter={adapter}", "sharding=optim", "launch.dry_run=true"])
    (violation,) = caught.value.violations
    assert violation.subject == f"engine.adapter={adapter}"
    assert said in violation.problem
    assert violation.fix or violation.choices


@pytest.mark.usefixtures("forked")
def test_an_adapter_is_held_to_what_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EXAMPLE.replace("strategies=(Strategy.optim,),", "strategies=(Strategy.optim,), package='nothing==1',")
    monkeypatch.chdir(project(tmp_path, text))
    words = ["engine=ext", "engine.adapter=mine:Adapter"]
    with pytest.raises(BadRequest) as caught:
        compose([*words, "sharding=optim_grads", "dtype=bf16_comm", "numerics=ordered", "engine.prefetch=2"])
    told = {violation.subject.partition("=")[0] for violation in caught.value.violations}
    assert told == {"sharding.strategy", "dtype.grad_comm", "numerics.mode", "engine.prefetch", "engine"}
    assert "harness.engines.protocol" not in sys.modules or "mine" not in sys.modules, "nothing was imported here"


def test_a_request_without_an_adapter_says_so() -> None:
    with pytest.raises(BadRequest, match=r"engine=ext: needs a class of yours"):
        compose(["engine=ext", "sharding=optim"])


def test_declarations_pass_through_json_whole() -> None:
    reader = TypeAdapter(Capabilities)
    for can in ENGINES.values():
        assert reader.validate_json(json.dumps(reader.dump_python(can, mode="json"))) == can


@pytest.mark.usefixtures("forked")
def test_a_rank_asks_the_class_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.adapter import Adapter

    config = compose(["engine=ext", "engine.adapter=tests.engines.adapter:Adapter", "sharding=optim"]).typed
    monkeypatch.setattr("harness.config.own.describe_engine", lambda adapter: pytest.fail("started a process"))
    assert capabilities_of(config).strategies == Adapter.capabilities.strategies == (Strategy.optim,)
    assert accumulate_dtype(config) is Dtype.fp32


@pytest.mark.usefixtures("forked")
def test_only_files_of_ones_own_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = project(tmp_path / "engines", EXAMPLE.replace("import torch\n", "import torch\nimport engines.parts\n"))
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("import json\n")
    (package / "unrelated.py").touch()
    monkeypatch.chdir(tmp_path)
    found = describe_engine("engines.mine:Adapter")
    assert isinstance(found, Own), found
    assert found.files == ("engines/__init__.py", "engines/mine.py", "engines/parts.py")
    before = found.facts()["digest"]
    (package / "parts.py").write_text("import json  # edited\n")
    assert found.facts()["digest"] != before


@pytest.mark.full
def test_the_suite_runs_from_a_users_folder(tmp_path: Path) -> None:
    """Only collected here: what it asks of the example is asked in the conformance suite itself."""
    project(tmp_path)
    suite = REPOSITORY / "tests" / "engines" / "conformance"
    command = [sys.executable, "-m", "pytest", str(suite), "--engine", "ext", "--adapter", "mine:Adapter"]
    done = subprocess.run([*command, "--collect-only"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conforms[ext-optim-4ranks" in done.stdout
    refused = subprocess.run([*command[:-1], "mine:Adaptor"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 4, refused.stdout
    assert "mine has no Adaptor" in refused.stderr + refused.stdout
