"""What this machine has: printed as JSON. Every import is tried by itself, so that one that fails names itself."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from typing import Any

MODULES = (
    *("hydra", "omegaconf", "submitit", "jinja2", "numpy", "psutil", "pydantic", "safetensors", "scipy", "xxhash"),
    *("yaml", "harness.cli.main", "harness.parity.judgement", "harness.bench.record", "harness.worker"),
    *("harness.train", *(f"harness.engines.adapters.{name}" for name in ("single", "native", "ddp", "fsdp2", "fsdp1"))),
)
PEERS = ("megatron_fsdp", "deepspeed")
"""May be missing: what asks for them is then left out."""
PACKAGES = (
    *("torch", "triton", "megatron-fsdp", "deepspeed", "hydra-core", "numpy"),
    *("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
)
"""Whose versions numbers may depend on."""


def main() -> int:
    """Print; returns 1 where an import that everything needs fails, or CUDA was asked for and is not there."""
    wants_cuda = sys.argv[1:] == ["cuda"]
    with contextlib.redirect_stdout(sys.stderr):  # some packages speak while they are imported
        imports = {name: tried(name) for name in (*MODULES, *PEERS)}
        from harness.store.provenance import versions

        found = versions(PACKAGES)
        facts = {"imports": imports, "python": found["python"], "versions": found, **devices()}
    print(json.dumps(facts))
    broken = [name for name in MODULES if imports[name]]
    return 1 if broken or (wants_cuda and not facts["devices"]) else 0


def tried(name: str) -> str:
    """Why a module cannot be imported; empty where it can."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def devices() -> dict[str, Any]:
    """GPUs as torch and the driver see them, and the NCCL that is loaded."""
    import torch

    from harness.probe.network import loaded_version, version_facts

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    sums, version = None, loaded_version() or "0.0"
    if names:
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        sums = float((ones @ ones).sum())  # 256 ** 3: a kernel was compiled for this device and ran
    return {
        "devices": names,
        "memory_bytes": [torch.cuda.get_device_properties(index).total_memory for index in range(len(names))],
        "product": sums,
        "cuda": torch.version.cuda,
        "driver": driver(),
        "ranks_share": tuple(map(int, version.split(".")[:2])) >= (2, 30),
        **version_facts(),
    }


def driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        return None
    return told[0] if told else None


if __name__ == "__main__":
    sys.exit(main())
