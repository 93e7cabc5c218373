"""From a composed configuration to a cell: merged into the typed root, checked, frozen.

Hydra composes the files (`run.py`, the sweeper). A cell is plain, complete values that a rank reads from `config.yaml`
and turns back into the typed root with `load_config`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any, cast, get_args, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from harness.config.capabilities import EngineName
from harness.config.catalog import file_of, load_catalog, own_folder
from harness.config.doc import settings
from harness.config.errors import BadRequest, refuse
from harness.config.overrides import check_overrides, forbid_appending, hydra_words
from harness.config.root import typed_root
from harness.config.schema import Config, TrainConfig
from harness.config.words import quote
from harness.store.errors import StoreError
from harness.store.rundir import Store


@dataclass(frozen=True)
class Cell:
    config: dict[str, Any]
    overrides: tuple[str, ...]
    """Request as `key=value`, after a study was expanded."""

    @cached_property
    def typed(self) -> Config:
        return load_config(self.config)

    @cached_property
    def signature(self) -> str:
        """Hash of the defining settings (sha256, hex)."""
        from harness.store.identity import signature

        return signature(self.config)

    @cached_property
    def name(self) -> str:
        from harness.store.identity import run_name

        return run_name(self.config)

    @property
    def study(self) -> str:
        return str(self.config["study"]["name"])


def register() -> None:
    ConfigStore.instance().store(name="schema", node=typed_root(), provider="harness")
    _register_declared()


@functools.cache
def _register_declared() -> None:
    for name in load_catalog().options["engine"]:
        if (values := declared_option("engine", name)) is not None:
            ConfigStore.instance().store(group="engine", name=name, node=values, provider="harness")


def declared_option(group: str, name: str) -> dict[str, str] | None:
    """Values of an option that code declares, an engine without a file in conf/; None of others."""
    declared = group == "engine" and name in EngineName.__members__ and not file_of(group, name).exists()
    return {"name": name} if declared else None


def load_config(plain: Mapping[str, Any]) -> Config:
    """Typed root of a frozen `config.yaml`.

    Raises `BadRequest`: an unknown key, a value of another type, or a missing mandatory one, as in runs of another
    version.
    """
    try:
        return cast(Config, OmegaConf.to_object(_merge(dict(plain))))
    except MissingMandatoryValue as error:
        choices = ", ".join(settings()[str(error.full_key)].choices)
        raise refuse(str(error.full_key), "is not said, and nothing can be assumed", choices=choices) from error


def compose_cell(cfg: DictConfig, overrides: Sequence[str], *, earlier: Sequence[str] = ()) -> Cell:
    """Freeze a composed configuration: merge it into the typed root, resolve it, apply every rule.

    Args: overrides: the request as typed, `key=value` each. earlier: overrides of the frozen cell it starts from;
    recorded, but exempt from rules on typed settings.

    Raises `BadRequest` with every violation; nothing was written or started.
    """
    return freeze(into_root(cfg), overrides, earlier=earlier)


def into_root(cfg: DictConfig) -> DictConfig:
    """Typed root of an unresolved configuration, without Hydra's own node.

    Raises `BadRequest`: a key is unknown or a value has the wrong type.
    """
    values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    values.pop("hydra", None)
    return _merge(values)


def choose(root: DictConfig, group: str, values: Mapping[str, Any]) -> None:
    """Replace a group in a typed root by an option's values, and the schema's where it has none.

    Raises `BadRequest`: a key is unknown or a value has the wrong type.
    """
    root[group] = deepcopy(_empty_root()[group])
    try:
        _put(root, group, dict(values))
    except OmegaConfBaseException as error:
        from harness.config.hints import explain_value

        raise BadRequest([explain_value(error)]) from error


def freeze(root: DictConfig, overrides: Sequence[str], *, earlier: Sequence[str] = ()) -> Cell:
    from harness.config import rules
    from harness.config.hints import explain_unsaid

    forbid_appending(overrides)
    try:
        config = cast(Config, OmegaConf.to_object(root))
    except MissingMandatoryValue as error:
        raise BadRequest([explain_unsaid(str(error.full_key), root)]) from error
    except OmegaConfBaseException as error:
        raise refuse(error.full_key or "interpolation", str(error).splitlines()[0]) from error
    check_kinds(config)
    _anchor_paths(config)
    _shorten_warmup(config, [*earlier, *overrides])
    _count(config)
    violations = rules.check(config, overrides)
    if violations:
        raise BadRequest(violations)
    cell = Cell(cast(dict[str, Any], _plain(asdict(config))), (*earlier, *overrides))
    vars(cell)["typed"] = config  # at hand: to make it again from plain values takes as long as all of the above
    return cell


def compose(overrides: Sequence[str] = ()) -> Cell:
    """Compose and freeze one cell outside the command line.

    Raises `BadRequest`, as `run.py` does.
    """
    check_overrides(overrides)
    return compose_cell(composed(overrides), overrides)


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from harness.config.catalog import ROOT

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra_compose("config", [*hydra_words(overrides), *_search_path()])


def _search_path() -> list[str]:
    own = own_folder()
    return [] if own is None else [f"hydra.searchpath=[study://sweeps,{quote(f'file://{own}')}]"]


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Resolved values as dicts, lists, strings, numbers, booleans and None; enums by name."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def _merge(values: dict[str, Any]) -> DictConfig:
    from harness.config.hints import explain_key, explain_value

    violations = [explain_key(str(key)) for key in values if key not in Config.__dataclass_fields__]
    merged = deepcopy(_empty_root())
    for key in (key for key in Config.__dataclass_fields__ if key in values):
        try:
            _put(merged, key, values[key])
        except OmegaConfBaseException as error:
            violations.append(explain_value(error))
    if violations:
        raise BadRequest(violations)
    return merged


def _put(root: DictConfig, key: str, value: Any) -> None:
    if isinstance(node := root[key], DictConfig) and isinstance(value, dict):
        node.merge_with(value)
    else:
        root[key] = value


@functools.cache
def _empty_root() -> DictConfig:
    return typed_root()


def check_kinds(config: Any, under: str = "") -> None:
    """Refuse kinds that OmegaConf accepts: a number for a list or table, or a container or number for a text.

    Args: under: path of `config` in the typed root, such as `study`.

    Raises `BadRequest`: naming each such setting.
    """
    from harness.config.hints import explain_setting

    held = {path: each for path, each in settings().items() if path.startswith(f"{under}." if under else "")}
    values = {path: attrgetter(path.removeprefix(f"{under}."))(config) for path in held}
    wrong = [
        explain_setting(path, values[path])
        for path, setting in held.items()
        if get_origin(setting.type) is not None
        and not (setting.optional and values[path] is None)
        and not _fits(values[path], setting.type)
    ]
    if wrong:
        raise BadRequest(wrong)


def _fits(value: Any, kind: Any) -> bool:
    """True if a value matches a type such as `dict[str, list[str]]` at every level."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items()
        )
    return kind is Any or (isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool))


def _anchor_paths(config: Config) -> None:
    config.launch.root = _anchored("launch.root", config.launch.root, "launch.root=runs")
    if config.data.path is not None:
        config.data.path = _anchored("data.path", config.data.path, "a file or folder, or data.path=null")
    if config.ckpt.load is not None:
        config.ckpt.load = _checkpoint(config.ckpt.load, config.launch.root)


def _checkpoint(named: str, root: str) -> str:
    """Path of a checkpoint, or of the run that a path, a signature's first digits or `@last` names."""
    path = _anchored("ckpt.load", named, "a run or checkpoint, or ckpt.load=null")
    if os.path.exists(path):
        return path
    try:
        return str(Store(root).find(named).path)
    except StoreError:  # the rules of checkpoints say what is missing
        return path


def _anchored(key: str, path: str, fix: str) -> str:
    if not path.strip():
        raise refuse(f"{key}=", "is empty, which would mean the folder in which this is typed", fix=fix)
    return os.path.abspath(os.path.expanduser(path))


def _shorten_warmup(config: Config, overrides: Sequence[str]) -> None:
    """A run shorter than the default warm-up warms up for all of it."""
    is_default = config.train.warmup_steps == TrainConfig().warmup_steps
    if is_default and not any(text.startswith("train.warmup_steps=") for text in overrides):
        config.train.warmup_steps = min(config.train.warmup_steps, config.train.steps)


def _count(config: Config) -> None:
    from harness.config import own

    found = own.described("model", config)
    config.model.parameters = None if found is None else found.told["parameters"]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.name if isinstance(value, Enum) else value
