"""Requests made of nonsense: every key, every kind of it. Exit 0 (looked at) or 2 (refused), no traceback, no hang."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from harness.config.catalog import load_catalog
from harness.config.doc import settings
from tests.support.bad_requests import Asker, BadRequest, make_bad_data, poison_torch

DRY = "launch.dry_run=true"

VALUES = (
    *("", "null", "???", "true", "false", "0", "1", "-1", "3", "7", "1e-9", "1e308", "nan", "inf", "-inf", "[]", "{}"),
    *("[1]", "[0,0]", "[[1]]", "{a: 1}", "{a: {b: 1}}", "[null]", "99999999999999999999999", "0x10", "1_0", "''"),
    *("${train.steps}", "${train}", "${measure.capture_steps}", "${nope}", "${", "${oc.env:HOME}", "a,b", "range(3)"),
    *(
        "interval(0,1)",
        "choice(a,b)",
        "glob(*)",
        "sort(3,1)",
        "shuffle(1,2)",
        "'a\nb'",
        "'\t'",
        "'a b'",
        "ü",
        "\\",
        "'",
    ),
    *(
        "x" * 5000,
        "/" + "x/" * 3000,
        "~nobody/x",
        "~",
        "/dev/null",
        "/proc/1/mem",
        ".",
        "..",
        "/",
        "%s",
        "*",
        "=",
        "a=b",
    ),
    *("!!python/object:os.system", "&a", "*a", "@", "@last", "\x7f", "\U0001f600"),
    *("1e400", "-0.0", "1e-400", "1__0", "٣", "'\u202e'", "'\u2028'", "9" * 5000, "range(1,5,0)", "range(0,1e9)"),
    *("shuffle(range(3,1,0))", "range(0,inf)", "choice()", "${oc.env:NOPE}", "${oc.env:NOPE,1}", "${oc.decode:[1]}"),
    *("${oc.dict.keys:train}", "${hydra:runtime.cwd}", "${oc.env:[]}", "${optimizer.lr}", "${train.${x}}"),
)
FLAGS = (
    *(
        "-m",
        "--cfg=job",
        "--cfg=nope",
        "--package=train",
        "--resolve",
        "--info",
        "--info=all",
        "--hydra-help",
        "--help",
    ),
    *(
        "--from=@last",
        "--from=",
        "--from=/dev/zero",
        "--version",
        "--config-dir=/tmp",
        "--shell-completion",
        "-c",
        "-p",
    ),
    *(
        "--shell-completion=install=bash",
        "-sc=query=bash",
        "--multirun",
        "--run",
        "--experimental-rerun=x",
        "--",
        "-x",
        "-p",
    ),
)


def _word(dice: random.Random) -> str:
    catalog = load_catalog()
    key = dice.choice([*settings(), *catalog, *settings(), "nope", "train", "hydra.run.dir", "", "a.b.c"])
    options = catalog.get(key, ())
    value = dice.choice([*options, *VALUES]) if options and dice.random() < 0.5 else dice.choice(VALUES)
    sign = dice.choice(["", "", "", "", "", "", "+", "++", "~"])
    return f"{sign}{key}={value}" if dice.random() < 0.97 else f"{sign}{key}{value}"


def request(seed: int) -> list[str]:
    """Some words of nonsense, and one that keeps a request which is none from starting anything."""
    dice = random.Random(seed)
    words = [_word(dice) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
    flags = [dice.choice(FLAGS)] if dice.random() < 0.15 else []
    words = [word for word in words if not word.lstrip("+~").startswith("launch.dry_run")]
    return [*flags, *words, DRY]


LEVELS = "".join(
    f"{key}: &{key} [{', '.join([f'*{below}'] * 9)}]\n" for key, below in zip("bcdefgh", "abcdefg", strict=True)
)

OPTIONS = {
    "latin": (b"name: \xe9\n", "is not UTF-8 text"),
    "deep": (b"dim: " + b"[" * 20_000, "nest"),
    "bomb": (f"a: &a [x]\n{LEVELS}".encode(), "refers to itself"),
    "round": (b"defaults: [about]\n", "name each other without end"),
    "about": (b"defaults: [round]\n", "name each other without end"),
    "listed": (b"- dim\n", "not a table"),
}
"""Files of one's own that are no options, and what is said of them."""


SECRETS = {"MY_TOKEN": "qwertz-1", "WANDB_API_KEY": "hunter2", "DB_PASSWORD": 'it is "so"'}

OF_SECRETS = (
    "notes='x${oc.env:MY_TOKEN}'",
    "train.steps=${oc.env:MY_TOKEN}",
    "data.path=${oc.env:DB_PASSWORD}",
    "model=${oc.env:MY_TOKEN}",
    "ckpt.load=/${oc.env:WANDB_API_KEY}",
    "notes=hf_abcdefghijklmnopqrstuvwx",
    "cluster.additional={api_token: hunter2}",
)
"""Requests of which Hydra makes a secret's value, or a rule refuses it."""


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    folder = tmp_path_factory.mktemp("nonsense")
    make_bad_data(folder)
    poison_torch(folder)
    options = folder / "own" / "model"
    options.mkdir(parents=True)
    for name, (data, _) in OPTIONS.items():
        (options / f"{name}.yaml").write_bytes(data)
    os.mkfifo(options / "waits.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        asker = Asker(folder)
    with closing(asker) as made:
        yield made


def found_wrong(asker: Asker, seeds: Sequence[int]) -> list[str]:
    """Requests that do not end as documented, each with its seed and the end of what it said."""
    wrong = []
    for seed in seeds:
        words = request(seed)
        outcome = asker.ask(BadRequest(tuple(words), ()))
        quiet = "Traceback" not in outcome.err + outcome.out and not outcome.torch_imported
        if outcome.code not in (0, 2) or not quiet or outcome.left_behind:
            shown = " ".join(word[:80] for word in words)
            wrong.append(
                f"seed {seed}: {shown!r} ended with {outcome.code}, left {outcome.left_behind}: {outcome.err[-600:]}"
            )
    return wrong


@pytest.mark.parametrize("word", OF_SECRETS)
def test_a_secret_that_a_refusal_comes_across_is_not_said(word: str, asker: Asker) -> None:
    outcome = asker.ask(BadRequest((word, DRY), ()))
    assert outcome.code == 2, outcome.out
    assert not [each for each in (*SECRETS.values(), "hf_abcde") if each in outcome.err + outcome.out], outcome.err


def test_nonsense_is_refused_in_words(asker: Asker) -> None:
    assert not found_wrong(asker, range(40))


KINDS = {
    "study.skip_if=[[1]]": "takes a list of texts",
    "study.skip_if=${measure.capture_steps}": "takes a list of texts",
    "measure.callbacks=[{a: 1}]": "takes a list of texts",
    "measure.capture_steps=[[1]]": "takes a list of whole numbers",
    "-m study.grid.x=${train.steps}": "takes axes",
    "-m study.control=${optimizer}": "takes pairs",
    "train.steps=" + "9" * 5000: "more digits than are read",
    "cluster.python='it\\'s'": "is no command",
    "--resolve": "goes with --cfg",
    "--package=train": "goes with --cfg",
}
"""Lists and tables of something else than they hold, which OmegaConf lets through; flags without what they go with, of
which `-p` takes the next word; and what is said of them."""


@pytest.mark.parametrize("words", KINDS)
def test_a_value_is_of_its_kind_all_the_way_down(words: str, asker: Asker) -> None:
    flag, text = ("-m", words.removeprefix("-m ")) if words.startswith("-m ") else ("", words)
    outcome = asker.ask(BadRequest((*filter(None, (flag, text)), DRY), ()))
    assert outcome.code == 2, outcome.err[-600:]
    assert KINDS[words] in outcome.err


@pytest.mark.parametrize("name", [*OPTIONS, "waits"])
def test_a_file_of_ones_own_that_is_no_option(name: str, asker: Asker) -> None:
    outcome = asker.ask(BadRequest(("--config-dir={tmp}/own", f"model={name}", DRY), ()))
    assert outcome.code == 2, outcome.err[-600:]
    assert "Traceback" not in outcome.err
    assert OPTIONS.get(name, (b"", "is a FIFO, not a file"))[1] in outcome.err


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_all_nonsense_is_refused_in_words(part: int, asker: Asker) -> None:
    assert not found_wrong(asker, range(1000 + 150 * part, 1150 + 150 * part))
