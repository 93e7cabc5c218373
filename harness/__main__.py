"""`python -m harness VERB`."""

import sys

from harness.command import main

if __name__ == "__main__":
    sys.exit(main())
