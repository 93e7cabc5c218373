"""Rule: a typed setting has an effect under the choices beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.config.adapter import capabilities_of
from harness.config.capabilities import ENGINES
from harness.config.derived import wants_infiniband_sharp
from harness.config.errors import Violation
from harness.config.rules.engine import narrow_waits
from harness.config.rules.request import Request, rule
from harness.config.schema import (
    NO_FAULT,
    Backend,
    CkptPolicy,
    Config,
    DataKind,
    Device,
    Dtype,
    Fp8,
    MeasureMode,
    ModelFamily,
    Numerics,
    OptimizerName,
    Registration,
    WandbMode,
)


@dataclass(frozen=True)
class Condition:
    holds: Callable[[Config], bool]
    where: str
    because: Callable[[Config], str]


def _data(*kinds: DataKind) -> Condition:
    where = " or ".join(f"data={kind.name}" for kind in kinds)
    return Condition(lambda c: c.data.kind in kinds, where, lambda c: f"data={c.data.kind.name}")


def _optimizer(*names: OptimizerName) -> Condition:
    where = " or ".join(f"optimizer={name.name}" for name in names)
    return Condition(lambda c: c.optimizer.name in names, where, lambda c: f"optimizer={c.optimizer.name.name}")


_FILES = _data(DataKind.text, DataKind.tokens, DataKind.ext)
_OWN_OPTIMIZER = _optimizer(OptimizerName.ext)
_ADAM = _optimizer(OptimizerName.adam, OptimizerName.adamw)
_SLURM = Condition(
    lambda c: c.cluster.backend is Backend.slurm, "cluster=slurm", lambda c: f"cluster.backend={c.cluster.backend.name}"
)
_LOCAL = Condition(
    lambda c: c.cluster.backend is Backend.local, "cluster=local", lambda c: f"cluster.backend={c.cluster.backend.name}"
)
_WANDB = Condition(
    lambda c: c.wandb.mode is not WandbMode.disabled, "wandb=offline or wandb=online", lambda c: "wandb=disabled"
)
_CAPTURE = Condition(
    lambda c: c.measure.capture_steps != [] or bool(c.measure.update_steps),
    "measure.capture_steps=[1]",
    lambda c: "measure.capture_steps=[]",
)
_BENCH = Condition(
    lambda c: c.measure.mode is MeasureMode.bench, "measure=bench", lambda c: f"measure.mode={c.measure.mode.name}"
)
_TRACE = Condition(
    lambda c: bool(c.measure.trace_steps), "measure=trace", lambda c: f"measure.trace_steps={c.measure.trace_steps}"
)
_RECORD = Condition(lambda c: c.measure.mode is MeasureMode.record, "measure=default", lambda c: "measure=bench")
_STEP_CHECKS = Condition(
    lambda c: c.measure.mode is MeasureMode.record and c.measure.step_checks,
    "measure.step_checks=true",
    lambda c: "measure.step_checks=false",
)
_CKPT = Condition(lambda c: c.ckpt.policy is not CkptPolicy.none, "ckpt=last", lambda c: "ckpt=none")
_NARROW_SUMS = Condition(
    lambda c: (
        any(d is not None and d.bytes < 4 for d in (c.dtype.main_grads, c.dtype.grad_accum))
        or (c.dtype.grad_accum is Dtype.fp32 and c.dtype.grad_comm is Dtype.fp64)
        or any(narrow_waits(c))
        or (c.dtype.compute is Dtype.fp16 and c.dtype.loss_scale == "none")
    ),
    "dtype.main_grads=bf16 or a narrow dtype.grad_accum",
    lambda c: f"dtype.main_grads={c.dtype.main_grads.name}",
)
_DYNAMIC_SCALE = Condition(
    lambda c: c.dtype.loss_scale == "dynamic",
    "dtype.loss_scale=dynamic",
    lambda c: f"dtype.loss_scale={c.dtype.loss_scale}",
)
_DELAYED = Condition(
    lambda c: c.dtype.fp8 is Fp8.delayed,
    "dtype=fp8_delayed",
    lambda c: f"dtype.fp8={'null' if c.dtype.fp8 is None else c.dtype.fp8.name}",
)
_MOE = Condition(
    lambda c: c.model.family in (ModelFamily.moe, ModelFamily.ext),
    "model=moe",
    lambda c: f"model.family={c.model.family.name}",
)
_DECODER = Condition(
    lambda c: c.model.family is not ModelFamily.odd, "model=tiny", lambda c: f"model.family={c.model.family.name}"
)
_ODD = Condition(
    lambda c: c.model.family in (ModelFamily.odd, ModelFamily.ext),
    "model=odd",
    lambda c: f"model.family={c.model.family.name}",
)
_SPARSE = Condition(
    lambda c: c.model.family is not ModelFamily.llama,
    "model=ext, model=moe or model=odd",
    lambda c: f"model.family={c.model.family.name}",
)
_OWN_MODEL = Condition(
    lambda c: c.model.family is ModelFamily.ext, "model=ext", lambda c: f"model.family={c.model.family.name}"
)
_CUDA = Condition(
    lambda c: c.cluster.device is Device.cuda,
    "cluster.device=cuda",
    lambda c: f"cluster.device={c.cluster.device.name}",
)
_UB = Condition(lambda c: c.nccl_ub.mode is not Registration.none, "nccl_ub=auto", lambda c: "nccl_ub=none")
_SHARP = Condition(lambda c: c.sharp.group.is_asked, "sharp=dp", lambda c: f"sharp={c.sharp.group.name}")
_NVLINK = Condition(
    lambda c: c.sharp.group.is_asked and c.sharp.nvlink,
    "sharp=dp sharp.nvlink=true",
    lambda c: "sharp.nvlink=false" if c.sharp.group.is_asked else f"sharp={c.sharp.group.name}",
)
_INFINIBAND = Condition(
    wants_infiniband_sharp,
    "sharp=dp sharp.infiniband=true",
    lambda c: "sharp.infiniband=false" if c.sharp.group.is_asked else f"sharp={c.sharp.group.name}",
)
_OUTER = Condition(lambda c: c.mesh.dp_outer > 1, "mesh=two_by_two", lambda c: f"mesh.dp_outer={c.mesh.dp_outer}")

CONDITIONS: dict[str, Condition] = {
    "model.target": _OWN_MODEL,
    "data.target": _data(DataKind.ext),
    "optimizer.target": _OWN_OPTIMIZER,
    "optimizer.options": _OWN_OPTIMIZER,
    "data.path": _FILES,
    "data.token_dtype": _data(DataKind.tokens),
    "data.header_bytes": _data(DataKind.tokens),
    "data.num_sequences": _data(DataKind.synthetic),
    "optimizer.betas": _ADAM,
    "optimizer.eps": _ADAM,
    "optimizer.momentum": _optimizer(OptimizerName.sgd),
    "dtype.allow_low_precision_grads": _NARROW_SUMS,
    "dtype.loss_scale_growth_steps": _DYNAMIC_SCALE,
    "dtype.fp8_history": _DELAYED,
    "model.num_heads": _DECODER,
    "model.num_kv_heads": _DECODER,
    "model.rope_theta": _DECODER,
    "model.tie_embeddings": _DECODER,
    "model.skip_idle": _SPARSE,
    "model.repeat_unit": _ODD,
    "model.num_experts": _MOE,
    "model.experts_per_token": _MOE,
    "sharding.outer": _OUTER,
    "mesh.sequence_parallel": Condition(lambda c: c.mesh.tp > 1, "mesh.tp=2", lambda c: f"mesh.tp={c.mesh.tp}"),
    "numerics.exact_bits": Condition(
        lambda c: c.numerics.mode is Numerics.exact, "numerics=exact", lambda c: f"numerics.mode={c.numerics.mode.name}"
    ),
    "nccl_ub.symmetric": _UB,
    "nccl_ub.fallback": _UB,
    "sharp.nvlink": _SHARP,
    "sharp.infiniband": _SHARP,
    "sharp.nvls_ctas": _NVLINK,
    "sharp.streaming": _INFINIBAND,
    "sharp.overlap_gather": _INFINIBAND,
    "fault.begins_at": Condition(lambda c: c.fault.name != NO_FAULT, "a fault", lambda c: f"fault={NO_FAULT}"),
    "ckpt.every": _CKPT,
    "ckpt.minutes": _CKPT,
    "ckpt.keep": _CKPT,
    "ckpt.background": _CKPT,
    "ckpt.strict": Condition(
        lambda c: c.ckpt.policy is not CkptPolicy.none or c.ckpt.load is not None,
        "ckpt=last, or a checkpoint to begin from in ckpt.load",
        lambda c: "ckpt=none",
    ),
    "measure.capture_limit_mib": _CAPTURE,
    "measure.rounding_fp8": Condition(
        lambda c: c.measure.rounding_draws > 0,
        "measure.rounding_draws=8",
        lambda c: f"measure.rounding_draws={c.measure.rounding_draws}",
    ),
    "measure.step_checks": _RECORD,
    "measure.step_checks_limit_mib": _STEP_CHECKS,
    "measure.warmup_steps": _BENCH,
    "measure.trace_ranks": _TRACE,
    "measure.memory_snapshot": _TRACE,
    "train.param_norm_every": _RECORD,
    "study.order_seed": _BENCH,
    "wandb.project": _WANDB,
    "wandb.entity": _WANDB,
    "cluster.nodes": _SLURM,
    "cluster.partition": _SLURM,
    "cluster.account": _SLURM,
    "cluster.qos": _SLURM,
    "cluster.time_min": _SLURM,
    "cluster.grace_s": _SLURM,
    "cluster.mem_gb": _SLURM,
    "cluster.gpus_per_node": _SLURM,
    "cluster.gres": _SLURM,
    "cluster.cpus_per_rank": _SLURM,
    "cluster.ranks_per_device": _CUDA,
    "cluster.bind_to_device": _CUDA,
    "cluster.sharp_network": _SLURM,
    "cluster.additional": _SLURM,
    "cluster.flags": _SLURM,
    "cluster.srun_args": _SLURM,
    "cluster.setup": _SLURM,
    "cluster.teardown": _SLURM,
    "cluster.array_parallelism": _SLURM,
    "cluster.python": _SLURM,
    "cluster.container_image": _SLURM,
    "cluster.container_mounts": Condition(
        lambda c: c.cluster.container_image is not None, "cluster.container_image", lambda c: "no container_image"
    ),
    "cluster.slots": _LOCAL,
}


@rule()
def typed_settings_have_an_effect(request: Request) -> Iterator[Violation]:
    for key in request.named:
        condition = CONDITIONS.get(key) or CONDITIONS.get(key.rpartition(".")[0])
        if condition and not condition.holds(request.config):
            yield _without_effect(request, key, condition.because(request.config), condition.where)


@rule()
def engine_takes_its_settings(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    for key in request.named:
        if key.startswith("engine.") and key != "engine.name" and key not in capabilities_of(request.config).settings:
            takers = " or ".join(f"engine={e.name}" for e, can in ENGINES.items() if key in can.settings)
            yield _without_effect(request, key, f"engine={engine.name}", takers)


def _without_effect(request: Request, key: str, because: str, where: str) -> Violation:
    return Violation(
        f"{key}={request.named[key]}", f"has no effect with {because}", fix=f"leave it out, or choose {where}"
    )
