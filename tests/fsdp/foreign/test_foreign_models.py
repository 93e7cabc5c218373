"""Models of transformers, peft and timm train under every strategy as on one process; `generate` gives its tokens."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard
from tests.fsdp.foreign.models import MODELS, Foreign
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.full
RANKS, STEPS = 2, 3
WIDE = MixedPrecisionPolicy(main_params_dtype=None)


def built(foreign: Foreign) -> nn.Module:
    torch.manual_seed(0)
    return foreign.build().double().train()


def optimizer_over(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def backward(foreign: Foreign, model: nn.Module, step: int, rank: int, share: float) -> None:
    """Of a rank's loss; what is dropped, a rank drops by its own and the step's numbers."""
    seed = 10 * step + rank
    torch.manual_seed(seed)
    (foreign.loss(model, seed) * share).backward()


def train(rank: int, name: str) -> dict[str, dict[str, Tensor]]:
    """Whole weights after the last step by strategy; on one process, under "" (rank -1)."""
    foreign, found = MODELS[name], {}
    for strategy in STRATEGIES if rank >= 0 else [""]:
        module = built(foreign)
        model, optimizer = module, optimizer_over(module)
        if strategy:
            model, optimizer = fully_shard(
                module,
                optimizer,
                fsdp_unit_modules=foreign.units,
                zero_dp_strategy=strategy,
                mixed_precision_policy=WIDE,
            )
        for step in range(STEPS):
            for each in range(RANKS) if rank < 0 else [rank]:
                backward(foreign, model, step, each, 1 / RANKS if rank < 0 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[strategy] = weights_of(model)
    return found


def weights_of(model: Any) -> dict[str, Tensor]:
    if isinstance(model, ShardedModel):
        found = dict(model.full_weights())
        model.close()
        return found
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def skip_without(package: str) -> None:
    """Skip a test where a library is missing, or does not fit this torch, as torchvision of another build."""
    try:
        import_module(package)
    except Exception as error:
        pytest.skip(f"{package} cannot be imported ({error}): make models")


trained = once(lambda name: run_ranks(train, RANKS, name))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_process(name: str, strategy: str) -> None:
    skip_without(MODELS[name].package)
    right = train(-1, name)[""]
    start = weights_of(built(MODELS[name]))
    moved = [float((right[each] - start[each]).norm()) for each in right]
    for rank in trained(name):
        assert rank[strategy].keys() == right.keys()
        for each, weight in right.items():
            torch.testing.assert_close(rank[strategy][each], weight, rtol=1e-9, atol=1e-9 * max(moved), msg=each)


def generate(rank: int, name: str) -> list[Tensor]:
    """Tokens that every strategy gives, and a module alone."""
    prompt = torch.arange(3, 7)[None] + rank
    found = []
    for strategy in ("", *STRATEGIES):
        model = built(MODELS[name]).eval()
        if strategy:
            model, _ = fully_shard(
                model,
                optimizer_over(model),
                fsdp_unit_modules=MODELS[name].units,
                zero_dp_strategy=strategy,
                mixed_precision_policy=WIDE,
            )
        found.append(model.generate(input_ids=prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False))
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate_gives_the_tokens_of_one_process(name: str) -> None:
    skip_without("transformers")
    for right, *others in run_ranks(generate, RANKS, name):
        assert all(torch.equal(other, right) for other in others)
