"""From a composed configuration to a cell: resolved, typed, checked, frozen.

Hydra composes the files (`run.py`, the sweeper). A cell is plain, complete values that a rank reads from `config.yaml`
(`harness.config.typed`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import own, rules
from harness.config.catalog import ROOT, is_declared, load_catalog, own_folder
from harness.config.doc import plain_of, tables
from harness.config.errors import BadRequest, Violation, completed, refuse
from harness.config.overrides import check_overrides, hydra_words
from harness.config.schema import Config, TrainConfig
from harness.config.typed import MISSING, load_config, load_within, put
from harness.config.words import quote
from harness.store.errors import StoreError
from harness.store.identity import run_name, signature
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
        return signature(self.config)

    @cached_property
    def name(self) -> str:
        return run_name(self.config)

    @property
    def study(self) -> str:
        return str(self.config["study"]["name"])


@functools.cache
def defaults() -> dict[str, Any]:
    """Values of the schema, without those that every option of their group must set."""
    values: dict[str, Any] = plain_of(Config())
    values["model"]["family"] = MISSING
    return values


@functools.cache
def register() -> None:
    """Give Hydra the schema, and our sweeper as the default: an option's file may choose another."""
    schema = OmegaConf.create(defaults())
    for path in tables():
        OmegaConf.set_struct(OmegaConf.select(schema, path), False)
    ConfigStore.instance().store(name="schema", node=schema, provider="harness")
    for name in filter(functools.partial(is_declared, "engine"), load_catalog()["engine"]):
        ConfigStore.instance().store(group="engine", name=name, node={"name": name}, provider="harness")
    ours = [{"sweeper": "harness"} if "sweeper" in each else each for each in HydraConf().defaults]
    ConfigStore.instance().store(group="hydra", name="config", node=HydraConf(defaults=ours), provider="harness")


def compose_cell(cfg: DictConfig, overrides: Sequence[str]) -> Cell:
    """Freeze a composed configuration. Args, Raises: as `freeze`."""
    values = plain(cfg, resolve=False)
    try:
        return freeze(values, overrides)
    except BadRequest as error:
        refused = functools.partial(_refused, values, overrides)
        raise BadRequest(completed(error.violations, refused)) from None


def _refused(values: Mapping[str, Any], overrides: Sequence[str], words: Sequence[str]) -> Sequence[Violation]:
    """Violations of a request with other values of some settings."""
    changed = deepcopy(dict(values))
    for word in words:
        key, _, value = word.partition("=")
        put(changed, key, OmegaConf.create(f"- {value}")[0])
    try:
        freeze(changed, [*overrides, *words])
    except BadRequest as error:
        return error.violations
    return ()


def freeze(values: Mapping[str, Any], overrides: Sequence[str], *, earlier: Sequence[str] = ()) -> Cell:
    """Resolve plain values, type them, apply every rule.

    Args: overrides: the request as typed, `key=value` each. earlier: overrides of the frozen cell it starts from;
    recorded, but exempt from rules on typed settings.

    Raises `BadRequest` with every violation; nothing was written or started.
    """
    config, beyond = load_within(_resolved(values))
    config.launch.root = _anchored("launch.root", config.launch.root, "launch.root=runs")
    if config.data.path is not None:
        config.data.path = _anchored("data.path", config.data.path, "a file or folder, or data.path=null")
    if config.ckpt.load is not None:
        config.ckpt.load = _checkpoint(config.ckpt.load, config.launch.root)
    typed = any(text.startswith("train.warmup_steps=") for text in (*earlier, *overrides))
    if not typed and config.train.warmup_steps == TrainConfig().warmup_steps:  # a short run warms up for all of it
        config.train.warmup_steps = min(config.train.warmup_steps, config.train.steps)
    counted = own.described("model", config)
    config.model.parameters = None if counted is None else counted.answer["parameters"]
    if violations := rules.check(config, overrides, beyond):
        raise BadRequest(violations)
    cell = Cell(plain_of(config), (*earlier, *overrides))
    vars(cell)["typed"] = config
    return cell


def _resolved(values: Mapping[str, Any]) -> Mapping[str, Any]:
    if "${" not in str(values):
        return values
    try:
        return plain(OmegaConf.create(dict(values)))
    except OmegaConfBaseException as error:
        raise refuse(error.full_key or "interpolation", str(error).splitlines()[0]) from error


def compose(overrides: Sequence[str] = ()) -> Cell:
    """Compose and freeze one cell outside the command line.

    Raises `BadRequest`, as `run.py` does.
    """
    check_overrides(overrides)
    return compose_cell(composed(overrides), overrides)


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    from hydra import compose as hydra_compose

    with hydra_begun() as path:
        return hydra_compose("config", [*hydra_words(overrides), *path])


@contextmanager
def hydra_begun() -> Iterator[list[str]]:
    """Hydra over `conf/` outside of `run.py`, with the words that name the user's own folder."""
    from hydra import initialize_config_dir

    register()
    folder = own_folder()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield [] if folder is None else [f"hydra.searchpath=[{quote(f'file://{folder}')}]"]


def plain(cfg: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    """Values as dicts, lists, strings, numbers, booleans and None, enums by name; without Hydra's own node.

    Args: resolve: follow references between settings, instead of leaving them as written.
    """
    values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=resolve, enum_to_str=True))
    values.pop("hydra", None)
    return values


def _checkpoint(named: str, root: str) -> str:
    """Path of a checkpoint, or of the run that a path, a signature's first digits or `@last` names."""
    path = _anchored("ckpt.load", named, "a run or checkpoint, or ckpt.load=null")
    if os.path.exists(path):
        return path
    try:
        return str(Store(root).find(named).path)
    except StoreError as error:
        fix = "ckpt.load=runs/STUDY/RUN, its ckpt folder, a step-* folder in it, digits of its signature, or @last"
        raise refuse(f"ckpt.load={path}", "holds no checkpoint", fix=fix) from error


def _anchored(key: str, path: str, fix: str) -> str:
    if not path.strip():
        raise refuse(f"{key}=", "is empty, which would mean the folder in which this is typed", fix=fix)
    return os.path.abspath(os.path.expanduser(path))
