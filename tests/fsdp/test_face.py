"""The engine's face: every option is a keyword that `inspect` sees and a row of the guide to knobs."""

from __future__ import annotations

import ast
import builtins
import inspect
import pydoc
import re
import subprocess
import sys
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from torch import nn

import harness.fsdp
from harness.config.doc import settings
from harness.fsdp import (
    MixedPrecisionPolicy,
    Options,
    fully_shard,
    fully_shard_model,
    megatron,
    sharding,
)
from harness.fsdp.megatron import UNBUILT
from harness.fsdp.options import OPTIONS, Dtype, OuterStrategy, Strategy
from tests.support.mutants import each_found_by

ROOT = Path(__file__).parents[2]


def test_every_argument_is_seen() -> None:
    """Also by `inspect`, with its default."""
    seen = inspect.signature(fully_shard).parameters
    own = inspect.signature(sharding.shard).parameters
    assert [*seen] == ["module", "optimizer", *[n for n in own if n not in ("module", "kind", "options")], *OPTIONS]
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in seen.values())
    assert {name: seen[name].default for name in OPTIONS} == {n: each.default for n, each in OPTIONS.items()}
    assert all(seen[name] == own[name] for name in sharding.shard.__kwdefaults__)


@pytest.mark.parametrize(
    ("entry", "unknown", "near"),
    [
        (lambda m, **k: megatron.fully_shard(m, None, **k), "prefech", "prefetch"),
        (fully_shard_model, "overlap_grad_reduc", "overlap_grad_reduce"),
        (fully_shard_model, "zero_dp_stratgy", "zero_dp_strategy"),
        (fully_shard, "zero_dp_strategy", ".*strategy"),
    ],
)
def test_an_unknown_keyword_gets_the_nearest_names(entry: typing.Any, unknown: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"fully_shard got .*'{unknown}'; nearest are {near}"):
        entry(nn.Linear(2, 2), **{unknown: 1})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prefetch": "2"}, r"prefetch='2' is of another type; valid are 0 to 1,024 units"),
        ({"prefetch": True}, r"prefetch=True is of another type"),
        ({"double_buffer": "false"}, r"double_buffer='false' is of another type; valid are True, False"),
        ({"prefetch": 1025}, r"prefetch=1025 is out of range; valid are 0 to 1,024 units"),
        ({"watchdog_timeout_s": 0}, r"watchdog_timeout_s=0 is out of range; valid are above 0.* seconds, or None"),
        ({"watchdog_timeout_s": float("nan")}, r"watchdog_timeout_s=nan is out of range"),
        ({"prefetch": None}, r"prefetch=None is of another type"),
        ({"numerics": "exat"}, r"numerics='exat' is not one of fast, deterministic, ordered, exact"),
        (
            {"prefetch": 2, "nccl_ub": True},
            r"prefetch=2 wants more units ahead .* valid are 0 or 1. Set prefetch=1, or",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_valid(given: dict[str, typing.Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Options(**given)


def test_every_export_is_there() -> None:
    assert {"Fp8Linear", "FSDPModule", "Placements", "Transport", "fully_shard"} < set(harness.fsdp.__all__)
    for name in harness.fsdp.__all__:
        assert getattr(harness.fsdp, name) is not None
    assert set(harness.fsdp.__all__) <= set(dir(harness.fsdp))
    with pytest.raises(AttributeError, match=r"no attribute 'fully_sharded'; it has .*fully_shard"):
        _ = harness.fsdp.fully_sharded


def test_a_former_name_is_answered_with_the_present_one() -> None:
    page = (ROOT / "docs/renamed.md").read_text().split("## Names of `harness.fsdp`")[1].split("##")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.M)
    former = [name for names, _ in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(former) == sorted(harness.fsdp._FORMER)
    for name in former:
        with pytest.raises(AttributeError, match=f"{name} is now"):
            getattr(harness.fsdp, name)
    for present in re.findall(r"harness\.\w+\.[\w.]+", " ".join(harness.fsdp._FORMER.values())):
        assert pydoc.locate(present), present


def test_every_exception_of_the_engine_is_of_the_face() -> None:
    found = {}
    for path in sorted((ROOT / "harness/fsdp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.endswith(("Error", "Exception")) for base in bases):
                found[node.name] = path.relative_to(ROOT).as_posix()
    assert {"StepError", "ReplicaDrift", "RanksDisagree"} <= set(found)
    public = {name for name in found if not name.startswith("_")}
    assert public <= set(harness.fsdp.__all__), {name: found[name] for name in public - set(harness.fsdp.__all__)}
    assert all(issubclass(getattr(harness.fsdp, name), Exception) for name in public)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {"InternalTorchDynamoError"}
"""Exceptions of others that the pages of the engine name."""


@pytest.mark.parametrize("page", ["engine.md", "compatibility.md"])
def test_every_exception_that_a_page_names_is_of_the_face(page: str) -> None:
    named = set(re.findall(r"\b(?<!\.)[A-Z]\w+(?:Error|Drift|Mismatch)\b", (ROOT / "docs" / page).read_text()))
    assert named
    assert {name for name in named if not hasattr(builtins, name)} - ELSEWHERE <= set(harness.fsdp.__all__)


def test_pages_import_from_the_face() -> None:
    """Lines of README and docs, those of a diff too, which a reader copies."""
    lines = [line.strip("+ \n") for page in PAGES for line in page.read_text().splitlines()]
    imports = [line for line in lines if re.match(r"(from|import) harness\.fsdp\b", line)]
    assert len(imports) > 4
    for line in imports:
        (node,) = ast.parse(line).body
        assert isinstance(node, ast.ImportFrom), line
        assert node.module == "harness.fsdp", line
        assert {alias.name for alias in node.names} <= set(harness.fsdp.__all__), line


def test_the_desk_reads_the_engine_s_words_without_torch() -> None:
    """Every module of the configuration, and what it imports of the engine."""
    code = """
import pkgutil, sys, importlib
import harness.config as config
for each in pkgutil.walk_packages(config.__path__, "harness.config."):
    importlib.import_module(each.name)
names = "options", "storage", "storage.placement"
words = {f"harness.fsdp.{name}" for name in names}
loaded = {name for name in sys.modules if name.startswith("harness.fsdp.")}
sys.exit(f"{loaded}, torch: {'torch' in sys.modules}" if loaded != words or "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the guide to knobs ------------------------------------------------------------------------------------------------


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
    section = re.search(rf"\n## {heading}\n(.*?)(\n## |\Z)", (ROOT / "docs/engine_knobs.md").read_text(), re.DOTALL)
    assert section is not None
    return [knob(line) for line in section[1].splitlines() if line.startswith("| ") and "| entry |" not in line]


CHOICES, ARGUMENTS, DTYPES = map(rows, ("Options", "Arguments", "Dtypes"))
EVERY = [*CHOICES, *ARGUMENTS, *DTYPES]


def named(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)


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
    for name, each in inspect.signature(function).parameters.items():
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


test_a_mutant_is_found = each_found_by(
    "The engine, by the values it takes",
    """
    one more: A range takes one number more than it says
        fsdp.options.Range.holds: value <= self.high and => value <= self.high + 1 and
    open ends: A range that begins above a number takes it
        fsdp.options.Range.holds: self.high and not left_out => self.high
    open ends unsaid: A range does not say that its first number is none of it
        fsdp.options.Range.__str__: if self.above else => if self.below else
    True is 1: A bool is taken for a number
        fsdp.options.Option.read: or (isinstance(value, bool) and self.kind is not bool): => :
    None for all: None is taken by an option that has no such value
        fsdp.options.Option.read: value is None and self.optional => value is None
    None unsaid: An option does not say that it takes None
        fsdp.options.Option.takes: if self.optional else words => if not self.optional else words
    room for three: Two units ahead are taken where buffers have room for one
        fsdp.options.Options.__post_init__: self.prefetch > 1 => self.prefetch > 2
    buffers that move: Registered buffers are allocated anew
        fsdp.options.fixed_buffers: or chosen["nccl_ub"] is not Registration.none =>
    """,
    test_a_wrong_value_is_refused_with_what_is_valid,
)
