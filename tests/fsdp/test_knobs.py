"""The guide to the engine's knobs says what the source says."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from harness.config.doc import settings
from harness.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from harness.fsdp.megatron import UNBUILT
from harness.fsdp.options import OPTIONS
from harness.fsdp.vocabulary import Dtype, OuterStrategy, Strategy

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Knob:
    """A row of docs/engine_knobs.md; "" where there is none."""

    plain: str
    direct: str
    takes: str
    default: str
    does: str
    costs: str
    use: str
    setting: str
    peer: str


def knob(line: str) -> Knob:
    entry, takes, default, does, costs, use, setting, peer = (cell.strip() for cell in line.strip("|").split(" | "))
    both = [part.strip("`- ") for part in entry.split(" / ")]
    default = "" if default == "required" else default.strip("`")
    return Knob(
        both[0], both[-1], takes, default, does, costs, use, setting.replace("`", "").strip("-"), peer.strip("`-")
    )


def rows(heading: str) -> list[Knob]:
    section = re.search(rf"\n## {heading}\n(.*?)(\n## |\Z)", (DOCS / "engine_knobs.md").read_text(), re.DOTALL)
    assert section is not None
    return [knob(line) for line in section[1].splitlines() if line.startswith("| ") and "| entry |" not in line]


CHOICES, ARGUMENTS, DTYPES = map(rows, ("Options", "Arguments", "Dtypes"))
EVERY = [*CHOICES, *ARGUMENTS, *DTYPES]


def named(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_option_has_its_row() -> None:
    """Name, values, default and setting are those declared."""
    assert [row.direct for row in CHOICES] == list(OPTIONS)
    for row in CHOICES:
        option = OPTIONS[row.direct]
        default = str(getattr(option.default, "name", option.default))
        assert (row.takes, row.default, row.setting) == (option.takes, default, option.setting), row.direct


def test_every_argument_of_both_entries_has_a_row_and_every_row_an_argument() -> None:
    plain, direct = {row.plain for row in ARGUMENTS} - {""}, {row.direct for row in ARGUMENTS} - {""}
    renamed = {row.plain for row in CHOICES if row.plain != row.direct}
    assert plain == named(fully_shard_model) - {"others"} - renamed
    assert direct == named(fully_shard) - {"optimizer", *OPTIONS}
    assert [row.plain for row in DTYPES] == [field.name for field in fields(MixedPrecisionPolicy)]


def defaults(function: object) -> dict[str, str]:
    """Argument -> its default as a row writes it, "" where there is none."""
    found = {}
    for name, each in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        bare = "" if each.default is inspect.Parameter.empty else each.default
        found[name] = str(getattr(bare, "name", bare))
    return found


def test_defaults_of_arguments_are_those_of_both_entries() -> None:
    plain, direct, policy = map(defaults, (fully_shard_model, fully_shard, MixedPrecisionPolicy.__init__))
    plain["zero_dp_strategy"] = Strategy.parse(int(plain["zero_dp_strategy"]), "").name
    plain["outer_dp_sharding_strategy"] = OuterStrategy.parse(int(plain["outer_dp_sharding_strategy"]), "").name
    for row in ARGUMENTS:
        assert plain[row.plain] == row.default, row.plain
        assert not row.direct or direct[row.direct] == row.default, row.direct
    for row in DTYPES:
        assert policy[row.plain] == row.default, row.plain


def test_what_arguments_take_is_said() -> None:
    """None and the bools are said exactly where the annotation has them."""
    hints = typing.get_type_hints(fully_shard_model) | typing.get_type_hints(MixedPrecisionPolicy)
    for row in [*ARGUMENTS, *DTYPES]:
        kind = hints[row.plain]
        assert ("or None" in row.takes) == (type(None) in typing.get_args(kind)), row.plain
        assert (row.takes == "True, False") == (kind is bool), row.plain
    assert all(
        f"torch.{dtype.torch_name}" in row.takes for row in DTYPES if row.takes != "True, False" for dtype in Dtype
    )


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.plain)
def test_a_row_is_complete_and_its_setting_exists(row: Knob) -> None:
    assert row.takes
    assert all(text.endswith(".") for text in (row.does, row.costs, row.use))
    path = row.setting.removeprefix("not ")
    assert path in settings() or not path


def test_every_setting_of_the_engine_s_group_is_a_knob() -> None:
    known = {row.setting for row in EVERY}
    assert {path for path in settings() if path.startswith("engine.")} - known == {"engine.name", "engine.adapter"}


def test_every_argument_of_the_peer_is_a_knob_or_refused() -> None:
    peer = pytest.importorskip("megatron_fsdp")
    ours = {row.peer for row in EVERY} - {""}
    theirs = named(peer.fully_shard) - {"optimizer"}
    dtypes = named(peer.MixedPrecisionPolicy)
    assert ours - theirs <= dtypes, "a name the peer does not have"
    assert theirs - ours == set(UNBUILT), "an argument of the peer that is neither a knob nor refused"
