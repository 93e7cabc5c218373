"""The guides say what the source says, and the knobs' facts cover every knob exactly."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from harness.config.doc import guide, settings
from harness.config.engine_doc import Knob, arguments, engine_guide, options
from harness.fsdp import MixedPrecisionPolicy, Options, ShardedModel, fully_shard_model
from harness.fsdp.arguments import ARGUMENTS, DTYPES
from harness.fsdp.megatron_arguments import UNBUILT
from harness.fsdp.options import OPTIONS

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
