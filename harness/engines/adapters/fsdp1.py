"""Torch's FSDP1 (`FullyShardedDataParallel`, use_orig_params=True), used as its documentation recommends.

    sharding             one axis        with an outer axis     reduces
    no_shard             NO_SHARD        -                      once a step, `no_sync` before
    optim_grads          SHARD_GRAD_OP   _HYBRID_SHARD_ZERO2    every microbatch
    optim_grads_params   FULL_SHARD      HYBRID_SHARD           every microbatch

`optim_grads` gathers weights once a microbatch, not once a step: FSDP1 frees them after each backward that reduces.
With an outer axis its all-reduce follows each reduce-scatter, every microbatch: the only way around that is `no_sync`,
which would keep whole gradients.

Dtypes: the flat parameters are the main weights; a unit is gathered in the compute dtype (`param_dtype`), its gradients
travel in the wire dtype (`reduce_dtype`), summed there by the backend, and are cast to the main dtype before shards
accumulate. Buffers keep their dtype (`buffer_dtype=None`). Inputs are not cast, for the reason given in `fsdp2`.

Limits, on torch 2.13:

- On a shard group of one rank FSDP1 turns every strategy into NO_SHARD: a reduced gradient is averaged and cast again
  with every further microbatch, and a hybrid leaves out the outer all-reduce without a word. A rule refuses them.
- Parameters of shape [] are refused by FSDP1 (`ValueError`).
- Under `no_sync` microbatches are summed in the *compute* dtype. A rule refuses no_shard with 16-bit compute and
  several microbatches unless dtype.allow_low_precision_grads=true accepts it.
- All ranks run the same units in the same order in each microbatch, as in `fsdp2`; parameters unused inside a unit
  that does run get zeros from the flat parameter.
- Frozen parameters are flattened with the others of their unit, so that gradients have room for them (`padding`).
- fp16 gets no loss scale.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from harness.capture.shards import flat_pieces
from harness.config.schema import Config, Strategy
from harness.engines.base import ShardedEngine, mesh_of, units_of
from harness.engines.protocol import Ranks, Seen, Workload
from harness.fsdp import create_state
from harness.probe.step_checks.pieces import Piece

STRATEGIES = {
    Strategy.no_shard: (ShardingStrategy.NO_SHARD, ShardingStrategy.NO_SHARD),
    Strategy.optim_grads: (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2),
    Strategy.optim_grads_params: (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD),
}

KNOWN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"The `NO_SHARD` sharding strategy is deprecated\. If having issues, please use ", FutureWarning),
    (r"\S* has both parameters with requires_grad=True and False\. We do not recommend wrapping such", UserWarning),
)
"""Warnings of FSDP1 on deliberate choices: the strategy, and partly frozen units."""


class Fsdp1Engine(ShardedEngine):
    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        super().__init__(workload, config, ranks)
        model = workload.build("meta", self.main_dtype)
        workload.materialise_buffers(model, ranks.device)
        shapes = {name: param.shape for name, param in model.named_parameters()}
        filler = _Filler(workload, model, ranks.device)
        strategy = STRATEGIES[config.sharding.strategy][config.mesh.dp_outer > 1]
        mesh = mesh_of(config, ranks)
        units = {id(unit) for unit in units_of(model, workload.unit_classes)}
        with warnings.catch_warnings():
            for message, category in KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message=message, category=category)
            self.model = FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                sharding_strategy=strategy,
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                mixed_precision=MixedPrecision(
                    param_dtype=self.compute_dtype,
                    reduce_dtype=self.wire_dtype,
                    buffer_dtype=None,
                    keep_low_precision_grads=False,
                    cast_forward_inputs=False,
                    cast_root_forward_inputs=False,
                ),
                param_init_fn=filler,
                device_id=ranks.device,
                sync_module_states=False,  # every rank computes the same values from names
                use_orig_params=True,
            )
        is_whole = strategy is ShardingStrategy.NO_SHARD
        weights = {name: filler.made[name] for name in shapes}
        if is_whole:
            for weight in weights.values():
                weight.grad_dtype = None  # under no_sync FSDP1 hands tied ones a gradient in the compute dtype
        self.group = None if is_whole else mesh.get_group("dp_shard")
        self._finish(weights, shapes, fused=True)

    def seen(self) -> Seen:
        """The wrapped module: in a forward its slots have views of gathered flat parameters."""
        return Seen(self.model, self.ranks.world_size, self.compute_dtype, self.shapes)

    def flat_pieces(self) -> dict[str, Piece]:
        """Pieces as they were found first: an evaluation leaves other parameters in the modules."""
        return self._flat

    @cached_property
    def _flat(self) -> dict[str, Piece]:
        return flat_pieces(self.model, self.optimizer, create_state(self.optimizer))

    def _rhythm(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self.model, FullyShardedDataParallel)
        waits = self.config.sharding.strategy is Strategy.no_shard and not last
        return self.model.no_sync() if waits else nullcontext()

    def _padding_elements(self) -> tuple[int, int]:
        handles = [module._handle for module in FullyShardedDataParallel.fsdp_modules(self.model)]
        flats = [handle.flat_param for handle in handles if handle is not None]
        trained = [flat for flat in flats if any(param.requires_grad for param in flat._params or ())]
        unused = sum(map(torch.numel, flats)) - sum(map(torch.numel, self.weights.values()))
        return unused, sum(map(torch.numel, trained)) - sum(map(torch.numel, self.trained.values()))


class _Filler:
    """FSDP1's `param_init_fn`: allocates and initialises a module's own meta parameters, tied ones once."""

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.names: dict[nn.Parameter, str] = {param: name for name, param in model.named_parameters()}
        self.made: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        for slot, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            name = self.names[param]
            if name not in self.made:
                value = self.workload.initial_weight(name, param.shape).to(self.device, param.dtype)
                self.made[name] = nn.Parameter(value, requires_grad=param.requires_grad)
            module._parameters[slot] = self.made[name]
