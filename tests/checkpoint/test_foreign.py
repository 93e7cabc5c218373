"""Other people's formats: Hugging Face's Llama, and DCP's own files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from harness.checkpoint import __main__ as tool, foreign
from harness.checkpoint.folder import path_of
from harness.checkpoint.manifest import Damaged
from harness.checkpoint.storage import whole_tensor
from harness.config.schema import Config
from tests.engines.test_replicated import build
from tests.parity.edits import edit_config
from tests.support.factory import freeze, small_config
from tests.support.mutants import Slip, each
from tests.train.test_checkpoint import checkpoints


def saved(root: Path, **changes: Any) -> tuple[Path, dict[str, Tensor], Config]:
    """A run's folder with a checkpoint of step 4, the weights in it, its configuration."""
    config = small_config(**changes)
    freeze(config, root)
    engine = build(config)
    checkpoints(root / "ckpt", **changes).save(engine, 4, "digest")
    return root, dict(engine.named_weights()), config


def exported(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_names_shards_and_sizes(tmp_path: Path, tied: bool) -> None:
    run, weights, config = saved(tmp_path / "run", model__tie_embeddings=tied)
    index = foreign.export_hugging_face(path_of(run / "ckpt", 4), tmp_path / "hf", config, shard_bytes=20_000)
    found = exported(tmp_path / "hf")
    assert len(found) == len(weights)
    assert ("lm_head.weight" in found) is not tied
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], weights["blocks.1.attention.wk.weight"])
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], weights["blocks.0.ffn.w_gate.weight"])
    assert torch.equal(found["model.norm.weight"], weights["head.norm.weight"])
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 1
    assert json.loads((tmp_path / "hf" / foreign.INDEX).read_text()) == index
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "hf" / file)
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (told["hidden_size"], told["num_key_value_heads"], told["tie_word_embeddings"]) == (32, 2, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_is_the_same_model(tmp_path: Path, tied: bool) -> None:
    run, weights, config = saved(tmp_path / "run", model__tie_embeddings=tied)
    foreign.export_hugging_face(path_of(run / "ckpt", 4), tmp_path / "hf", config)
    foreign.import_hugging_face(tmp_path / "hf", tmp_path / "begin")
    changes = {"model__tie_embeddings": tied, "ckpt__load": str(tmp_path / "begin"), "train__seed": 5}
    engine = build(small_config(**changes))
    found = checkpoints(tmp_path / "own", **changes).load_newest(engine)
    assert found is not None
    assert (found.step, found.begins_after, found.wrong) == (0, 0, ())
    assert found.skipped
    assert all(key.startswith("optimizer/") for key in found.skipped), "of weights alone, the optimizer begins anew"
    assert all(torch.equal(weight, weights[name]) for name, weight in engine.named_weights())
    assert not any(value.any() for key, value in engine.state_dict().items() if key.startswith("optimizer/"))


def test_export_rounds_where_asked(tmp_path: Path) -> None:
    run, weights, config = saved(tmp_path / "run")
    foreign.export_hugging_face(path_of(run / "ckpt", 4), tmp_path / "hf", config, torch.bfloat16)
    found = exported(tmp_path / "hf")["model.embed_tokens.weight"]
    assert torch.equal(found, weights["embedding.weight"].bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_is_no_llama_or_not_whole_is_refused(tmp_path: Path) -> None:
    run, _, config = saved(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(foreign.Unfit, match="has no safetensors files"):
        foreign.import_hugging_face(tmp_path / "empty", tmp_path / "a")
    foreign.export_hugging_face(path_of(run / "ckpt", 4), tmp_path / "hf", config, shard_bytes=20_000)
    (tmp_path / "hf" / "model-00001-of-00003.safetensors").unlink(missing_ok=True)
    next((tmp_path / "hf").glob("*.safetensors")).unlink()
    with pytest.raises(foreign.Unfit, match=r"has no model-0000\d-of"):
        foreign.import_hugging_face(tmp_path / "hf", tmp_path / "b")
    biased = tmp_path / "biased"
    biased.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}, biased / "model.safetensors")
    with pytest.raises(foreign.Unfit, match=r"q_proj.bias has no place in this decoder"):
        foreign.import_hugging_face(biased, tmp_path / "c")
    file = path_of(run / "ckpt", 4) / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match="bytes"):
        foreign.export_hugging_face(path_of(run / "ckpt", 4), tmp_path / "d", config)


def test_dcp_reads_what_is_exported_and_what_dcp_wrote_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, weights, _ = saved(tmp_path / "run")
    words = ["--format", "dcp", "--rename", "weights/=model."]
    assert tool.main(["export", str(run), str(tmp_path / "dcp"), *words]) == 0
    assert "is a pickle" in capsys.readouterr().err
    state = {f"model.{name}": torch.zeros_like(weight) for name, weight in weights.items()}
    dcp_load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(state[f"model.{name}"], weight) for name, weight in weights.items())

    theirs = {f"model.{name}": weight + 1 for name, weight in weights.items()}
    dcp_save(theirs, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    back = ["--format", "dcp", "--rename", "model.=weights/"]
    assert tool.main(["import", str(tmp_path / "theirs"), str(tmp_path / "begin"), *back]) == 0
    captured = capsys.readouterr()
    assert "go on only with files you trust" in captured.err
    assert "next: python run.py ckpt.load=" in captured.out
    engine = build(small_config())
    assert checkpoints(tmp_path / "own", ckpt__load=str(tmp_path / "begin")).load_newest(engine) is not None
    assert all(torch.equal(weight, weights[name] + 1) for name, weight in engine.named_weights())


def test_names_that_nobody_explained_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({"net.a": torch.zeros(2)}, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    assert tool.main(["import", str(tmp_path / "theirs"), str(tmp_path / "x"), "--format", "dcp"]) == 2
    assert "net.a: say what these are, --rename" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert tool.main(["export", str(tmp_path / "nothing"), str(tmp_path / "y"), "--format", "hf"]) == 2
    assert re.match(r"refused:\n  .* holds no checkpoint: .*ckpt=last", capsys.readouterr().err)
    run, _, _ = saved(tmp_path / "run")
    assert tool.main(["export", str(run), str(tmp_path / "y"), "--format", "hf", "--step", "3"]) == 2
    assert "has checkpoints of steps [4], not 3" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


def test_export_of_a_damaged_one_names_an_intact_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, _ = saved(tmp_path / "run", ckpt__keep=2)
    shutil.copytree(path_of(run / "ckpt", 4), path_of(run / "ckpt", 5))
    (path_of(run / "ckpt", 5) / "rank-00000.safetensors").write_bytes(b"")
    words = [str(run), str(tmp_path / "y"), "--format", "hf"]
    assert tool.main(["export", *words]) == 2
    said = capsys.readouterr().err
    assert "step-000005: rank-00000.safetensors has 0 bytes" in said
    assert "; --step 4, beside it, is intact" in said
    assert tool.main(["export", *words, "--step", "4"]) == 0


def test_nothing_is_lost_where_two_are_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Renaming that makes one key of two, a weight in two files, a folder that holds something."""
    both = {"model.a": torch.zeros(2), "ema.a": torch.ones(2)}
    dcp_save(both, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    renamed = ["--format", "dcp", "--rename", "model.=weights/", "--rename", "ema.=weights/"]
    assert tool.main(["import", str(tmp_path / "theirs"), str(tmp_path / "x"), *renamed]) == 2
    assert re.search(r"makes weights/a of both (model|ema)\.a and (model|ema)\.a", capsys.readouterr().err)

    folder = tmp_path / "hf"
    folder.mkdir()
    for file, value in (("a", 0.0), ("b", 1.0)):
        save_file({"model.norm.weight": torch.full((4,), value)}, folder / f"{file}.safetensors")
    with pytest.raises(foreign.Unfit, match=r"holds model\.norm\.weight in two files"):
        foreign.import_hugging_face(folder, tmp_path / "y")
    save_file({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(1)}, folder / "b.safetensors")
    (folder / foreign.INDEX).write_text(
        json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}})
    )
    manifest = foreign.import_hugging_face(folder, tmp_path / "z")
    norm = manifest.tensors["weights/head.norm.weight"]
    assert not whole_tensor(path_of(tmp_path / "z", 0), norm).any(), "the index says which of the two"

    run, _, _ = saved(tmp_path / "run")
    assert tool.main(["export", str(run), str(folder), "--format", "dcp"]) == 2
    assert capsys.readouterr().err.endswith(f"\nbad request:\n  {folder} is there already; name a folder to be made\n")
    assert tool.main(["export", str(run), str(folder), "--format", "hf"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert tool.main(["export", str(run), "/proc/none", "--format", "hf"]) == 2
    assert capsys.readouterr().err == "bad request:\n  /proc/none: No such file or directory\n"
    edit_config(run, "engine", warp=True)
    assert tool.main(["export", str(run), str(tmp_path / "newer"), "--format", "hf"]) == 2
    assert capsys.readouterr().err.startswith("bad request:\n  engine.warp: engine has no such setting\n")
    frozen = run / "config.yaml"
    frozen.write_text(re.sub(r"^ +(family|warp): .*\n", "", frozen.read_text(), flags=re.MULTILINE))
    assert tool.main(["export", str(run), str(tmp_path / "older"), "--format", "hf"]) == 2
    told = "bad request:\n  model.family: is not said, and nothing can be assumed\n      valid: llama, "
    assert capsys.readouterr().err.startswith(told)


REFUSALS = {
    "a step that is not there": (
        test_names_that_nobody_explained_are_refused,
        Slip(tool, "_export", "arguments.step not in held", "False", "export asks for a step that no checkpoint is of"),
    ),
    "a folder that is there": (
        test_nothing_is_lost_where_two_are_of_one_name,
        Slip(
            foreign, "export_dcp", "parents=True", "parents=True, exist_ok=True", "export writes over a folder's files"
        ),
    ),
    "keys nobody explained": (
        test_names_that_nobody_explained_are_refused,
        Slip(foreign, "import_dcp", "if strange:", "if not held:", "import takes keys that are no weight's"),
    ),
    "two keys of one name": (
        test_nothing_is_lost_where_two_are_of_one_name,
        Slip(foreign, "_check_distinct", "first != key", "False", "--rename makes one key of two, and one is lost"),
    ),
    "a weight in two files": (
        test_nothing_is_lost_where_two_are_of_one_name,
        Slip(foreign, "import_hugging_face", "if key in named", "if key in ()", "of a weight in two files one is lost"),
    ),
}


@pytest.mark.parametrize("name", each("checkpoint files", REFUSALS))
def test_what_is_not_refused_is_found(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, slip = REFUSALS[name]
    slip.put(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        claim(tmp_path, capsys)
