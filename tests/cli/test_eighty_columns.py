"""What people read while they work fits 80 columns, and says what it is for within them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.launch import watch
from harness.store import provenance, status
from harness.store.labels import named
from harness.store.status import State, Status
from tests.parity.corpus import DOUBLED, FP32, OURS
from tests.parity.edits import edit_json
from tests.parity.lab import as_study, write
from tests.support.mutants import finds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study: a control, a clean arm, one whose gradients are doubled, one that failed with a long reason."""
    store = tmp_path_factory.mktemp("store")
    arms = (FP32, OURS, DOUBLED, replace(OURS, replicate=1))
    control, clean, doubled, failed = (write(store, each) for each in arms)
    as_study(store, {control: None, clean: control, doubled: control, failed: control}, "Is it the same? " * 9)
    for run in (control, clean, doubled, failed):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    status.note(failed, state=State.failed, reason=f"rank 0: ValueError: {'no luck ' * 20}")
    return store


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "words", [["watch", "lab"], ["verdict", "lab"], ["show", "RUN"], ["compare", "RUN", "RUN"], ["diff", "RUN", "RUN"]]
)
def test_every_line_fits(
    words: list[str], columns: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    doubled, control = (str(next(root.glob(f"lab/*{part}*"))) for part in ("native*k1", "ddp"))
    runs = iter((doubled, control))
    main([*(next(runs) if word == "RUN" else word for word in words), "--root", str(root)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4
    whole = re.compile(r"(arm +|control +|[ab]  |runs in )?\S*/|next: | +\S+$")  # what is typed or copied
    assert [line for line in lines if len(line) > columns and not whole.match(line)] == []


STATES = (
    ("failed", "rank 1: ValueError: the batch of 17 sequences does not divide into microbatches of 4 on 2 ranks"),
    ("lost", "its process on a-host-with-a-name-17 is gone (pid 12345)"),
    ("queued", "SLURM job 123456_7 is PENDING (Resources: nodes required for this job are down or drained)"),
    ("done", "20 steps"),
)
GRID = [
    f"{engine}-{strategy}-{dtype}-dp2-k2"
    for engine in ("native", "megatron_fsdp")
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params", "hfsdp")
    for dtype in ("fp32", "bf16_comm", "fp8_block")
]
STUDIES = {2: ["single-no_shard-fp32-dp1-k4", GRID[10]], 6: GRID[7:13], 30: GRID}


def the_rows(cells: int) -> list[watch.Row]:
    known = {"steps_done": 3, "final_loss": 3.3, "step_time_s": 0.123}
    shown = [watch.columns(STATES[place % 4][0], place % 5 == 0, 20, known) for place in range(cells)]
    named = enumerate(zip(STUDIES[cells], shown, strict=True))
    return [watch.Row(f"tiny-{name}-{n:08x}", "s", *STATES[n % 4], columns) for n, (name, columns) in named]


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("cells", STUDIES)
def test_names_keep_what_tells_them_apart_beside_long_reasons(cells: int, columns: int) -> None:
    """Eighty columns left `nativ…-7a3b2e35` of each: the reason and the parts that say nothing give way."""
    rows = the_rows(cells)
    lines = watch.render(rows, columns).splitlines()
    assert max(map(len, lines)) <= columns
    shown = [line.split()[0] for line in lines if re.search(r"-[0-9a-f]{8}( |$)", line)]
    assert len(shown) == cells
    told = {name.rpartition("-")[0] for name in shown}
    assert len(told) == cells, "without its signature a name is told from the others too"
    assert all(set(one.split("-")) - {"…"} <= set("-".join(STUDIES[cells]).split("-")) for one in told), "whole parts"
    text = " ".join(" ".join(lines).split())
    assert f"{(cells + 2) // 4} x {STATES[1][1]}" in text
    assert all(state in text for state, _ in STATES[: min(cells, 4)])


def test_a_reason_has_its_column_where_there_is_room() -> None:
    rows = the_rows(6)
    lines = watch.render(rows, 112).splitlines()
    assert lines[0].endswith("reason")
    names = named([row.name for row in rows])
    assert [line.split()[0] for line in lines[1:7]] == list(names.values())


def test_a_verdict_keeps_what_tells_arms_apart(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 60 columns an arm's name goes into a line of its own."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["verdict", "lab", "--root", str(root)]) == 1
    table = capsys.readouterr().out.partition("control ")[2].partition("\n\n")[0]
    arms = named({path.parent.name for path in root.glob("lab/*/config.yaml")})
    shown = [line for line in table.splitlines()[1:] if re.fullmatch(r"\S+-[0-9a-f]{8}", line)]
    assert len(shown) == 3
    assert set(shown) < set(arms.values())
    assert re.search(r"^    EQUAL +T1 +[\d.]+ % +\S+", table, re.M)
    assert re.search(r"^    DIFFERENT +T2 +\S+", table, re.M)


def test_a_status_without_a_copy_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote it; later ones under the name `mirror`."""
    written = status.write(tmp_path, Status(State.running, "r", 0, wandb="why"))
    edit_json(tmp_path / "status.json")
    text = (tmp_path / "status.json").read_text()
    for before, read in (('"mirror": "why",', written), ("", replace(written, wandb=""))):
        (tmp_path / "status.json").write_text(text.replace('"wandb": "why",', before))
        assert status.read(tmp_path) == read


def names_and_reasons() -> None:
    test_a_reason_has_its_column_where_there_is_room()
    for cells in STUDIES:
        test_names_keep_what_tells_them_apart_beside_long_reasons(cells, 80)


test_a_mutant_is_found = finds(
    "The terminal",
    names_and_reasons="""
        names give way: A long reason takes the room of a run's name
            launch.watch._table: firm=(0,), =>
        everything in a line: A long name is cut for a column
            launch.watch._table: breaks = (1,) if => breaks = () if
    """,
    test_a_verdict_keeps_what_tells_arms_apart="""
        an arm for a check: The name of an arm is cut for the name of a check
            parity.telling.render._arms: breaks=breaks => breaks=()
    """,
)
