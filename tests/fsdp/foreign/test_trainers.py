"""accelerate leaves a sharded model as it is; its loop and Hugging Face's Trainer train it as on one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from harness.fsdp import fully_shard
from tests.fsdp.foreign.models import MODELS, WORDS
from tests.fsdp.foreign.test_foreign_models import WIDE, built, optimizer_over, skip_without, weights_of
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.full
RANKS, ROWS, STEPS = 2, 2, 3
MICROBATCHES = 4
"""Of a step, over all ranks."""
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def tokens() -> list[Tensor]:
    count = ROWS * MICROBATCHES * STEPS
    return [*torch.randint(3, WORDS, (count, 6), generator=torch.Generator().manual_seed(0))]


def sharded(rank: int, strategy: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer, as a launcher's environment has them; `strategy` "" is one process."""
    module = built(MODELS["llama"])
    optimizer = optimizer_over(module)
    if not strategy:
        return module, optimizer
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    units = MODELS["llama"].units
    return fully_shard(
        module, optimizer, fsdp_unit_modules=units, zero_dp_strategy=strategy, mixed_precision_policy=WIDE
    )


def by_accelerate(rank: int, strategy: str) -> dict[str, Tensor]:
    from accelerate import Accelerator

    model, optimizer = sharded(rank, strategy)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES // (RANKS if strategy else 1))
    loader = torch.utils.data.DataLoader(tokens(), batch_size=ROWS)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert prepared is model
    assert accelerator.unwrap_model(model) is model
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def by_trainer(rank: int, strategy: str, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and losses that were logged; weights are written by `save_pretrained`."""
    from transformers import Trainer, TrainingArguments

    model, optimizer = sharded(rank, strategy)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICROBATCHES // (RANKS if strategy else 1),
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": each, "labels": each} for each in tokens()]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.model_wrapped is model
    if strategy and (whole := get_model_state_dict(model, options=WHOLE)):  # on rank 0
        model.save_pretrained(folder, state_dict=whole)
    return weights_of(model), [line["loss"] for line in trainer.state.log_history if "loss" in line]


def same(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, weight in right.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9, msg=name)


alone = once(lambda: run_ranks(by_accelerate, 1, "", apart=True)[0])
trained_alone = once(lambda folder: run_ranks(by_trainer, 1, "", folder, apart=True)[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_accelerate_trains_a_sharded_model(strategy: str) -> None:
    skip_without("accelerate")
    for found in run_ranks(by_accelerate, RANKS, strategy):
        same(found, alone())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trainer_trains_a_sharded_model_and_its_weights_are_saved(strategy: str, tmp_path: Path) -> None:
    skip_without("accelerate")
    skip_without("transformers")
    right, losses = trained_alone(tmp_path)
    for found, logged in run_ranks(by_trainer, RANKS, strategy, tmp_path):
        same(found, right)
        assert logged == [] or logged == pytest.approx(losses, rel=1e-6)
    read = type(built(MODELS["llama"])).from_pretrained(tmp_path, dtype=torch.float64)
    same({name: value.detach() for name, value in read.state_dict().items()}, right)
