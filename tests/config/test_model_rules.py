"""Settings of a family: what it refuses, and that nothing is refused that it does not read."""

from __future__ import annotations

import pytest

from harness.config.catalog import load_catalog
from harness.config.compose import composed, plain
from harness.config.derived import may_leave_unused
from harness.config.hints import explain_key, explain_option
from harness.config.rules import effect, rules_of, sizes
from harness.config.rules.request import Request
from harness.config.schema import Config
from harness.config.typed import load_config


def asked(*overrides: str) -> tuple[Config, dict[str, str]]:
    """The configuration and the violations of the model's rules, by the knob they name."""
    config = load_config(plain(composed([*overrides])))
    request = Request(config, overrides)
    return config, {
        v.subject.partition("=")[0]: str(v) for rule in rules_of(sizes, effect) for v in rule.apply(request)
    }


@pytest.mark.parametrize(
    ("overrides", "knob", "says"),
    [
        ("model=moe model.experts_per_token=9", "model.experts_per_token", "model.num_experts=9"),
        ("model=odd model.num_heads=3", "model.num_heads", "model.family=odd"),
        ("model=odd model.num_kv_heads=3", "model.num_kv_heads", "model.family=odd"),
        ("model=odd model.rope_theta=1.0", "model.rope_theta", "model.family=odd"),
        ("model=odd model.tie_embeddings=true", "model.tie_embeddings", "model.family=odd"),
        ("model=odd model.num_experts=3", "model.num_experts", "model=moe"),
        ("model=moe model.repeat_unit=true", "model.repeat_unit", "model=odd"),
        ("model=tiny model.repeat_unit=true", "model.repeat_unit", "model=odd"),
        ("model=tiny model.skip_idle=false", "model.skip_idle", "model=moe or model=odd"),
        ("model=moe model.num_heads=5 model.num_kv_heads=1", "model.dim", "model.dim=40"),
        ("model=odd data.seq_len=4096", "data.seq_len", "model.max_seq_len=4096"),
    ],
)
def test_what_a_family_refuses(overrides: str, knob: str, says: str) -> None:
    _, found = asked(*overrides.split())
    assert set(found) == {knob}
    assert says in found[knob]


@pytest.mark.parametrize(
    "overrides",
    [
        "model=odd model.dim=41 model.skip_idle=false model.repeat_unit=true model.activation_checkpointing=true",
        "model=moe model.experts_per_token=8 model.skip_idle=false model.tie_embeddings=true",
        "model=tiny model.family=moe model.num_experts=3",
    ],
)
def test_what_a_family_reads_is_not_refused(overrides: str) -> None:
    assert asked(*overrides.split())[1] == {}


def test_names_used_elsewhere_are_understood() -> None:
    assert "model=moe" in str(explain_option("model", "mixtral"))
    assert "model.experts_per_token" in str(explain_key("top_k"))


def test_every_option_is_clean() -> None:
    for name in load_catalog()["model"]:
        assert asked(f"model={name}")[1] == {}, name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model=tiny", False),
        ("model=odd", True),
        ("model=odd model.skip_idle=false", False),
        ("model=moe", True),
        ("model=moe model.experts_per_token=8", False),
        ("model=moe model.skip_idle=false", False),
    ],
)
def test_what_may_be_left_unused_is_known_without_building(overrides: str, expected: bool) -> None:
    assert may_leave_unused(asked(*overrides.split())[0]) is expected
