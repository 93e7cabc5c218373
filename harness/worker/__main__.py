"""`python -m harness.worker RUN_DIR --attempt N`: be one rank of a frozen run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from harness.worker import main

parser = argparse.ArgumentParser(prog="python -m harness.worker", description="Be one rank of a frozen run.")
parser.add_argument("run", type=Path, help="the run directory")
parser.add_argument("--attempt", type=int, required=True, help="number of the attempt, whose folder exists")
arguments = parser.parse_args()
code = main(arguments.run, arguments.attempt)
with contextlib.suppress(OSError):  # a log on a full disk must not change the exit code
    sys.stdout.flush()
    sys.stderr.flush()
os._exit(code)  # threads of a broken process group must not keep a finished rank alive
