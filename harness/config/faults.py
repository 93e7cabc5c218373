"""The corpus of faults that can be put into the engine on purpose, so that the power of a verdict is known.

The F numbers are silent bugs that were reported in public; the others are families of mistakes that every engine can
make. A fault is one function of `harness/probe/faults/`: its decorator says what the fault is, its body does it.

[Note: Read, not run] Those functions need torch, and the desk, which lists, checks and composes faults, never imports
it. So the desk evaluates the decorators alone, with the names that this module defines and no others.

[Note: Strength] `full` is the fault as reported. `middle` and `weak` are a tenth and a hundredth of it: the wrong part
of a number times 0.1 or 0.01, or that share of the elements; a fault of precision keeps 8, 11 or 16 significant bits.

[Note: Edition] Faults come in editions. Those of the edition that is `SEALED` were written by somebody who had not seen
the judges, and no judge has seen them: nothing but the campaign over whole runs may hold one against a verdict, once,
after judges were frozen. Then `SEALED` becomes 0, and what is asked of other faults is asked of them. So it was with
edition 2, judged at commit b20c64d (docs/records/power.md). The next that nobody has seen is 3.

[Note: Late] `fault.begins_at` names the step from which on a fault acts. Whatever it needs to know of earlier steps (a
stale gradient) it has seen by then. What acts once, at a moment of its own (a resume, the end), takes no step.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.fsdp import Placements
from harness.fsdp.vocabulary import Strategy

FOLDER = Path(__file__).resolve().parents[1] / "probe" / "faults"
"""The sources that declare and do every fault."""

AMOUNTS = {"full": 1.0, "middle": 0.1, "weak": 0.01}
"""Share of a fault, by strength."""

BITS = {"full": 8, "middle": 11, "weak": 16}
"""Significant bits that a fault of precision keeps: those of bf16, those of fp16, and a third of what fp32 drops."""

SEALED = 0
"""The edition that no judge has seen; 0: there is none. See [Note: Edition]."""

NONE = "none"
"""The option of the group `fault` that is a normal run."""


@dataclass(frozen=True)
class Fault:
    """One mistake, as its decorator `@fault(...)` declares it."""

    name: str
    """The option of the group `fault`."""
    does: str
    """What happens, in a clause."""
    stage: str
    """Where a verdict should place it."""
    cell: tuple[str, ...]
    """Overrides of the smallest cell in which it acts."""
    strategies: tuple[str, ...] = ()
    """Strategies under which it does anything; empty: all."""
    microbatches: int = 1
    """Microbatches a rank and step with which it does anything."""
    resumes: bool = False
    """Whether the fault acts when a run is resumed, and at no other time."""
    ends: bool = False
    """Whether the fault acts when the last step is done, and at no other time."""
    recipes: tuple[str, ...] = ()
    """Recipes of dtype.fp8 under which it does anything; empty: it has nothing to do with 8 bits."""
    tensor_parallel: bool = False
    """Whether the fault acts under tensor parallelism, and only with it."""
    measured: bool = True
    """Whether docs/records/power.md has it at every strength; of those that came later, CI has the full one."""
    report: str = ""
    """Where the fault was reported; empty for a family."""
    edition: int = 1
    """When the fault came into the corpus; see [Note: Edition]."""

    @property
    def is_sealed(self) -> bool:
        """Whether no judge has seen the fault."""
        return self.edition == SEALED


K2 = ("train.global_batch_size=8", "train.microbatch_size=2")
"""Two microbatches a rank on two ranks."""
FOUR = ("mesh.world_size=4", *K2)
"""One microbatch a rank on four ranks."""
TP = (*FOUR, "mesh.tp=2")
"""Two tensor-parallel ranks in each of two groups with data of their own."""
SEQUENCE = "mesh.sequence_parallel=true"
FP8_CURRENT, FP8_DELAYED = "dtype=fp8_current", "dtype=fp8_delayed"
HELD = ("current", "delayed", "block", "mx", "mx_32x32")
"""Recipes whose weights are kept and gathered in 8 bits."""
SGD, NO_CLIP = "optimizer=sgd", "optimizer.clip_norm=null"
ZERO0, ZERO1, ZERO2, ZERO3 = (f"sharding={each.name}" for each in Strategy)
ACCUMULATES_WHOLE, ACCUMULATES_SHARDS = (
    tuple(each.name for each in Strategy if Placements.of(each, None).accumulates_locally is whole)
    for whole in (True, False)
)


@functools.cache
def corpus() -> Mapping[str, Fault]:
    """Every fault by name, in alphabetical order: the reported ones first.

    Raises:
        ValueError: two faults have one name, or a decorator says what cannot be read without running its file.
    """
    declared = [fault for path in sorted(FOLDER.glob("*.py")) for fault in read_faults(path)]
    found = {fault.name: fault for fault in sorted(declared, key=lambda fault: fault.name)}
    if len(found) < len(declared):
        names = [fault.name for fault in declared]
        raise ValueError(f"{FOLDER} declares twice: {', '.join(name for name in found if names.count(name) > 1)}")
    return found


def read_faults(path: Path) -> Iterator[Fault]:
    """The faults that one file declares, without running it; see [Note: Read, not run].

    Raises:
        ValueError: a decorator says more than literals and names of this module.
    """
    names = {name: value for name, value in globals().items() if name.isupper()} | {"fault": Fault}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "fault":
                try:
                    yield eval(compile(ast.Expression(decorator), str(path), "eval"), {"__builtins__": {}} | names)
                except (NameError, TypeError) as error:
                    fix = "declare it with literals and the names of harness/config/faults.py"
                    raise ValueError(f"{path}:{decorator.lineno}: {error}; {fix}") from error
