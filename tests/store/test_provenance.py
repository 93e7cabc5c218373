"""Where a result came from; and what must never be written down."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from harness.store import provenance
from tests.support.needs import needs

SECRETS = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "NCCL_SECRET", "MY_OMP_NUM_THREADS"]


def test_secrets_never_reach_a_file(tmp_path, monkeypatch):
    """And the diff of an earlier attempt does not stay."""
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    provenance.record_start(tmp_path, {}, "a diff")
    provenance.record_start(tmp_path, provenance.desk_facts(), "")
    provenance.merge(tmp_path, provenance.machine_facts())
    assert not (tmp_path / "diff.patch").exists()
    text = (tmp_path / "provenance.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "3"


@needs("git")
def test_a_remote_with_a_password_is_not_recorded_and_another_repository_says_nothing_of_the_code(
    tmp_path, monkeypatch
):
    """Another one is around the place a package is installed in, or named by git to its hooks."""

    def git(*words):
        return subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True).stdout

    assert provenance.git_facts(tmp_path) is None
    git("init", "-q")
    git("remote", "add", "origin", "https://me:hunter2@example.org/x.git")
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", "a.py")
    git("-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "one")
    clean = provenance.git_facts(tmp_path)
    assert clean is not None
    assert (clean["dirty"], len(clean["sha"])) == (False, 40)
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "_git", lambda *_: pytest.fail("git is asked again"))
        assert provenance.git_diff(tmp_path, clean) == ""
    (tmp_path / "a.py").write_text("a = 2\n")
    (tmp_path / "new.py").write_text("")
    dirty = provenance.git_facts(tmp_path)
    assert dirty == {"sha": clean["sha"], "dirty": True}
    assert "+a = 2" in provenance.git_diff(tmp_path)
    assert "hunter2" not in json.dumps(dirty)
    git("tag", "v1")
    assert provenance.git_facts(tmp_path) == dirty
    (tmp_path / "lib").mkdir()
    assert provenance.git_facts(tmp_path / "lib") is None
    assert provenance.git_diff(tmp_path / "lib") == ""
    own = provenance.git_facts(provenance.ROOT)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert provenance.git_facts(provenance.ROOT) == own


@pytest.fixture
def package(tmp_path):
    """A copy of the sources that count, and one that does not."""
    copy = tmp_path / "harness"
    for path in [*provenance.source_files(), provenance.PACKAGE / "probe" / "meters.py"]:
        target = copy / path.relative_to(provenance.PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return copy


def test_the_digest_is_of_content_and_of_place(package):
    assert provenance.sources_digest(package) == provenance.sources_digest()
    (package / "probe" / "meters.py").write_text("")
    (package / "fsdp" / "__pycache__").mkdir()
    (package / "fsdp" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert provenance.sources_digest(package) == provenance.sources_digest(), "a meter changes no number"


def test_every_source_that_counts_changes_it(package):
    found = [provenance.sources_digest(package)]
    of_engine = ("fsdp/guards.py", "fp8/quantize.py", "shm/transfer.py", "muon.py")
    of_run = ("engines/single.py", "train/loop.py", "models/llama.py", "data/order.py", "worker/rank.py")
    for name in of_engine + of_run:
        with (package / name).open("a") as file:
            file.write("#\n")
        found.append(provenance.sources_digest(package))
    (package / "train" / "loop.py").rename(package / "train" / "loop2.py")
    found.append(provenance.sources_digest(package))
    assert len(set(found)) == len(found)


def test_stale_is_made_by_other_sources(tmp_path):
    assert not provenance.is_stale(tmp_path, "now"), "a run that was never started is not stale"
    provenance.record_start(tmp_path, {"sources_digest": "then"}, "")
    assert provenance.is_stale(tmp_path, "now")
    assert not provenance.is_stale(tmp_path, "then")


def test_rank_0_completes_what_the_desk_began(tmp_path):
    provenance.record_start(tmp_path, {"sources_digest": "a", "versions": {"python": "3"}}, "")
    provenance.merge(tmp_path, {"versions": {"torch": "2"}, "threads_per_rank": 1})
    assert provenance.read(tmp_path) == {
        "sources_digest": "a",
        "versions": {"python": "3", "torch": "2"},
        "threads_per_rank": 1,
    }
