"""The power study of whole runs: classes of faults, and clean pairs, fixed before any of their pairs was judged.

Twelve steps under default settings: steps 1 and 12 are captured, and one is drawn by the seed and worked out again
(`DRAWN`). A fault of edition 5 acts from `LATE` on, or in one step only; each faulty run is held against its twin (the
same cell without the fault) and against the same training by other engines.

    late       from step 8 on, in each kind of training
    drawn      in one step only, which is worked out again; nothing before or after it is wrong
    captured   in the last step only, which is captured
    unseen     in one step only, of which nothing but every step's checks is kept
    feed       from step 8 on, in what the model is fed though the digest of the data is right
    long       60 steps at sixty times the default learning rate, from step 40 on

[Note: Full strength] A fault has full strength in a kind of training where, in the step in which it acts, it moves the
loss or a tensor (a gradient of a rank, a rank's rows of a weight or moment after the update) by ten times the bound of
docs/verdicts.md: 4e-7 of a tensor where all is fp32 (*Recomputed gradients*), so 4e-6 in a run that computes in fp64,
in which no rounding hides it. A weight counts in units of what the step changes of it, whose bound is 1e-5. Faults that
are weaker are left out of rates and listed; one that leaves no trace in a run does not count there (`acts`).

[Note: Clean groups] The arms of one group have one kind of training and one seed and differ in what must not matter;
every two of them are a pair. Pairs of a group share runs: groups are independent, pairs are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from tests.faults.corpus import ZERO1, ZERO3, Fault, corpus

STUDY = "power_classes"
EDITION = 5
LATE, LAST, UNSEEN = 8, 12, 9
SEED, DRAWN = 4, 6
"""Of all runs with faults, and what it draws from 12 steps."""

PREEMPT_AT = 7
"""Step after which a run that is to be resumed is interrupted: what a resume spoils shows at `LATE`."""

COMMON = (
    *(f"study.name={STUDY}", f"train.steps={LAST}", "train.warmup_steps=0", "train.global_batch_size=8"),
    *("train.microbatch_size=4", "data.seq_len=32", "model.num_layers=2", "ckpt=none"),
)

WORLDS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "sgd": ("optimizer=sgd",),
    "hot": ("optimizer.lr=0.06",),
    "bf16": ("dtype=bf16",),
    "bf16_pure": ("dtype=bf16_pure",),
    "fp8": ("dtype=fp8_current",),
    "moe": ("model=moe", "model.num_layers=2", "model.skip_idle=false"),
    "long": ("train.steps=60", "optimizer.lr=0.06"),
}

FULL = "sharding=optim_grads_params"
ENGINES = {
    "ddp": ("engine=ddp",),
    "fsdp2": ("engine=fsdp2", FULL),
    "single": ("engine=single",),
    "fsdp1": ("engine=fsdp1", FULL),
    "deepspeed": ("engine=deepspeed", FULL),
    "megatron_fsdp": ("engine=megatron_fsdp", FULL),
}
"""Controls beside the twin."""
FEW = ("ddp", "fsdp2", "single")
CONTROLS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WORLDS, FEW),
    "fp32": tuple(ENGINES),
    "hot": tuple(ENGINES),
    "bf16": ("ddp", "fsdp2", "single", "fsdp1"),
    "fp8": ("ddp", "single"),  # FSDP2 under FP8 with fp32 main weights is another arithmetic
}
CLASSES = {
    "late": (("fp32", "hot", "bf16", "bf16_pure", "fp8", "moe"), LATE),
    "drawn": (("fp32", "hot"), DRAWN),
    "captured": (("fp32",), LAST),
    "unseen": (("fp32",), UNSEEN),
    "long": (("long",), 40),
}
"""Kinds of training, and step at which faults begin, of each class; `feed` is late."""
SHARE = {
    ("late", "fp32"): 2,
    ("drawn", "fp32"): 5,
    **{("late", world): 5 for world in ("hot", "bf16")},
    **{("late", world): 4 for world in ("bf16_pure", "moe")},
    ("late", "fp8"): 3,
    **{(kind, "fp32"): 6 for kind in ("captured", "unseen")},
    ("drawn", "hot"): 5,
    ("long", "long"): 4,
}
"""Every so many faults, by name, are in a class, others in each kind of training."""
FEED = ("tokens_masked", "lower_case", "shifted_right", "cut_short", "padded_left", "zigzag", "row_again")
FEED += ("transposed",)
"""Faults of class `feed`."""
PLAIN = ((ZERO3,), (ZERO1,))
"""Cells of faults in all kinds of training but fp32, so that they share controls."""
OWN = (f"train.seed={SEED}", "train.min_lr_ratio=0.1")
"""Of all runs with faults and what they are held against: no step is one without an update."""

SEEDS = {"fp32": (40, 41), "sgd": (42,), "hot": (43,), "bf16": (46, 47), "bf16_pure": (48,), "moe": (50,), "fp8": (49,)}
"""Of clean groups."""
ONE = ("sharding=no_shard", "mesh.world_size=1")
ARMS = {
    "single k=1": ("engine=single", *ONE, "train.microbatch_size=8"),
    "single k=4": ("engine=single", *ONE, "train.microbatch_size=2"),
    "one rank k=2": ONE,
    "ddp": ("engine=ddp",),
    "fsdp2": ("engine=fsdp2", FULL),
    "no_shard": ("sharding=no_shard",),
    "no_shard k=2": ("sharding=no_shard", "train.microbatch_size=2"),
    "optim_grads k=4": ("sharding=optim_grads", "train.microbatch_size=1"),
    "optim_grads_params": (FULL,),
    "hsdp": ("sharding=hsdp", "mesh=two_by_two", "train.microbatch_size=2"),
    "hfsdp k=2": ("sharding=hfsdp", "mesh=two_by_two", "train.microbatch_size=1"),
    "four ranks": ("sharding=optim", "mesh.world_size=4", "train.microbatch_size=2"),
    "buffers k=4": (FULL, "engine.double_buffer=true", "engine.grad_buffer=concat", "train.microbatch_size=1"),
    "messages": (FULL, "engine.prefetch=2", "engine.transport=auto"),
    "single k=2": ("engine=single", *ONE),
    "one rank": (*ONE, "train.microbatch_size=8"),
    "fsdp1": ENGINES["fsdp1"],
    "fsdp1 no_shard": ("engine=fsdp1", "sharding=no_shard", "train.microbatch_size=2"),
    "deepspeed": ENGINES["deepspeed"],
    "deepspeed optim": ("engine=deepspeed", "sharding=optim"),
    "megatron_fsdp": ENGINES["megatron_fsdp"],
}
"""What must not matter, by name."""
NOT_IN = {
    "bf16": ("fsdp1 no_shard",),
    "bf16_pure": ("deepspeed",),
    "moe": ("deepspeed", "megatron"),
    "fp8": ("fsdp", "deepspeed", "megatron"),
}
"""Arms of clean groups that a kind of training does not have, by the beginning of their names."""


@dataclass(frozen=True)
class ClassPair:
    """An arm and its control, as overrides.

    kind: a class, `clean` or `peer`. name: the fault's, or of two clean arms.
    """

    kind: str
    name: str
    world: str
    against: str
    step: int
    arm: tuple[str, ...]
    control: tuple[str, ...]

    @property
    def resumes(self) -> bool:
        return self.kind not in ("clean", "peer") and corpus()[self.name].resumes


def cell(world: str, *more: str) -> tuple[str, ...]:
    """Overrides of a run; what `more` names is its own."""
    found = {text.partition("=")[0]: text for text in (*COMMON, *WORLDS[world], *more)}
    return tuple(found.values())


def faulty() -> Iterator[ClassPair]:
    """Every fault in each class that has it, against its twin and against other engines."""
    faults = [fault for fault in corpus().values() if fault.edition == EDITION]
    for kind, (worlds, step) in CLASSES.items():
        for turn, world in enumerate(worlds, list(CLASSES).index(kind)):
            plain = [f for f in faults if world == "fp32" or (f.cell in PLAIN and not f.resumes)]
            for number, fault in enumerate(plain):
                fed = kind == "late" and world == "fp32" and (fault.name in FEED or fault.resumes)
                if fed or ((number + turn) % SHARE[kind, world] == 0 and not fault.resumes):
                    yield from _held("feed" if fed and fault.name in FEED else kind, world, fault, step)


def _held(kind: str, world: str, fault: Fault, step: int) -> Iterator[ClassPair]:
    own = (*OWN, *(("ckpt=last",) if fault.resumes else ()), *fault.cell)
    twin = cell(world, *own)
    suffix = "" if kind in ("late", "feed", "long") else "_once"
    begins = () if fault.resumes else (f"fault.begins_at={step}",)
    arm = (*twin, f"fault.name={fault.target}{suffix}", *begins)
    yield ClassPair(kind, fault.name, world, "twin", step, arm, twin)
    others = (*OWN, *(text for text in fault.cell if not text.startswith("sharding=")))
    for engine in CONTROLS[world]:
        yield ClassPair(kind, fault.name, world, engine, step, arm, cell(world, *others, *ENGINES[engine]))


def clean() -> Iterator[ClassPair]:
    """Every two arms of every group; what faults are held against in one kind of training is a group, too."""
    for world, seeds in SEEDS.items():
        arms = {name: own for name, own in ARMS.items() if not name.startswith(NOT_IN.get(world, ("none",)))}
        for seed in seeds:
            made = {name: cell(world, f"train.seed={seed}", *own) for name, own in arms.items()}
            for left, right in combinations(made, 2):
                yield _alike(f"{left}, {right}, seed {seed}", world, made[left], made[right])
    for world in WORLDS:
        controls = [pair.control for pair in faulty() if pair.world == world]
        clips = {control: "optimizer.clip_norm=0.1" in control for control in controls}
        for left, right in combinations(clips, 2):
            if clips[left] is clips[right] and "ckpt=last" not in (*left, *right):
                yield _alike("controls", world, left, right)


def _alike(name: str, world: str, arm: tuple[str, ...], control: tuple[str, ...]) -> ClassPair:
    """A clean pair; of kind `peer` where one is of megatron-fsdp, whose Adam is known to be one step ahead."""
    is_peer = "engine=megatron_fsdp" in (*arm, *control) and world != "sgd"
    return ClassPair("peer" if is_peer else "clean", name, world, "arm", 0, arm, control)
