"""Models of transformers, peft and timm with random weights: nothing is fetched; each gives a loss for data of its own.

Imports are inside functions: the libraries are the optional dependency `models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    out: Any = model(images)
    logits = out if isinstance(out, Tensor) else out.logits
    return nn.functional.cross_entropy(logits, torch.tensor([seed % 3, (seed + 1) % 3]))


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **sizes, **more))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, **quiet))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **sizes, **quiet))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16}
    drops = {"dropout": 0.0, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, **sizes, **heads, **drops))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    config = MixtralConfig(vocab_size=WORDS, **sizes, **experts)
    config._experts_implementation = "eager"  # the others do not take fp64
    return MixtralForCausalLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes))


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def _checkpointed_lora() -> nn.Module:
    """Adapters that are not zero, in blocks that reentrant checkpointing recomputes."""
    model = _lora()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def _timm_vit() -> nn.Module:
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes)
    return model


def _timm_convnext() -> nn.Module:
    import timm

    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    model: nn.Module = timm.create_model("convnext_tiny", num_classes=3, **sizes)
    return model


def _path(family: str, *names: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{family}.modeling_{family}.{name}" for name in names)


MODELS = {
    "llama": Foreign("transformers", _llama, _path("llama", "LlamaDecoderLayer"), _causal),
    "llama, tied": Foreign(
        "transformers", lambda: _llama(tie_word_embeddings=True), _path("llama", "LlamaDecoderLayer"), _causal
    ),
    "gpt2": Foreign("transformers", _gpt2, _path("gpt2", "GPT2Block"), _causal),
    "bert": Foreign("transformers", _bert, _path("bert", "BertLayer"), _causal),
    "t5": Foreign("transformers", _t5, _path("t5", "T5Block"), _causal),
    "bart, layers dropped": Foreign(
        "transformers", _bart, _path("bart", "BartEncoderLayer", "BartDecoderLayer"), _causal
    ),
    "mixtral": Foreign("transformers", _mixtral, _path("mixtral", "MixtralDecoderLayer"), _causal),
    "vit": Foreign("transformers", _vit, _path("vit", "ViTLayer"), _images),
    "llama with LoRA, reentrant": Foreign("peft", _checkpointed_lora, _path("llama", "LlamaDecoderLayer"), _causal),
    "llama with LoRA": Foreign("peft", _lora, _path("llama", "LlamaDecoderLayer"), _causal),
    "timm's vit": Foreign("timm", _timm_vit, ("timm.models.vision_transformer.Block",), _images),
    "timm's convnext": Foreign("timm", _timm_convnext, ("timm.models.convnext.ConvNeXtBlock",), _images),
}
