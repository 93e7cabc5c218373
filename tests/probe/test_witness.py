"""What is seen beside an engine: local gradients, their sums, the weights that forwards compute with, and memory that
tensors share."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engines.base import shadow_weights
from harness.probe.witness import SEVERAL, UNSEEN, Seen, Witness, checksum, wrong_weights
from tests.support.spawn import run_ranks


class Twice(nn.Module):
    """A layer used twice, one used once, one that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.once = nn.Linear(3, 1)
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.once(self.frozen(self.shared(self.shared(x))))
        return out


@pytest.fixture
def model() -> Twice:
    torch.manual_seed(0)
    return Twice()


def step(model: nn.Module, witness: Witness, batches: int = 3) -> None:
    with witness:
        for seed in range(batches):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            model(x).pow(2).mean().backward()


def test_local_gradients_add_up_to_what_autograd_accumulated(model: Twice) -> None:
    witness = Witness(Seen(model, 3, torch.float32))
    step(model, witness)
    found = {name: tensor for name, tensor, _ in witness.gradients(None)}
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert list(found) == list(trained)
    for name, param in trained.items():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(found[name], expected.double() / 3, rtol=1e-6, atol=1e-8)
    assert not found["idle.weight"].any()


def test_a_gradient_in_other_strides_is_added_by_element() -> None:
    """A collective takes contiguous memory, and ranks must agree on the order in it."""
    weight = nn.Parameter(torch.ones(2, 3))
    model = nn.Module()
    model.weight = weight
    with Witness(Seen(model, 1, torch.float32)) as witness:
        (weight.t() * torch.arange(6.0).view(3, 2)).sum().backward()
    [(_, tensor, _)] = witness.gradients(None)
    assert tensor.is_contiguous()
    assert torch.equal(tensor, torch.arange(6.0).view(3, 2).t().double())


def two_witnesses(rank: int) -> tuple[list[tuple[str, Tensor, float]], dict[str, Tensor]]:
    """What a rank is told, and the gradients that autograd accumulated on it. The ranks see different data."""
    torch.manual_seed(0)
    model = Twice().double()
    witness = Witness(Seen(model, 2, torch.float64))
    with witness:
        for seed in (rank, rank + 2):
            x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            model(x).pow(2).mean().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return witness.gradients(dist.group.WORLD), grads


def test_the_first_rank_is_told_the_sum_over_ranks() -> None:
    (found, one), (nothing, other) = run_ranks(two_witnesses, 2)
    assert nothing == []
    for name, tensor, terms in found:
        expected = (one[name] + other[name]) / 2 if name in one else torch.zeros_like(tensor)
        torch.testing.assert_close(tensor, expected, rtol=1e-14, atol=1e-16)
        assert terms >= expected.norm().item() / 2  # of four terms; the triangle inequality and Cauchy's


def test_terms_are_the_norms_of_what_was_added(model: Twice) -> None:
    witness = Witness(Seen(model, 1, torch.float32))
    norms = []
    with witness:
        for seed in range(2):
            before = None if model.once.weight.grad is None else model.once.weight.grad.clone()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            model(x).pow(2).mean().backward()
            assert model.once.weight.grad is not None
            norms.append((model.once.weight.grad - (0 if before is None else before)).norm().item())
    terms = {name: norm for name, _, norm in witness.gradients(None)}
    assert terms["once.weight"] == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_the_forward_are_those_of_the_model(model: Twice, dtype: torch.dtype) -> None:
    """Also a cast copy of them."""
    if dtype is torch.bfloat16:
        shadow_weights(model, dtype)
    with Witness(Seen(model, 1, dtype)) as witness:
        for _ in range(3):
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    names = list(witness.checksums)
    assert wrong_weights(names, [witness.kept(model.named_parameters()) + witness.used()]) == []
    assert witness.used()[names.index("idle.weight")] == UNSEEN


def test_weights_that_change_within_a_step_are_named(model: Twice) -> None:
    witness = Witness(Seen(model, 1, torch.float32))
    with witness:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            with torch.no_grad():
                model.once.weight.mul_(2)
    names = list(witness.checksums)
    assert witness.used()[names.index("once.weight")] == SEVERAL
    found = wrong_weights(names, [witness.kept(model.named_parameters()) + witness.used()])
    assert found == [{"rank": 0, "tensor": "once.weight", "what": "computed with several values in one step"}]


def test_ranks_are_held_against_the_first() -> None:
    one, other = checksum(torch.ones(3)), checksum(torch.zeros(3))
    found = wrong_weights(["a", "b"], [[one, one, one, one], [one, other, other, one]])
    assert found == [
        {"rank": 1, "tensor": "a", "what": "computed with other weights than the main ones"},
        {"rank": 1, "tensor": "b", "what": "keeps other main weights than rank 0"},
    ]


def test_a_checksum_leaves_storage_as_it_was() -> None:
    """numpy must not see storage that an engine resizes."""
    tensor = torch.ones(4)
    checksum(tensor)
    tensor.untyped_storage().resize_(0)


def test_a_checksum_is_of_the_values_in_order() -> None:
    rows = torch.arange(6.0).view(2, 3)
    assert checksum(rows) == zlib.crc32(rows.numpy().tobytes())
    assert checksum(rows.t()) == checksum(rows.t().contiguous()) != checksum(rows)
    assert checksum(torch.empty(0)) == 0
