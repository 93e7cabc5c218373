"""How many places a new engine option touches: its declaration and where it is read, shown on a copy of the tree.

The copy gets one option, `example_option`, by edits of two files, and is then asked for it everywhere an option must
appear: the typed configuration, its rules, the capabilities, the verdict's settings without effect, both pages, the
adapter's arguments, and the engine's face.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.fsdp.options import OPTIONS

ROOT = Path(__file__).parents[2]

EDITS = {
    "harness/fsdp/options.py": [
        (
            'class EngineOptions:\n    """Options that a cell sets in its group `engine`, under the same names."""\n',
            "    example_option: int | None = option(\n"
            '        3, Facts(range=Range(1, 9, "cups"), costs="Tea.", use="In the afternoon.", same_bits=True)\n'
            "    )\n"
            '    """Cups for each unit; None is none."""\n',
        ),
        ("class OptionKeywords(TypedDict, total=False):\n", "    example_option: int | None\n"),
    ],
    "harness/fsdp/construction.py": [
        (
            "from harness.fsdp.options import Options\n",
            "def cups(options: Options) -> int:\n    return options.example_option or 0\n",
        )
    ],
}
"""By file: text there is, and what is put behind it."""

QUESTIONS = """
import json, torch
from harness.config import doc, engine_doc, derived
from harness.config.capabilities import ENGINES, SAME_BITS
from harness.config.compose import compose
from harness.config.errors import BadRequest
from harness.config.schema import EngineName
from harness.fsdp import Options, ShardedModel
from harness.fsdp.construction import cups
from harness.parity.tiers.admissible import WITHOUT_EFFECT

PATH = "engine.example_option"
cell = compose([f"{PATH}=5", "launch.dry_run=true"])

def refusal(*overrides):
    try:
        compose([*overrides, "launch.dry_run=true"])
    except BadRequest as error:
        return str(error)

def mistake(**given):
    try:
        ShardedModel(torch.nn.Linear(1, 1), **given)
    except (TypeError, ValueError) as error:
        return str(error)

print(json.dumps({
    "configuration": cell.typed.engine.example_option,
    "null": compose([f"{PATH}=null", "launch.dry_run=true"]).typed.engine.example_option,
    "frozen cell": cell.config["engine"]["example_option"],
    "adapter": derived.engine_options(cell.typed)["example_option"],
    "range": refusal(f"{PATH}=10"),
    "typo": refusal("engine.example_optoin=1"),
    "capabilities": [name.value for name in EngineName if PATH in ENGINES[name].settings],
    "another engine": refusal("engine=ddp", f"{PATH}=5"),
    "bits": [PATH in SAME_BITS, PATH in WITHOUT_EFFECT],
    "page of settings": [line for line in doc.guide().splitlines() if PATH in line],
    "page of knobs": [line for line in engine_doc.engine_guide().splitlines() if "`example_option`" in line],
    "face": [mistake(example_option=10), mistake(example_optoin=1)],
    "reader": cups(Options(example_option=4)),
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, with the edits."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("harness", "conf", "sweeps", "hydra_plugins"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in EDITS.items():
        text = (root / name).read_text()
        for before, added in changes:
            assert text.count(before) == 1, f"{name} has {text.count(before)} times {before!r}"
            text = text.replace(before, before + added) if not added.startswith("def") else f"{text}\n\n{added}"
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def answers(copy: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_option_is_two_places() -> None:
    """The edits that the answers below follow from: the declaration, and the place that reads it."""
    assert len(EDITS) == 2


def test_a_declared_option_is_configured_ranged_and_handed_on(answers: dict[str, object]) -> None:
    assert (answers["configuration"], answers["null"], answers["frozen cell"], answers["adapter"]) == (5, None, 5, 5)
    assert "engine.example_option=10: is out of range" in str(answers["range"])
    assert "1 to 9 cups, or null" in str(answers["range"])
    assert "engine.example_option" in str(answers["typo"])
    assert answers["reader"] == 4


def test_a_declared_option_is_a_capability_of_the_engine_alone(answers: dict[str, object]) -> None:
    assert answers["capabilities"] == ["native"]
    assert "engine.example_option" in str(answers["another engine"])
    assert answers["bits"] == [True, True]


def test_a_declared_option_has_a_row_on_both_pages(answers: dict[str, object]) -> None:
    (setting,), (knob,) = answers["page of settings"], answers["page of knobs"]
    assert "`3` | Cups for each unit; null is none. Taken by native." in setting
    assert "a whole number, 1 to 9 cups, or null" in setting
    for text in ("1 to 9 cups, or None", "`3`", "Cups for each unit; None is none.", "Tea.", "`engine.example_option`"):
        assert text in knob


def test_a_declared_option_is_a_keyword(answers: dict[str, object]) -> None:
    beyond, typo = answers["face"]
    assert beyond == "example_option=10 is out of range; valid are 1 to 9 cups, or None"
    assert typo == "ShardedModel got an unexpected argument 'example_optoin'; nearest are example_option"


@pytest.mark.parametrize("name", ["prefetch_limit_bytes", "unit_min_elements", "offload_optimizer"])
def test_an_option_is_named_where_it_is_declared_and_where_it_is_read(name: str) -> None:
    """Real options, counted: nothing of the configuration, the capabilities, the rules or the adapters names them."""
    assert name in OPTIONS
    named = re.compile(rf"\b{name}\b")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "harness").rglob("*.py") if named.search(path.read_text())}
    assert files == {"harness/fsdp/options.py", "harness/fsdp/construction.py"}
