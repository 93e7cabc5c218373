"""NVIDIA's megatron-fsdp as released, through the stand-in for what it asks of CUDA where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.engines.adapters import megatron_on_cpu
from harness.engines.adapters.megatron import Buckets
from harness.engines.protocol import Ranks
from tests.fsdp.behaviours.models import Make
from tests.fsdp.behaviours.subject import NotOffered, Optimize, Subject, meshes


class Megatron(Subject):
    """`megatron_fsdp.fully_shard`. Its own optimizer step at wrapping is part of it; plain SGD does not notice."""

    name: ClassVar[str] = "megatron_fsdp"

    def _build(self, make: Make, optimize: Optimize) -> None:
        megatron_on_cpu.install()
        package = import_module("megatron_fsdp")
        setup = self.setup
        self.module = make() if setup.as_it_is else make().to(setup.compute)
        self.reduced = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer = package.fully_shard(
                self.module,
                optimize(self.module),
                fsdp_unit_modules=list(setup.units) if setup.units is not None else None,
                zero_dp_strategy=setup.strategy,
                device=torch.device("cpu"),
                mixed_precision_policy=package.MixedPrecisionPolicy(
                    main_params_dtype=setup.main_params, main_grads_dtype=setup.main_grads, grad_comm_dtype=setup.comm
                ),
                **({} if setup.rhythm == "auto" else {"sync_model_each_microbatch": False}),
                **({} if setup.overlap else {"overlap_grad_reduce": False, "overlap_param_gather": False}),
                **self._meshes(),
                **setup.options,
            )
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        self.buckets = Buckets(self.model.param_and_grad_buffer, setup.strategy != "no_shard", ranks)
        self.params = dict(self.module.named_parameters())

    def _meshes(self) -> dict[str, Any]:
        arguments = meshes(self.setup, tensor_axis=True)
        if self.setup.outer > 1:
            arguments["hybrid_fsdp_expt_group"] = dist.group.WORLD
            arguments.setdefault("expt_device_mesh", arguments["device_mesh"])
        return arguments

    def microbatch(self, loss: Callable[[Callable[..., Any]], Tensor], *, last: bool = True) -> Tensor:
        rhythm = self.setup.rhythm
        if rhythm == "cycle":
            self.model.is_last_microbatch = last
        with self.model.no_sync() if rhythm == "contexts" and not last else nullcontext():
            value = loss(self.model)
            value.backward()
        self.reduced = rhythm == "auto"
        return value.detach()

    def finish(self) -> None:
        if not self.reduced:
            self.model.finish_grad_sync()
            self.reduced = True

    def update(self) -> None:
        self.finish()
        self.optimizer.step(sync_grad_before_optimizer_step=False)  # a second time, it would take unclipped ones
        self.reduced = False

    def gradients(self) -> dict[str, Tensor]:
        self.finish()
        return dict(self.buckets.gather(lambda group: group.main_grad_buffer, self.params))

    def weights(self) -> dict[str, Tensor]:
        if self.setup.strategy == "no_shard":
            return {name: _local(weight).clone() for name, weight in self._distributed().items()}
        return dict(self.buckets.gather(lambda it: it.main_weight_buffer or it.model_weight_buffer, self.params))

    def _distributed(self) -> dict[str, Tensor]:
        self.model._replace_param_with_distributed_if_needed()
        return dict(self.module.named_parameters())

    def held(self) -> dict[str, int]:
        return {name: _local(weight).numel() for name, weight in self._distributed().items()}

    def groups(self) -> list[list[str]]:
        names = self.model.param_and_grad_buffer.param_to_name
        return [[names[param] for param in group.params] for group in self.buckets.groups]

    def has_gradient_storage(self, name: str) -> bool:
        number, _ = self.buckets.places[name]
        return self.buckets.groups[number].main_grad_buffer is not None

    def clip(self, max_norm: float) -> float:
        raise NotOffered("the package has no clipping helper; plain loops clip by hand")

    def save(self) -> Any:
        model = {key: _copied(value) for key, value in self.model.state_dict().items()}
        return {"model": model}

    def load(self, state: Any) -> None:
        self.model.state_dict()  # after a forward, parameters are DTensors again only once somebody asks
        self.model.load_state_dict(state["model"])

    def tampered(self, state: Any, *, missing: bool) -> Any:
        model = dict(state["model"])
        key = next(iter(model))
        if missing:
            del model[key]
        else:
            model["nobody"] = model[key]
        return {"model": model}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _local(tensor: Tensor) -> Tensor:
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()
