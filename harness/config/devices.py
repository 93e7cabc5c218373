"""CUDA devices of this machine, from files and the environment, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRIVER_FILES = Path("/dev")


def visible_devices(environment: Mapping[str, str] = os.environ, folder: Path = DRIVER_FILES) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES, or numbers from 0 on.

    CUDA counts the devices it can open from 0 (a container with /dev/nvidia3 alone has device 0), so files are counted.
    It stops reading the variable at the first invalid entry.

    Args: folder: of the driver's device files.
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
