"""DeepSpeed ZeRO 1 to 3, as its documentation says: a client optimizer of two groups, its own clipping and boundary.

Main weights, gradients and moments are fp32. Weights are computed with in fp32 or bf16, gradients travel in
`communication_data_type` and are summed there by the backend; between microbatches they accumulate in fp32
(`data_types.grad_accum_dtype`). With bf16, `optim` is DeepSpeed's BF16_Optimizer, which accumulates the whole gradient
on every rank and all-reduces it at the boundary. DeepSpeed scales each loss by 1 / k and averages over the ranks.

Limits, on DeepSpeed 0.19.8:

- ZeRO-0 is not offered: it is DDP, and refuses bf16 weights with fp32 gradients.
- ZeRO leaves a step out whose gradient norm is not finite and reports `inf`; BF16_Optimizer and ZeRO-3 do so in every
  dtype. Nothing else here skips a step (docs/records/upstream/deepspeed_skips_nonfinite.md).
- Every trained weight gets a gradient in every microbatch on every rank. ZeRO-1 and 2 leave a weight without one out of
  that rank's bucket, and the ranks then reduce buckets of different sizes (gloo aborts). ZeRO-3 keeps the last gradient
  of a weight that gets none, and updates by it again (docs/records/upstream/deepspeed_stale_gradient.md).
- fp16 would bring loss scaling; fp64 and 16-bit main weights or gradients are not asked of it.
- MoE, tensor parallelism, offloading and hpZ are not used: there is no outer axis.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.capture.shards import find, flat_pieces
from harness.config.derived import microbatches_per_rank, parameter_count
from harness.config.schema import Config, Device, Strategy
from harness.engines import optim
from harness.engines.base import evaluating, whole
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch, Ranks, Seen, State, Workload
from harness.fsdp import create_state
from harness.probe.step_checks.pieces import Piece

STAGES = {strategy: stage for stage, strategy in enumerate(Strategy)}
MAIN_BYTES = 4


class DeepspeedEngine(Engine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        self.workload, self.config, self.ranks = workload, config, ranks
        self.stage = STAGES[config.sharding.strategy]
        self.compute_dtype = TORCH_DTYPES[config.dtype.compute]
        self.model = workload.build(ranks.device, self.compute_dtype)
        self.params: dict[str, Any] = dict(self.model.named_parameters())
        self.shapes: dict[str, torch.Size] = {name: param.shape for name, param in self.params.items()}
        self.trained = {name: param for name, param in self.params.items() if param.requires_grad}
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(workload.initial_weight(name, param.shape))
        groups = optim.groups_of(config.optimizer, workload, self.trained, self.shapes)
        self.base = optim.make_optimizer(config.optimizer, groups, fused=True)
        with _surroundings(ranks), redirect_stdout(io.StringIO()):  # some of what it tells passes by its logger
            deepspeed = _quiet_deepspeed()
            self.engine: Any = deepspeed.initialize(
                model=self.model, optimizer=self.base, config=deepspeed_config(config, self.stage)
            )[0]
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # that a step was skipped is worth a line
        zero: Any = self.engine.optimizer
        names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
        flats = next(getattr(zero, name) for name in names if hasattr(zero, name))
        self.main: dict[str, Tensor] = {f"group{index}": flat for index, flat in enumerate(flats)}
        self.shards = find([self.engine], self.engine.optimizer).shards
        if self.compute_dtype is not torch.float32:
            with torch.no_grad():
                for name, shard in ((name, self.shards[name]) for name in self.trained if self.shards[name].numel):
                    value = workload.initial_weight(name, self.shapes[name]).flatten()
                    shard.local.copy_(value[shard.begin : shard.begin + shard.numel])
        with self._listed():
            create_state(self.base)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        with _surroundings(self.ranks):
            self.engine.set_gradient_accumulation_boundary(last)
            loss = self.workload.loss(self.engine, batch)
            self.engine.backward(loss)
        return loss.detach()

    def evaluate(self, batches: Iterable[Microbatch]) -> list[float]:
        with _surroundings(self.ranks), evaluating(self.engine, self.ranks.device):
            losses = [self.workload.loss(self.engine, batch).item() for batch in batches]
        if self.stage == 3:
            self.engine.optimizer.empty_partition_cache()  # a step gathers them as it would
        return losses

    def step(self, lr: float) -> float:
        """Norm before clipping; `inf` where the step was skipped."""
        optim.set_lr(self.base, lr)
        with _surroundings(self.ranks):
            self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def seen(self) -> Seen:
        """The module itself, whose losses DeepSpeed scales by 1 / k. ZeRO-3's parameters are empty between passes."""
        return Seen(self.model, self.ranks.world_size, self.compute_dtype, self.shapes)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 gradients, gathered one by one; zeros where unused in the step."""
        found = self.local_gradients()
        return ((name, self._whole(name, found.get(name))) for name in self.trained)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 main weights, gathered one by one; frozen ones in their compute dtype."""
        return ((name, self._whole(name, self.shards[name].local)) for name in self.params)

    def _whole(self, name: str, part: Tensor | None) -> Tensor:
        """Unsharded fp32 tensor, on the CPU. Collective where ranks have parts of it. Args: part: of `shards`."""
        is_cut = self.stage == 3 or name in self.trained
        groups = [dist.group.WORLD] if is_cut else []
        return whole(self.shards[name], part, groups, torch.float32, self.ranks.device).cpu()

    def state(self) -> State:
        """This rank's main weights and optimizer state: flat, one tensor a parameter group."""
        with self._listed():
            moments = optim.optimizer_state(self.base, {tensor: name for name, tensor in self.main.items()})
        weights = {f"weights/{name}": tensor.detach() for name, tensor in self.main.items()}
        return State(weights | {f"optimizer/{key}": t for key, t in moments.items()}, self._publish, portable=False)

    def flat_pieces(self) -> dict[str, Piece]:
        with self._listed():
            return flat_pieces(self.engine, self.engine.optimizer, create_state(self.base))

    def local_gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_local_grad

        found: dict[str, Tensor] = {}
        for name, param in self.trained.items():
            shard = self.shards[name]
            if self.stage == 3 and shard.numel:
                found[name] = safe_get_local_grad(param)[: shard.numel]
            elif shard.numel:  # BF16_Optimizer keeps the whole gradient
                here = param._hp_mapping.get_lp_grad_fragment(param._index_in_param_group).view(-1)
                begin = 0 if here.numel() == shard.numel else shard.begin
                found[name] = here[begin : begin + shard.numel]
        return found

    def accounted_bytes(self) -> dict[str, int]:
        """Bytes by role. ZeRO-1 keeps the full gradient between microbatches, ZeRO-2 and 3 this rank's share."""
        sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        trained = sum(sizes[name] for name in self.trained)
        flat = sum(tensor.numel() for tensor in self.main.values())
        compute, unused, reduced = sum(sizes.values()), flat * self.ranks.world_size - trained, 0
        if self.stage == 3:  # small parameters stay whole, and so does what gradients are reduced from
            persistent = {id(param) for param in self.engine.optimizer.persistent_parameters}
            held = sum(shard.numel for shard in self.shards.values())
            compute = held + sum(sizes[name] for name, param in self.params.items() if id(param) in persistent)
            unused = sum(param.ds_tensor.numel() for param in self.params.values()) - held
            reduced = sum(bucket.buffer.nbytes for bucket in self.engine.optimizer.ipg_buckets.values())
        spare = flat - sum(self.shards[name].numel for name in self.trained)
        moments = {key: t for key, t in self.state().tensors.items() if key.startswith("optimizer/")}
        per_element = sum(t.element_size() for key, t in moments.items() if not key.endswith("/step")) // len(self.main)
        optimizer = sum(tensor.numel() * tensor.element_size() for tensor in moments.values())
        grads = trained if self.stage < 2 else flat - spare
        return {
            "compute_weights": compute * self.compute_dtype.itemsize,
            "main_weights": (flat - spare) * MAIN_BYTES,
            "main_grads": grads * MAIN_BYTES,
            "optimizer": optimizer - spare * per_element,
            "padding": spare * (MAIN_BYTES + per_element) + unused * self.compute_dtype.itemsize,
            "buffers": sum(buffer.nbytes for buffer in self.model.buffers()) + reduced,
        }

    def close(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None

    @torch.no_grad()
    def _publish(self) -> None:
        if self.stage == 3:
            kept = self.engine.optimizer.persistent_parameters
            if kept:  # whole on every rank, so all need each other's parts anew
                kept[0].partition(kept)
            for index in range(len(self.main)):
                self.engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if kept:
                kept[0].all_gather(kept)
        else:
            self.engine.optimizer.update_lp_params()

    @contextmanager
    def _listed(self) -> Iterator[None]:
        before = [group["params"] for group in self.base.param_groups]
        if self.stage == 3:
            for group, flat in zip(self.base.param_groups, self.main.values(), strict=True):
                group["params"] = [flat]
        yield
        for group, params in zip(self.base.param_groups, before, strict=True):
            group["params"] = params


def deepspeed_config(config: Config, stage: int) -> dict[str, Any]:
    """Configuration with every dtype and numeric choice explicit.

    The reduce bucket is at most the model's size, because ZeRO-2 and 3 allocate all of the default 500 million
    elements. On CUDA communication overlaps and ZeRO-3 keeps small weights unsharded, as documented. On CPU there are
    no streams, and every weight is sharded.
    """
    on_cuda = config.cluster.device is Device.cuda
    zero: dict[str, Any] = {"overlap_comm": on_cuda} | ({} if on_cuda else {"stage3_param_persistence_threshold": 0})
    return {
        "train_micro_batch_size_per_gpu": config.train.microbatch_size,
        "gradient_accumulation_steps": microbatches_per_rank(config),
        "gradient_clipping": config.optimizer.clip_norm or 0.0,
        "bf16": {"enabled": TORCH_DTYPES[config.dtype.compute] is torch.bfloat16, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": config.dtype.main_grads.name},
        "communication_data_type": config.dtype.grad_comm.name,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(500_000_000, parameter_count(config)),
            "ignore_unused_parameters": True,
            "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear for the whole process
            **zero,
        },
        "steps_per_print": None,
    }


def _quiet_deepspeed() -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor` is dep", category=FutureWarning
    )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _surroundings(ranks: Ranks) -> Iterator[None]:
    wanted = {"LOCAL_RANK": str(ranks.local_rank), "LOCAL_SIZE": str(ranks.world_size)}
    wanted["DS_ACCELERATOR"] = ranks.device.type
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
