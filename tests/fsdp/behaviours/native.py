"""Our engine, by its entry for plain loops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.behaviours.models import Make
from tests.fsdp.behaviours.subject import Optimize, Subject, meshes


class Native(Subject):
    """`harness.fsdp.fully_shard`."""

    name: ClassVar[str] = "native"

    def _build(self, make: Make, optimize: Optimize) -> None:
        setup = self.setup
        self.module = make() if setup.as_it_is else make().to(setup.compute)
        arguments = dict(setup.options)
        if not setup.overlap:
            arguments["prefetch"] = 0
        self.model, self.optimizer = fully_shard(
            self.module,
            optimize(self.module),
            fsdp_unit_modules=setup.units,
            zero_dp_strategy=setup.strategy,
            mixed_precision_policy=MixedPrecisionPolicy(setup.main_params, setup.main_grads, setup.comm),
            **meshes(setup, tensor_axis=False),
            **arguments,
        )

    def microbatch(self, loss: Callable[[Callable[..., Any]], Tensor], *, last: bool = True) -> Tensor:
        with nullcontext() if last or self.setup.rhythm == "auto" else self.model.no_sync():
            value = loss(self.model)
            value.backward()
        return value.detach()

    def finish(self) -> None:
        self.model.finish_grad_sync()

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return dict(self.model.full_gradients())

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.full_weights())

    def held(self) -> dict[str, int]:
        return {
            slot.spec.name: bucket.layout.local_slice(slot, bucket.cuts.layout_rank).numel
            for bucket in self.model.buckets
            for slot in bucket.layout.slots
        }

    def groups(self) -> list[list[str]]:
        return [[name for name, _ in bucket.params] for bucket in self.model.buckets]

    def has_gradient_storage(self, name: str) -> bool:
        homes = [bucket for bucket in self.model.buckets if name in dict(bucket.params)]
        return any(bucket.gradients is not None for bucket in homes)

    def clip(self, max_norm: float) -> float:
        return float(self.model.clip_grad_norm_(max_norm))

    def gathered(self) -> list[str]:
        with torch._C.DisableTorchFunctionSubclass():  # a parameter that was kept lets nobody look
            return [
                name
                for bucket in self.model.buckets
                for name, param in bucket.params
                if param.untyped_storage().nbytes() >= param.numel() * param.itemsize
            ]

    def state_tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def dcp_state(self) -> dict[str, Any]:
        self._state = self.model.sharded_state()
        return self._state.tensors

    def adopt(self, state: dict[str, Any]) -> None:
        self.model.adopt_state(self._state)

    def save(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.model.local_state().items()}

    def load(self, state: Any) -> None:
        self.model.load_local_state(state)

    def tampered(self, state: Any, *, missing: bool) -> Any:
        key = next(key for key in state if key.startswith("weights/"))
        rest = {name: value for name, value in state.items() if name != key}
        return rest if missing else {**state, "weights/nobody": state[key]}

    def close(self) -> None:
        self.model.close()
