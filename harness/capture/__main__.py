"""Put together what the ranks of a watched run left that did not end: `python -m harness.capture RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.capture.merge import merge
from harness.capture.parts import FOLDER


def main(words: list[str]) -> int:
    if len(words) != 1 or not (Path(words[0]) / FOLDER).is_dir():
        print("give one folder: of a watched run whose ranks did not all end", file=sys.stderr)
        return 2
    merge(Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
