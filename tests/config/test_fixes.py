"""Each printed fix, typed, is accepted: of a request with one problem at once, of one with several after them all."""

from __future__ import annotations

import pytest

from harness.config import compose as compositions
from harness.config.compose import compose
from harness.config.errors import BadRequest
from tests.support.mutants import kills

DRY = "launch.dry_run=true"
MISTAKES = """
mesh.world_size=6 mesh.tp=3
mesh.world_size=3
mesh.world_size=5 mesh.tp=2
mesh.world_size=8 mesh.tp=8
mesh.world_size=12 mesh.tp=6
mesh.world_size=3 mesh.tp=3
mesh.tp=5
mesh.world_size=6 mesh.dp_outer=4
mesh.world_size=8 mesh.tp=2 mesh.dp_outer=3
mesh=two_by_two mesh.world_size=6
mesh.world_size=0
mesh.world_size=4 mesh.tp=2 mesh.sequence_parallel=true data.seq_len=33
mesh.world_size=4 mesh.tp=2 model.num_heads=3
mesh.world_size=3 mesh.tp=3 data=synthetic model.vocab_size=4
mesh.world_size=3 train.microbatch_size=7
train.global_batch_size=1
train.microbatch_size=32
train.steps=5 measure.capture_steps=[1,6]
model.num_heads=8 model.num_kv_heads=3
data.seq_len=2049 mesh.world_size=3
engine=single mesh.world_size=3
sharding=hsdp
engine=megatron_fsdp sharding=hsdp mesh.world_size=2 mesh.dp_outer=2
cluster=slurm cluster.nodes=2 mesh.world_size=3
""".strip().splitlines()


def refused(request: list[str]) -> tuple[BadRequest | None, set[str]]:
    try:
        compose([*request, DRY])
    except BadRequest as error:
        return error, {each.subject.partition("=")[0] for each in error.violations}
    return None, set()


def typed(request: list[str], fix: str) -> list[str]:
    """The request with the words of a fix in place of those for the same settings, as one would edit it."""
    words = fix.split()
    keys = {word.partition("=")[0] for word in words}
    return [word for word in request if word.partition("=")[0] not in keys] + words


def fixes(error: BadRequest) -> list[tuple[str, list[str]]]:
    """Settings that are refused, and fixes as they are printed."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line.removeprefix("fix:").strip().split(", or ") for line in lines if line.startswith("fix:")]
    return list(zip((each.subject.partition("=")[0] for each in error.violations if each.fix), told, strict=True))


@pytest.mark.parametrize("request_", MISTAKES)
def test_each_printed_fix_typed_is_accepted(request_: str) -> None:
    request = request_.split()
    error, named = refused(request)
    assert error is not None
    assert fixes(error)
    for setting, alternatives in fixes(error):
        for fix in (each for each in alternatives if "=" in each):  # the others are advice
            accept(typed(request, fix), named - {setting}, fix)


def accept(request: list[str], others: set[str], fix: str) -> None:
    """The request is refused for nothing but what the first answer named too, and not once that is corrected."""
    error, named = refused(request)
    assert named <= others, f"{fix} was refused: {error}"
    if error is not None:
        setting, (first, *_) = fixes(error)[0]
        accept(typed(request, first), named - {setting}, first)


@kills("The terminal", "fixes alone", "A fix is printed without what it needs beside it, and is refused in turn")
def test_a_fix_that_needs_more_is_refused_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositions, "completed", lambda violations, _: violations)
    with pytest.raises(AssertionError, match="was refused"):
        test_each_printed_fix_typed_is_accepted("mesh.world_size=6 mesh.tp=3")
