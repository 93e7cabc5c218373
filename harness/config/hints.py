"""Errors that teach: the nearest names for an unknown word, and the values of a setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from yaml import YAMLError

from harness.config.catalog import load_catalog
from harness.config.doc import as_typed, settings
from harness.config.errors import BadRequest, Violation
from harness.store.commands import page

MEANINGS = """
    sharding=no_shard: zero0 ddp replicate none; sharding=optim: zero1; sharding=optim_grads: zero2 shard_grad_op
    sharding=optim_grads_params: zero3 fsdp fsdp2 full_shard; sharding: strategy zero; engine=native: fsdp
    engine=ddp: torch_ddp; dtype=fp32: float32 float; dtype=bf16: mixed amp; dtype=fp64: float64 double
    dtype=fp8_current: fp8 float8; dtype=fp8_block: blockwise; dtype=mxfp8: mx; dtype: mixed_precision precision
    dtype.grad_comm: grad_reduce_in_fp32; dtype.main_params: preserve_fp32_weights; model=moe: mixtral experts
    numerics=ordered: bitwise; wandb=disabled: off false none; wandb=online: on true; numerics: deterministic
    train.global_batch_size: batch_size gbs; train.microbatch_size: mbs; train.steps: iterations; optimizer: optim
    optimizer.lr: learning_rate; optimizer.weight_decay: wd; optimizer.clip_norm: grad_clip; model.dim: hidden_size
    mesh.world_size: data_parallel_size dp dp_size gpus nproc num_gpus ranks; data.seq_len: sequence_length
    data.seq_len: context_length; model.experts_per_token: top_k; ckpt: checkpoint; engine: backend
    launch.root: output_dir; measure.step_checks: vouch; measure.step_checks_limit_mib: vouch_limit_mib
    engine.transport: eager_limit_bytes; cluster.additional: gres
"""
SYNONYMS = {
    f"{meaning.partition('=')[0]}={word}" if "=" in meaning else word: meaning
    for meaning, words in re.findall(r"(\S+): ([^;\n]+)", MEANINGS)
    for word in words.split()
}
"""Words of other programs: `group=word` and keys."""


def nearest(word: str, pool: Iterable[str]) -> list[str]:
    names, lower = list(pool), word.lower()
    leaf = lower.rpartition(".")[2]
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(lower, names, 3, 0.6)
    by_leaf = {n.rpartition(".")[2]: n for n in reversed(names)}
    close_leaf = [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, 3, 0.75)]
    holding = [n for n in names if len(lower) > 2 and n.rpartition(".")[2].startswith(leaf)]
    return (same_leaf or list(dict.fromkeys(close + close_leaf + holding)))[:3]


def explain_key(key: str) -> Violation:
    group, _, rest = key.partition(".")
    if rest and group in load_catalog():
        inside = [path for path in settings() if path.startswith(f"{group}.")]
        elsewhere = [path for path in settings() if path.endswith(f".{rest}")]
        meant = list(dict.fromkeys(_synonym(key) + elsewhere + (nearest(key, inside) or nearest(rest, settings()))))[:3]
        choices = ", ".join(inside) or "none of its own"
        return Violation(key, f"{group} has no such setting", choices, _did_you_mean(meant))
    everything = [*load_catalog(), *settings()]
    meant = _synonym(key) or nearest(key, everything)
    meant = [name for name in meant if name.partition(".")[0] not in meant or "." not in name]  # the group says it
    if meant:
        return Violation(key, "no such group or setting", fix=_did_you_mean(meant))
    guide = f"{page('configuration.md')} lists every setting"
    return Violation(key, "no such group or setting", "groups " + ", ".join(load_catalog()), guide)


def explain_option(group: str, option: object) -> Violation:
    options = load_catalog()[group]
    word = as_typed(option)
    meant = SYNONYMS.get(f"{group}={word.lower()}", "")
    known = meant.partition("=")[2] in options
    fix = _did_you_mean([meant] if known else [f"{group}={name}" for name in nearest(word, options)])
    if group in ("fault", "study"):
        own = {"fault": "fault.name=package.module:function", "study": "a file conf/study/NAME.yaml, and study=NAME"}
        fix = fix or own[group]
    return Violation(f"{group}={word}", "no such option", ", ".join(options) or "none yet", fix)


def explain_unsaid(path: str, values: Mapping[str, Any]) -> Violation:
    setting, (group, _, key) = settings()[path], path.partition(".")
    problem = f"the option {group}={values[group].get('name', 'NAME')} does not say it, and nothing can be assumed"
    fix = f"add the line `{key}: {setting.choices[0]}` to its file in conf/{group}/"
    return Violation(path, problem, ", ".join(setting.choices), fix, setting.sentence)


def explain_range(path: str, value: Any) -> Violation:
    setting = settings()[path]
    assert setting.range is not None
    fix = f"{path}={as_typed(setting.default or [setting.range.low])}"
    if not isinstance(value, list):
        nearest = setting.range.nearest(value)
        fix = "" if nearest is None else f"{path}={nearest}"
    return Violation(f"{path}={as_typed(value)}", "is out of range", setting.valid, fix)


def explain_setting(path: str, value: Any) -> Violation:
    setting = settings()[path]
    subject = f"{path}={as_typed(value)}"
    if setting.choices:
        option = SYNONYMS.get(f"{path.partition('.')[0]}={str(value).lower()}", "")
        meant = nearest(str(value), setting.choices) or [option.partition("=")[2]]
        fix = _did_you_mean([f"{path}={m}" for m in meant if m in setting.choices])
        return Violation(
            subject, "no such value", ", ".join(setting.choices) + (", null" if setting.optional else ""), fix
        )
    return Violation(subject, f"takes {setting.expects}", about=setting.sentence)


def _synonym(key: str) -> list[str]:
    meant = SYNONYMS.get(key.rpartition(".")[2].lower())
    return [meant] if meant else []


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def explain(error: Exception) -> BadRequest:
    """Request error from an exception of Hydra, OmegaConf or YAML during composition.

    Keys and options were checked before: the causes are option files, and combinations only Hydra sees. Its advice to
    append with `+`, and its search path, are left out.
    """
    if isinstance(error, YAMLError):
        return BadRequest([Violation("a file of conf/ or sweeps/", f"is not YAML: {' '.join(str(error).split())}")])
    text = str(error)
    if key := getattr(error, "full_key", None):
        return BadRequest([Violation(str(key), text.splitlines()[0])])
    merged = re.fullmatch(r"Error merging override ([\w.]+)=(.*)", text, re.DOTALL)
    if merged and merged[1] in settings():
        return BadRequest([explain_setting(merged[1], merged[2])])
    lines = (
        line.strip() for line in re.split("Config search path:|full_key:", text)[0].splitlines() if "+" not in line
    )
    return BadRequest([Violation("request", " ".join(filter(None, lines)) or type(error).__name__)])
