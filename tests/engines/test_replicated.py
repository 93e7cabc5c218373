"""`single`, to which the conformance suite holds all engines, against arithmetic written out; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.config.schema import Config, Dtype
from harness.data.loader import Loader
from harness.engines import optim
from harness.engines.protocol import Engine, Microbatch, engine_class
from harness.models.workload import LlamaWorkload
from tests.support.factory import ranks_of, small_config, with_dtypes

LR = 1e-2


def build(config: Config, rank: int = 0) -> Engine:
    return engine_class(config.engine.name)(LlamaWorkload(config), config, ranks_of(config, rank))


def microbatches(config: Config, step: int, rank: int = 0) -> list[Microbatch]:
    batch = Loader(config, rank).batch(step)
    return [Microbatch(*(torch.from_numpy(rows) for rows in microbatch)) for microbatch in batch]


def accumulate(engine: Engine, config: Config, step: int, rank: int = 0) -> list[float]:
    parts = microbatches(config, step, rank)
    return [engine.forward_backward(part, last=part is parts[-1]).item() for part in parts]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative error of a tensor."""
    assert list(a) == list(b), "names, in model order"
    return max(((a[name].double() - b[name].double()).norm() / b[name].double().norm()).item() for name in a)


def test_single_is_the_mean_over_the_global_batch() -> None:
    """In fp64 the engine equals one backward of one loss over all sequences at once, and a hand-written AdamW."""
    config = with_dtypes(small_config(optimizer__clip_norm=0.01), Dtype.fp64, Dtype.fp64)
    engine = build(config)
    losses = accumulate(engine, config, step=1)

    workload = LlamaWorkload(config)
    model = workload.build("cpu", torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(workload.initial_weight(name, parameter.shape))
    whole = Microbatch(*(torch.cat(parts) for parts in zip(*microbatches(config, 1), strict=True)))
    loss = workload.loss(model, whole)
    loss.backward()
    assert sum(losses) / 4 == pytest.approx(loss.item(), rel=1e-14)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert distance(dict(engine.named_gradients()), expected) < 1e-13

    norm = engine.step(LR)
    by_hand = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    assert norm == pytest.approx(by_hand, rel=1e-13)
    scale = 0.01 / (by_hand + 1e-6)
    for name, weight in engine.named_weights():
        before, gradient = workload.initial_weight(name, weight.shape).double(), expected[name] * scale
        decay = 0.1 if weight.ndim > 1 else 0.0
        # First AdamW step: bias correction makes both moments the gradient itself.
        after = before * (1 - LR * decay) - LR * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(weight, after, rtol=1e-12, atol=1e-12)


def test_bf16_gradients_accumulate_in_fp32() -> None:
    """Each microbatch's gradient is a bf16 number; their sum is not rounded to bf16 again."""
    config = with_dtypes(small_config(), Dtype.bf16, Dtype.fp32)
    parts = []
    for part in microbatches(config, 1):
        engine = build(config)
        engine.forward_backward(part, last=True)
        parts.append(dict(engine.named_gradients()))
    assert all(torch.equal(grad, grad.bfloat16().float()) for grad in parts[0].values())
    engine = build(config)
    accumulate(engine, config, 1)
    for name, gradient in engine.named_gradients():
        total = torch.zeros_like(gradient)
        for part in parts:
            total += part[name]
        assert torch.equal(gradient, total / len(parts))
        assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_clip_coefficient_is_torchs(norm: float, clip: float | None) -> None:
    expected = (
        1.0 if clip is None else torch.clamp(torch.tensor(clip, dtype=torch.float64) / (norm + 1e-6), max=1.0).item()
    )
    assert optim.clip_coefficient(norm, clip) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_accounted_bytes_are_what_the_formula_says() -> None:
    config = with_dtypes(small_config(), Dtype.bf16, Dtype.fp32)
    elements = sum(weight.numel() for _, weight in build(config).named_weights())
    tensors = len(list(build(config).named_weights()))
    assert build(config).accounted_bytes() == {
        "compute_weights": 2 * elements,
        "main_weights": 4 * elements,
        "main_grads": 4 * elements,
        "optimizer": 8 * elements + 4 * tensors,
        "padding": 0,
        "buffers": 2 * 32 * 4 * 4,
    }
