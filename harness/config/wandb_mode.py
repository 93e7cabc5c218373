"""Mode of the wandb copy, from the request and the environment.

Nothing here imports wandb, which takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.schema import WandbMode
from harness.store.wandb_run import VARIABLE

WORDS = {
    "online": WandbMode.online,
    "run": WandbMode.online,
    "offline": WandbMode.offline,
    "dryrun": WandbMode.offline,
    "disabled": WandbMode.disabled,
}
"""Values of `WANDB_MODE`, except `shared`, under which several processes would write one run."""


def wandb_mode(asked: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Effective mode: `WANDB_MODE` chooses among copies, but never turns one on.

    Raises `ValueError`: the variable holds none of `WORDS`.
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if asked is WandbMode.disabled or not word:
        return asked
    if word not in WORDS:
        raise ValueError(f"{VARIABLE}={word} is none of {', '.join(WORDS)}")
    return WORDS[word]
