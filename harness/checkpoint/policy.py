"""Save a run's state and resume from it, under any layout, after a check of every byte.

Keys are the engine's state by the model's own names (`weights/...`, `optimizer/...`) and each rank's random number
states (`rng/00003/cpu`). The step is a plain value, from which schedule, data and record derive their positions. [Note:
A checkpoint's folder] has the form on disk. A resume checks every file's checksum and every name and shape before it
loads anything, and compares the engine with the files afterwards.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint import folder as folders, storage
from harness.checkpoint.manifest import Damaged, FileEntry, Manifest
from harness.config.derived import lr_at
from harness.config.schema import Config
from harness.control import Control, gather_json
from harness.engines.protocol import Engine, Ranks
from harness.store.errors import StoreError
from harness.store.rundir import checkpoint_folder

RNG = "rng/"
SHOWN = 6


@dataclass(frozen=True)
class Checkpoint:
    step: int
    initial_weights: str
    begins_after: int = 0
    """Step of another run's checkpoint that this run began from; its record begins after it."""
    wrong: tuple[str, ...] = ()
    layout: Mapping[str, Any] | None = None


class Checkpoints:
    """The `ckpt/` folder of one run. Every method is collective over all ranks.

    Args: folder: the run's `ckpt/`. warn: called once, by rank 0.
    """

    def __init__(
        self, folder: Path, config: Config, ranks: Ranks, control: Control, warn: Callable[[str], None] = print
    ) -> None:
        self.folder = folder
        self.config = config
        self.ranks = ranks
        self.control = control
        self.warn = warn
        self.layout = {
            "engine": config.engine.name.name,
            "strategy": config.sharding.strategy.name,
            "outer": config.sharding.outer.name,
            "world_size": config.mesh.world_size,
            "dp_outer": config.mesh.dp_outer,
            "main_params": config.dtype.main_params.name,
        }

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, engine: Engine, step: int, initial_weights: str, begins_after: int = 0, best: Sequence[int] = ()
    ) -> None:
        """Write the state after `step` and drop checkpoints beyond `ckpt.keep` and those of the steps `best`.

        Raises `RuntimeError`: some rank could not write; older ones stay.
        """
        unfinished = folders.path_of(self.folder, step).with_suffix(folders.UNFINISHED)
        self._on_first_rank(f"make {unfinished}", lambda: folders.begin(self.folder, step))
        state = engine.state()
        held = storage.held_of({**self._own(state.tensors, portable=state.portable), **self._rng_state()})
        values = {
            "step": step,
            "layout": self.layout,
            "portable": state.portable,
            "initial_weights": initial_weights,
            "data": data_position(self.config, step),
            "schedule": {"lr": lr_at(self.config, step), "next_step": step + 1},
            "record": {"begins_after": begins_after, "lines": step - begins_after},
        }
        entries = storage.shared_out(_everyone(storage.described(held), self.control))
        told = self._on_every_rank(
            f"write {unfinished}", lambda: storage.write(unfinished, self.ranks.rank, held, entries)
        )

        def publish() -> None:
            files = {storage.file_of(rank): FileEntry(*written) for rank, written in enumerate(told) if written}
            Manifest(entries, files, values).write(unfinished)
            folders.publish(unfinished)
            folders.keep_newest(self.folder, self.config.ckpt.keep, step, best)

        self._on_first_rank(f"publish {unfinished}", publish)

    def _own(self, tensors: Mapping[str, Tensor], *, portable: bool) -> dict[str, Tensor]:
        return dict(tensors) if portable else {f"local/{self.ranks.rank:05d}/{key}": t for key, t in tensors.items()}

    # -- loading -----------------------------------------------------------------------------------------------------

    def load_newest(self, engine: Engine) -> Checkpoint | None:
        """Resume from the newest intact checkpoint; without any, begin from `ckpt.load`, or return None.

        Raises `StoreError`: all checkpoints are damaged, or `ckpt.load` has no intact one. `ValueError`: it does not
        fit this run; nothing was loaded.
        """
        found = self._load_from(self.folder, engine)
        if found is None and self.config.ckpt.load is not None:
            source = Path(self.config.ckpt.load)
            single = source.name.startswith(folders.PREFIX)
            folder = source.parent if single else checkpoint_folder(source)
            found = self._load_from(folder, engine, source if single else None)
            if found is None:
                raise StoreError(f"ckpt.load={source} holds no checkpoint: name a run, or one of its step-* folders")
        return found

    def _load_from(self, folder: Path, engine: Engine, only: Path | None = None) -> Checkpoint | None:
        steps = folders.steps(folder) if self.ranks.rank == 0 else []
        if only is not None and self.ranks.rank == 0:
            steps = [step for step in steps if folders.path_of(folder, step) == only]
        passed: list[str] = []
        while True:
            # Rank 0 proposes, so that all ranks try the same one whatever their view of a shared disk.
            step = self.control.gather([steps.pop() if steps else -1])[0][0]
            if step < 0:
                if passed:
                    raise StoreError(self._none_intact(folder, passed, only))
                return None
            path = folders.path_of(folder, step)
            manifest, wrong = self._verified(path)
            if manifest is None or wrong:
                passed.append(f"{path.name}: {wrong or 'another rank finds it damaged; see its log'}")
                continue
            if passed and self.ranks.rank == 0:
                self.warn(f"in {folder}, damaged and passed over: {'; '.join(passed)}. {path.name} is intact and used")
            return self._take(path, manifest, engine)

    def _none_intact(self, folder: Path, passed: Sequence[str], only: Path | None) -> str:
        """Damage of each, and a way out, as rank 0 finds it, which alone reads what else lies there."""
        source, bad, problem = self.config.ckpt.load, "; ".join(passed), ""
        begins = "begins at step 0" if source is None or folder != self.folder else f"begins from ckpt.load={source}"
        how = shlex.join(["rm", "-r", str(folder)]) if folder == self.folder else "ckpt.load=null"
        if only is None:
            problem = f"no checkpoint in {folder} is intact: {bad}. {how} {begins}"
        elif self.ranks.rank == 0:
            found = folders.newest_intact(folder)
            way = f"ckpt.load={found} is intact" if found else f"No other in {folder} is intact; {how} {begins}"
            problem = f"ckpt.load={only} is damaged: {bad}. {way}"
        return str(_everyone(problem, self.control)[0])

    def _verified(self, path: Path) -> tuple[Manifest | None, str]:
        wrong, manifest = "", None
        try:
            manifest = Manifest.read(path)
            mine = sorted(manifest.files)[self.ranks.rank :: self.ranks.world_size]
            wrong = "; ".join(folders.damage(path, manifest, mine))
        except Damaged as error:
            wrong = str(error)
        found = _everyone(wrong, self.control)
        return manifest, "; ".join(dict.fromkeys(each for each in found if each))

    def _take(self, path: Path, manifest: Manifest, engine: Engine) -> Checkpoint:
        engine.expect(
            {k: torch.empty(e.shape, dtype=storage.dtype_of(e), device="meta") for k, e in manifest.tensors.items()}
        )
        values, state = manifest.values, engine.state()
        if not (values["portable"] and state.portable) and values["layout"] != self.layout:
            raise StoreError(
                f"{path} was written as {values['layout']}, this run is {self.layout}: only native, fsdp2, ddp and"
                " single take what another layout wrote; remove ckpt/ to start from step 0"
            )
        self._check_position(path, values)
        tensors = self._own(state.tensors, portable=state.portable)
        skipped = self._check_names(path, manifest, tensors)
        wanted = {key: tensor for key, tensor in tensors.items() if key not in skipped}
        self._read(path, manifest, wanted, storage.load_into)
        state.adopt()
        self._restore_rng(path, manifest)
        wrong = self._differing(path, manifest, engine, skipped)
        return Checkpoint(
            step=values["step"],
            initial_weights=values["initial_weights"],
            begins_after=values["record"]["begins_after"] if path.parent == self.folder else values["step"],
            wrong=wrong,
            layout=values["layout"],
        )

    def _check_position(self, path: Path, values: Mapping[str, Any]) -> None:
        if values["step"] > self.config.train.steps:
            raise ValueError(
                f"{path} is of step {values['step']}, and train.steps={self.config.train.steps} counts from the"
                " beginning of training; nothing was loaded"
            )
        here = data_position(self.config, values["step"])
        there = values["data"].items()
        faults = [
            f"data.{key} was {value}, here it is {here.get(key)}" for key, value in there if here.get(key) != value
        ]
        if faults and self.config.ckpt.strict:
            raise ValueError(
                f"{path} does not fit this run, nothing was loaded: {'; '.join(faults)}; the position in the data would"
                " be another one. ckpt.strict=false takes it all the same"
            )

    def _check_names(self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> set[str]:
        """Keys to leave out; empty if strict.

        Raises `ValueError` on all ranks: missing, unexpected or misshapen keys; nothing was loaded.
        """
        mine = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        wanted: dict[str, tuple[int, ...]] = {}
        for theirs in _everyone(mine, self.control):
            wanted |= {key: tuple(shape) for key, shape in theirs.items()}
        held = {key: entry for key, entry in manifest.tensors.items() if not key.startswith(RNG)}
        keys = sorted(wanted.keys() | held.keys(), key=lambda key: (not key.startswith("weights/"), key))
        shapes = [key for key in keys if key in wanted and key in held and held[key].shape != wanted[key]]
        wrong = [f"missing {key}" for key in keys if key not in held and 0 not in wanted[key]]
        wrong += [f"unexpected {key}" for key in keys if key not in wanted]
        wrong += [f"{key} is {list(held[key].shape)}, here {list(wanted[key])}" for key in shapes]
        if wrong and self.config.ckpt.strict:
            shown = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
            raise ValueError(
                f"{path} does not fit this run, nothing was loaded "
                f"({len(wrong)} difference{'s' * (len(wrong) > 1)}): {shown}. Is it another model's, or another "
                "optimizer's? ckpt.strict=false loads what fits and leaves the rest as it is"
            )
        if wrong and self.ranks.rank == 0:
            do = "names do" if len(wrong) > 1 else "name does"
            self.warn(f"ckpt.strict=false: of {path}, {len(wrong)} {do} not fit: {'; '.join(wrong[:SHOWN])}")
        return {key for key in mine if key not in held} | set(shapes)

    def _read(self, path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], deliver: storage.Deliver) -> None:
        self._on_every_rank(f"read {path}", lambda: storage.read(path, manifest, tensors, deliver))

    def _differing(self, path: Path, manifest: Manifest, engine: Engine, skipped: set[str]) -> tuple[str, ...]:
        """Keys of tensors that differ, bit for bit, from the checkpoint after the documented cast."""
        state, wrong = engine.state(), set[str]()

        def compare(key: str, stored: Tensor, target: Tensor) -> None:
            if not storage.is_loaded(stored, target):
                wrong.add(key)

        tensors = self._own(state.tensors, portable=state.portable)
        self._read(path, manifest, {key: t for key, t in tensors.items() if key not in skipped}, compare)
        return tuple(sorted(set().union(*_everyone(sorted(wrong), self.control))))

    # -- random numbers ----------------------------------------------------------------------------------------------

    def _rng_state(self) -> dict[str, Tensor]:
        prefix = f"{RNG}{self.ranks.rank:05d}/"
        state = {f"{prefix}cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            state[f"{prefix}cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        return state

    def _restore_rng(self, path: Path, manifest: Manifest) -> None:
        wanted = {key: torch.empty_like(held) for key, held in self._rng_state().items() if key in manifest.tensors}
        self._read(path, manifest, wanted, storage.load_into)
        for key, state in wanted.items():
            if key.endswith("/cuda"):
                torch.cuda.set_rng_state(state, self.ranks.device)
            else:
                torch.set_rng_state(state)

    def _on_first_rank(self, what: str, act: Callable[[], object]) -> None:
        self._on_every_rank(what, act if self.ranks.rank == 0 else lambda: None)

    def _on_every_rank(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """JSON results of all ranks, by rank; fails on all ranks if it failed on any, so that none waits in the next
        exchange.

        Raises `RuntimeError`: the first such rank's reason.
        """
        fault, found = None, None
        try:
            found = act()
        except Exception as error:
            fault = error
        told = _everyone([found, None if fault is None else str(fault)], self.control)
        for rank, (_, reason) in enumerate(told):
            if reason is not None:
                raise RuntimeError(f"checkpoint: rank {rank} cannot {what}: {reason}") from fault
        return [found for found, _ in told]


def data_position(config: Config, step: int) -> dict[str, Any]:
    """Position in the data: sequences used by all ranks, and how they are drawn."""
    return {
        "order_seed": config.data.order_seed,
        "sequences_done": step * config.train.global_batch_size,
        "seq_len": config.data.seq_len,
    }


def _everyone(value: Any, control: Control) -> list[Any]:
    """JSON value of every rank, by rank. Collective over all ranks."""
    with control.meter.paused():
        return gather_json(value, control.group)
