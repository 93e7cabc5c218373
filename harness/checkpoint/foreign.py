"""Foreign formats: Hugging Face's Llama weights, and DCP's own checkpoints.

Hugging Face: safetensors in its Llama naming, in shards with an index, and a `config.json`. Its rotary embedding pairs
the halves of a head, as ours does, so that no row is permuted. DCP: the `.metadata` of its default storage is a pickle,
and reading one runs any code in it; only trusted files are read, by explicit request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from harness.checkpoint import folder as folders, tensor_file
from harness.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from harness.checkpoint.snapshot import LoadPlanner, SavePlanner
from harness.checkpoint.storage import whole_tensor
from harness.config.schema import Config, ModelFamily
from harness.store.reading import read_json
from harness.store.shapes import Each

WEIGHTS = "weights/"
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SHARD_BYTES = 5_000_000_000
LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w_gate.weight": "mlp.gate_proj.weight",
    "ffn.w_up.weight": "mlp.up_proj.weight",
    "ffn.w_down.weight": "mlp.down_proj.weight",
}
ROOT = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
FROM_LAYER, FROM_ROOT = ({theirs: ours for ours, theirs in table.items()} for table in (LAYER, ROOT))


class Unfit(ValueError):
    """State that a foreign format cannot hold, or malformed files."""


def to_hugging_face_name(name: str) -> str:
    """`blocks.3.attention.wq.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises `Unfit`: no Llama has such a parameter.
    """
    if name in ROOT:
        return ROOT[name]
    if (found := re.fullmatch(r"blocks\.(\d+)\.(.+)", name)) and found[2] in LAYER:
        return f"model.layers.{found[1]}.{LAYER[found[2]]}"
    raise Unfit(f"{name} is no parameter of a Llama: only model.family=llama has a Hugging Face form here")


def from_hugging_face_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blocks.3.attention.wq.weight`.

    Raises `Unfit`: this decoder has no such parameter (a bias, say).
    """
    if name in FROM_ROOT:
        return FROM_ROOT[name]
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) and found[2] in FROM_LAYER:
        return f"blocks.{found[1]}.{FROM_LAYER[found[2]]}"
    raise Unfit(f"{name} has no place in this decoder: {', '.join([*FROM_ROOT, *FROM_LAYER])} are known")


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def export_hugging_face(
    source: Path, target: Path, config: Config, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write a checkpoint's weights, with one shard in memory at a time; returns the index.

    Args: source: a `step-*` folder, checked first. target: a new folder. dtype: None keeps the main weights' dtype.

    Raises `Damaged`, `Unfit` (the model is no Llama), `FileExistsError`.
    """
    manifest = folders.read_verified(source)
    weights = [key for key in manifest.tensors if key.startswith(WEIGHTS)]
    names = {key: to_hugging_face_name(key.removeprefix(WEIGHTS)) for key in weights}
    if config.model.family is not ModelFamily.llama or not names:
        raise Unfit(f"model.family={config.model.family.name} has no Hugging Face Llama form")
    target.mkdir(parents=True)
    shards = _shards(manifest, names, dtype, shard_bytes)
    where: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {names[key]: _as(whole_tensor(source, manifest.tensors[key]), dtype) for key in keys}
        tensor_file.write(target / file, tensors)
        where |= dict.fromkeys(tensors, file)
    total = sum(_bytes(manifest.tensors[key], dtype) for key in names)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    if len(shards) > 1:
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    kept = dtype or getattr(torch, manifest.tensors[next(iter(names))].dtype)
    (target / CONFIG).write_text(json.dumps(hugging_face_config(config, kept), indent=2) + "\n", encoding="utf-8")
    return index


def hugging_face_config(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """Sizes of our model under the names of `transformers.LlamaConfig`."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def import_hugging_face(source: Path, target: Path) -> Manifest:
    """Checkpoint of weights alone from a Hugging Face folder, for `ckpt.load`.

    Raises `Unfit`: no safetensors, a missing shard, a duplicate or unknown parameter. `FileExistsError`: `target`
    exists.
    """
    files, where = _hugging_face_files(source)
    tied = (read_json(source / CONFIG, {"tie_word_embeddings?": bool}) or {}).get("tie_word_embeddings", False)
    named: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if (tied and name == "lm_head.weight") or where.get(name, file.name) != file.name:
                    continue
                key = WEIGHTS + from_hugging_face_name(name)
                if key in named:
                    raise Unfit(f"{source} holds {name} in two files, one of them {file.name}: remove one of the two")
                named[key] = _lazily(file, name)
    return write_weights(target, named, {"engine": "hugging_face", "source": source.name})


def _lazily(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    return read


def _hugging_face_files(source: Path) -> tuple[list[Path], dict[str, str]]:
    index = read_json(source / INDEX, {"weight_map": Each(dict, str)})
    if index is not None:
        names = sorted(set(index["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise Unfit(f"{source / INDEX} names {outside[0]!r}, which is no file of its folder")
        files = [source / name for name in names]
    else:
        files = sorted(source.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise Unfit(f"{source} has no {', '.join(missing) or 'safetensors files'}")
    return files, index["weight_map"] if index is not None else {}


def _shards(
    manifest: Manifest, names: Mapping[str, str], dtype: torch.dtype | None, shard_bytes: int
) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key in sorted(names, key=lambda each: names[each]):
        more = _bytes(manifest.tensors[key], dtype)
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += more
    return shards


def _bytes(entry: TensorEntry, dtype: torch.dtype | None) -> int:
    numel = 1
    for size in entry.shape:
        numel *= size
    kept: torch.dtype = dtype or getattr(torch, entry.dtype)
    return numel * kept.itemsize


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def write_weights(target: Path, named: Mapping[str, Callable[[], Tensor]], layout: Mapping[str, Any]) -> Manifest:
    """Checkpoint of unsharded tensors by one process, `step-000000` in `target`; of these parts alone."""
    target.mkdir(parents=True, exist_ok=False)
    unfinished = folders.begin(target, 0)
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    for number, (key, read) in enumerate(sorted(named.items())):
        file, tensor = f"tensor-{number:05d}.safetensors", read()
        written = tensor_file.write(unfinished / file, {key: tensor})
        files[file] = FileEntry(written.bytes, written.xxh3)
        shape = tuple(tensor.shape)
        chunk = Chunk(tuple(0 for _ in shape), shape, file, key)
        tensors[key] = TensorEntry(str(tensor.dtype).removeprefix("torch."), shape, (chunk,))
    parts = sorted({key.partition("/")[0] + "/" for key in tensors})
    values = {
        "step": 0,
        "layout": dict(layout),
        "portable": True,
        "initial_weights": "",
        "data": {},
        "parts": parts,
        "record": {"begins_after": 0, "lines": 0},
    }
    manifest = Manifest(tensors, files, values)
    manifest.write(unfinished)
    folders.publish(unfinished)
    return manifest


# -- DCP ---------------------------------------------------------------------------------------------------------------


def export_dcp(source: Path, target: Path, rename: Mapping[str, str]) -> list[str]:
    """Write a checkpoint's tensors with DCP's default storage, a pickle among it; returns their keys.

    All are in memory at once. `rename` replaces prefixes of keys.

    Raises `Damaged`, `Unfit` (two keys become one), `FileExistsError`.
    """
    manifest = folders.read_verified(source)
    _check_distinct(manifest.tensors, rename)
    state = {_renamed(key, rename): whole_tensor(source, entry) for key, entry in manifest.tensors.items()}
    target.mkdir(parents=True)  # DCP writes over what is there
    dcp_save(state, storage_writer=FileSystemWriter(target), planner=SavePlanner(), no_dist=True)
    return sorted(state)


def import_dcp(source: Path, target: Path, rename: Mapping[str, str]) -> Manifest:
    """Checkpoint of a DCP folder's tensors; its `.metadata` is unpickled, which runs any code in it.

    `rename` replaces prefixes of keys; results are `weights/...` and `optimizer/...`.

    Raises `Unfit`: a key is neither after renaming, or two become one.
    """
    metadata = FileSystemReader(source).read_metadata()
    held = {
        key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    strange = [key for key in held if not _renamed(key, rename).startswith((WEIGHTS, "optimizer/"))]
    if strange:
        raise Unfit(
            f"{', '.join(sorted(strange)[:5])}: say what these are, --rename model.=weights/ for example; keys must"
            " become weights/<parameter> or optimizer/<parameter>/<entry>"
        )

    _check_distinct(held, rename)

    def reader(key: str, entry: TensorStorageMetadata) -> Callable[[], Tensor]:
        def read() -> Tensor:
            state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
            dcp_load(state, storage_reader=FileSystemReader(source), planner=LoadPlanner(), no_dist=True)
            return state[key]

        return read

    named = {_renamed(key, rename): reader(key, entry) for key, entry in held.items()}
    return write_weights(target, named, {"engine": "dcp", "source": source.name})


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _check_distinct(keys: Iterable[str], rename: Mapping[str, str]) -> None:
    """Raises `Unfit`: renaming makes two keys one."""
    before: dict[str, str] = {}
    for key in keys:
        first = before.setdefault(_renamed(key, rename), key)
        if first != key:
            raise Unfit(f"--rename makes {_renamed(key, rename)} of both {first} and {key}; name longer beginnings")


def parse_renames(words: Iterator[str] | list[str]) -> dict[str, str]:
    """Table of `OLD=NEW` words. Raises `Unfit`: a word has no `=`."""
    found = {}
    for word in words:
        old, sign, new = word.partition("=")
        if not sign:
            raise Unfit(f"--rename {word}: write OLD=NEW, beginnings of keys")
        found[old] = new
    return found
