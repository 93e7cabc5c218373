"""Errors that teach: the nearest names for an unknown word, and the values of a setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.config.catalog import STUDY_FILES, Catalog, load_catalog
from harness.config.doc import as_typed, settings
from harness.config.errors import BadRequest, Violation

OPTION_SYNONYMS = {
    "sharding": {
        "zero0": "no_shard",
        "ddp": "no_shard",
        "replicate": "no_shard",
        "none": "no_shard",
        "zero1": "optim",
        "zero2": "optim_grads",
        "shard_grad_op": "optim_grads",
        "zero3": "optim_grads_params",
        "fsdp": "optim_grads_params",
        "fsdp2": "optim_grads_params",
        "full_shard": "optim_grads_params",
    },
    "dtype": {
        "float32": "fp32",
        "float": "fp32",
        "bfloat16": "bf16",
        "mixed": "bf16",
        "amp": "bf16",
        "float64": "fp64",
        "double": "fp64",
        "fp8": "fp8_current",
        "float8": "fp8_current",
        "blockwise": "fp8_block",
        "mx": "mxfp8",
    },
    "engine": {"fsdp": "native", "reference": "single", "torch_ddp": "ddp"},
    "data": {"bin": "tokens", "memmap": "tokens", "random": "synthetic", "bytes": "text", "txt": "text"},
    "model": {"mixtral": "moe", "experts": "moe", "awkward": "odd", "llama": "tiny", "gpt2": "gpt_125m"},
    "cluster": {"cpu": "local", "workstation": "local", "sbatch": "slurm", "submitit": "slurm"},
    "wandb": {"off": "disabled", "false": "disabled", "none": "disabled", "on": "online", "true": "online"},
    "ckpt": {"off": "none", "latest": "last", "newest": "last"},
    "numerics": {"free": "fast", "bitwise": "ordered", "integer": "exact", "fixed_point": "exact"},
    "mesh": {"1": "one", "2": "two"},
}

KEY_SYNONYMS = {
    "backend": "engine",
    "batch_size": "train.global_batch_size",
    "checkpoint": "ckpt",
    "clip": "optimizer.clip_norm",
    "context_length": "data.seq_len",
    "dataset": "data",
    "deterministic": "numerics",
    "device": "cluster.device",
    "dry_run": "launch.dry_run",
    "eager_limit_bytes": "engine.transport",
    "framework": "engine",
    "gbs": "train.global_batch_size",
    "gpus": "mesh.world_size",
    "grad_clip": "optimizer.clip_norm",
    "grad_comm_dtype": "dtype.grad_comm",
    "grad_reduce_in_fp32": "dtype.grad_comm",
    "hidden_size": "model.dim",
    "iterations": "train.steps",
    "launcher": "cluster",
    "layers": "model.num_layers",
    "learning_rate": "optimizer.lr",
    "logger": "wandb",
    "main_grads_dtype": "dtype.main_grads",
    "main_params_dtype": "dtype.main_params",
    "max_steps": "train.steps",
    "mbs": "train.microbatch_size",
    "micro_batch_size": "train.microbatch_size",
    "mixed_precision": "dtype",
    "nproc": "mesh.world_size",
    "num_gpus": "mesh.world_size",
    "num_steps": "train.steps",
    "optim": "optimizer",
    "output_dir": "launch.root",
    "precision": "dtype",
    "preserve_fp32_weights": "dtype.main_params",
    "ranks": "mesh.world_size",
    "root": "launch.root",
    "seed": "train.seed",
    "sequence_length": "data.seq_len",
    "num_local_experts": "model.num_experts",
    "num_experts_per_tok": "model.experts_per_token",
    "strategy": "sharding",
    "top_k": "model.experts_per_token",
    "sweep": "study",
    "vouch": "measure.step_checks",
    "vouch_limit_mib": "measure.step_checks_limit_mib",
    "wd": "optimizer.weight_decay",
    "zero": "sharding",
}

REPLACED_KEYS = {
    "eager_limit_bytes": "engine.transport=backend sends all data over gloo, as engine.eager_limit_bytes=null did",
    "grad_reduce_in_fp32": "dtype.grad_comm is what a reduction sends and dtype.main_grads what is stored and"
    " accumulated; fp32 in both is what grad_reduce_in_fp32=true meant",
    "preserve_fp32_weights": "dtype.main_params=fp32 keeps fp32 main weights; dtype.main_params equal to dtype.compute"
    " keeps none",
    "vouch": "measure.step_checks is its name now",
    "vouch_limit_mib": "measure.step_checks_limit_mib is its name now",
}


def nearest(word: str, pool: Iterable[str], count: int = 3) -> list[str]:
    names, lower = list(pool), word.lower()
    leaf = lower.rpartition(".")[2]
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(lower, names, count, 0.6)
    by_leaf = {n.rpartition(".")[2]: n for n in reversed(names)}
    close_leaf = [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, count, 0.75)]
    holding = [n for n in names if len(lower) > 2 and n.rpartition(".")[2].startswith(leaf)]
    return (same_leaf or list(dict.fromkeys(close + close_leaf + holding)))[:count]


def explain_key(key: str, catalog: Catalog | None = None) -> Violation:
    catalog = catalog or load_catalog()
    group, _, rest = key.partition(".")
    if rest and group in catalog.groups:
        inside = [path for path in settings() if path.startswith(f"{group}.")]
        elsewhere = [path for path in settings() if path.endswith(f".{rest}")]
        meant = list(dict.fromkeys(_synonym(key) + elsewhere + (nearest(key, inside) or nearest(rest, settings()))))[:3]
        return Violation(
            key,
            f"{group} has no such setting",
            ", ".join(inside) or "none of its own",
            _did_you_mean(meant),
            _replaced(key),
        )
    everything = [*catalog.groups, *settings()]
    meant = _synonym(key) or nearest(key, everything)
    meant = [name for name in meant if name.partition(".")[0] not in meant or "." not in name]  # the group says it
    if meant:
        return Violation(key, "no such group or setting", fix=_did_you_mean(meant), about=_replaced(key))
    return Violation(
        key,
        "no such group or setting",
        "groups " + ", ".join(catalog.groups),
        "docs/configuration.md lists every setting",
    )


def explain_option(group: str, option: object, catalog: Catalog | None = None) -> Violation:
    options = (catalog or load_catalog()).options[group]
    word = as_typed(option)
    meant = [OPTION_SYNONYMS.get(group, {}).get(word.lower(), "")]
    meant = [m for m in meant if m in options] or nearest(word, options)
    fix = _did_you_mean([f"{group}={name}" for name in meant])
    if group == "fault":
        fix = fix or "fault.name=package.module:function"
    return Violation(f"{group}={word}", "no such option", ", ".join(options) or "none yet", fix)


def explain_value(error: Exception, subject: str | None = None) -> Violation:
    path = str(getattr(error, "full_key", None) or "")
    setting = settings().get(path.partition("[")[0])
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if setting is None:
        return explain_key(path) if path and "not in" in first else Violation(subject or path or "request", first)
    return Violation(subject or path, f"takes {setting.expects}", about=setting.sentence)


def explain_unsaid(path: str, root: DictConfig) -> Violation:
    setting, (group, _, key) = settings()[path], path.partition(".")
    return Violation(
        path,
        f"the option {group}={root[group].name} does not say it, and nothing can be assumed",
        ", ".join(setting.choices),
        f"add the line `{key}: {setting.choices[0]}` to its file in conf/{group}/",
        setting.sentence,
    )


def explain_setting(path: str, value: Any) -> Violation:
    setting = settings()[path]
    subject = f"{path}={as_typed(value)}"
    if setting.choices:
        meant = nearest(str(value), setting.choices) or [
            OPTION_SYNONYMS.get(path.partition(".")[0], {}).get(str(value).lower(), "")
        ]
        fix = _did_you_mean([f"{path}={m}" for m in meant if m in setting.choices])
        return Violation(
            subject, "no such value", ", ".join(setting.choices) + (", null" if setting.optional else ""), fix
        )
    return Violation(subject, f"takes {setting.expects}", about=setting.sentence)


def _synonym(key: str) -> list[str]:
    meant = KEY_SYNONYMS.get(key.rpartition(".")[2].lower())
    return [meant] if meant else []


def _replaced(key: str) -> str:
    return REPLACED_KEYS.get(key.rpartition(".")[2].lower(), "")


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def explain(error: Exception) -> BadRequest:
    """Request error from an exception of Hydra, OmegaConf or YAML during composition.

    Command-line words were checked before: the causes are files of `conf/` and `sweeps/`, and combinations only Hydra
    sees.
    """
    if isinstance(error, YAMLError):
        return BadRequest([Violation("a file of conf/ or sweeps/", f"is not YAML: {' '.join(str(error).split())}")])
    inner = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(inner, OmegaConfBaseException) and inner.full_key:
        return BadRequest([explain_value(inner)])
    plugin = re.search(
        r"Could not find '(hydra/(?:sweeper|launcher))/(\S+)'(?:.*?:\n((?:\t\S+\n?)+))?", str(error), re.DOTALL
    )
    if plugin:
        return BadRequest([_no_plugin(plugin[1], plugin[2], (plugin[3] or "").split())])
    pattern = r"In '(?P<option>[^']+)': \w+ raised while composing config:\n(?P<text>.*)"
    in_file = re.search(pattern, str(error), re.DOTALL)
    if in_file:
        return BadRequest([_in_file(in_file["option"], in_file["text"])])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if "+" not in line] or [type(error).__name__]
    return BadRequest([Violation("request", " ".join(useful[:3]))])


_PLUGINS = {
    "optuna": "optuna-sweeper",
    "ax": "ax-sweeper",
    "nevergrad": "nevergrad-sweeper",
    "joblib": "joblib-launcher",
}
_PLUGINS |= {"ray": "ray-launcher", "rq": "rq-launcher"} | dict.fromkeys(
    ("submitit_local", "submitit_slurm"), "submitit-launcher"
)


def _no_plugin(group: str, name: str, installed: Sequence[str]) -> Violation:
    package = _PLUGINS.get(name)
    meant = [f"{group}={each}" for each in nearest(name, installed)]
    fix = f"pip install hydra-{package}" if package else _did_you_mean(meant)
    return Violation(f"{group}={name}", "no such plugin is installed", ", ".join(installed), fix)


def _in_file(option: str, text: str) -> Violation:
    folder = "sweeps" if option.startswith("study/") else "conf"
    file = STUDY_FILES.get(option) or f"{folder}/{option.removeprefix('study/')}.yaml"
    named = re.search(r"full_key: (\S+)", text)
    first = text.splitlines()[0]
    if named is None:
        return Violation(file, first)
    known = settings().get(named[1].partition("[")[0])
    if known is None and " not in " in first:
        found = explain_key(named[1])
        return Violation(f"{file}: {found.subject}", found.problem, found.choices, found.fix)
    takes = f" ({named[1]} takes {known.expects})" if known else ""
    return Violation(f"{file}: {named[1]}", f"{first}{takes}", about=known.sentence if known else "")
