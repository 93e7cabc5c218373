"""Which CUDA devices a process on this machine may use, by files and the environment: torch is not loaded here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRIVER_FILES = Path("/dev")


def visible_devices(environment: Mapping[str, str] = os.environ, folder: Path = DRIVER_FILES) -> list[str]:
    """Devices as CUDA_VISIBLE_DEVICES may name them: what it names already, or numbers from 0 on.

    CUDA counts what it can open, from 0: a container that was given /dev/nvidia3 alone has device 0. So the driver's
    files are counted, and their own numbers are nobody's names.

    Args:
        environment: whose CUDA_VISIBLE_DEVICES counts. CUDA stops reading at the first entry that names no device.
        folder: where the driver's files are.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        named = []
        for entry in (entry.strip() for entry in chosen.split(",")):
            if not entry or entry.startswith("-") or entry == "NoDevFiles":
                break
            named.append(entry)
        return named
    files = [path for path in folder.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    return [str(number) for number in range(len(files))]
