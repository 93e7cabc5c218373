"""What the machine must offer, found out before ranks start, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.config import rules
from harness.config.errors import BadRequest
from harness.config.rules import environment
from tests.support.composing import compose
from tests.support.disk import fill, small_disk
from tests.support.mutants import Slip, kills


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, 4):
        assert environment.room(tmp_path / "a" / "b", 1 << 20) == ""
        assert "free" in environment.room(tmp_path, 8 << 20)
        fill(tmp_path / "others")
        assert "free" in environment.room(tmp_path, 1 << 20)
        assert [p.name for p in tmp_path.iterdir()] == ["others"]


def test_a_run_that_will_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2 << 20})())
    with pytest.raises(BadRequest, match="2 MiB free"):
        compose([f"launch.root={tmp_path}"])
    compose([f"launch.root={tmp_path}", "ckpt=none", "measure=light"])


def test_a_request_looks_and_does_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose([f"launch.root={tmp_path}/runs"])
    monkeypatch.setattr(environment, "free_bytes", lambda _: 0)
    compose([f"launch.root={tmp_path}/runs", "launch.dry_run=true"])
    assert list(tmp_path.iterdir()) == []


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="is a file, not a folder"):
        compose([f"launch.root={tmp_path}/file/runs"])


def test_a_root_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "access", lambda *_: False)
    with pytest.raises(BadRequest, match="is not writable"):
        compose([f"launch.root={tmp_path}"])


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(BadRequest, match="no sbatch on PATH"):
        compose(["cluster=slurm"])
    compose(["cluster=slurm", "launch.dry_run=true"])
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadRequest, match="wandb is not installed"):
        compose(["wandb=offline"])
    with pytest.raises(BadRequest, match=r"cluster\.backend=local: .+ lacks torch\n +fix: +\S"):
        compose([])
    compose(["launch.dry_run=true"])


@kills("The terminal", "ranks without torch", "Ranks are started by an interpreter that lacks torch")
def test_missing_torch_is_missed_without_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    less = Slip(rules, "RULES", "", lambda all_: [each for each in all_ if each is not environment.torch_is_installed])
    less.put(monkeypatch)
    with pytest.raises(pytest.fail.Exception):
        test_missing_tools_are_named(monkeypatch)


def test_a_copy_nobody_could_log_into_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BadRequest, match=r"(?s)wandb\.mode=online: neither WANDB_API_KEY .* fix: +wandb login"):
        compose(["wandb=online"])
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(BadRequest, match="WANDB_MODE=sometimes is none of online, run, offline, dryrun, disabled"):
        compose(["wandb=online"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    compose(["wandb=online"])


def test_devices_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0"), Path("/dev/nvidiactl")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        BadRequest, match=r"(?s)may use 1 CUDA device for 2 ranks.*cluster.ranks_per_device=2 \(NCCL 2.30\)"
    ):
        compose(["cluster.device=cuda"])
    compose(["cluster.device=cuda", "mesh=one"])
    compose(["cluster.device=cuda", "cluster.ranks_per_device=2"])
    with pytest.raises(BadRequest, match=r"for 4 ranks, cluster\.ranks_per_device=2"):
        compose(["cluster.device=cuda", "cluster.ranks_per_device=2", "mesh.world_size=4"])


def test_an_fsdp2_that_cannot_agree_on_unused_parameters_is_refused_where_ranks_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ["engine=fsdp2", "model=odd", "launch.dry_run=true"]
    compose(request)
    real = environment.versions
    monkeypatch.setattr(environment, "versions", lambda names: real(names) | {"torch": "2.12.1+cu130"})
    with pytest.raises(BadRequest, match=r"torch 2\.13 and later"):
        compose(request)
    for way_out in (["model.skip_idle=false"], ["mesh=one"], ["cluster=slurm", "cluster.python=p"]):
        compose([*request, *way_out])


def test_user_buffers_of_megatron_fsdp_need_an_allocator_it_does_not_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_devices", lambda: ["0", "1"])
    monkeypatch.setattr(environment, "ALLOCATORS", ("no_such_package",))
    request = ["engine=megatron_fsdp", "nccl_ub=auto", "launch.dry_run=true"]
    compose(request)
    with pytest.raises(BadRequest, match="pip install megatron-core"):
        compose([*request, "cluster.device=cuda"])
    monkeypatch.setattr(environment, "ALLOCATORS", ("json",))
    compose([*request, "cluster.device=cuda"])


def test_a_model_beyond_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    with pytest.raises(BadRequest, match="model=llama_8b: needs"):
        compose(["model=llama_8b", "launch.dry_run=true"])
    compose(["model=llama_8b", "launch.dry_run=true", "cluster=slurm"])
