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
from pathlib import Path

import pytest

from harness.fsdp.options import OPTIONS
from tests.architecture.places import ROOT, Copy

Place = tuple[str, str, str]
"""File, what is written into it, and before what; no text there begins a file of its own."""

BUILD, CONTEXT = "harness/fsdp/build.py", "@dataclass(frozen=True)\nclass BuildContext:"

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
            BUILD,
            "def cups(options: Options) -> int:\n    return options.example_option or 0\n\n\n",
            CONTEXT,
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
            "harness/fsdp/options.py",
            '    tea = "tea", "As optim, by another name.", "hftea"\n',
            "\n\nclass GradBuffer(Choice):",
        ),
        (
            "harness/fsdp/storage/placement.py",
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
        (BUILD, "def lumps(policy: MixedPrecisionPolicy) -> object:\n    return policy.sugar_dtype\n\n\n", CONTEXT),
    ],
}
"""What each example needs: with one place less, some answer below is another, or there are none."""

AIMS = {"option": 2, "engine": 2, "sharding": 3, "role": 3}
"""Places an example may touch."""

QUESTIONS = """
import json, torch
from harness.config import derived, doc
from harness.config.capabilities import ENGINES, PACKAGES, SAME_BITS
from harness.config.compose import compose
from harness.config.errors import BadRequest
from harness.config.schema import EngineName, OuterStrategy
from harness.engines.adapters.native import policy_of
from harness.engines.protocol import engine_class
from harness.fsdp import Options, fully_shard
from harness.fsdp.build import cups, lumps
from harness.fsdp.storage.placement import Placements
from harness.fsdp.options import Strategy
from harness.parity.tiers.comparable import WITHOUT_EFFECT
from harness.store.labels import strategy_of

PATH = "engine.example_option"
TEA = ("sharding=hftea", "mesh=two_by_two")
placements = Placements.of(Strategy.optim_grads_params, OuterStrategy.tea)

def settled(*overrides):
    return compose([*overrides, "launch.dry_run=true"])

def refusal(*overrides):
    try:
        settled(*overrides)
    except BadRequest as error:
        return str(error)

def mistake(**given):
    try:
        fully_shard(torch.nn.Linear(1, 1), **given)
    except (TypeError, ValueError) as error:
        return str(error)

cell, tea = settled(f"{PATH}=5"), settled(*TEA)
print(json.dumps({
    "option": [cell.config["engine"]["example_option"], derived.engine_options(cell.typed)["example_option"],
               settled(f"{PATH}=null").typed.engine.example_option, cups(Options(example_option=4))],
    "option's engines": [name.value for name in EngineName if PATH in ENGINES[name].settings],
    "option's bits": [PATH in SAME_BITS, PATH in WITHOUT_EFFECT],
    "option's sentence": [doc.settings()[PATH].expects, doc.settings()[PATH].sentence],
    "option refused": [refusal(f"{PATH}=10"), refusal("engine.example_optoin=1"), refusal("engine=ddp", f"{PATH}=5")],
    "face": [mistake(example_option=10), mistake(example_optoin=1)],
    "engine": [settled("engine=example", "sharding=no_shard", "mesh=one").typed.engine.name.value,
               engine_class(EngineName.example).__mro__[1].__name__, EngineName.example.sentence,
               "packaging" in PACKAGES],
    "engine refused": [refusal("engine=example", "sharding=no_shard"), refusal("engine=exampel")],
    "sharding": [tea.config["sharding"], strategy_of(tea.config), "hftea2x2" in tea.name],
    "sharding refused": [refusal("engine=fsdp2", *TEA), refusal("sharding=hftea")],
    "placements": [str(placements.optimizer_state.share(2, 2)), *(
        [f"{step.axis.value} {step.operation.value}" for step in placements.reductions[last]]
        for last in (False, True))],
    "role": [str(lumps(policy_of(settled(*sugar).typed.dtype))) for sugar in (["dtype.sugar=bf16"], [])],
    "role's sentence": doc.settings()["dtype.sugar"].sentence,
    "role refused": [refusal("engine=deepspeed", "dtype.sugar=fp64")],
}))
"""

TOLD = {
    "option": [5, 5, None, 4],
    "option's engines": ["native"],
    "option's bits": [True, True],
    "option's sentence": ["a whole number, 1 to 9 cups, or null", "Cups for each unit; null is none."],
    "face": [
        "example_option=10 is out of range; valid are 1 to 9 cups, or None",
        "fully_shard got an unexpected argument 'example_optoin'; nearest are example_option",
    ],
    "engine": ["example", "SingleEngine", "Tea for one.", True],
    "sharding": [{"strategy": "optim_grads_params", "outer": "tea"}, "hftea", True],
    "placements": ["1/4", ["inner reduce_scatter"], ["inner reduce_scatter", "outer reduce_scatter"]],
    "role": ["torch.bfloat16", "None"],
    "role's sentence": "Lumps; null is none.",
}
REFUSED = {
    "option refused": ["1 to 9 cups, or null", "engine.example_option", "engine.example_option"],
    "engine refused": ["engine=example runs in 1 process", "engine=example"],
    "sharding refused": ["engine=fsdp2 does not run this hybrid", "has no outer axis to act on"],
    "role refused": ["engine=deepspeed does not take this dtype"],
}
"""Words of each refusal, in order."""


def test_an_option_an_engine_a_sharding_and_a_dtype_role_are_declared_once(tmp_path: Path) -> None:
    """No other file differs, and each example stays within its aim: the answers follow from these places."""
    copy = Copy(tmp_path)
    for file, text, before in (place for places in ADDED.values() for place in places):
        copy.insert(file, text, before)
    assert copy.changed() == sorted({place[0] for places in ADDED.values() for place in places})
    assert {name: len(places) for name, places in ADDED.items()} == AIMS
    done = copy.run("-c", QUESTIONS)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert {name: answers[name] for name in TOLD} == TOLD
    for name, words in REFUSED.items():
        for word, said in zip(words, answers[name], strict=True):
            assert word in str(said), name


@pytest.mark.parametrize("name", ["separate_gather_group", "offload_optimizer"])
def test_an_option_is_named_where_it_is_declared_and_where_it_is_read(name: str) -> None:
    """Real options, counted: nothing of the configuration, the capabilities, the rules or the adapters names them; the
    plan of a cell does, as it says what they cost."""
    assert name in OPTIONS
    named = re.compile(rf"\b{name}\b")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "harness").rglob("*.py") if named.search(path.read_text())}
    files = {file for file in files if not file.startswith(("harness/plan/", "harness/cli/plan.py"))}
    assert files == {"harness/fsdp/options.py", "harness/fsdp/build.py"}
