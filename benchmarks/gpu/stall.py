"""A rank that stops for good after its second step: what a hang looks like to all the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from harness.engines.protocol import Engine
from harness.train.callbacks import Callback

STEP = 2


class Stall(Callback):
    """The last rank never comes back; the others wait for it in the next step's first collective."""

    def step(self, step: int, record: Mapping[str, Any], engine: Engine) -> None:
        """Sleep, where this is the last rank and the step has come."""
        if step == STEP and dist.get_rank() == dist.get_world_size() - 1:
            while True:
                time.sleep(3600.0)
