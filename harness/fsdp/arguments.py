"""What both entries take beside options, by name."""

from __future__ import annotations

DIRECT = (
    "module",
    "strategy",
    "outer_strategy",
    "unit_modules",
    "mixed_precision_policy",
    "grad_divisor",
    "groups",
    "group",
    "expert_groups",
    "device",
    "init_on_meta",
    "initial_value",
)
"""Keywords of `ShardedModel` that are no options."""

PLAIN = (
    "module",
    "zero_dp_strategy",
    "outer_dp_sharding_strategy",
    "fsdp_unit_modules",
    "mixed_precision_policy",
    "grad_divisor",
    "calculate_per_token_loss",
    "sync_model_each_microbatch",
    "device_mesh",
    "dp_shard_dim",
    "dp_outer_dim",
    "tp_dim",
    "maxpool_double_buffer",
    "hybrid_fsdp_group",
    "expt_device_mesh",
    "hybrid_fsdp_expt_group",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    "device",
    "init_model_with_meta_device",
    "initial_value",
)
"""Keywords of `fully_shard` that are no options."""
