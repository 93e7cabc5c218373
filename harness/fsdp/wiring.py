"""How a model's gradients are summed and in which dtype they travel: chosen when it is built, and again when that dtype
changes between two steps."""

from __future__ import annotations

from dataclasses import fields, replace

from harness.fsdp.comm.gradient_format import Integers
from harness.fsdp.comm.reduction import make_reduction
from harness.fsdp.components import Components
from harness.fsdp.policy import MixedPrecisionPolicy
from harness.fsdp.runtime.bucket_reduction import Reductions
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.vocabulary import Numerics

WIRE = "grad_comm_dtype"
"""The field of a policy that may change after a model was sharded: no buffer that stays has this dtype."""


def make_reductions(numerics: Numerics, integers: Integers | None, bucket: Bucket) -> Reductions:
    """How one bucket's sums are made along each axis.

    Raises:
        ValueError: see `Dtypes.as_integers`.
    """
    mesh = bucket.context.mesh
    dtypes = bucket.dtypes if integers is None else bucket.dtypes.as_integers()
    apart = mesh.has_outer
    inner = make_reduction(mesh.inner, dtypes, numerics, integers, legs_apart=apart)
    if mesh.outer is None or not apart:
        return Reductions(inner)
    return Reductions(inner, make_reduction(mesh.outer, dtypes, numerics, integers))


def with_wire_of(given: MixedPrecisionPolicy, held: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of a sharded model with another wire.

    Raises:
        NotImplementedError: another field is neither the model's nor left at its default.
    """
    usual = MixedPrecisionPolicy()
    for name in (field.name for field in fields(given) if field.name != WIRE):
        value = getattr(given, name)
        if value not in (getattr(usual, name), getattr(held, name)):
            raise NotImplementedError(
                f"{name}={value} cannot take the place of {getattr(held, name)} in a sharded model, whose buffers have"
                f" it: only {WIRE} may change. Give {name} to fully_shard_model"
            )
    return replace(held, grad_comm_dtype=given.grad_comm_dtype)


def set_wire(parts: Components, policy: MixedPrecisionPolicy, numerics: Numerics) -> None:
    """Send gradients from now on as a policy says. No reduction may be under way. *Collective.*

    Raises:
        ValueError: the policy does not fit the model; nothing has changed.
    """
    trainable = [bucket for bucket in parts.buckets if bucket.trainable]
    dtypes = {
        bucket.name: replace(policy.resolve(bucket.key.dtype), compute=bucket.dtypes.compute) for bucket in trainable
    }
    integers = parts.gradients.integers
    for each in dtypes.values() if integers is not None else ():
        each.as_integers()
    for bucket in trainable:
        bucket.send_as(dtypes[bucket.name])
    parts.trainability.policy = policy
    parts.reduce.reductions = {bucket.name: make_reductions(numerics, integers, bucket) for bucket in trainable}
