"""Packages that an image lacks, from wheels that lie beside the sources: nothing is fetched and nothing is installed.

`make gpu-wheels` puts wheels into wheels_gpu/ where there is a network. Here those whose package this Python does not
have are unpacked next to them and put on the path of this process and of all that it starts: the image's own win.
"""

from __future__ import annotations

import os
import sys
import zipfile
from importlib import metadata
from pathlib import Path

FOLDER, UNPACKED = "wheels_gpu", "unpacked"


def bring(root: Path) -> list[str]:
    """Unpack what is missing of the wheels under `root`; returns the names of those packages."""
    folder = root / FOLDER
    target = folder / UNPACKED
    found = {wheel.name.partition("-")[0]: wheel for wheel in sorted(folder.glob("*.whl"))}
    lacking = [name for name in found if not _has(name)]
    for name in lacking:
        with zipfile.ZipFile(found[name]) as archive:
            archive.extractall(target)
    if lacking:
        sys.path.append(str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(target))))
    return lacking


def _has(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
