"""Models of transformers, peft and timm train under every strategy as on one process; `generate` gives its tokens.

accelerate leaves a sharded model as it is; its loop and Hugging Face's Trainer train it as on one process. Weights are
random, nothing is fetched, and imports are inside functions: the libraries are the optional dependency `models`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORDS = 32


@dataclass(frozen=True)
class Foreign:
    """package: that has to be there. build: the model. units: classes, as dotted paths. loss: for a seed."""

    package: str
    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    loss: Callable[[nn.Module, int], Tensor]


def _tokens(seed: int, rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def _causal(model: nn.Module, seed: int) -> Tensor:
    tokens = _tokens(seed)
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _images(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    return nn.functional.cross_entropy(model(images), torch.tensor([seed % 3, (seed + 1) % 3]))


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **sizes, **more))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, **quiet))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=WORDS, **sizes, **experts)
    config._experts_implementation = "eager"  # the others do not take fp64
    return MixtralForCausalLM(config)


def _lora() -> nn.Module:
    """Adapters that are not zero, in blocks that reentrant checkpointing recomputes."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def _timm_convnext() -> nn.Module:
    import timm

    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    model: nn.Module = timm.create_model("convnext_tiny", num_classes=3, **sizes)
    return model


def _path(family: str, name: str) -> tuple[str]:
    return (f"transformers.models.{family}.modeling_{family}.{name}",)


MODELS = {
    "llama": Foreign("transformers", _llama, _path("llama", "LlamaDecoderLayer"), _causal),
    "llama, tied": Foreign(
        "transformers", lambda: _llama(tie_word_embeddings=True), _path("llama", "LlamaDecoderLayer"), _causal
    ),
    "gpt2": Foreign("transformers", _gpt2, _path("gpt2", "GPT2Block"), _causal),
    "t5": Foreign("transformers", _t5, _path("t5", "T5Block"), _causal),
    "mixtral": Foreign("transformers", _mixtral, _path("mixtral", "MixtralDecoderLayer"), _causal),
    "llama with LoRA, reentrant": Foreign("peft", _lora, _path("llama", "LlamaDecoderLayer"), _causal),
    "timm's convnext": Foreign("timm", _timm_convnext, ("timm.models.convnext.ConvNeXtBlock",), _images),
}


pytestmark = pytest.mark.full
RANKS, ROWS, STEPS = 2, 2, 3
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


# -- their trainers ----------------------------------------------------------------------------------------------------

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
