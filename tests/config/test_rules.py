"""Every rule: what it refuses, what it says, and what it lets through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.config.capabilities import ENGINES
from harness.config.doc import settings
from harness.config.errors import BadRequest
from harness.config.schema import EngineName
from tests.support.composing import compose

DRY = "launch.dry_run=true"


def violations(*overrides: str) -> dict[str, str]:
    """Violations of a request by the knob they name."""
    with pytest.raises(BadRequest) as caught:
        compose([*overrides])
    return {v.subject.partition("=")[0]: str(v) for v in caught.value.violations}


REFUSED = """
train.global_batch_size=10 | train.global_batch_size | train.global_batch_size=8 | train.global_batch_size=24
train.global_batch_size=4 | train.global_batch_size | train.microbatch_size=2 | train.global_batch_size=8
mesh.world_size=3 cluster=slurm cluster.nodes=2 train.global_batch_size=12 | mesh.world_size | 2 |
train.steps=5 train.warmup_steps=6 | train.warmup_steps | train.warmup_steps=5 | train.steps=6 train.warmup_steps=6
measure.capture_steps=[1,21] | measure.capture_steps | measure.capture_steps=[1] | measure.capture_steps=[1,20]
measure.capture_steps=[1,1] | measure.capture_steps | [1] | measure.capture_steps=[]
model.num_heads=3 model.num_kv_heads=1 | model.dim | model.dim=60 | model.num_heads=2
model.num_kv_heads=3 | model.num_kv_heads | model.num_kv_heads=2 | model.num_kv_heads=4
data.seq_len=2049 | data.seq_len | data.seq_len=2048 | data.seq_len=2048
engine=ddp sharding=optim_grads | sharding.strategy | engine=native | engine=ddp
engine=ddp numerics=ordered | numerics.mode | numerics=deterministic | engine=ddp numerics=deterministic
engine=single mesh.world_size=2 | mesh.world_size | mesh.world_size=1 | engine=single numerics=ordered
engine=ddp dtype.main_grads=fp64 | dtype.main_grads | dtype.main_grads=fp32 | engine=ddp dtype=bf16
engine=ddp dtype.grad_accum=fp64 | dtype.grad_accum | engine=native | dtype.grad_accum=fp64
dtype.main_grads=bf16 | dtype.main_grads | dtype.allow_low_precision_grads=true | dtype=bf16
dtype.grad_accum=bf16 | dtype.grad_accum | dtype.grad_accum=fp32 | dtype=bf16_comm
engine=fsdp2 sharding=optim | sharding.strategy | sharding=optim_grads | engine=fsdp2 sharding=optim_grads
engine=deepspeed mesh=two_by_two | sharding.strategy | engine=native | engine=native mesh=two_by_two
numerics.exact_bits=40 | numerics.exact_bits | numerics=exact | numerics=exact numerics.exact_bits=40
engine.double_buffer=true engine.prefetch=2 | engine.prefetch | engine.prefetch=1 | engine.double_buffer=true
engine=fsdp2 mesh.world_size=4 mesh.dp_outer=3 | mesh.dp_outer | mesh.world_size=3 | mesh.dp_outer=1
sharding=hsdp | sharding | mesh=two_by_two | engine=fsdp1 sharding=hsdp mesh=two_by_two
engine=deepspeed dtype=fp64 | dtype.compute | engine=native | engine=deepspeed dtype=bf16
engine=megatron_fsdp model=odd | model.skip_idle |
    model.skip_idle=false | engine=megatron_fsdp model=odd model.skip_idle=false
engine=megatron_fsdp sharding=optim_grads mesh=one | mesh.world_size |
    mesh.world_size=2 | engine=megatron_fsdp sharding=optim mesh=one
engine=megatron_fsdp sharding=hsdp mesh.world_size=2 mesh.dp_outer=2 | mesh.world_size |
    mesh.world_size=4 | engine=megatron_fsdp sharding=hfsdp mesh=two_by_two
dtype.compute=fp16 dtype.main_params=bf16 | dtype.main_params | fp16 | dtype=fp16
dtype.compute=fp16 | dtype.compute |
    dtype.loss_scale=dynamic (engine=native) | dtype.compute=fp16 dtype.allow_low_precision_grads=true
engine=fsdp1 sharding=optim_grads dtype=fp8_current | dtype.fp8 |
    engine=native | engine=fsdp2 sharding=optim_grads dtype=fp8_current
dtype=fp8_block | dtype.fp8 | model=tiny_wide | dtype=fp8_block model=tiny_wide
dtype=mxfp8 model=moe model.num_kv_heads=4 | dtype.fp8 | model=tiny_wide | dtype=fp8_current
dtype=fp8_current model=odd | dtype.fp8 | model=tiny | dtype=fp8_current engine=ddp
dtype=fp8_block model=tiny_wide mesh.tp=2 mesh.world_size=2 | dtype.fp8 | mesh.tp=1 | dtype=fp8_block model=tiny_wide
dtype=fp8_current sharp=dp | dtype.fp8 | sharp=none | dtype=fp8_current
dtype=fp64 dtype.fp8=current | dtype.compute | dtype.compute=bf16 | dtype=fp32 dtype.fp8=current
engine=fsdp1 dtype=bf16 sharding=no_shard | dtype.compute | dtype.allow_low_precision_grads=true |
    engine=fsdp1 dtype=bf16 sharding=no_shard train.global_batch_size=8
engine=fsdp2 dtype=bf16_comm sharding=hsdp mesh=two_by_two train.global_batch_size=32 | dtype.grad_comm |
    until the outer axis reduces | engine=fsdp1 dtype=bf16_comm sharding=hsdp mesh=two_by_two
engine=ddp dtype=fp64 dtype.grad_comm=fp32 | dtype.grad_comm | dtype.grad_comm=fp64 |
    engine=ddp dtype=fp64 dtype.grad_comm=bf16
engine=deepspeed dtype=bf16_pure | dtype.main_params | does not keep main weights and gradients in this dtype |
engine=deepspeed model=odd | model.skip_idle | hangs |
engine=deepspeed model=odd mesh=one | model.skip_idle | updates them by their last step's gradient again |
engine=deepspeed numerics=ordered | numerics.mode | cannot promise this order |
optimizer=muon engine=fsdp2 | optimizer | engine=native |
optimizer=muon engine=fsdp1 | optimizer | engine=ddp |
optimizer=muon engine=deepspeed | optimizer | steps parts of matrices |
optimizer=muon engine=megatron_fsdp | optimizer | is not taken by engine=megatron_fsdp |
optimizer=muon dtype=bf16_pure numerics=ordered | optimizer.name | optimizer=adamw |
optimizer=muon optimizer.ns_coefficients=[1,2] | optimizer.ns_coefficients | three numbers |
engine=fsdp2 dtype=fp16 | dtype.loss_scale | engine=native | dtype=fp16
dtype=fp16 engine.report_nan_in_param_grad=true | engine.report_nan_in_param_grad |
    dtype.loss_scale=none | dtype=bf16 engine.report_nan_in_param_grad=true
dtype=bf16_pure dtype.loss_scale=dynamic | dtype.main_grads |
    dtype.main_grads=fp32 | dtype=bf16 dtype.loss_scale=dynamic
dtype=bf16 dtype.loss_scale_growth_steps=9 | dtype.loss_scale_growth_steps |
    dtype.loss_scale=dynamic | dtype=fp16 dtype.loss_scale_growth_steps=9
optimizer=sgd numerics=ordered dtype=bf16_pure | optimizer.name |
    optimizer=adamw | optimizer=adamw numerics=ordered dtype=bf16_pure
engine=ddp nccl_ub=auto | nccl_ub.mode | engine=native | nccl_ub=auto
nccl_ub=manual engine.double_buffer=false | engine.double_buffer |
    nccl_ub=none | nccl_ub=manual engine.double_buffer=true
engine=megatron_fsdp nccl_ub=manual | nccl_ub.mode | nccl_ub=auto | engine=megatron_fsdp nccl_ub=auto
sharp=dp numerics=deterministic | sharp.group | numerics=fast | sharp=dp
sharp=dp_outer | sharp.group | mesh=two_by_two | sharp=dp engine=fsdp2
sharp=dp engine=fsdp2 mesh=two_by_two | sharp.group | engine=native | engine=fsdp2 mesh=two_by_two sharp=none
engine=ext | engine | docs/adapter.md | engine=native
dtype.compute=fp64 | dtype.main_params | dtype.main_params=fp64 | dtype=fp64
launch.inline=true | launch.inline | mesh=one | debug=inline
cluster=slurm debug=inline | launch.inline | cluster=local |
cluster=slurm cluster.device=cuda | cluster.gpus_per_node | cluster.gpus_per_node=2 |
cluster=slurm launch.root='/tmp/50%' | launch.root | a folder without |
train.global_batch_size=160000 | data | a smaller train.global_batch_size |
study.name=../x | study.name | study.name=x | study.name=x
study.name=Big | study.name | big | study.name=big
run.name='' | run.name | run.name=null | run.name=a.b-c_1
optimizer.betas=[0.9] | optimizer.betas | [0.9,0.95] | optimizer.betas=[0,0]
model=moe model.experts_per_token=9 | model.experts_per_token | model.num_experts=9 |
    model=moe model.experts_per_token=8
model=odd model.num_heads=3 | model.num_heads | model.family=odd | model=odd model.dim=41 model.repeat_unit=true
model=tiny model.repeat_unit=true | model.repeat_unit | model=odd | model=odd model.repeat_unit=true
measure=bench measure.capture_steps=[1] | measure.capture_steps | measure.capture_steps=[] | measure=bench
measure=bench ckpt=last | ckpt.policy | ckpt=none | measure=bench ckpt=none
measure=bench wandb=offline | wandb.mode | wandb=disabled | measure=bench wandb=disabled
measure=bench train.steps=5 | train.steps | train.steps=15 | measure=bench train.steps=7
measure=bench measure.warmup_steps=2 | measure.warmup_steps | measure.warmup_steps=3 |
measure=bench train.param_norm_every=5 | train.param_norm_every | measure=default |
measure=trace measure.trace_ranks=[2] | measure.trace_ranks | numbers from 0 to 1; null: all |
    measure=trace measure.trace_ranks=null mesh.world_size=2
measure=trace measure.trace_ranks=[] | measure.trace_ranks | names no rank |
measure.trace_ranks=null | measure.trace_ranks | measure=trace |
measure.validation_batches=2 | measure.validation_batches | measure.validate_every=10 |
engine=ddp engine.prefetch=1 | engine.prefetch | engine=native | engine.prefetch=0
measure=bench measure.callbacks=[tests.own.parts:Plain] | measure.callbacks | measure=default |
measure=trace measure.memory_snapshot=true | measure.memory_snapshot | cluster.device=cuda |
    measure=trace measure.memory_snapshot=true cluster=slurm cluster.device=cuda cluster.gpus_per_node=2
sharp.nvlink=false | sharp.nvlink | has no effect with sharp=default | sharp=dp sharp.nvlink=false
cluster.nodes=2 | cluster.nodes | has no effect with cluster=local |
optimizer.options={a:1} | optimizer.options | optimizer=ext |
launch.preempt_at=20 | launch.preempt_at | 0 to 19 | launch.preempt_at=19
launch.preempt_at=3 ckpt=none cluster=slurm | launch.preempt_at | forever | launch.preempt_at=3 ckpt=none
ckpt.every=21 | ckpt.every | beyond the last step |
train.steps=??? | train.steps | is not a value |
notes='HF_TOKEN=abcdefgh1' | notes | holds a secret |
cluster=slurm launch.root='/a:b' | launch.root | ends an entry of PYTHONPATH |
mesh.dp_outer=8 | mesh.dp_outer | does not divide |
mesh.world_size=4 mesh.tp=3 | mesh.tp | does not divide mesh.world_size=4 |
mesh.world_size=4 mesh.tp=2 engine=fsdp1 | mesh.tp | engine=fsdp1 does not support |
mesh.world_size=4 mesh.tp=2 model=odd | mesh.tp | model.family=odd has no tensor-parallel plan |
mesh.world_size=4 mesh.tp=2 sharp=dp | sharp.group | is not implemented with mesh.tp=2 |
mesh.world_size=4 mesh.tp=4 model.num_heads=6 model.dim=96 | model.num_heads | or mesh.tp=2 |
mesh.world_size=8 mesh.tp=8 | model.num_kv_heads | is not divisible by mesh.tp=8 |
mesh.world_size=4 mesh.tp=2 mesh.sequence_parallel=true data.seq_len=31 | data.seq_len | is not divisible by mesh.tp=2 |
mesh.sequence_parallel=true | mesh.sequence_parallel | mesh.tp=1 |
mesh.world_size=8 mesh.tp=2 mesh.dp_outer=8 | mesh.dp_outer | the 4 ranks that mesh.tp=2 leaves |
mesh.world_size=2 mesh.tp=2 mesh.dp_outer=2 | mesh.dp_outer | the 1 rank that mesh.tp=2 leaves |
mesh.world_size=4 mesh.tp=2 train.global_batch_size=5 train.microbatch_size=1 | train.global_batch_size |
    mesh.world_size / mesh.tp |
fault=scale_by_two engine=ddp | fault.name | engine=ddp is another | fault=scale_by_two
fault=scale_by_two mesh.world_size=4 mesh.tp=2 | fault.name | is not implemented with mesh.tp=2 |
fault.name=scale_by_tow | fault.name | did you mean fault=scale_by_two |
fault.name=nothing_of_the_kind | fault.name | fault.name=package.module:function |
fault=scale_by_two fault.begins_at=9 train.steps=8 | fault.begins_at | begins after the run has ended |
fault.name=tests.faults.sums: | fault.name | names no function |
fault.begins_at=2 | fault.begins_at | has no effect with fault=none |
data=text data.path=/nope | data | does not exist |
data=text | data | data.path | data=stdlib
"""
"""What is asked for, the knob that its violation names, the fix, and what is let through; a row may go on below."""
MORE = [(f"run.name={'x' * 101}", "run.name", "100 lower-case", f"run.name={'x' * 100}")]


def rows(table: str) -> list[tuple[str, ...]]:
    found = re.split(r"\n(?=\S)", table.strip())
    return [tuple(cell.strip() for cell in re.sub(r"\s*\n\s+", " ", row).split("|")) for row in found]


@pytest.mark.parametrize(("overrides", "knob", "fix", "clean"), [*rows(REFUSED), *MORE])
def test_a_rule_names_knob_and_fix_and_spares_the_clean(overrides: str, knob: str, fix: str, clean: str) -> None:
    found = violations(*overrides.split(), DRY)
    assert knob in found
    assert fix in found[knob]
    compose([*clean.split(), DRY])


def test_numbers_out_of_range_do_not_hide_other_mistakes() -> None:
    found = violations(
        "train.steps=0", "data.seq_len=4096", "engine=ddp", "sharding=optim_grads", "model.num_heads=0", DRY
    )
    assert set(found) == {"train.steps", "data.seq_len", "sharding.strategy", "model.num_heads"}


def test_conditions_name_settings_that_exist() -> None:
    for setting in settings().values():
        for each in setting.only:
            named = settings()[each.path]
            assert all(value in (named.choices or each.values) for value in each.values), setting.path
    assert all(path in settings() for can in ENGINES.values() for path in can.settings)
    assert set(ENGINES) == set(EngineName)


def test_missing_or_wrong_data(tmp_path: Path) -> None:
    for name, held, told in (("empty", "", "is empty"), ("short", "x" * 1000, "fewer than one global batch")):
        (tmp_path / name).write_text(held)
        (text,) = violations("data=text", f"data.path={tmp_path / name}").values()
        assert told in text
    (tmp_path / "folder").mkdir()
    assert "without" in "".join(violations("data=text", f"data.path={tmp_path / 'folder'}").values())


@pytest.mark.parametrize("word", ["cluster.account='a\nb'", "notes='a\nb'"])
def test_a_control_character_is_refused(word: str) -> None:
    (told,) = violations("cluster=slurm", word, DRY).values()
    assert "control character" in told


def test_a_checkpoint_of_a_later_step_is_refused(tmp_path: Path) -> None:
    for step in (5, 60):
        (tmp_path / "ckpt" / f"step-{step:06d}").mkdir(parents=True)
        (tmp_path / "ckpt" / f"step-{step:06d}" / "manifest.json").touch()
    found = violations(f"ckpt.load={tmp_path}", "train.steps=10", DRY)
    assert "begins after step 60" in found["ckpt.load"]
    assert "train.steps=70" in found["ckpt.load"]
    assert compose([f"ckpt.load={tmp_path}/ckpt/step-000005", "train.steps=10", DRY])


@pytest.mark.parametrize("group", ["study", "debug", "experiment"])
def test_no_option_can_be_said(group: str) -> None:
    assert compose([f"{group}=null"]).signature == compose().signature
