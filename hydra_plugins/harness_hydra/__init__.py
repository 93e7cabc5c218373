"""Plugin that Hydra finds under its own namespace: the sweeper, and `sweeps/` as the config group `study`.

There is no `__init__.py` beside this package: `hydra_plugins` is a namespace that other distributions share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from harness.config import catalog

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="harness",
    node={"_target_": "hydra_plugins.harness_hydra.StudySweeper"},
    provider="harness",
)


class StudySource(FileConfigSource):
    """`study://sweeps` as a folder with one group, `study`, whose options are the files of `sweeps/`."""

    GROUP = "study"

    def __init__(self, provider: str, path: str) -> None:
        if "://" not in path:
            path = f"{self.scheme()}://{path}"
        super().__init__(provider, path)
        self.path = str(catalog.ROOT / self.path)

    @staticmethod
    def scheme() -> str:
        return "study"

    def _name(self, config_path: str) -> str | None:
        group, _, name = config_path.partition("/")
        return name if group == self.GROUP and name else None

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", self.GROUP)

    def is_config(self, config_path: str) -> bool:
        name = self._name(config_path)
        return name is not None and super().is_config(name)

    def load_config(self, config_path: str) -> ConfigResult:
        from harness.study.file import normalise

        name = self._name(config_path) or config_path
        result = super().load_config(name)
        if isinstance(result.config, DictConfig):
            raw = OmegaConf.to_container(result.config, resolve=False)
            assert isinstance(raw, dict)
            result.config = OmegaConf.create(normalise(cast("dict[str, Any]", raw), Path(name).stem))
        return result

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter is ObjectType.CONFIG else [self.GROUP]
        if config_path != self.GROUP or results_filter is ObjectType.GROUP:
            return []
        return list(catalog.load_catalog().options[self.GROUP])


class StudySweeper(Sweeper):
    """`run.py -m ...`: expand the whole request to one list of cells, and carry it out in one call."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> Any:
        from harness.study.request import sweep

        raise SystemExit(sweep(self._loader, self._config, arguments))
