"""Reading words: every mistake at once, the nearest names, and never the advice to append."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from harness.cli import arguments
from harness.cli.main import read
from harness.config.doc import settings
from harness.config.errors import BadRequest
from harness.config.hints import SYNONYMS
from harness.config.overrides import MAX_SWEEP, check_overrides, typed_value
from harness.config.words import as_word, ask_again, quote
from tests.support.composing import compose
from tests.support.mutants import finds


def refused(*overrides: str, multirun: bool = False) -> str:
    """What is said of words; of a set of cells, of one with the last values."""
    with pytest.raises(BadRequest) as caught:
        compose([word.cells[-1] for word in check_overrides(overrides, multirun=multirun)])
    return str(caught.value)


@pytest.mark.parametrize("typed", ["=3", "@=3", "@train=3", "1=3", "a b=3", "\u00fc=3", "a\nb=3"])
def test_what_is_no_key_is_no_fault_of_its_value(typed: str) -> None:
    told = refused(typed)
    assert "no such group or setting" in told or "names no group or setting" in told
    assert "quot" not in told


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("shardng=optim", "sharding"),
        ("modle.dim=3", "model.dim"),
        ("train.step=3", "train.steps"),
        ("train.Steps=3", "train.steps"),
        ("train.learning_rate=3", "optimizer.lr"),
        ("train.lr=3", "optimizer.lr"),
        ("world_size=3", "mesh.world_size"),
        ("steps=3", "train.steps"),
        ("vocab=3", "model.vocab_size"),
        ("dtype=bf16_com", "dtype=bf16_comm"),
        ("sharding=ZeRO1", "sharding=optim"),
        ("wandb.mode=on", "wandb.mode=online"),
        ("sharding.strategy=zero3", "sharding.strategy=optim_grads_params"),
        ("native", "engine=native"),
        ("lr", "optimizer.lr=VALUE"),
    ],
)
def test_a_typo_gets_the_name_that_was_meant(typed: str, meant: str) -> None:
    message = refused(typed)
    assert f"did you mean {meant}" in message or f" or {meant}" in message
    assert "+" not in message


def test_all_mistakes_are_told_at_once_in_the_order_typed() -> None:
    message = refused("shardng=optim", "train.stps=1", "dtype=float16", "+a=1", "~model", "", "x")
    assert message.startswith("bad request, 7 problems:")
    places = [message.index(part) for part in ("shardng", "train.stps", "dtype=float16", "+a=1")]
    assert places == sorted(places)


def test_synonyms_lead_to_names_that_exist() -> None:
    from harness.config.catalog import load_catalog

    options = load_catalog()
    for word, meant in SYNONYMS.items():
        (group, _, option), (_, sign, name) = meant.partition("="), word.partition("=")
        assert option in options[group] and name not in options[group] if sign else meant in {*options, *settings()}


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("sharding=no_shard,optim", 2),
        ("sharding=glob(optim*)", 3),
        ("train.seed=range(0,5)", 5),
        ("optimizer.lr=0.1,1e-3,3", 3),
        ("optimizer.betas=[0.9,0.95],[0.8,0.9]", 2),
        ("train.steps=choice(5,6)", 2),
    ],
)
def test_an_axis_has_its_values_under_m_and_is_refused_without(word: str, count: int) -> None:
    (read,) = check_overrides([word], multirun=True)
    assert len(read.values) == count
    assert all(len(check_overrides([cell])) == 1 for cell in read.cells), "each value is a valid override again"
    assert "python run.py -m" in refused(word)


def test_one_bad_value_of_an_axis_is_found() -> None:
    message = refused("sharding=optim,zero3,no_shard", multirun=True)
    assert "sharding=zero3" in message
    assert "sharding=optim:" not in message


AXES = {
    "never comes to its end": "range(1,5,0) shuffle(range(1,5,0)) range(0,inf,1) range(nan,5) range(1,5,-0.0)",
    str(MAX_SWEEP // 1000): "range(0,100000000000) range(0,-5)",
    "matches no option": "glob(q*)",
}


@pytest.mark.parametrize("told", AXES)
def test_axes_without_sense_are_refused_quickly(told: str) -> None:
    for word in AXES[told].split():
        assert told in refused(f"{'sharding' if 'glob' in word else 'optimizer.lr'}={word}", multirun=True)


@pytest.mark.parametrize(
    "word",
    [
        *("sharding@foo=optim", "train={steps: 5}", "train.steps.x=1", "train=5", "notes.x=1", "=", "train.=5"),
        *("train.steps=[1]", "train.steps={a: 1}", "optimizer.betas=0.9", "optimizer.betas=[a,b]", "train.steps=true"),
        *("measure.capture_steps=[1.5]", "train.seed=interval(0,1)", "notes='unbalanced", "sharding=[optim,no_shard]"),
        *(".steps=5", "sharding=", "sharding=null", "notes=héé 雪", "notes='\udcff'", "+train.steps=5", "~train.steps"),
    ],
)
def test_odd_words_are_refused_in_one_message(word: str) -> None:
    message = refused(word, multirun=True)
    assert message.startswith("bad request")
    assert "Traceback" not in message


@pytest.mark.parametrize("word", ["notes=", "notes=''", "notes='a, b=c'", "study=null", "experiment=null"])
def test_odd_words_that_make_sense_are_taken(word: str) -> None:
    assert len(check_overrides([word])) == 1


def test_the_fix_for_a_quote_can_be_typed() -> None:
    for text in ("""it's "so", ok""", "héé 雪", "{a"):
        (typed,) = shlex.split(re.findall(r"fix: +(.*)", refused(f"notes={text}"))[0])
        assert typed_value([typed], "notes", None) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
@example("\\")
@example(".5")
@example("..a")
@example("null")
@example("a\\'b\\\\")
def test_quoting_survives_hydras_grammar(text: str) -> None:
    for word in (quote(text), as_word(text)):
        assert typed_value([f"notes={word}"], "notes", None) == text


@pytest.mark.parametrize("root", ["/runs", "a,b (c)=d", "it's", "ünïcødé", "12", "null", "~/x"])
def test_a_study_is_asked_for_again_in_its_store(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, study, rerun, where = shlex.split(ask_again(root, "mine", "launch.rerun=stale"))
    assert (study, rerun) == ("study=mine", "launch.rerun=stale")
    assert str(typed_value([where], "launch.root", None)) == root
    assert ask_again("runs", "mine").endswith(" -m study=mine")


@given(st.text(max_size=20))
def test_no_word_crashes_the_reader(text: str) -> None:
    for word in (text, f"train.steps={text}", f"{text}=1"):
        with contextlib.suppress(BadRequest):
            check_overrides([word], multirun=True)


@pytest.mark.parametrize("typed", ["--sharding=optim", "--train.steps=3", "-sharding=optim"])
def test_a_setting_written_as_a_flag_is_given_back_without_dashes(typed: str) -> None:
    with pytest.raises(BadRequest) as caught:
        arguments.read_arguments([typed])
    (found,) = caught.value.violations
    assert (found.subject, found.problem) == (typed, "is no flag; settings have no dashes")
    assert shlex.split(found.fix) == [typed.lstrip("-")]
    for more, told in (
        (["--sharding", "optim"], "no dashes\n      fix:   sharding=VALUE"),
        (["--steps"], "mean train.steps"),
    ):
        with pytest.raises(BadRequest, match=re.escape(told)):
            arguments.read_arguments(more)


test_a_mutant_is_found = finds(
    "The terminal",
    test_a_setting_written_as_a_flag_is_given_back_without_dashes="""
        a setting as a flag: A setting with dashes before it is called an unknown flag
            cli.arguments._no_flag: "=" in word => not word
            (typed="--sharding=optim")
    """,
)


@pytest.mark.parametrize(
    ("word", "told", "not_told"),
    [
        ("launch.root=~/x", 'launch.root="$HOME/x"', "quotes, braces"),
        ("optimizer=null", "optimizer=null: no such option", "None"),
        ("experiment=[bitwise,oracle]", "experiment=[bitwise,oracle]: no such option", "'"),
        ("engine=native,ddp", "-m engine=native,ddp", "for a list"),
        ("measure.capture_steps=1,2", "measure.capture_steps=[...] for a list", "None"),
        ("steps=5", "did you mean train.steps?", "notes"),
    ],
)
def test_an_answer_is_in_the_words_that_are_typed(word: str, told: str, not_told: str) -> None:
    message = refused(word)
    assert told in message
    assert not_told not in message


@pytest.mark.parametrize("key", ["launch.root", "data.path", "ckpt.load"])
def test_an_empty_path_is_not_the_folder_in_which_it_is_typed(key: str) -> None:
    with pytest.raises(BadRequest, match=f"{key}=: is empty"):
        compose([f"{key}="])


def test_the_shortest_run_warms_up_for_all_of_it() -> None:
    assert compose(["train.steps=1"]).typed.train.warmup_steps == 1
    with pytest.raises(BadRequest, match="is longer than the run"):
        compose(["train.steps=1", "train.warmup_steps=2"])


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for ask in (lambda: arguments.read_arguments(["--version"]), lambda: read(["--version"])):
        with pytest.raises(SystemExit) as end:
            ask()
        assert not end.value.code
        assert capsys.readouterr().out.startswith("harness ")
