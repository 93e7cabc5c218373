"""What each fault of the corpus is, and in which runs it does anything.

The F numbers are silent bugs that were reported in public; the others are families of mistakes that every engine can
make.

[Note: Strength] `full` is the fault as reported. `middle` and `weak` are a tenth and a hundredth of it: the wrong part
of a number times 0.1 or 0.01, or that share of the elements; a fault of precision keeps 8, 11 or 16 significant bits.

[Note: Edition] Edition 2 was written by somebody who had not seen the judges, and judged once, at commit b20c64d, after
judges were frozen (docs/records/power.md). Edition 3 was written with the judges in mind, and no campaign has it.
Edition 5 (`fresh.py`) was judged once, in the classes of `benchmarks/power/classes.py`, after judges were mended for an
edition 4 that is no more; studies of the first steps never have it.

[Note: Late] `fault.begins_at` names the step from which on a fault acts. Whatever it needs to know of earlier steps (a
stale gradient) it has seen by then. What acts once, at a moment of its own (a resume, the end), takes no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config, EngineName
from harness.fsdp import Placements
from harness.fsdp.options import Strategy

BITS = {"full": 8, "middle": 11, "weak": 16}
"""Significant bits that a fault of precision keeps: those of bf16, those of fp16, and a third of what fp32 drops."""


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    name: str
    target: str
    """For `fault.name`: the function that makes it, or a sample's name."""
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
    report: str = ""
    """Where the fault was reported; empty for a family."""
    edition: int = 1
    """When the fault came into the corpus; see [Note: Edition]."""

    def asked(self, *, strength: str = "full", begins_at: int = 1) -> tuple[str, ...]:
        """Overrides that ask for the fault, beside those of its cell."""
        late = () if begins_at == 1 else (f"fault.begins_at={begins_at}",)
        return (f"fault.name={self.target}", f"fault.strength={strength}", *late)

    def check(self, config: Config) -> None:
        """Refuse a run in which the fault would do nothing: that would teach nothing.

        Raises:
            ValueError: the sentence says what the fault needs.
        """
        recipe, strategy = getattr(config.dtype.fp8, "name", ""), config.sharding.strategy.name
        for fits, needed in (
            (config.engine.name is EngineName.native, "is put into engine=native"),
            (not self.strategies or strategy in self.strategies, f"needs sharding={' or '.join(self.strategies)}"),
            (not self.recipes or recipe in self.recipes, f"needs dtype.fp8={' or '.join(self.recipes)}"),
            (self.tensor_parallel or config.mesh.tp == 1, "names data-parallel ranks: mesh.tp=1"),
            (not self.tensor_parallel or config.mesh.tp > 1, "needs mesh.tp=2 or more"),
            (self.microbatches <= microbatches_per_rank(config), f"needs {self.microbatches} microbatches a rank"),
            (config.fault.begins_at == 1 or not self.resumes, "acts when a run is resumed, at no fault.begins_at"),
            (config.fault.begins_at == 1 or not self.ends, "acts when the last step is done, at no fault.begins_at"),
        ):
            if not fits:
                raise ValueError(f"fault {self.name} {needed}")


K2 = ("train.global_batch_size=8", "train.microbatch_size=2")
"""Two microbatches a rank on two ranks."""
FOUR = ("mesh.world_size=4", *K2)
"""One microbatch a rank on four ranks."""
TP = (*FOUR, "mesh.tp=2")
"""Two tensor-parallel ranks in each of two groups with data of their own."""
SEQUENCE = "mesh.sequence_parallel=true"
TWO_BY_TWO = ("mesh=two_by_two", "train.microbatch_size=2")
GATHERS = ("optim_grads_params",)
"""Strategies that gather weights for each use."""
FP8_CURRENT = "dtype=fp8_current"
HELD = ("current", "block", "mx_32x32")
"""Recipes whose weights are kept and gathered in 8 bits."""
SGD, MUON, NO_CLIP = "optimizer=sgd", "optimizer=muon", "optimizer.clip_norm=null"
ZERO0, ZERO1, ZERO2, ZERO3 = (f"sharding={each.name}" for each in Strategy)
ACCUMULATES_WHOLE, ACCUMULATES_SHARDS = (
    tuple(each.name for each in Strategy if Placements.of(each, None).accumulates_locally is whole)
    for whole in (True, False)
)

DECLARED = [
    Fault("scale_by_two", "scale_by_two", "all gradients are twice what they should be", "reduction", cell=(ZERO3,)),
]
"""The sample of `harness.train.faults`, and every fault of a file that was imported (`tests.faults.site.fault`)."""


@cache
def corpus() -> Mapping[str, Fault]:
    """Every fault by name, in alphabetical order: the reported ones first. Imports torch."""
    package = __name__.rpartition(".")[0]
    for file in iter_modules(import_module(package).__path__):
        if not file.name.startswith("test_"):
            import_module(f"{package}.{file.name}")
    found = {fault.name: fault for fault in sorted(DECLARED, key=lambda fault: fault.name)}
    assert len(found) == len(DECLARED), "two faults have one name"
    return found
