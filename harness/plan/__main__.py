"""`python -m harness.plan`: what the verb `plan` runs, in a process that may load torch.

Reads a list of configurations (JSON) from stdin and writes a list of plans; each is `harness.plan.planned.plan`'s, or
`{"refused": sentence}`.
"""

from __future__ import annotations

import json
import sys

import torch

from harness.plan.planned import Records, planned
from harness.store.screen import filtered


def main() -> int:
    torch.set_num_threads(1)
    records: Records = {}
    print(json.dumps([planned(values, records) for values in json.load(sys.stdin)]))
    return 0


if __name__ == "__main__":
    with filtered():
        sys.exit(main())
