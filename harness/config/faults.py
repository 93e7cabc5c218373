"""The corpus of faults that can be put into the engine on purpose, so that the power of a verdict is known.

The F numbers are silent bugs that were reported in public; the others are families of mistakes that every engine can
make. Each is defined here by what it does and by the cell in which it acts; `harness.probe.faults` does it, through
hooks that no normal run has.

[Note: Strength] `full` is the fault as reported. `middle` and `weak` are a tenth and a hundredth of it: the wrong part
of a number times 0.1 or 0.01, or that share of the elements; a fault of precision keeps 8, 11 or 16 significant bits.
"""

from __future__ import annotations

from dataclasses import dataclass

AMOUNTS = {"full": 1.0, "middle": 0.1, "weak": 0.01}
"""Share of a fault, by strength."""

BITS = {"full": 8, "middle": 11, "weak": 16}
"""Significant bits that a fault of precision keeps: those of bf16, those of fp16, and a third of what fp32 drops."""

NONE = "none"


@dataclass(frozen=True)
class Fault:
    """One mistake.

    report: where it was reported; empty for a family. does: what happens, in a clause. stage: where a verdict should
    place it. cell: overrides of the smallest cell in which it acts. resumes: it acts when a run is resumed.
    """

    name: str
    report: str
    does: str
    stage: str
    cell: tuple[str, ...] = ()
    resumes: bool = False

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies under which it does anything; empty: all."""
        return NEEDS.get(self.name, ())

    @property
    def microbatches(self) -> int:
        """Microbatches a rank and step with which it does anything."""
        return 2 if self.name in NEEDS_K else 1


K2 = ("train.global_batch_size=8", "train.microbatch_size=2")
"""Two microbatches a rank on two ranks."""
FOUR = ("mesh.world_size=4", "train.global_batch_size=8", "train.microbatch_size=2")
SGD, NO_CLIP = "optimizer=sgd", "optimizer.clip_norm=null"
ZERO0, ZERO1, ZERO2, ZERO3 = (f"sharding={each}" for each in ("no_shard", "optim", "optim_grads", "optim_grads_params"))

REPORTED = (
    Fault(
        "F01_duplicated_gradient",
        "NVIDIA/Megatron-LM PR 3067",
        "the reduce-scattered shard is added to the unreduced gradient instead of copied over it",
        "reduction",
        (ZERO1, *K2),
    ),
    Fault(
        "F02_doubled_each_microbatch",
        "NVIDIA/Megatron-LM#6660",
        "the gradient buffer of a group is doubled once a microbatch",
        "reduction",
        (ZERO1, *K2),
    ),
    Fault(
        "F03_nested_division",
        "NVIDIA/Megatron-LM PR 3023",
        "1/DP is applied to the accumulated shard at every microbatch",
        "reduction",
        (ZERO2, *K2, SGD),
    ),
    Fault(
        "F04_extra_adam_step",
        "NVIDIA/Megatron-LM#5974",
        "the step that creates optimizer state is counted: bias corrections are one step ahead",
        "optimizer",
        (ZERO3,),
    ),
    Fault(
        "F05_no_sync_without_effect",
        "NVIDIA/Megatron-LM PR 7186",
        "each backward begins from zero: only the last microbatch reaches the optimizer",
        "reduction",
        (ZERO0, *K2),
    ),
    Fault(
        "F06_gradient_memory_reused",
        "NVIDIA/Megatron-LM PR 6187",
        "in some steps the allocator hands a main gradient's memory out while it is in use",
        "reduction",
        (ZERO3,),
    ),
    Fault(
        "F07_copied_too_early",
        "pytorch/pytorch PR 180665",
        "in half of the steps a gradient shard still holds the step before",
        "reduction",
        (ZERO2,),
    ),
    Fault(
        "F08_layers_collapse",
        "pytorch/pytorch PR 140044",
        "a buffer is freed early: the gradients of all layers become the last one's",
        "reduction",
        (ZERO3,),
    ),
    Fault(
        "F09_half_reduced_in_bf16",
        "pytorch/pytorch#190626",
        "one of two axes is reduced in 16 bits: half of the contributions are rounded",
        "reduction",
        (ZERO3, *FOUR),
    ),
    Fault(
        "F10_ranks_added_in_bf16",
        "pytorch/pytorch PR 194434",
        "contributions are added in 16 bits where fp32 was asked for",
        "reduction",
        (ZERO3, *FOUR),
    ),
    Fault(
        "F11_microbatches_added_in_bf16",
        "ISEEKYAN/Megatron-LM#149",
        "microbatches accumulate in 16 bits before the fp32 reduction",
        "reduction",
        (ZERO1, *K2),
    ),
    Fault(
        "F12_boundary_resets",
        "allenai/open-instruct PR 1498",
        "ZeRO-2 begins to accumulate anew at each microbatch; ZeRO-3 does not",
        "reduction",
        (ZERO2, *K2),
    ),
    Fault(
        "F13_reduced_before_ready",
        "microsoft/DeepSpeed#966",
        "a bucket leaves before the last gradient of a parameter is in it",
        "reduction",
        (ZERO2, *K2),
    ),
    Fault(
        "F14_stale_parameters",
        "pytorch/pytorch#149205",
        "the optimizer steps tensors that the model no longer uses: some weights never change",
        "optimizer",
        (ZERO3,),
    ),
    Fault(
        "F15_untied_embedding",
        "facebookresearch/lingua PR 75",
        "sharding unties embedding and head: one of the two gradients is lost",
        "gradient",
        (ZERO3, "model.tie_embeddings=true"),
    ),
    Fault(
        "F16_tail_lost_on_resume",
        "pytorch/torchtitan#1136",
        "the last rows of a split weight come back wrong from a checkpoint",
        "checkpoint",
        (ZERO3,),
        resumes=True,
    ),
    Fault(
        "F17_shards_not_refreshed",
        "ISEEKYAN/Megatron-LM PR 104",
        "loading fills the full weights, the shards keep what they had",
        "checkpoint",
        (ZERO3,),
        resumes=True,
    ),
    Fault(
        "F18_absent_weights_skipped",
        "NVIDIA/Megatron-LM, note on fsdp_dtensor",
        "a weight that the checkpoint lacks stays at its initial value, silently",
        "checkpoint",
        (ZERO3,),
        resumes=True,
    ),
    Fault(
        "F19_permuted_shards",
        "pytorch/torchtitan PR 1483",
        "weights are split in one order and gathered in another",
        "weights",
        (ZERO3,),
    ),
    Fault(
        "F20_norm_counts_replicas",
        "NVIDIA-NeMo/RL PR 3788",
        "replicated gradients count once a rank in the norm: clipping is too strong",
        "clipping",
        (ZERO0,),
    ),
    Fault(
        "F21_norm_of_one_rank",
        "zero-stage logging, pytorch/pytorch#170862",
        "the norm that is logged is a rank's own part; clipping is right",
        "clipping",
        (ZERO3,),
    ),
    Fault(
        "F22_one_node_only",
        "pytorch/pytorch#140183",
        "hybrid sharding reduces within a node alone",
        "reduction",
        (ZERO3, *FOUR),
    ),
    Fault(
        "F23_clipped_on_one_rank",
        "microsoft/DeepSpeed PR 1801",
        "one replica does not clip, and drifts from the others",
        "gather",
        (ZERO0, "optimizer.clip_norm=0.1", SGD),
    ),
    Fault(
        "F24_not_divided_by_k",
        "huggingface/transformers#34191",
        "the loss is not divided by the number of microbatches",
        "reduction",
        (ZERO3, *K2),
    ),
    Fault(
        "F25_read_before_ready",
        "sgl-project/sglang#37768",
        "a gather reads what other ranks held a step before",
        "gather",
        (ZERO3,),
    ),
    Fault(
        "F26_second_use_lost",
        "facebookresearch/fairscale#780",
        "a module is used twice, and its gradient leaves after the first use",
        "gradient",
        (ZERO3, "model=odd_units"),
    ),
)

FAMILIES = (
    Fault("scale_by_two", "", "all gradients are twice what they should be", "reduction", (ZERO3,)),
    Fault("scale_by_ranks", "", "gradients are not divided by the ranks", "reduction", (ZERO2, *FOUR)),
    Fault("scale_over_ranks", "", "gradients are divided by the ranks twice", "reduction", (ZERO1, SGD, NO_CLIP)),
    Fault("drop_rank", "", "the last rank's contribution is lost", "reduction", (ZERO3, *FOUR)),
    Fault("drop_bucket", "", "one bucket's gradient is lost", "reduction", (ZERO2,)),
    Fault("drop_tail", "", "the end of the last rank's shard is lost", "reduction", (ZERO3,)),
    Fault("repeat_microbatch", "", "the last microbatch counts twice", "gradient", (ZERO3, *K2)),
    Fault("repeat_rank", "", "the first rank's contribution counts twice", "reduction", (ZERO0, *FOUR)),
    Fault("stale_gradient", "", "a bucket's gradient is that of the step before", "reduction", (ZERO3, SGD)),
    Fault("stale_weights", "", "updated weights are not brought into the next forward", "gather", (ZERO1,)),
    Fault("round_gradient", "", "summed gradients are rounded to 16 bits", "reduction", (ZERO3,)),
    Fault("round_contributions", "", "contributions are rounded to 16 bits before an fp32 wire", "reduction", (ZERO2,)),
    Fault("round_weights", "", "main weights are kept in 16 bits", "optimizer", (ZERO3,)),
    Fault("round_moments", "", "Adam's second moment is kept in 16 bits", "optimizer", (ZERO3,)),
    Fault("inner_group_only", "", "ranks are summed within pairs and averaged over all", "reduction", (ZERO0, *FOUR)),
    Fault("alias_buckets", "", "two buckets share the memory of their gradients", "reduction", (ZERO2,)),
    Fault("unwritten_gather", "", "the end of a gathered bucket is used before it has arrived", "gather", (ZERO3,)),
    Fault(
        "garbage_in_padding",
        "",
        "what lies between parameters is not zero and counts in the norm",
        "clipping",
        (ZERO3, "model=odd", "mesh.world_size=3", "train.global_batch_size=6", "train.microbatch_size=2"),
    ),
    Fault("decay_on_vectors", "", "weight decay is applied to gains and biases", "optimizer", (ZERO3,)),
    Fault("lr_of_a_group", "", "one parameter group has another learning rate", "optimizer", (ZERO2,)),
    Fault("moments_forgotten", "", "Adam's moments are zeroed after the first step", "optimizer", (ZERO1,)),
    Fault("rank_not_stepped", "", "one rank's shard is never updated", "optimizer", (ZERO3,)),
    Fault(
        "clipped_twice",
        "",
        "gradients are clipped, and clipped again",
        "clipping",
        (ZERO3, "optimizer.clip_norm=0.1", SGD),
    ),
    Fault(
        "same_batch", "", "every rank is fed the first rank's tokens; the digests say otherwise", "gradient", (ZERO3,)
    ),
    Fault("unequal_microbatches", "", "microbatches have unequal weight in the mean", "gradient", (ZERO2, *K2)),
    Fault("logged_loss", "", "the loss that is logged is not the one that is trained on", "forward", (ZERO3,)),
    Fault("wrong_targets", "", "one rank's rows are held against the wrong tokens", "forward", (ZERO3,)),
    Fault("round_gather", "", "gathered weights are rounded to 16 bits on the way", "gather", (ZERO3,)),
    Fault("replica_drift", "", "one replica's weights grow by a thousandth a step", "gather", (ZERO0,)),
    Fault("scale_one_bucket", "", "one bucket's gradient is twice what it should be", "reduction", (ZERO1,)),
    Fault("leaks_into_next_step", "", "a bucket's gradient is not cleared before the next step", "reduction", (ZERO2,)),
    Fault(
        "clip_bound",
        "",
        "gradients are clipped to twice the norm that was asked for",
        "clipping",
        (ZERO3, "optimizer.clip_norm=0.1", SGD),
    ),
    Fault("beta_of_a_group", "", "one parameter group has another second beta", "optimizer", (ZERO3,)),
    Fault("stale_lr", "", "the optimizer steps with the learning rate of the step before", "optimizer", (ZERO1,)),
    Fault("skipped_step", "", "the second step is not taken", "optimizer", (ZERO2,)),
    Fault(
        "optimizer_step_lost_on_resume",
        "",
        "Adam's step count begins anew after a resume",
        "checkpoint",
        (ZERO3,),
        True,
    ),
    Fault("moments_lost_on_resume", "", "Adam's moments begin anew after a resume", "checkpoint", (ZERO2,), True),
)

ACCUMULATES_WHOLE, ACCUMULATES_SHARDS = ("no_shard", "optim"), ("optim_grads", "optim_grads_params")

NEEDS = {
    "F03_nested_division": ACCUMULATES_SHARDS,
    "F05_no_sync_without_effect": ACCUMULATES_WHOLE,
    "F11_microbatches_added_in_bf16": ACCUMULATES_WHOLE,
    "F12_boundary_resets": ACCUMULATES_SHARDS,
    "F25_read_before_ready": ("optim_grads_params",),
    "unwritten_gather": ("optim_grads_params",),
    "stale_weights": ("optim", "optim_grads"),
}
"""Strategies that a fault needs."""

NEEDS_K = {
    "F03_nested_division",
    "F05_no_sync_without_effect",
    "F11_microbatches_added_in_bf16",
    "F12_boundary_resets",
    "F24_not_divided_by_k",
    "unequal_microbatches",
}
"""Faults between microbatches."""

CORPUS = {fault.name: fault for fault in (*REPORTED, *FAMILIES)}
"""Every fault by name."""
