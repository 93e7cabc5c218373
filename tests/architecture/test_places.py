"""How many places an option, an engine, a sharding and a dtype role touch, counted on a copy of the tree.

The copy gets one of each, and is then asked for them everywhere they must appear. An option: the typed configuration,
its rules, the capabilities, the verdict's settings without effect, its sentence, the adapter's arguments, the engine's
face. An engine: the catalog, the rules, its sentence, the recorded packages, the class that runs. A sharding: what is
composed, what a run is called, which engines take it, what a rank keeps and sends. A role: the rules, its sentence,
the policy.
"""

from __future__ import annotations

import json
import re
from importlib import metadata

import pytest

from harness.fsdp.options import OPTIONS
from tests.architecture.places import ROOT, Copy

Place = tuple[str, str, str]
"""File, what is written into it, and before what; no text there begins a file of its own."""

VOCABULARY, PLACEMENT = "harness/fsdp/vocabulary.py", "harness/fsdp/storage/placement.py"

ADDED: dict[str, list[Place]] = {
    "option": [
        (
            "harness/fsdp/options.py",
            "    example_option: int | None = option(\n"
            '        3, range=Range(1, 9, "cups"), same_bits=True\n'
            "    )\n"
            '    """Cups for each unit; None is none."""\n',
            "    prefetch: int = option(",
        ),
        (
            "harness/fsdp/build.py",
            "def cups(options: Options) -> int:\n    return options.example_option or 0\n\n\n",
            "@dataclass(frozen=True)\nclass BuildContext:",
        ),
    ],
    "engine": [
        (
            "harness/config/capabilities.py",
            '    example = "example", "Tea for one.", Capabilities(\n'
            '        strategies=(Strategy.no_shard,), max_data_ranks=1, package="packaging=='
            + metadata.version("packaging")
            + '",\n        adapter="harness.engines.adapters.example:ExampleEngine",\n    )\n\n',
            "    def __new__(cls, name: str, sentence: str, declared: Capabilities)",
        ),
        (
            "harness/engines/adapters/example.py",
            "from harness.engines.adapters.single import SingleEngine\n\n\nclass ExampleEngine(SingleEngine): ...\n",
            "",
        ),
    ],
    "sharding": [
        (
            VOCABULARY,
            '    tea = "tea", "As optim, by another name.", "hftea"\n',
            "\n\nclass GradBuffer(Choice):",
        ),
        (
            PLACEMENT,
            "    OuterStrategy.tea: (REPLICATE, SHARD, PARTIAL, PARTIAL, SHARD, SHARD),\n",
            '}\n"""Placement of each buffer (in the order of `Placements`) on the outer axis',
        ),
        ("conf/sharding/hftea.yaml", "strategy: optim_grads_params\nouter: tea\n", ""),
    ],
    "role": [
        (
            "harness/config/schema.py",
            '    sugar: Dtype | None = None\n    """Lumps; null is none."""\n',
            "    allow_low_precision_grads: Flag = False\n",
        ),
        (
            "harness/fsdp/policy.py",
            "    sugar_dtype: torch.dtype | None = None\n",
            "    allow_low_precision_grads: bool = False\n    param_dtype",
        ),
        (
            "harness/fsdp/build.py",
            "def lumps(policy: MixedPrecisionPolicy) -> object:\n    return policy.sugar_dtype\n\n\n",
            "@dataclass(frozen=True)\nclass BuildContext:",
        ),
    ],
}
"""What each example needs: with one place less, some answer below is another, or there are none."""

AIMS = {"option": 2, "engine": 2, "sharding": 3, "role": 3}
"""Places an example may touch."""

QUESTIONS = """
import json, torch
from harness.config import doc, derived
from harness.config.capabilities import ENGINES, SAME_BITS
from harness.config.compose import compose
from harness.config.errors import BadRequest
from harness.config.schema import EngineName
from harness.fsdp import Options, fully_shard
from harness.fsdp.options import OPTIONS
from harness.fsdp.build import cups
from harness.parity.tiers.comparable import WITHOUT_EFFECT
from harness.store.labels import strategy_of
from harness.config.catalog import load_catalog
from harness.config.capabilities import PACKAGES
from harness.config.schema import OuterStrategy
from harness.engines.adapters.native import policy_of
from harness.engines.protocol import engine_class
from harness.fsdp.build import lumps
from harness.fsdp.storage.placement import Placements
from harness.fsdp.vocabulary import Strategy
from harness.store.provenance import desk_facts

PATH = "engine.example_option"
cell = compose([f"{PATH}=5", "launch.dry_run=true"])

TEA = ("sharding=hftea", "mesh=two_by_two")
tea = compose([*TEA, "launch.dry_run=true"])
placements = Placements.of(Strategy.optim_grads_params, OuterStrategy.tea)

def settled(*overrides):
    return compose([*overrides, "launch.dry_run=true"]).typed

def refusal(*overrides):
    try:
        compose([*overrides, "launch.dry_run=true"])
    except BadRequest as error:
        return str(error)

def mistake(**given):
    try:
        fully_shard(torch.nn.Linear(1, 1), **given)
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
    "setting": [doc.settings()[PATH].expects, doc.settings()[PATH].sentence],
    "face": [mistake(example_option=10), mistake(example_optoin=1)],
    "reader": cups(Options(example_option=4)),
    "engines": load_catalog()["engine"],
    "engine": settled("engine=example", "sharding=no_shard", "mesh=one").engine.name.value,
    "engine's ranks": refusal("engine=example", "sharding=no_shard"),
    "engine's typo": refusal("engine=exampel"),
    "engine's class": engine_class(EngineName.example).__mro__[1].__name__,
    "engine's sentence": EngineName.example.sentence,
    "packages": ["packaging" in PACKAGES, "packaging" in desk_facts(PACKAGES)["versions"]],
    "sharding": [tea.config["sharding"], strategy_of(tea.config), tea.name],
    "sharding elsewhere": refusal("engine=fsdp2", *TEA),
    "sharding alone": refusal("sharding=hftea"),
    "operations": [[f"{step.axis.value} {step.operation.value}" for step in placements.reductions[last]]
                   for last in (False, True)],
    "kept state": str(placements.optimizer_state.share(2, 2)),
    "role": [str(lumps(policy_of(settled(*sugar).dtype))) for sugar in (["dtype.sugar=bf16"], [])],
    "role elsewhere": refusal("engine=deepspeed", "dtype.sugar=fp64"),
    "role's sentence": doc.settings()["dtype.sugar"].sentence,
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of what is shipped, with all that is added."""
    copy = Copy(tmp_path_factory.mktemp("tree"))
    for file, text, before in (place for places in ADDED.values() for place in places):
        if before:
            copy.insert(file, text, before=before)
        else:
            copy.add(file, text)
    return copy


@pytest.fixture(scope="module")
def answers(copy: Copy) -> dict[str, object]:
    done = copy.run("-c", QUESTIONS)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_is_changed_is_what_is_counted(copy: Copy, answers: dict[str, object]) -> None:
    """No other file differs, and each example stays within its aim: the answers below follow from these places."""
    assert copy.changed() == sorted(set(copy.places))
    assert len(copy.places) == sum(AIMS.values())
    assert {name: len(places) for name, places in ADDED.items()} == AIMS


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


def test_a_declared_option_is_a_setting_with_its_sentence(answers: dict[str, object]) -> None:
    assert answers["setting"] == ["a whole number, 1 to 9 cups, or null", "Cups for each unit; null is none."]


def test_a_declared_option_is_a_keyword(answers: dict[str, object]) -> None:
    beyond, typo = answers["face"]
    assert beyond == "example_option=10 is out of range; valid are 1 to 9 cups, or None"
    assert typo == "fully_shard got an unexpected argument 'example_optoin'; nearest are example_option"


@pytest.mark.parametrize("name", ["separate_gather_group", "offload_optimizer"])
def test_an_option_is_named_where_it_is_declared_and_where_it_is_read(name: str) -> None:
    """Real options, counted: nothing of the configuration, the capabilities, the rules or the adapters names them; the
    plan of a cell does, as it says what they cost."""
    assert name in OPTIONS
    named = re.compile(rf"\b{name}\b")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "harness").rglob("*.py") if named.search(path.read_text())}
    files = {file for file in files if not file.startswith(("harness/plan/", "harness/cli/plan.py"))}
    assert files == {"harness/fsdp/options.py", "harness/fsdp/build.py"}


def test_an_engine_is_its_row_and_its_adapter(answers: dict[str, object]) -> None:
    assert "example" in str(answers["engines"])
    assert (answers["engine"], answers["engine's class"]) == ("example", "SingleEngine")
    assert "engine=example runs in 1 process" in str(answers["engine's ranks"])
    assert "engine=example" in str(answers["engine's typo"])
    assert answers["engine's sentence"] == "Tea for one."
    assert answers["packages"] == [True, True]


def test_a_sharding_is_its_word_its_placements_and_its_file(answers: dict[str, object]) -> None:
    """It has the placements of HFSDP, whose operations the engine has: by hand, four ranks train it to HFSDP's bits."""
    settings, strategy, name = answers["sharding"]
    assert settings == {"strategy": "optim_grads_params", "outer": "tea"}
    assert strategy == "hftea"
    assert "hftea2x2" in name
    assert "engine=fsdp2 does not run this hybrid" in str(answers["sharding elsewhere"])
    assert "has no outer axis to act on" in str(answers["sharding alone"])
    assert answers["operations"] == [["inner reduce_scatter"], ["inner reduce_scatter", "outer reduce_scatter"]]
    assert answers["kept state"] == "1/4"


def test_a_dtype_role_is_set_refused_documented_and_handed_on(answers: dict[str, object]) -> None:
    assert answers["role"] == ["torch.bfloat16", "None"]
    assert "engine=deepspeed does not take this dtype" in str(answers["role elsewhere"])
    assert answers["role's sentence"] == "Lumps; null is none."
