"""Plugin that Hydra finds under its own namespace: the sweeper, and `sweeps/` as the config group `study`.

There is no `__init__.py` beside this package: `hydra_plugins` is a namespace that other distributions share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from harness.config import catalog
from harness.config.errors import refuse

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="harness",
    # params: axes as Hydra's own sweeper has them, a key and its values, `train.seed: 1,2`
    node={"_target_": "hydra_plugins.harness_hydra.StudySweeper", "params": None},
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
        from harness.study.expand import normalise

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
    """`run.py -m ...`: expand the whole request to one list of cells, and carry it out in one call.

    Under a launcher of Hydra's (hydra/launcher=joblib) each cell is a job of that.
    """

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self._params = {} if params is None else params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        from harness.study.request import sweep

        if not isinstance(self._params, Mapping):
            fix = "'hydra.sweeper.params={train.seed: \"1,2\"}', or train.seed=1,2"
            raise refuse(f"hydra.sweeper.params={self._params}", "is no table of axes", fix=fix)
        typed = {text.partition("=")[0] for text in arguments}
        params = [f"{key}={values}" for key, values in self._params.items() if key not in typed]
        raise SystemExit(sweep(self._context.config_loader, self._config, [*params, *arguments], self._launch))

    def _launch(self, jobs: Sequence[Sequence[str]]) -> None:
        """Carry out jobs, the overrides of a cell each, by the launcher that was named; raises what one raised."""
        launcher = Plugins.instance().instantiate_launcher(self._context, self._task, self._config)
        for result in launcher.launch([list(job) for job in jobs], initial_job_idx=0):
            _ = result.return_value
