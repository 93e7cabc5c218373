"""Draw docs/pictures/ from a finished study: every figure of the notebooks, and the page of `harness report`.

    python run.py -m study=strategies
    python benchmarks/pages/pictures.py

Notebooks run as programs, the page in a headless Chromium. Runs of other sources than these are drawn as well
(`--archived`).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from benchmarks.pages import tables
from benchmarks.pages.tables import ROOT
from harness.cli.main import main as harness

PICTURES = ROOT / "docs" / "pictures"
STUDY = "strategies"
NOTEBOOKS = ("loss_parity", "step_time", "memory_and_bytes")
MOST_BYTES = 200_000
SIZE = "1100,2300"
"""CSS pixels of the page that are shown."""

BROWSER = (
    *("chromium", "--headless=new", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"),
    "--no-sandbox",  # root has none; the page is ours
)


def notebook(name: str, store: Path, archived: bool) -> list[Path]:
    os.environ |= {"STORE": str(store), "STUDY": STUDY}
    if archived:
        os.environ["ARCHIVED"] = "1"
    plt.close("all")
    runpy.run_path(str(ROOT / "analysis/notebooks" / f"{name}.py"))
    found = []
    for number, place in enumerate(plt.get_fignums(), start=1):
        target = PICTURES / f"{name}_{number}.png"
        plt.figure(place).savefig(target, dpi=110, metadata={"Software": None})
        found.append(target)
    return found


def report(store: Path, archived: bool) -> Path:
    target = PICTURES / "report.png"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        words = ["report", STUDY, "--root", str(store), "--out", str(page), *(["--archived"] if archived else [])]
        if harness(words):
            raise SystemExit(f"no report of {STUDY}")
        subprocess.run([*BROWSER, f"--window-size={SIZE}", f"--screenshot={target}", page.as_uri()], check=True)
    return target


def shrink(picture: Path) -> None:
    """Fewer colours where that is needed to stay small; pictures of lines lose nothing that is seen."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
    size = picture.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{picture} has {size} bytes, more than {MOST_BYTES}")


def main(argv: list[str]) -> int:
    parser = tables.parser(__doc__)
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs are stored (default: runs)")
    parser.add_argument("--archived", action="store_true", help="of runs that other sources made")
    arguments = parser.parse_args(argv)
    PICTURES.mkdir(exist_ok=True)
    drawn = [path for name in NOTEBOOKS for path in notebook(name, arguments.root, arguments.archived)]
    drawn.append(report(arguments.root, arguments.archived))
    for path in drawn:
        shrink(path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
