"""All behaviours, the engines they are put to, and what is not checked and why."""

from __future__ import annotations

from tests.fsdp.behaviours import api, communication, numerics, saved, sharding_memory, updates
from tests.fsdp.behaviours.fsdp2 import Fsdp2
from tests.fsdp.behaviours.lab import CATALOG, Behaviour
from tests.fsdp.behaviours.megatron import Megatron
from tests.fsdp.behaviours.native import Native
from tests.fsdp.behaviours.subject import Subject

SECTIONS = {
    "Sharding and memory": sharding_memory,
    "Communication": communication,
    "Numerics: gradients": numerics,
    "Numerics: updates": updates,
    "Reports, state and defaults": api,
    "Checkpoints": saved,
}

BEHAVIOURS: dict[str, Behaviour] = dict(sorted(CATALOG.items(), key=lambda each: (each[1].number, each[0])))

SUBJECTS: dict[str, type[Subject]] = {each.name: each for each in (Native, Megatron, Fsdp2)}

PENDING: dict[str, str] = {}
"""What our engine does not have yet: these checks fail on it, and must be taken out of here when they no longer do."""

DECIDED = {
    3: "Buckets are not padded to a common multiple of all row lengths: a bucket is one segment for each row length, so"
    " that padding stays near zero at any number of ranks (harness/fsdp/storage/layout.py).",
    9: "Initial values come by name (`initial_value`), the same whatever was built where, or from the first rank;"
    " equality with an eager run under one seed is not promised for modules that draw random numbers. What is checked"
    " is a module whose reset_parameters does not.",
    44: "Errors are our own: outer `optim` is for every inner strategy, not ZeRO-3 alone; the optimizer is built over"
    " the module's own parameters before wrapping, not over wrapped ones; an argument that is not honoured raises"
    " NotImplementedError by name. tests/fsdp/test_api.py has them.",
}
"""Behaviours that are not wanted as they stand, and what is done instead."""

UNPROVEN = {
    18: "user buffers registered with NCCL: no NCCL here (the double buffer is checked).",
    20: "symmetric kernels and zero-CTA gathers: seen in a profile of NCCL across devices only.",
    46: "CUDA graphs: no CUDA here.",
}
"""What no machine here can show."""

WAITING = {
    36: "tensor-parallel duplicates are counted once: tests/fsdp/tensor_parallel checks it.",
    48: "shards that are gathered are the whole weight quantized: tests/fsdp/fp8 checks it; transposed copies of MXFP8"
    " wait for their issue.",
}
"""What waits for other work."""
