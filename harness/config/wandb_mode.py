"""Mode of the wandb copy, from the request and the environment.

Nothing here imports wandb, which takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.schema import WandbMode
from harness.store.wandb_run import VARIABLE


def wandb_mode(asked: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Effective mode: `WANDB_MODE` chooses among copies, but never turns one on.

    Raises `ValueError`: the variable holds no mode. `shared`, under which processes write one run, is none here.
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if asked is WandbMode.disabled or not word:
        return asked
    if word not in WandbMode.__members__:
        raise ValueError(f"{VARIABLE}={word} is none of {', '.join(WandbMode.__members__)}")
    return WandbMode[word]
