"""The NCCL that is loaded tells its version, not the one torch was built with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.probe.network import NcclVersion, loaded_version
from tests.support.needs import needs


@pytest.mark.parametrize(
    ("code", "text"), [(23_203, "2.32.3"), (22_809, "2.28.9"), (2_708, "2.7.8"), (21_005, "2.10.5")]
)
def test_nccls_number(code: int, text: str) -> None:
    assert str(NcclVersion.of_code(code)) == text


def test_none_is_loaded_here() -> None:
    assert loaded_version() is None


@needs("cc")
def test_a_library_that_was_put_before_torchs_is_the_one(tmp_path: Path) -> None:
    """A real shared library of that name, preloaded as a newer NCCL would be, under a file name of its own."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.slim.so"
    source.write_text("int ncclGetVersion(int* version) { *version = 23203; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
    words = "from harness.probe.network import loaded_version; print(loaded_version())"
    ran = subprocess.run(
        ["env", f"LD_PRELOAD={library}", sys.executable, "-c", words], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "2.32.3"
