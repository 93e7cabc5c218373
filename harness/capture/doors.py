"""Doors into programs that own their loop: a callback for each, made where its package is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from harness.capture.run import watch


def transformers_callback(path: str | Path, **options: Any) -> Any:
    """`TrainerCallback` of transformers, for `Trainer(callbacks=[...])`. Args: options: of `watch`."""
    from transformers import TrainerCallback

    return type("Watched", (_Transformers, TrainerCallback), {})(path, options)


def lightning_callback(path: str | Path, **options: Any) -> Any:
    """`Callback` of lightning, for `Trainer(callbacks=[...])`. Args: options: of `watch`."""
    from lightning.pytorch import Callback

    return type("Watched", (_Lightning, Callback), {})(path, options)


class _Transformers:
    """Loss and data are taken from the model's forward: callbacks are given neither."""

    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self._data: Any = None
        self._loss: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.run = watch(given["model"], given["optimizer"], self._path, **self._options)
        self._terms = args.world_size * args.gradient_accumulation_steps
        ended = self.run.guard(self._ended)
        self._handle = given["model"].register_forward_hook(ended, with_kwargs=True)

    def _ended(self, module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
        if not module.training:
            return
        self._data = {key: each for key, each in keywords.items() if isinstance(each, Tensor) and each.ndim}
        self._loss = output.get("loss")
        if self._loss is not None and keywords.get("num_items_in_batch") is not None:
            self._loss = self._loss * self._terms  # it was divided by the tokens of all ranks and microbatches

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.run.step(loss=self._loss, data=self._data)

    on_substep_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._handle.remove()
        self.run.close()


class _Lightning:
    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        self._path, self._options = path, options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.run = watch(trainer.model, trainer.optimizers, self._path, **self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.run.step(loss=None if loss is None else loss * trainer.accumulate_grad_batches, data=batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.close()
