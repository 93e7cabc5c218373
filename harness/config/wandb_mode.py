"""Mode, server and key of the wandb copy, from the request and the environment.

Nothing here imports wandb, which takes a second.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

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
SERVER = "https://api.wandb.ai"


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


def server(environment: Mapping[str, str]) -> str:
    return (environment.get("WANDB_BASE_URL") or _setting("base_url", environment) or SERVER).rstrip("/")


def has_key(environment: Mapping[str, str]) -> bool:
    """True if wandb finds a key without a prompt: environment, netrc file, settings file."""
    named = any(environment.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    return named or _in_netrc(environment) or bool(_setting("api_key", environment))


def _in_netrc(environment: Mapping[str, str]) -> bool:
    files = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, files):  # also where there is no home
        try:
            if netrc.netrc(path).hosts.get(urlsplit(server(environment)).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _setting(name: str, environment: Mapping[str, str]) -> str:
    folder = os.path.expanduser(environment.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.join(folder, "settings"), encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return ""
    return parser.get("default", name, fallback="")
