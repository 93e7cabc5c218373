"""The decoder against arithmetic written out, its sizes against published ones, its start against its names."""

import math
import resource
import time

import pytest
import torch
from torch import Tensor

from harness.config.derived import parameter_count
from harness.config.schema import Config, ModelConfig
from harness.models.llama import Attention, Block, Embedding, Head, Llama, rotary_tables, rotate
from harness.models.workload import LlamaWorkload, workload_for
from tests.models.families import filled as as_initialised, option
from tests.support.factory import small_config

PUBLISHED = {"gpt_125m": 124e6, "llama_1b": 1.236e9, "llama_8b": 8.03e9, "llama_70b": 70.55e9}
"""Parameters as their publishers state them (GPT-2 small's 124 M stands for its class)."""


def filled(config: Config, dtype: torch.dtype = torch.float64) -> Llama:
    """The decoder with its initial weights, ten times as large so that nothing is nearly linear."""
    model = as_initialised(LlamaWorkload(config), dtype)
    assert isinstance(model, Llama)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
    return model


def batch(config: Config, size: int = 2) -> tuple[Tensor, Tensor]:
    rows = torch.randint(
        config.model.vocab_size, (size, config.data.seq_len + 1), generator=torch.Generator().manual_seed(1)
    )
    return rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_sizes_are_built_on_meta_at_once_and_without_memory(name: str) -> None:
    """140 GB of weights would not go unnoticed; nor would one real tensor the size of a rotary table."""
    config = option(f"model={name}")
    workload = workload_for(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    model = workload.build("meta", torch.bfloat16)
    assert time.process_time() - start < 2.0  # measured: 0.01 to 0.3 s
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024, "the tables in fp64, for a while"
    assert not workload.may_leave_unused
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == parameter_count(config) == pytest.approx(PUBLISHED[name], rel=5e-3)


def test_attention_is_softmax_of_scaled_products_over_the_past() -> None:
    """Grouped queries, causal mask and scale, written out head by head."""
    config = ModelConfig(dim=24, num_heads=6, num_kv_heads=2, max_seq_len=8)
    attention = Attention(config, "cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(generator=generator)
    x_BSD = torch.randn(2, 5, 24, dtype=torch.float64, generator=generator)
    cos, sin = (table[:5] for table in rotary_tables(config, torch.float64, "cpu"))
    q = rotate((x_BSD @ attention.wq.weight.T).view(2, 5, 6, 4), cos, sin)
    k = rotate((x_BSD @ attention.wk.weight.T).view(2, 5, 2, 4), cos, sin)
    v = (x_BSD @ attention.wv.weight.T).view(2, 5, 2, 4)
    expected = torch.zeros(2, 5, 6, 4, dtype=torch.float64)
    for b in range(2):
        for head in range(6):
            for s in range(5):
                shared = head // 3
                scores = torch.stack([q[b, s, head] @ k[b, t, shared] / math.sqrt(4) for t in range(s + 1)])
                for t, weight in enumerate(torch.softmax(scores, 0)):
                    expected[b, s, head] += weight * v[b, t, shared]
    expected = expected.flatten(2) @ attention.wo.weight.T
    torch.testing.assert_close(attention(x_BSD, cos, sin), expected, rtol=1e-12, atol=1e-12)


def test_rotation_is_a_complex_product_and_sees_only_distances() -> None:
    config = ModelConfig(dim=8, num_heads=1, num_kv_heads=1, max_seq_len=16, rope_theta=100.0)
    cos, sin = rotary_tables(config, torch.float64, "cpu")
    x, y = torch.randn(2, 1, 16, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cos, sin)
    for s in (0, 5):
        for pair in range(4):
            angle = s * 100.0 ** (-2 * pair / 8)
            product = complex(x[0, s, 0, pair], x[0, s, 0, pair + 4]) * complex(math.cos(angle), math.sin(angle))
            assert complex(turned[0, s, 0, pair], turned[0, s, 0, pair + 4]) == pytest.approx(product, abs=1e-14)
    same_x, same_y = x[:, :1].expand_as(x), y[:, :1].expand_as(y)
    products = torch.einsum("bshe,bthe->st", rotate(same_x, cos, sin), rotate(same_y, cos, sin))
    torch.testing.assert_close(products[5, 2], products[9, 6], rtol=1e-12, atol=1e-12)


def test_model_is_pre_norm_blocks_of_attention_and_swiglu() -> None:
    """The whole forward from the weights by name, with residuals, gate and norms written out."""
    config = small_config()
    model, (tokens, _) = filled(config), batch(config)
    weights = dict(model.named_parameters())
    cos, sin = (table[: tokens.shape[1]] for table in rotary_tables(config.model, torch.float64, "cpu"))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    x = weights["embedding.weight"][tokens]
    for number, block in enumerate(model.blocks):
        prefix = f"blocks.{number}"
        x = x + block.get_submodule("attention")(norm(x, f"{prefix}.attention_norm.weight"), cos, sin)
        inner = norm(x, f"{prefix}.ffn_norm.weight")
        gate = inner @ weights[f"{prefix}.ffn.w_gate.weight"].T
        up = inner @ weights[f"{prefix}.ffn.w_up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.ffn.w_down.weight"].T
    logits = norm(x, "head.norm.weight") @ weights["head.output.weight"].T
    torch.testing.assert_close(model(tokens), logits, rtol=1e-11, atol=1e-11)


def test_loss_starts_at_chance_and_sees_only_the_past() -> None:
    config = small_config()
    model, (tokens, targets) = filled(config), batch(config)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % config.model.vocab_size
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10], rtol=0, atol=0)
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])
    small = LlamaWorkload(config)
    loss = small.loss(as_initialised(small), (tokens, targets)).item()
    assert loss == pytest.approx(math.log(64), abs=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_units_own_every_parameter_but_a_tied_matrix(tied: bool) -> None:
    config = small_config(model__tie_embeddings=tied)
    workload = LlamaWorkload(config)
    model = workload.build("cpu", torch.float32)
    units = [module for module in model.modules() if isinstance(module, workload.unit_classes)]
    owned = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = [name for name, parameter in model.named_parameters() if id(parameter) not in owned]
    assert rest == (["embedding.weight"] if tied else [])
    assert {type(unit) for unit in units} == ({Block, Head} if tied else {Embedding, Block, Head})


def test_tied_matrix_gets_both_gradients() -> None:
    config = small_config(model__tie_embeddings=True)
    tied, untied = filled(config), filled(small_config())
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            source = "embedding.weight" if name == "head.output.weight" else name
            parameter.copy_(tied.get_parameter(source))
    workload = LlamaWorkload(config)
    for model in (tied, untied):
        workload.loss(model, batch(config)).backward()
    both = untied.embedding.weight.grad + untied.get_parameter("head.output.weight").grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=1e-12, atol=1e-15)


def test_recomputation_keeps_only_block_inputs() -> None:
    """Bytes saved for the backward fall to about one stream a block."""
    saved = {}
    for recompute in (False, True):
        config = small_config(model__activation_checkpointing=recompute, model__num_layers=4)
        model, total = filled(config, torch.float32), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, total=total: total.append(t.numel()) or t, lambda t: t):
            LlamaWorkload(config).loss(model, batch(config))
        saved[recompute] = sum(total)
    assert saved[True] < saved[False] / 4


def test_initial_weights_follow_from_name_and_seed_alone() -> None:
    """Same values from meta, on the CPU, in any order of asking; others for another seed; sizes as configured."""
    config = small_config(model__init_std=0.1, model__num_layers=8)
    workload, other = LlamaWorkload(config), LlamaWorkload(small_config(train__seed=1))
    shape = torch.Size((400, 300))
    value = workload.initial_weight("blocks.0.ffn.w_up.weight", shape)
    assert value.dtype is torch.float32
    torch.manual_seed(99)
    assert torch.equal(value, LlamaWorkload(config).initial_weight("blocks.0.ffn.w_up.weight", shape))
    assert not torch.equal(value, workload.initial_weight("blocks.1.ffn.w_up.weight", shape))
    assert not torch.equal(value, other.initial_weight("blocks.0.ffn.w_up.weight", shape))
    assert value.std().item() == pytest.approx(0.1, rel=0.01)
    residual = workload.initial_weight("blocks.0.attention.wo.weight", shape)
    assert residual.std().item() == pytest.approx(0.1 / math.sqrt(16), rel=0.01)
    assert torch.equal(workload.initial_weight("head.norm.weight", torch.Size((5,))), torch.ones(5))


def test_initial_weights_are_pinned() -> None:
    """A change here makes every old run incomparable to every new one (torch's generator is part of it)."""
    workload = LlamaWorkload(small_config())
    value = workload.initial_weight("embedding.weight", torch.Size((64, 32)))
    assert value.flatten()[:2].tolist() == pytest.approx([0.0236649774, 0.0012145367], rel=1e-5)
