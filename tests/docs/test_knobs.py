"""The guides say what the source says, and the knobs' facts cover every knob exactly."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from harness.config.doc import guide, settings
from harness.config.engine_doc import Knob, arguments, engine_guide, options
from harness.fsdp import MixedPrecisionPolicy, Options, ShardedModel, fully_shard_model
from harness.fsdp.arguments import ARGUMENTS, DTYPES
from harness.fsdp.megatron_arguments import UNBUILT
from harness.fsdp.options import OPTIONS
from harness.fsdp.vocabulary import Dtype, OuterStrategy, Strategy

DOCS = Path(__file__).parents[2] / "docs"


def every() -> list[Knob]:
    return [*options(), *arguments(ARGUMENTS), *arguments(DTYPES)]


def test_the_guide_to_knobs_is_not_out_of_date() -> None:
    assert (DOCS / "engine_knobs.md").read_text() == engine_guide(), (
        "run: python -m harness.config.engine_doc > docs/engine_knobs.md"
    )


def test_the_guide_to_settings_is_not_out_of_date() -> None:
    assert (DOCS / "configuration.md").read_text() == guide(), (
        "run: python -m harness.config.doc > docs/configuration.md"
    )


def named(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_argument_of_both_entries_has_a_row_and_every_row_an_argument() -> None:
    rows = arguments(ARGUMENTS)
    plain, direct = {row.plain for row in rows} - {""}, {row.direct for row in rows} - {""}
    renamed = {row.plain for row in options() if row.plain != row.direct}
    assert plain == named(fully_shard_model) - {"others"} - renamed
    assert direct == named(ShardedModel.__init__) - {"self", "chosen"}


def defaults(function: object) -> dict[str, str]:
    """Argument -> its default as a row writes it, "" where there is none."""
    found = {}
    for name, each in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        bare = "" if each.default is inspect.Parameter.empty else each.default
        found[name] = str(getattr(bare, "name", bare))
    return found


def test_defaults_of_arguments_are_those_of_both_entries() -> None:
    plain, direct, policy = map(defaults, (fully_shard_model, ShardedModel.__init__, MixedPrecisionPolicy.__init__))
    plain["zero_dp_strategy"] = Strategy.parse(int(plain["zero_dp_strategy"]), "").name
    plain["outer_dp_sharding_strategy"] = OuterStrategy.parse(int(plain["outer_dp_sharding_strategy"]), "").name
    for row in arguments(ARGUMENTS):
        assert plain[row.plain] == row.default, row.plain
        assert not row.direct or direct[row.direct] == row.default, row.direct
    for row in arguments(DTYPES):
        assert policy[row.plain] == row.default, row.plain


def test_what_arguments_take_is_said() -> None:
    """None and the bools are said exactly where the annotation has them."""
    hints = typing.get_type_hints(fully_shard_model) | typing.get_type_hints(MixedPrecisionPolicy)
    for row in [*arguments(ARGUMENTS), *arguments(DTYPES)]:
        kind = hints[row.plain]
        assert ("or None" in row.takes) == (type(None) in typing.get_args(kind)), row.plain
        assert (row.takes == "True, False") == (kind is bool), row.plain
    assert all(f"torch.{dtype.torch_name}" in row.takes for row in arguments(DTYPES)[:-1] for dtype in Dtype)
    assert "required" in next(line for line in engine_guide().splitlines() if line.startswith("| `module`"))


def test_every_option_and_dtype_has_a_row() -> None:
    assert [row.direct for row in options()] == [field.name for field in fields(Options)] == list(OPTIONS)
    assert [row.plain for row in arguments(DTYPES)] == [field.name for field in fields(MixedPrecisionPolicy)]
    assert all(row.does for row in options())


def test_defaults_are_those_of_the_class() -> None:
    for row in options():
        value = getattr(Options(), row.direct)
        assert row.default == str(getattr(value, "name", value)), row.direct


@pytest.mark.parametrize("row", every(), ids=lambda row: row.plain)
def test_a_row_is_complete_and_its_setting_exists(row: Knob) -> None:
    assert row.takes
    for text in (row.does, row.costs, row.use):
        assert text.endswith("."), text
        assert "|" not in text
    path = row.setting.removeprefix("not ")
    assert path in settings() or not path


def test_every_setting_of_the_engine_s_group_is_a_knob() -> None:
    known = {row.setting for row in every()}
    assert {path for path in settings() if path.startswith("engine.")} - known == {"engine.name", "engine.adapter"}


def test_every_argument_of_the_peer_is_a_knob_or_refused() -> None:
    peer = pytest.importorskip("megatron_fsdp")
    ours = {row.peer for row in every()} - {""}
    theirs = named(peer.fully_shard) - {"optimizer"}
    dtypes = named(peer.MixedPrecisionPolicy)
    assert ours - theirs <= dtypes, "a name the peer does not have"
    assert theirs - ours == set(UNBUILT), "an argument of the peer that is neither a knob nor refused"


def test_the_desk_makes_the_guide_without_torch() -> None:
    code = (
        "import sys; from harness.config import engine_doc; engine_doc.engine_guide(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
