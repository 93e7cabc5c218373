"""Version of the loaded NCCL.

`torch.cuda.nccl.version()` is a constant of torch's build. LD_PRELOAD, another wheel or a newer file give the process
another library, which is asked here.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch

LIBRARY = "libnccl.so.2"

SEVERAL_RANKS_A_DEVICE = (2, 30)


class NcclVersion(NamedTuple):
    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @classmethod
    def of_code(cls, code: int) -> NcclVersion:
        """From NCCL's number: 10,000 a major version, or 1,000 before 2.9."""
        major, rest = divmod(code, 10_000 if code >= 10_000 else 1_000)
        return cls(major, *divmod(rest, 100))


def loaded_version() -> NcclVersion | None:
    """Version of the loaded NCCL; None without one, or if torch is statically linked."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    code = ctypes.c_int(0)
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None
    return NcclVersion.of_code(code.value)


def version_facts() -> dict[str, str | None]:
    """`nccl`: the loaded version, or else that of torch's build; `nccl_built`: that of the build. None without NCCL."""
    if not torch.cuda.is_available():
        return {"nccl": None, "nccl_built": None}
    built = str(NcclVersion(*torch.cuda.nccl.version()[:3]))
    loaded = loaded_version()
    return {"nccl": built if loaded is None else str(loaded), "nccl_built": built}
