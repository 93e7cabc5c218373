"""From a module to units with storage: who gets which values, and how a module leaves the meta device.

[Note: Meta device] A model too large for one device is built on "meta", without memory. Its values come either from
`initial_value`, by name, or from the modules' own `reset_parameters()`, run module by module in definition order, so
that a random generator gives each the numbers it would have given an ordinary construction. Only one module's
parameters are whole at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.fsdp.comm.mesh import Mesh, Meshes
from harness.fsdp.policy import Dtypes, MixedPrecisionPolicy
from harness.fsdp.runtime.units import Unit, UnitPlan, is_expert
from harness.fsdp.storage.bucket import Bucket, BucketContext, BucketKey, InitialValue
from harness.fsdp.storage.layout import Slot
from harness.fsdp.storage.memory import BucketMemory, placeholder


def build_units(
    plans: Sequence[UnitPlan],
    contexts: Callable[[BucketKey], BucketContext],
    memory: BucketMemory,
    policy: MixedPrecisionPolicy,
    initial: InitialValue | None,
) -> list[Unit]:
    """Give every planned unit its buckets; `initial` None leaves them zero."""
    units = []
    for plan in plans:
        with memory.unit(shares=not plan.is_root):
            buckets = []
            for key, members in plan.buckets.items():
                dtypes = policy.resolve(key.dtype) if key.trainable else Dtypes.frozen(key.dtype)
                buckets.append(Bucket(f"{plan.name}/{key.label}", key, members, dtypes, contexts(key), initial))
        units.append(Unit(plan.name, plan.modules, buckets))
    return units


def values_of_first_rank(module: nn.Module, meshes: Meshes) -> InitialValue:
    """What parameters hold on the first rank that has them; buffers are taken from there at once. *Collective.*"""
    params = dict(module.named_parameters())
    for name, buffer in module.named_buffers():
        value = meshes.dense.everyone.from_first(buffer, f"initial {name}")
        if not torch.equal(value, buffer.to(value.device)):
            buffer.copy_(value)

    def initial(name: str, shape: torch.Size) -> Tensor:
        everyone = meshes.of(expert=is_expert(params[name])).everyone
        return everyone.from_first(params[name], f"initial {name}")

    return initial


def leave_meta(module: nn.Module, device: torch.device, *, has_values: bool) -> None:
    """Give meta parameters a device without memory; the objects stay the same, for optimizers that hold them.

    Raises:
        ValueError: nothing says what their values are to be.
    """
    for name, param in list(module.named_parameters()):
        if not param.is_meta:
            continue
        if device.type == "meta" or not has_values:
            raise ValueError(
                f"parameter {name} is on the meta device: give `device`, and `initial_value` or"
                " init_model_with_meta_device=True"
            )
        real = nn.Parameter(placeholder(param.shape, param.dtype, device), requires_grad=param.requires_grad)
        real.__dict__.update(param.__dict__)  # marks such as `allreduce`
        torch.utils.swap_tensors(param, real)


def reset_by_module(module: nn.Module, buckets: Sequence[Bucket], mesh: Mesh, device: torch.device) -> None:
    """Let each module reset its own parameters, whole for that moment, and keep this rank's part. *Collective.*

    A parameter of several modules keeps what the first of them gave it. Every rank takes the first one's values.

    Raises:
        ValueError: a module with parameters or buffers has no `reset_parameters`.
    """
    homes = {
        id(param): (bucket, slot)
        for bucket in buckets
        for slot, (_, param) in zip(bucket.layout.slots, bucket.params, strict=True)
    }
    done: set[int] = set()
    for path, part in module.named_modules():
        own = [param for param in part._parameters.values() if param is not None]
        hollow = [name for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        if not own and not hollow:
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{path or 'the module'} ({type(part).__name__}) has parameters or buffers of its own and no"
                " reset_parameters(); write one, or give `initial_value`"
            )
        for name in hollow:
            part._buffers[name] = torch.empty_like(part._buffers[name], device=device)
        _reset(reset, own, homes, done, mesh, device)


def _reset(
    reset: Callable[[], None],
    params: Sequence[nn.Parameter],
    homes: dict[int, tuple[Bucket, Slot]],
    done: set[int],
    mesh: Mesh,
    device: torch.device,
) -> None:
    for bucket, _ in (homes[id(param)] for param in params):
        bucket.hand_over()
    held = [param.data for param in params]
    for param in params:
        param.data = torch.empty(param.shape, dtype=param.dtype, device=device)
    reset()
    for param, before in zip(params, held, strict=True):
        value, param.data = param.data, before
        bucket, slot = homes[id(param)]
        if id(param) not in done:
            done.add(id(param))
            bucket.set_value(slot, mesh.everyone.from_first(value, f"initial {slot.spec.name}"))
    for bucket, _ in (homes[id(param)] for param in params):
        bucket.point_at_weights()
        bucket.rest()
        bucket.forget_edits()  # a tied one is reset again: of no effect, yet it counts as written to
