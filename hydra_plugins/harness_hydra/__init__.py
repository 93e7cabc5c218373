"""Plugin that Hydra finds under its own namespace: the sweeper.

There is no `__init__.py` beside this package: `hydra_plugins` is a namespace that other distributions share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from harness.config.errors import refuse

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="harness",
    # params: axes as Hydra's own sweeper has them, a key and its values, `train.seed: 1,2`
    node={"_target_": "hydra_plugins.harness_hydra.StudySweeper", "params": None},
    provider="harness",
)


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
