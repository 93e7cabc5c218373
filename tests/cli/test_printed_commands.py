"""Every command printed in README.md and the guides is carried out here as far as it can be looked at, as printed.

`run.py` with `launch.dry_run=true` added, verbs that only read on a small store; of the others, which have tests of
their own, words and choices are read.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.cli.arguments import read_arguments
from harness.cli.main import main, read
from harness.store import commands as commands_printed, provenance
from tests.parity.edits import edit_json
from tests.parity.lab import pair
from tests.support.bad_requests import Asker
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
GUIDES = "commands quickstart choosing reading_verdicts sweeps wandb slurm adapter bisect checkpoints network report"
PAGES = ("README.md", "docs/suite.md", "docs/verdicts.md", *(f"docs/{name}.md" for name in GUIDES.split()))
READS = ("compare", "verdict", "report", "watch", "show", "diff", "cancel", "gc")
SLOW = ("study=engine_step_time", "study=dtype_policies", "study=stages_by_dtype", "model=odd")
"""Of so many cells that to compose them takes more than a second; and an engine that another line imports too."""
ELSEWHERE = r"bad request:\n  (ckpt\.load=\S+: holds no checkpoint|launch\.dry_run=true: trains nothing).*"
"""Refusals that are about a name that stands for the reader's own."""
SEPARATE = re.compile(r"\s+#\s")


def commands() -> list[str]:
    """What fenced blocks print at the beginning of a line, and inline code that is a whole command."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
        lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
        inline = [" ".join(each.split()) for each in re.findall(r"`((?:python|torchrun|make|pytest) [^`]+)`", text)]
        found += [SEPARATE.split(line)[0] for line in [*lines, *inline]]
    kinds = ("python run.py", "python -m harness ", "torchrun", "make ", "pytest", "python -m pytest")
    return list(dict.fromkeys(each for each in found if each.startswith(kinds)))


COMMANDS = commands()


def of(kind: str) -> list[str]:
    return [each for each in COMMANDS if each.startswith(kind)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a study of two runs, a checkpoint's folder, and an engine of one's own in mine.py."""
    here = tmp_path_factory.mktemp("walk")
    control, arm = pair(here / "runs")
    for run in (control, arm):
        edit_json(run / "provenance.json", sources_digest=provenance.sources_digest())
    (here / "runs" / ".last").write_text(f"lab/{arm.name}\n")
    (mine,) = re.findall(
        r"^```yaml conf/study/mine.yaml\n(.*?)^```$", (ROOT / "docs/sweeps.md").read_text(), re.M | re.S
    )
    (here / "conf" / "study").mkdir(parents=True)
    (here / "conf" / "study" / "mine.yaml").write_text(mine)
    (here / "poison").mkdir()  # the asker's PYTHONPATH: here it holds an engine of one's own, and nothing poisonous
    (here / "poison" / "mine.py").write_text((ROOT / "tests/engines/adapter.py").read_text())
    return here


def filled(command: str, folder: Path) -> list[str]:
    """The words, with what a reader puts in place of a name in capitals."""
    control, arm = sorted(path.parent for path in (folder / "runs").glob("lab/*/config.yaml"))
    meant = {"STUDY": "lab", "RUN_GOOD": str(control), "RUN_BAD": str(arm), "GOOD": "HEAD~1", "BAD": "HEAD", "N": "7"}
    meant |= {"DIR": str(folder / "runs" / "lab"), "NEW": str(arm), "OLD": str(control)}
    meant |= dict.fromkeys(("adhoc", "mine", "parity_pair", "strategies", "against_fp64"), "lab")
    meant |= {"blocks.0.attention.wv.weight": "blocks.0.w_up.weight"}
    words = [meant.get(word, word) for word in shlex.split(command)]
    runs = itertools.cycle((str(control), str(arm)) if "@last" in words else (str(arm), str(control)))
    words = [word.replace("=PATH", f"={folder}") for word in words]
    if "study=mine" in words:
        words.append(f"--config-dir={folder}/conf")
    return [next(runs) if word == "RUN" else word for word in words]


@pytest.fixture(scope="module")
def asker(folder: Path) -> Iterator[Asker]:
    with closing(Asker(folder)) as found:
        yield found


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.full if any(study in each for study in SLOW) else ())
        for each in of("python run.py") + of("torchrun")
        if "&&" not in each and "NAME" not in each and "local_mine" not in each
    ],
)
def test_a_request_is_taken(command: str, folder: Path, asker: Asker) -> None:
    words = filled(command, folder)
    words = words[words.index("run.py") + 1 :]
    asked = words if "launch.dry_run=true" in words else [*words, "launch.dry_run=true"]
    outcome = asker.ask(asked)
    if outcome.code:
        assert re.fullmatch(ELSEWHERE, outcome.err, re.S), outcome.err
    else:
        assert ("Groups and their options" if "--help" in words else "dry run") in outcome.out


@pytest.mark.full
def test_a_cluster_of_ones_own_is_taken(tmp_path: Path) -> None:
    """The lines of docs/slurm.md: the copied file, and what it gives; twice the same request, once for show."""
    (shown, asked) = (each for each in of("python run.py") if "local_mine" in each)
    assert shown == f"{asked} launch.dry_run=true"
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/local_mine.yaml").write_text((ROOT / "conf/cluster/slurm.yaml").read_text())
    done = run_program([str(ROOT / "run.py"), *shlex.split(shown)[2:]], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sbatch script of" in done.stdout


@pytest.mark.parametrize("command", of("python -m harness "))
def test_a_verb_is_understood_and_a_reading_one_carried_out(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = filled(command, folder)[3:]
    verb, _ = read(words)
    if verb.name not in READS or "--code" in words:
        return
    monkeypatch.chdir(folder)
    # one run before and one after: of their noise nothing is known
    assert main(words) == (3 if "--history" in words else 0), capsys.readouterr().err
    out = capsys.readouterr().out
    for then in map(shlex.split, re.findall("^next: (.*)", out, re.M)):
        assert then[:1] == ["python"], then
        assert not {"RUN", "STUDY"} & set(then), "what is next can be typed as printed"
        if then[1:3] == ["-m", "harness"] and read(then[3:])[0].name in READS:
            assert main(then[3:]) != 2, capsys.readouterr().err


@pytest.mark.parametrize("words", ["watch lab", "show RUN", "diff RUN RUN", "verdict lab", "report lab"])
def test_what_the_console_script_prints_is_typed_as_the_console_script(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv(commands_printed.TYPED, "harness")
    assert main(filled(words, folder)) == 0
    out, err = capsys.readouterr()
    assert "python" not in out + err
    typed = [shlex.split(each) for each in re.findall("^next: (.*)", out, re.M)]
    assert typed
    for then in typed:
        assert then[0] == "harness"
        if then[1] == "run":
            assert read_arguments(then[2:]).overrides
        else:
            assert read(then[1:])


@pytest.mark.parametrize("command", of("make ") + of("pytest") + of("python -m pytest"))
def test_targets_of_make_and_files_that_pytest_is_given_exist(command: str) -> None:
    program, *words = shlex.split(command)
    assert program != "make" or re.search(rf"^{re.escape(words[0])}:", (ROOT / "Makefile").read_text(), re.M)
    for word in words:
        if word.startswith(("tests/", "REPOSITORY/")):
            assert (ROOT / word.removeprefix("REPOSITORY/")).exists(), word
