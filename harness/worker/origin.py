"""The rank's part of provenance: actual torch, threads and machines."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.control import gather_json
from harness.engines.protocol import Ranks
from harness.probe.network import version_facts
from harness.store import provenance


def record(run: Path, ranks: Ranks, control: dist.ProcessGroup | None, *, resuming: bool) -> None:
    """Complete `provenance.json`. Collective over all ranks.

    Raises `RuntimeError`: a resumed run has other sources now.
    """
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    mine = {"host": socket.gethostname(), "cpu_model": provenance.cpu_model(), "device": device}
    machines = gather_json(mine, control)
    if ranks.rank == 0:
        joined = {key: " | ".join(sorted({machine[key] for machine in machines})) for key in ("cpu_model", "device")}
        hosts = {"hosts": [machine["host"] for machine in machines]}
        provenance.merge(run, _sources(run, resuming) | provenance.machine_facts() | joined | hosts | _of_torch())


def kernels() -> dict[str, str]:
    """Switches of torch that choose kernels or what they round to, and that no setting of a run moves."""
    backends = torch.backends
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny)
    attention = {
        "flash": backends.cuda.flash_sdp_enabled(),
        "memory-efficient": backends.cuda.mem_efficient_sdp_enabled(),
        "math": backends.cuda.math_sdp_enabled(),
        "cudnn": backends.cuda.cudnn_sdp_enabled(),
    }
    return {
        "mkldnn": str(backends.mkldnn.enabled),
        "denormals": str(bool((tiny / 2).item())),
        "threads": str(torch.get_num_threads()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "sdp": ", ".join(name for name, is_on in attention.items() if is_on),
        "cudnn": f"enabled {backends.cudnn.enabled}, benchmark {backends.cudnn.benchmark}",
        "reduced_precision_reduction": str(backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }


def record_kernels(run: Path, rank: int, control: dist.ProcessGroup | None, begun: dict[str, str]) -> None:
    """Add to `provenance.json` what `kernels` were, with those that a rank or the program changed since `begun`.

    Collective over all ranks.
    """
    ended = kernels()
    mine = {key: was if was == ended[key] else f"{was}, then {ended[key]}" for key, was in begun.items()}
    every = gather_json(mine, control)
    if rank == 0:
        provenance.merge(run, {"kernels": {key: " | ".join(sorted({each[key] for each in every})) for key in mine}})


def find_own(run: Path) -> None:
    for each in provenance.read(run).get("own", ()):
        if (folder := each.get("copy", each["root"])) not in sys.path:
            sys.path.insert(0, folder)


def _sources(run: Path, resuming: bool) -> dict[str, Any]:
    origin = provenance.read(run)
    recorded, current = origin.get("sources_digest"), provenance.sources_digest()
    if resuming and recorded is not None and recorded != current:
        raise _changed("the sources", recorded, current)
    own = provenance.own_now(origin, loaded=True)
    for then, now in zip(origin.get("own", ()), own, strict=True):
        if resuming and then["digest"] != now["digest"]:
            raise _changed(f"the files of {now['name']}", then["digest"], now["digest"])
    return {"sources_digest": current} | ({"own": own} if own else {})


def _changed(what: str, then: str, now: str) -> RuntimeError:
    return RuntimeError(
        f"{what} changed since this run's checkpoint was made ({then[:8]} then, {now[:8]} now); "
        "go back to those sources, or start it over with launch.rerun=stale"
    )


def _of_torch() -> dict[str, Any]:
    return {
        "versions": {"torch": torch.__version__},
        "threads_per_rank": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": dist.get_backend(),
        "cuda": torch.version.cuda,
        **version_facts(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
