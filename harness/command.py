"""The console script `harness`, and `python -m harness`: `run ...` is run.py; any other word is a verb."""

import gc
import os
import runpy
import signal
import sys

from harness.store import interpreter


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while we import: nothing has begun
    interpreter.require()
    gc.set_threshold(interpreter.RARELY)
    from harness.store import commands

    if os.path.splitext(os.path.basename(sys.argv[0]))[0] == commands.SCRIPT:
        commands.started_as_script(sys.argv[0])
    if sys.argv[1:2] != ["run"]:
        from harness.cli.main import main as verbs

        return verbs()
    from harness.store.provenance import ROOT

    script = str(ROOT / "run.py")
    sys.argv = [script, *sys.argv[2:]]
    runpy.run_path(script, run_name="__main__")  # ends with SystemExit
    return 0
