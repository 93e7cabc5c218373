"""`python -m harness VERB`."""

import os
import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while we import: nothing has begun

    from harness.cli.main import main

    sys.exit(main())
