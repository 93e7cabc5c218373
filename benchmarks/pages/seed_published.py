"""What others published about the five questions of `seed_studies`, and how ours are asked of this machine.

Data, no logic: a study's published figures with their source, what of them can be compared and what cannot, and the
words that turn the study into its timed half.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seed:
    """One study and the experiment it follows."""

    study: str
    title: str
    source: str
    setting: str
    """What was published about, in words."""
    comparable: str
    incomparable: str
    timed: tuple[str, ...] = ()
    """Overrides of its timed half; none where nothing of it can be timed here."""
    minutes: float = 0.0
    """Of the timed half, on two cores that do nothing else."""


_TIMED = (
    "measure=bench",
    "measure.update_steps=[]",
    "experiment=bench_comm",
    "data.seq_len=8",
    "train.steps=15",
    "train.warmup_steps=2",
    "train.microbatch_size=1",
    "cluster.threads_per_rank=1",
)
_TWO = ("train.global_batch_size=2", "train.replicate=0,1,2,3,4")

SEEDS = (
    Seed(
        study="dtype_policies",
        title="Dtype policies: what travels, what is stored",
        source="NVIDIA/Megatron-LM#3067",
        setting="Llama 70B, global batch 128, ZeRO-3 with user buffers, fp32 against bf16 gradients on the wire "
        "with fp32 sums; loss and gradient norm at step 100",
        comparable="relative differences of loss and gradient norm between the two wires, at step 100, and whether "
        "they matter (margins fixed in the study); bytes on the wire, which follow from the policy alone. Under "
        "ZeRO-3 a microbatch's weight gradients leave bf16 arithmetic as bf16 numbers, of which a bf16 wire loses "
        "nothing, and sums are fp32 either way; what a narrow wire rounds shows under ZeRO-1, where sums of "
        "microbatches travel",
        incomparable="step time: two processes that share two cores and one memory, no network and no device. The "
        "published run is almost all communication between GPUs; here bf16 arithmetic itself is slow, "
        "and a narrow wire costs conversions on the cores that train",
        timed=(*_TIMED, *_TWO, "engine=native,fsdp2", "sharding=optim_grads_params", "train.seed=0"),
        minutes=5.5,
    ),
    Seed(
        study="hybrid",
        title="Hybrid sharding: one row of ranks, or two by two",
        source="NVIDIA/Megatron-LM#3067",
        setting="Llama 8B, sequences of 1,024, fp32 on the wire: FSDP against HFSDP; and HFSDP over 4 nodes",
        comparable="relative differences of loss and gradient norm between the two layouts; which share of memory "
        "and of bytes moves from the inner to the outer axis",
        incomparable="step time and the 3.62x over 4 nodes: there the outer axis is a slow network between machines, "
        "here both axes are the same memory, and four ranks take turns on two cores. Reserved memory: "
        "the published figure is the CUDA allocator's, with activations of another model; ours is bytes "
        "of tensor storage",
        timed=(*_TIMED, "dtype=bf16", "train.global_batch_size=4", "train.replicate=0,1,2"),
        minutes=6.0,
    ),
    Seed(
        study="grad_buffer",
        title="Gradient storage: written flat, or copied together",
        source="facebookresearch/fairscale#1186",
        setting="fp32 gradients of FSDP written straight into one flat buffer instead of concatenated at the end",
        comparable="that no bit of the loss changes; the sign and the cause of the memory saved: copied gradients "
        "exist twice for as long as the copy takes",
        incomparable="size: how much of the peak gradients are depends on the model and on what else lies in memory. "
        "Reserved memory counts what CUDA's allocator holds; ours is bytes of tensor storage at the "
        "peak of a step",
        timed=(*_TIMED, *_TWO, "sharding=no_shard,optim_grads_params"),
        minutes=3.0,
    ),
    Seed(
        study="nan_check",
        title="Looking for NaN in every gradient",
        source="NVIDIA/Megatron-LM#3067",
        setting="report_nan_in_param_grad: a check of every parameter's gradient, on GPUs",
        comparable="the cost as a share of a step, with the same bits; ours looks at a whole bucket at once",
        incomparable="on a GPU the cost is kernels launched and a wait for their answer, here one pass over memory",
        timed=(*_TIMED, *_TWO, "engine=native"),
        minutes=1.5,
    ),
    Seed(
        study="user_buffers",
        title="User buffers and SHARP",
        source="NVIDIA/Megatron-LM#5596, #3067",
        setting="symmetric memory on 8 H100: gathers and reduce-scatters of 2 to 128 MiB",
        comparable="that asking for them changes no bit where nothing can take effect, and that every run says so",
        incomparable="everything else needs GPUs under NCCL, SHARP a switch as well: registration, zero-copy, thread "
        "blocks, time. Where a GPU is, benchmarks/gpu/user_buffers.py measures them",
    ),
)
