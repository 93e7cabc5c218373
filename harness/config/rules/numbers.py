"""The range of every number, alone: a table of intervals, and the few lists and names that need more."""

from __future__ import annotations

import math
import re

from harness.config.doc import settings
from harness.config.errors import Violation
from harness.config.rules.request import Request
from harness.fsdp.options import OPTIONS
from harness.store.identity import slug

_COUNT = 2**31 - 1
_SEED = 2**63 - 1

_OF_OPTIONS = {option.facts.setting: option.facts.range for option in OPTIONS.values() if option.facts.setting}

RANGES: dict[str, tuple[float, float]] = {
    **{path: (each.low, each.high) for path, each in _OF_OPTIONS.items() if each is not None and not each.above},
    "model.vocab_size": (2, _COUNT),
    "model.dim": (1, 2**20),
    "model.num_layers": (1, 10_000),
    "model.num_heads": (1, 2**16),
    "model.num_kv_heads": (1, 2**16),
    "model.ffn_dim": (1, 2**22),
    "model.num_experts": (1, 2**16),
    "model.experts_per_token": (1, 2**16),
    "model.max_seq_len": (1, 2**24),
    "model.init_std": (0, 1e3),
    "data.seq_len": (1, 2**24),
    "data.header_bytes": (0, 2**40),
    "data.order_seed": (0, _SEED),
    "data.num_sequences": (1, 2**40),
    "optimizer.lr": (0, 1e6),
    "optimizer.weight_decay": (0, 1e6),
    "dtype.loss_scale_growth_steps": (1, _COUNT),
    "dtype.fp8_history": (1, 2**20),
    "train.steps": (1, _COUNT),
    "train.seed": (0, _SEED),
    "train.global_batch_size": (1, _COUNT),
    "train.microbatch_size": (1, _COUNT),
    "train.replicate": (0, 9_999),
    "train.warmup_steps": (0, _COUNT),
    "train.min_lr_ratio": (0, 1),
    "train.param_norm_every": (0, _COUNT),
    "nccl_ub.min_ctas": (1, 64),
    "nccl_ub.max_ctas": (1, 64),
    "sharp.nvls_ctas": (1, 64),
    "mesh.world_size": (1, 2**20),
    "mesh.dp_outer": (1, 2**20),
    "mesh.tp": (1, 2**10),
    "fault.begins_at": (1, _COUNT),
    "ckpt.every": (0, _COUNT),
    "ckpt.keep": (1, _COUNT),
    "measure.warmup_steps": (0, _COUNT),
    "measure.capture_limit_mib": (0, 2**30),
    "model.parameters": (0, 2**50),
    "measure.vouch_limit_mib": (1, 2**30),
    "measure.rounding_draws": (0, 1_000),
    "cluster.nodes": (1, 2**16),
    "cluster.threads_per_rank": (1, 4_096),
    "cluster.cpus_per_rank": (1, 4_096),
    "cluster.ranks_per_device": (1, 64),
    "cluster.mem_gb": (0, 1e6),
    "cluster.slots": (1, 2**16),
    "cluster.time_min": (1, 525_600),
    "cluster.grace_s": (0, 86_400),
    "cluster.gpus_per_node": (0, 1_024),
    "cluster.array_parallelism": (1, 1_000_000),
    "launch.hang_timeout_s": (1, 1e7),
    "launch.stop_grace_s": (0, 86_400),
    "launch.preempt_at": (0, _COUNT),
    "study.window": (0, _COUNT),
    "study.replicates": (1, 9_999),
    "study.order_seed": (0, _SEED),
}
"""Smallest and largest value of a setting, both allowed; those of the engine's options are declared with them."""

POSITIVE: dict[str, float] = {
    **{path: each.high for path, each in _OF_OPTIONS.items() if each is not None and each.above},
    "model.rope_theta": 1e12,
    "model.norm_eps": 1.0,
    "optimizer.eps": 1.0,
    "optimizer.clip_norm": 1e9,
}
"""Largest value of a setting that must be above zero; null, where it is allowed, is fine."""

T3_MEASURES = ("loss", "grad_norm")
"""What paired seeds are compared by."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STUDY_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,98}[a-z0-9_])?")


def check(request: Request) -> dict[str, Violation]:
    """Violations by the setting that is out of range."""
    found = {}
    for path, (low, high) in RANGES.items():
        value = request.value(path)
        if value is not None and not _within(value, low, high):
            found[path] = Violation(request.show(path), "is out of range", f"{low:,} to {high:,}", _nearest(path, low))
    for path, high in POSITIVE.items():
        value = request.value(path)
        if value is not None and not (_within(value, 0, high) and value > 0):
            found[path] = Violation(request.show(path), "is out of range", f"above 0, up to {high:,.0f}")
    return found | _lists(request) | _names(request) | _texts(request)


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _nearest(path: str, low: float) -> str:
    return f"{path}={low:g} is the smallest"


def _lists(request: Request) -> dict[str, Violation]:
    found = {}
    betas = request.config.optimizer.betas
    if len(betas) != 2 or not all(math.isfinite(b) and 0 <= b < 1 for b in betas):
        path = "optimizer.betas"
        found[path] = Violation(
            request.show(path), "is out of range", "two numbers, each at least 0 and below 1", f"{path}=[0.9,0.95]"
        )
    momentum = request.config.optimizer.momentum
    if not (math.isfinite(momentum) and 0 <= momentum < 1):
        path = "optimizer.momentum"
        found[path] = Violation(request.show(path), "is out of range", "at least 0 and below 1", f"{path}=0.9")
    for measure, margin in request.config.study.margins.items():
        path = f"study.margins.{measure}"
        if measure not in T3_MEASURES:
            found[path] = Violation(path, "is no measure that pairs of seeds are judged by", ", ".join(T3_MEASURES))
        elif not 0 < margin < math.inf:
            found[path] = Violation(f"{path}={margin}", "is out of range", "above 0", f"{path}=0.001 is 0.1 %")
    for path in ("measure.capture_steps", "measure.update_steps"):
        steps = request.value(path) or ()
        if any(step < 1 for step in steps) or len(set(steps)) != len(steps):
            found[path] = Violation(request.show(path), "needs distinct steps, counted from 1", fix=f"{path}=[1]")
    return found


def _texts(request: Request) -> dict[str, Violation]:
    """No text holds a control character: it would end a line of a script, or command a terminal."""
    found = {}
    for path, setting in settings().items():
        value = request.value(path)
        texts = [value] if isinstance(value, str) else value if setting.type == list[str] else []
        if isinstance(value, dict) and setting.type == dict[str, str]:
            texts = [text for pair in value.items() for text in pair]
        if any(_CONTROL.search(text) for text in texts):
            problem = "holds a control character (a newline?)"
            found[path] = Violation(f"{path}={value!r}", problem, fix="one line of plain text")
    return found


def _names(request: Request) -> dict[str, Violation]:
    name = request.config.study.name
    if _STUDY_NAME.fullmatch(name):
        return {}
    choices = "lower-case letters, digits, and . _ - inside"
    return {
        "study.name": Violation(
            f"study.name={name!r}", "is a folder's name", choices, f"study.name={slug(name)[:100] or 'adhoc'}"
        )
    }
