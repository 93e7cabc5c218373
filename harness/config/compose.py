"""From a composed configuration to a cell: merged into the typed root, checked, frozen.

Nothing here composes files: Hydra does that (`run.py`, the sweeper). A cell is what is left when Hydra is gone: plain,
complete values that a rank reads from `config.yaml` and turns back into the typed root with `load_config`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.errors import BadRequest, Violation, refuse
from harness.config.schema import Config

OPEN_DICTS = ("cluster.additional", "study.control", "study.base", "study.grid", "study.zip")
"""Settings whose keys the user names; every other key is fixed by the schema."""


@dataclass(frozen=True)
class Cell:
    """One point of a study: a complete configuration, checked and frozen, and how it was asked for."""

    config: dict[str, Any]
    """Every setting, resolved, as plain values (enums by name)."""
    overrides: tuple[str, ...]
    """What was asked, as `key=value`, after a study was expanded."""

    @cached_property
    def typed(self) -> Config:
        """The same values as the typed root."""
        return load_config(self.config)

    @cached_property
    def signature(self) -> str:
        """Hash of all that defines the run (sha256, hex)."""
        from harness.store.identity import signature

        return signature(self.config)

    @cached_property
    def name(self) -> str:
        """Readable name, a function of the cell alone."""
        from harness.store.identity import run_name

        return run_name(self.config)

    @property
    def study(self) -> str:
        """The study the run is stored under."""
        return str(self.config["study"]["name"])


def typed_root() -> DictConfig:
    """Make the empty typed root; its user-named dictionaries accept new keys, nothing else does."""
    root = OmegaConf.structured(Config)
    for path in OPEN_DICTS:
        OmegaConf.set_struct(OmegaConf.select(root, path), False)
    return cast(DictConfig, root)


def register() -> None:
    """Give Hydra the typed root under the name `schema`, the first entry of conf/config.yaml."""
    ConfigStore.instance().store(name="schema", node=typed_root(), provider="harness")


def load_config(plain: Mapping[str, Any]) -> Config:
    """Turn the plain values of a frozen `config.yaml` into the typed root.

    Raises:
        BadRequest: a key is unknown or a value has the wrong type, as in a run frozen by another version of the schema.
    """
    return cast(Config, OmegaConf.to_object(_merge(dict(plain))))


def compose_cell(cfg: DictConfig, overrides: Sequence[str], *, earlier: Sequence[str] = ()) -> Cell:
    """Freeze what Hydra composed: merge it into the typed root, resolve it, apply every rule.

    Args:
        cfg: the composed configuration, with or without Hydra's own node.
        overrides: the request as typed, `key=value` each.
        earlier: overrides of the frozen cell this one starts from; recorded, and not held against this request.

    Raises:
        BadRequest: with every violation found; nothing was written and nothing started.
    """
    from harness.config import rules

    forbid_appending(overrides)
    merged = _merge(_resolve(cfg))
    _anchor_paths(merged)
    violations = rules.check(cast(Config, OmegaConf.to_object(merged)), overrides)
    if violations:
        raise BadRequest(violations)
    return Cell(plain(merged), (*earlier, *overrides))


def compose(overrides: Sequence[str] = ()) -> Cell:
    """Compose and freeze one cell outside the command line, for tests, notebooks and readers.

    Raises:
        BadRequest: as `run.py` would say.
    """
    from harness.config.overrides import check_overrides

    check_overrides(overrides)
    return compose_cell(composed(overrides), overrides)


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """What Hydra makes of `conf/` and these overrides, unchecked."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from harness.config.catalog import ROOT

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra_compose("config", list(overrides))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolved values of a configuration as dicts, lists, strings, numbers, booleans and None; enums by name."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def forbid_appending(overrides: Sequence[str]) -> None:
    """Refuse `+key`, `++key` and `~key`: the set of settings is fixed, and Hydra would accept them silently.

    Raises:
        BadRequest: one violation for each.
    """
    found = [appending(o) for o in overrides if o.startswith(("+", "~"))]
    if found:
        raise BadRequest(found)


def appending(override: str) -> Violation:
    """What to say of an override with a sign."""
    bare = override.lstrip("+~")
    if override.startswith("~"):
        key = bare.split("=", 1)[0]
        return Violation(
            override, "groups and settings cannot be removed, only chosen", fix=f"{key}=OPTION, or leave it out"
        )
    return Violation(override, "settings cannot be added: the schema names them all", fix=f"{bare} (without the sign)")


def _resolve(cfg: DictConfig) -> dict[str, Any]:
    try:
        return {str(k): plain(v) if isinstance(v := cfg[k], DictConfig) else v for k in cfg if k != "hydra"}
    except OmegaConfBaseException as error:
        raise refuse(error.full_key or "interpolation", str(error).splitlines()[0]) from error


def _merge(values: dict[str, Any]) -> DictConfig:
    from harness.config.hints import explain_key, explain_value

    unknown = [explain_key(str(key)) for key in values if key not in Config.__dataclass_fields__]
    violations, merged = unknown, typed_root()
    for key in Config.__dataclass_fields__:
        if key not in values:
            continue
        try:
            merged = cast(DictConfig, OmegaConf.merge(merged, {key: values[key]}))
        except OmegaConfBaseException as error:
            violations.append(explain_value(error))
    if violations:
        raise BadRequest(violations)
    return merged


def _anchor_paths(cfg: DictConfig) -> None:
    """Make paths absolute: a rank may start elsewhere, and the same words must not mean two files."""
    cfg.launch.root = os.path.abspath(os.path.expanduser(cfg.launch.root))
    if cfg.data.path is not None:
        cfg.data.path = os.path.abspath(os.path.expanduser(cfg.data.path))
