"""What both entries take beside options: what each argument and dtype does, what it costs, and when to choose it.

The pages of docs/ are made of these rows, so torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.fsdp.vocabulary import Dtype, OuterStrategy, Strategy


@dataclass(frozen=True)
class Argument:
    """One thing that is given to an entry and is no option.

    plain: keyword of `fully_shard`; direct: of `ShardedModel`; "" where that entry has none. takes: the values, in
    words; default: as Python writes it, a choice by its name, "" where there is none.
    """

    plain: str
    direct: str
    takes: str
    default: str
    does: str
    costs: str
    use: str
    setting: str = ""
    peer: str = ""


_FORMATS = f"{', '.join(f'torch.{each.torch_name}' for each in Dtype)}, or None"


def _choices(kind: type[Strategy] | type[OuterStrategy]) -> str:
    return ", ".join(f"{number} or `{member.name}`" for number, member in enumerate(kind))


ARGUMENTS = (
    Argument(
        plain="module",
        direct="module",
        takes="an `nn.Module`",
        default="",
        does="The module to shard, in place.",
        costs="Its parameters become views of flat buckets.",
        use="Always.",
        peer="module",
    ),
    Argument(
        plain="zero_dp_strategy",
        direct="strategy",
        takes=_choices(Strategy),
        default="optim_grads_params",
        does="What the inner axis shards: nothing, optimizer state, gradients too, or weights too (ZeRO-0 to 3).",
        costs="docs/engine.md has the bytes sent and kept.",
        use="The lowest one that fits into memory; 1 and 2 send the same bytes if a step has one microbatch.",
        setting="sharding.strategy",
        peer="zero_dp_strategy",
    ),
    Argument(
        plain="outer_dp_sharding_strategy",
        direct="outer_strategy",
        takes=_choices(OuterStrategy),
        default="no_shard",
        does="What the outer axis shards: nothing (HSDP), or optimizer state (HFSDP).",
        costs="HFSDP: one gather of weights per step over the outer axis, in place of a gradient's second leg.",
        use="1 if optimizer state does not fit, or if weights are sent in fewer bytes than gradients.",
        setting="sharding.outer",
        peer="outer_dp_sharding_strategy",
    ),
    Argument(
        plain="fsdp_unit_modules",
        direct="unit_modules",
        takes="classes, or dotted paths of them, or None",
        default="None",
        does="Classes, or dotted paths of them, whose outermost instances are gathered, reduced and released together.",
        costs="Large units cost transient memory, small ones the latency of a collective each.",
        use="Name transformer blocks, embedding and head. Without a list the whole model is one unit.",
        peer="fsdp_unit_modules",
    ),
    Argument(
        plain="mixed_precision_policy",
        direct="mixed_precision_policy",
        takes="a `MixedPrecisionPolicy`, or None",
        default="None",
        does="Dtypes of main weights, main gradients, wire and sum.",
        costs="See Dtypes below.",
        use="If the module is not fp32, or gradients shall be sent in fewer bits.",
        peer="mixed_precision_policy",
    ),
    Argument(
        plain="grad_divisor",
        direct="grad_divisor",
        takes="a number above 0, or None",
        default="None",
        does="Summed gradients are divided by it, once per step. None: the number of data-parallel ranks.",
        costs="Nothing.",
        use="The global microbatches or tokens of a step: the loop then need not scale its loss, and no rounding"
        " depends on the number of ranks.",
    ),
    Argument(
        plain="calculate_per_token_loss",
        direct="",
        takes="True, False",
        default="False",
        does="Gradients are summed and divided by nothing (`grad_divisor=1`).",
        costs="Nothing.",
        use="If the number of tokens is known only after the forward; scale gradients or the learning rate yourself.",
        peer="calculate_per_token_loss",
    ),
    Argument(
        plain="sync_model_each_microbatch",
        direct="",
        takes="True, False",
        default="True",
        does="Whether a backward outside `no_sync` and `sync` ends the step's accumulation; see `set_model_auto_sync`.",
        costs="With False, the last backward of a step must run inside `sync()`.",
        use="False in loops that mark the last microbatch.",
        peer="sync_model_each_microbatch",
    ),
    Argument(
        plain="device_mesh",
        direct="groups",
        takes="a `DeviceMesh`; `Groups`; or None",
        default="None",
        does="The ranks: a mesh whose dimensions other arguments name, or `Groups` of process groups. None: all"
        " ranks are one axis.",
        costs="One communicator per group.",
        use="For two axes, or with other kinds of parallelism.",
        setting="mesh.world_size",
        peer="device_mesh",
    ),
    Argument(
        plain="dp_shard_dim",
        direct="group",
        takes="a dimension's name; a `ProcessGroup`; or None",
        default="None",
        does="The inner axis: the name of the mesh's dimension, or its process group.",
        costs="Nothing.",
        use="With a mesh of more than one dimension.",
        setting="mesh.world_size",
        peer="dp_shard_dim",
    ),
    Argument(
        plain="dp_outer_dim",
        direct="groups",
        takes="a dimension's name; `Groups`; or None",
        default="None",
        does="The outer axis: the dimension over which shards are replicated, or optimizer state is sharded once more.",
        costs="Its collectives: one reduction per step, of 1/inner of the model.",
        use="With more ranks than one fast network has: shard inside it, replicate (or shard state) across.",
        setting="mesh.dp_outer",
        peer="dp_outer_dim",
    ),
    Argument(
        plain="tp_dim",
        direct="groups",
        takes="a dimension's name; `Groups`; or None",
        default="None",
        does="The dimension over which a tensor-parallel plan (`parallelize_module`) has already split parameters.",
        costs="The plan's own collectives in forward and backward; the engine's own send a few numbers only.",
        use="If the model was split by a plan; a dimension of one rank has no effect.",
        peer="tp_dim",
    ),
    Argument(
        plain="maxpool_double_buffer",
        direct="",
        takes="True, False",
        default="False",
        does="Another name of `double_buffer`, whose two buffers hold units of any shape.",
        costs="As `double_buffer`.",
        use="Use `double_buffer` instead.",
        peer="maxpool_double_buffer",
    ),
    Argument(
        plain="hybrid_fsdp_group",
        direct="groups",
        takes="a `ProcessGroup`; `Groups`; or None",
        default="None",
        does="The process group of all ranks of both axes. None: it is created.",
        costs="A communicator.",
        use="If such a group already exists.",
        peer="hybrid_fsdp_group",
    ),
    Argument(
        plain="expt_device_mesh",
        direct="expert_groups",
        takes="a `DeviceMesh`; `Groups`; or None",
        default="None",
        does="The ranks of experts' parameters, which have `allreduce = False`.",
        costs="Communicators of its own.",
        use="For expert parallelism; gradients of experts are divided by `grad_divisor` too.",
        peer="expt_device_mesh",
    ),
    Argument(
        plain="hybrid_fsdp_expt_group",
        direct="expert_groups",
        takes="a `ProcessGroup`; `Groups`; or None",
        default="None",
        does="The process group of all ranks of both axes of experts.",
        costs="A communicator.",
        use="If such a group already exists.",
        peer="hybrid_fsdp_expt_group",
    ),
    Argument(
        plain="fsdp_group_ag",
        direct="groups",
        takes="a `ProcessGroup`; `Groups`; or None",
        default="None",
        does="A process group of the inner ranks that is used only for gathers.",
        costs="Its buffers in device memory.",
        use="If such a group already exists; otherwise use `separate_gather_group`.",
        peer="fsdp_group_ag",
    ),
    Argument(
        plain="expt_fsdp_group_ag",
        direct="expert_groups",
        takes="a `ProcessGroup`; `Groups`; or None",
        default="None",
        does="A process group of the inner ranks of experts that is used only for their gathers.",
        costs="Its buffers in device memory.",
        use="If such a group already exists.",
        peer="expt_fsdp_group_ag",
    ),
    Argument(
        plain="device",
        direct="device",
        takes="a `torch.device`, or None",
        default="None",
        does="The device of the buckets. None: the device of the parameters.",
        costs="Nothing.",
        use="For a module on the meta device.",
        setting="cluster.device",
        peer="device",
    ),
    Argument(
        plain="init_model_with_meta_device",
        direct="init_on_meta",
        takes="True, False",
        default="False",
        does="Parameters on the meta device get values from each module's `reset_parameters()`.",
        costs="One module's whole parameters at a time, and a broadcast of each.",
        use="For models that are too large for one device and initialise themselves.",
        peer="init_model_with_meta_device",
    ),
    Argument(
        plain="initial_value",
        direct="initial_value",
        takes="a function of a name that returns a tensor, or None",
        default="None",
        does="Returns each parameter's full value by name. None: the first rank's values are used.",
        costs="One whole parameter at a time.",
        use="For a module on the meta device with your own values, or to start without a broadcast.",
    ),
)
"""Everything the two entries take that is neither an option nor the optimizer."""

DIRECT = tuple(dict.fromkeys(each.direct for each in ARGUMENTS if each.direct))
"""Keywords of `ShardedModel` that are no options."""
PLAIN = tuple(each.plain for each in ARGUMENTS)
"""Keywords of `fully_shard` that are no options."""

DTYPES = (
    Argument(
        plain="main_params_dtype",
        direct="main_params_dtype",
        takes=_FORMATS,
        default="torch.float32",
        does="Dtype of the weights that the optimizer updates. None: it updates the compute weights themselves.",
        costs="A copy separate from the compute weights if the dtypes differ: 4 bytes per element in fp32.",
        use="fp32 for 16-bit modules, because small updates vanish in 16 bits.",
        setting="dtype.main_params",
        peer="main_params_dtype",
    ),
    Argument(
        plain="main_grads_dtype",
        direct="main_grads_dtype",
        takes=_FORMATS,
        default="None",
        does="Dtype of stored and accumulated gradients. None: the main weights' dtype.",
        costs="Its bytes per element, for whole gradients or for a shard.",
        use="Leave it at None.",
        setting="dtype.main_grads",
        peer="main_grads_dtype",
    ),
    Argument(
        plain="grad_comm_dtype",
        direct="grad_comm_dtype",
        takes=_FORMATS,
        default="None",
        does="Dtype in which a reduction sends gradients. None: the main gradients' dtype.",
        costs="bf16 rounds every contribution once; fp16 overflows without a loss scale.",
        use="bf16 if reductions are exposed: it halves the bytes.",
        setting="dtype.grad_comm",
        peer="grad_comm_dtype",
    ),
    Argument(
        plain="grad_accum_dtype",
        direct="grad_accum_dtype",
        takes=_FORMATS,
        default="None",
        does="Dtype of the sum inside a reduction. None: fp32, or wider if the wire is wider.",
        costs="On NCCL, if it is not the wire's dtype, the engine itself sums after an all-to-all.",
        use="Leave it at None.",
        setting="dtype.grad_accum",
    ),
    Argument(
        plain="allow_low_precision_grads",
        direct="allow_low_precision_grads",
        takes="True, False",
        default="False",
        does="Permits main gradients below fp32, and sums in fewer bits than fp32 or than the wire.",
        costs="Contributions that are small compared with the sum are lost.",
        use="To measure its effect.",
        setting="dtype.allow_low_precision_grads",
    ),
)
"""Fields of `MixedPrecisionPolicy`."""
