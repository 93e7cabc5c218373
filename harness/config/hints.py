"""Errors that teach: the nearest names for an unknown word, and the values of a setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from yaml import YAMLError

from harness.config.catalog import load_catalog
from harness.config.doc import as_typed, settings
from harness.config.errors import BadRequest, Violation
from harness.store.commands import page


def _synonyms(table: str) -> dict[str, str]:
    """Word -> its meaning, of `meaning: word word`, several on a line; of an option's word, after its group's name."""
    found: dict[str, str] = {}
    for meaning, words in re.findall(r"(\S+): ([^;\n]+)", table):
        group, sign, _ = meaning.partition("=")
        found |= {f"{group}={word}" if sign else word: meaning for word in words.split()}
    return found


SYNONYMS = _synonyms(
    """
    sharding=no_shard: zero0 ddp replicate none; sharding=optim: zero1; sharding=optim_grads: zero2 shard_grad_op
    sharding=optim_grads_params: zero3 fsdp fsdp2 full_shard
    dtype=fp32: float32 float; dtype=bf16: bfloat16 mixed amp; dtype=fp64: float64 double
    dtype=fp8_current: fp8 float8; dtype=fp8_block: blockwise; dtype=mxfp8: mx
    engine=native: fsdp; engine=single: reference; engine=ddp: torch_ddp
    data=tokens: bin memmap; data=synthetic: random; data=text: bytes txt
    model=moe: mixtral experts; model=odd: awkward; model=tiny: llama; model=gpt_125m: gpt2
    cluster=local: cpu workstation; cluster=slurm: sbatch submitit
    wandb=disabled: off false none; wandb=online: on true; ckpt=none: off; ckpt=last: latest newest
    numerics=fast: free; numerics=ordered: bitwise; numerics=exact: integer fixed_point; mesh=one: 1; mesh=two: 2
    engine: backend framework; train.global_batch_size: batch_size gbs; ckpt: checkpoint; optimizer.weight_decay: wd
    optimizer.clip_norm: clip grad_clip; data.seq_len: context_length sequence_length; data: dataset; cluster: launcher
    numerics: deterministic; cluster.device: device; launch.dry_run: dry_run; engine.transport: eager_limit_bytes
    mesh.world_size: data_parallel_size dp dp_size gpus nproc num_gpus ranks; model.dim: hidden_size; study: sweep
    dtype.grad_comm: grad_comm_dtype grad_reduce_in_fp32; train.steps: iterations max_steps num_steps; wandb: logger
    dtype.main_params: main_params_dtype preserve_fp32_weights; dtype.main_grads: main_grads_dtype; train.seed: seed
    train.microbatch_size: mbs micro_batch_size; model.num_layers: layers; optimizer.lr: learning_rate; optimizer: optim
    model.experts_per_token: num_experts_per_tok top_k; model.num_experts: num_local_experts; sharding: strategy zero
    launch.root: output_dir root; measure.step_checks: vouch; measure.step_checks_limit_mib: vouch_limit_mib
    dtype: mixed_precision precision; cluster.additional: gres
    """
)
"""Words of other programs: `group=word` and keys."""

REPLACED_KEYS = {
    "eager_limit_bytes": "engine.transport=backend sends all data over gloo, as engine.eager_limit_bytes=null did",
    "fork": "each rank is a process of its own: leave it out",
    "gres": "cluster.additional={gres: gpu:h100:8}, with cluster.gpus_per_node=0, says the same",
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


def explain_key(key: str) -> Violation:
    group, _, rest = key.partition(".")
    if rest and group in load_catalog():
        inside = [path for path in settings() if path.startswith(f"{group}.")]
        elsewhere = [path for path in settings() if path.endswith(f".{rest}")]
        meant = list(dict.fromkeys(_synonym(key) + elsewhere + (nearest(key, inside) or nearest(rest, settings()))))[:3]
        problem = f"{group} has no such setting"
        return Violation(key, problem, ", ".join(inside) or "none of its own", _did_you_mean(meant), _replaced(key))
    everything = [*load_catalog(), *settings()]
    meant = _synonym(key) or nearest(key, everything)
    meant = [name for name in meant if name.partition(".")[0] not in meant or "." not in name]  # the group says it
    if meant:
        return Violation(key, "no such group or setting", fix=_did_you_mean(meant), about=_replaced(key))
    problem, guide = "no such group or setting", page("configuration.md")
    return Violation(key, problem, "groups " + ", ".join(load_catalog()), f"{guide} lists every setting")


def explain_option(group: str, option: object) -> Violation:
    options = load_catalog()[group]
    word = as_typed(option)
    meant = SYNONYMS.get(f"{group}={word.lower()}", "")
    known = meant.partition("=")[2] in options
    fix = _did_you_mean([meant] if known else [f"{group}={name}" for name in nearest(word, options)])
    if group == "fault":
        fix = fix or "fault.name=package.module:function"
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
    key = getattr(error, "full_key", None)
    if key:
        return BadRequest([Violation(str(key), str(error).splitlines()[0])])
    plugin = re.search(
        r"Could not find '(hydra/(?:sweeper|launcher))/(\S+)'(?:.*?:\n((?:\t\S+\n?)+))?", str(error), re.DOTALL
    )
    if plugin:
        return BadRequest([_no_plugin(plugin[1], plugin[2], (plugin[3] or "").split())])
    inside = re.search(r"In '((?:study/)?)([^']+)': \w+ raised while composing config:\n([^\n]*)", str(error))
    if inside:
        problem = "is a list, not a table of settings" if "ListConfig" in inside[3] else inside[3]
        return BadRequest([Violation(f"{'sweeps' if inside[1] else 'conf'}/{inside[2]}.yaml", problem)])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if "+" not in line] or [type(error).__name__]
    return BadRequest([Violation("request", " ".join(useful[:3]))])


_PLUGINS = ("optuna", "ax", "nevergrad", "joblib", "ray", "rq", "submitit_local", "submitit_slurm")


def _no_plugin(group: str, name: str, installed: Sequence[str]) -> Violation:
    package = f"{name.partition('_')[0]}-{group.rpartition('/')[2]}"
    meant = [f"{group}={each}" for each in nearest(name, installed)]
    fix = f"pip install hydra-{package}" if name in _PLUGINS else _did_you_mean(meant)
    return Violation(f"{group}={name}", "no such plugin is installed", ", ".join(installed), fix)
