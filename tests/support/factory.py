"""Small configurations and sessions that tests of the rank half share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from omegaconf import OmegaConf

from harness.config.capabilities import ENGINES
from harness.config.compose import plain
from harness.config.schema import Config, DataKind, Dtype, EngineName, MeasureMode, Strategy
from harness.data.loader import Loader
from harness.engines.protocol import Ranks, engine_class
from harness.models.workload import workload_for
from harness.probe.meters import Meters
from harness.train import Outcome, Session, run, timed_workload
from harness.train.faults import build_session

torch.set_num_threads(1)  # tests share few cores, and tiny tensors gain nothing from two


def small_config(**changes: Any) -> Config:
    """A two-layer model on synthetic data; `changes` are dotted keys with double underscores: train__steps=3."""
    config = Config()
    config.model.dim, config.model.num_layers, config.model.ffn_dim, config.model.vocab_size = 32, 2, 48, 64
    config.model.max_seq_len = 32
    config.data.kind, config.data.seq_len, config.data.num_sequences = DataKind.synthetic, 16, 64
    config.train.steps, config.train.global_batch_size, config.train.microbatch_size = 3, 8, 2
    config.sharding.strategy = Strategy.no_shard
    config.engine.name, config.mesh.world_size = EngineName.single, 1
    config.measure.capture_steps = [1]  # what is chosen by default has tests of its own
    config.measure.step_checks = False  # costs a small model as much as its step
    for key, value in changes.items():
        *path, last = key.split("__")
        group: Any = config
        for name in path:
            group = getattr(group, name)
        assert hasattr(group, last), key
        setattr(group, last, value)
    return config


def with_dtypes(config: Config, compute: Dtype, main: Dtype) -> Config:
    """The same configuration computing in one dtype and keeping weights and gradients in another."""
    config.dtype.compute = compute
    config.dtype.main_params = config.dtype.main_grads = config.dtype.grad_comm = config.dtype.grad_accum = main
    return config


def ranks_of(config: Config, rank: int = 0) -> Ranks:
    """This process on the CPU."""
    return Ranks(rank, config.mesh.world_size, rank, torch.device("cpu"), tp=config.mesh.tp)


def train(
    config: Config,
    run_dir: Path,
    rank: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Mapping[str, Any]], None] = lambda _: None,
    wrap_engine: Callable[[Any], Any] = lambda engine: engine,
) -> Outcome:
    """Put a session together as a worker does, and run it."""
    ranks = ranks_of(config, rank)
    control = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
    run_dir.mkdir(parents=True, exist_ok=True)
    with Meters(ranks.device, follow_storage=config.measure.mode is MeasureMode.bench) as meters:

        def build() -> Session:
            workload = timed_workload(workload_for(config), meters.timers)
            engine = engine_class(config.engine.name)(workload, config, ranks)
            loader = Loader(config, ranks.data_rank)
            return Session(config, ranks, engine, loader, meters, control, run_dir, should_stop, progress)

        session = build_session(config, build)
        outcome = run(replace(session, engine=wrap_engine(session.engine)))
    if control is not None:
        dist.destroy_process_group(control)  # a process that trains often would keep the threads of every one
    return outcome


def layouts(**strategies: str) -> dict[str, dict[str, Any]]:
    """Changes for `small_config` by `engine-strategy`, of engines that are installed: layouts(fsdp2="optim_grads")."""
    return {
        f"{engine}-{strategy}": {"engine__name": EngineName[engine], "sharding__strategy": Strategy[strategy]}
        for engine, named in strategies.items()
        if ENGINES[EngineName[engine]].package is None or find_spec(engine)
        for strategy in named.split()
    }


def stopping(after: int) -> Callable[[], bool]:
    """Ask to stop when so many steps are done: `should_stop` is asked once a step, before its progress is told."""
    count = [0]

    def should_stop() -> bool:
        count[0] += 1
        return count[0] == after

    return should_stop


def freeze(config: Config, run_dir: Path) -> None:
    """Write `config.yaml` as a store would, for what reads it back."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(plain(OmegaConf.structured(config))), encoding="utf-8")
