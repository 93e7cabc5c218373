"""An engine of one's own, whole: every rank keeps all weights and steps a part of them (ZeRO-1).

    python run.py engine=ext engine.adapter=tests.engines.adapter:Adapter sharding=optim
    python -m pytest tests/engines/conformance --engine ext --adapter tests.engines.adapter:Adapter

The weights of one parameter group lie one after the other in a flat buffer, padded to a multiple of the ranks. A
microbatch adds its gradients to a buffer of the same shape; the last one reduces it. `step` updates this rank's part
of the main weights, gathers the parts of all ranks, and copies them into the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.config.capabilities import Capabilities
from harness.config.derived import global_microbatches
from harness.config.schema import Config, Strategy
from harness.engines import optim
from harness.engines.protocol import TORCH_DTYPES, Engine, Microbatch, Ranks, State, Workload
from harness.fsdp import Observer, create_state


class Flat:
    """The trainable weights that share a weight decay, end to end."""

    def __init__(self, params: Mapping[str, nn.Parameter], dtype: torch.dtype, ranks: Ranks) -> None:
        self.params = dict(params)
        self.numel = sum(param.numel() for param in params.values())
        part = -(-self.numel // ranks.world_size)
        self.weights = torch.zeros(part * ranks.world_size, dtype=dtype, device=ranks.device)
        self.gradients = torch.zeros_like(self.weights)
        self.mine = slice(part * ranks.rank, part * (ranks.rank + 1))
        self.main = self.weights[self.mine].clone().requires_grad_()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The pieces of a flat buffer, by parameter name, in the parameters' shapes."""
        pieces = flat[: self.numel].split([param.numel() for param in self.params.values()])
        return {name: piece.view(param.shape) for (name, param), piece in zip(self.params.items(), pieces, strict=True)}

    def publish(self) -> None:
        """Collect the main weights of all ranks and compute with them from now on."""
        parts = list(self.weights.chunk(dist.get_world_size()))
        with Observer.announce("all_gather", "main weights"), Observer.waiting():  # for the record: bytes, exposed time
            dist.all_gather(parts, self.main.detach())
        for name, view in self.views(self.weights).items():
            self.params[name].data.copy_(view)


class Adapter(Engine):
    """ZeRO-1 over the default process group."""

    capabilities = Capabilities(
        strategies=(Strategy.optim,),
        equal_dtypes=(("main_grads", "main_params"), ("grad_comm", "main_grads")),
    )

    def __init__(self, workload: Workload, config: Config, ranks: Ranks) -> None:
        self.workload, self.config, self.ranks = workload, config, ranks
        self.main_dtype = TORCH_DTYPES[config.dtype.main_params]
        self.model = workload.build(ranks.device, TORCH_DTYPES[config.dtype.compute])
        self.params = dict(self.model.named_parameters())  # the model's own names and order; a tied weight once
        for name, param in self.params.items():
            param.data.copy_(workload.initial_weight(name, param.shape))
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        groups: dict[bool, dict[str, nn.Parameter]] = {True: {}, False: {}}
        for name, param in trained.items():
            groups[workload.decays(name, param.shape)][name] = param
        self.flats = {decays: Flat(params, self.main_dtype, ranks) for decays, params in groups.items() if params}
        for flat in self.flats.values():
            for name, view in flat.views(flat.weights).items():
                view.copy_(workload.initial_weight(name, view.shape))  # not from the module: it may be bf16
            flat.main.data.copy_(flat.weights[flat.mine])
        self.optimizer = optim.make_optimizer(
            config.optimizer, [optim.Group([flat.main], decays) for decays, flat in self.flats.items()]
        )
        create_state(self.optimizer)

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        """Add one microbatch's gradients in the main dtype; the last one makes them the mean over all microbatches."""
        loss = self.workload.loss(self.model, batch)
        loss.backward()
        for flat in self.flats.values():
            for name, view in flat.views(flat.gradients).items():
                gradient = flat.params[name].grad
                if gradient is not None:  # no microbatch needs every weight
                    view.add_(gradient)
                flat.params[name].grad = None
            if last:
                with Observer.announce("all_reduce", "gradients"), Observer.waiting():
                    dist.all_reduce(flat.gradients)
                flat.gradients.div_(global_microbatches(self.config))
        return loss.detach()

    def step(self, lr: float) -> float:
        """Every rank has the whole gradient, so every rank finds the same norm."""
        norm = optim.euclidean_norm([flat.gradients for flat in self.flats.values()], self.ranks.device)
        coefficient = optim.clip_coefficient(norm, self.config.optimizer.clip_norm)
        for flat in self.flats.values():
            flat.main.grad = flat.gradients[flat.mine] * coefficient
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()
        for flat in self.flats.values():
            flat.main.grad = None
            flat.gradients.zero_()
            flat.publish()
        return norm

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Copies, by name, in the model's order."""
        found = {name: view for flat in self.flats.values() for name, view in flat.views(flat.gradients).items()}
        for name in self.params:
            if name in found:
                yield name, found[name].detach().to("cpu", copy=True)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of the main weights; a frozen weight has no other copy than the module's."""
        found = {name: view for flat in self.flats.values() for name, view in flat.views(flat.weights).items()}
        for name, param in self.params.items():
            yield name, found.get(name, param).detach().to("cpu", self.main_dtype, copy=True)

    def state(self) -> State:
        """This rank's part of the main weights and of the optimizer's state."""
        names = {flat.main: f"decay={decays}" for decays, flat in self.flats.items()}
        weights = {f"weights/{name}": main.detach() for main, name in names.items()}
        moments = optim.optimizer_state(self.optimizer, names)
        tensors = weights | {f"optimizer/{key}": value for key, value in moments.items()}
        return State(tensors, self.publish, portable=False)

    def publish(self) -> None:
        for flat in self.flats.values():
            flat.publish()

    def accounted_bytes(self) -> dict[str, int]:
        """What stays on this rank between steps; `publish` keeps the whole main weights beside this rank's part."""
        padding = sum(2 * (flat.weights.numel() - flat.numel) for flat in self.flats.values())
        whole = sum(flat.numel for flat in self.flats.values())
        return {
            "compute_weights": _bytes(self.model.parameters()),
            "main_weights": whole * self.main_dtype.itemsize + _bytes(flat.main for flat in self.flats.values()),
            "main_grads": whole * self.main_dtype.itemsize,
            "optimizer": _bytes(t for key, t in self.state().tensors.items() if key.startswith("optimizer/")),
            "padding": padding * self.main_dtype.itemsize,
            "buffers": _bytes(self.model.buffers()),
        }


def _bytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
