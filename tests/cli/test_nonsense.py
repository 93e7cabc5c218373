"""Bad requests, and requests made of nonsense: every key, every kind of it. Exit 0 (looked at) or 2 (refused), no
traceback, no rank, no torch, no litter, no hang."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from harness.config.catalog import load_catalog
from harness.config.doc import settings
from tests.support.bad_requests import Asker, poison_torch

pytestmark = pytest.mark.timeout(900)

DRY = "launch.dry_run=true"

PLAIN = r"""
null ??? true false 0 1 -1 3 7 1e-9 1e308 nan inf -inf [] {} [1] [0,0] [[1]] [null] {a:1} {a:{b:1}} 0x10 1_0 '' -0.0
${train.steps} ${train} ${measure.capture_steps} ${nope} ${ ${oc.env:HOME} ${oc.env:NOPE} ${oc.decode:[1]} ${train.${x}}
a,b range(3) interval(0,1) choice(a,b) glob(*) sort(3,1) shuffle(1,2) range(1,5,0) range(0,1e9) range(0,inf) choice() ٣
~nobody/x ~ /dev/null /proc/1/mem . .. / %s * = a=b &a *a @ @last 1e400 ü \ ' !!python/object:os.system
"""
LONG = ("x" * 5000, "/" + "x/" * 3000, "9" * 5000)
VALUES = (*PLAIN.split(), *LONG, "", "{a: 1}", "'a\nb'", "'\t'", "'a b'", "\x7f", "'\u202e'", "'\u2028'")
FLAGS = """
-m --cfg=job --cfg=nope --package=train --resolve --info --info=all --hydra-help --help --from=@last --from= --version
--from=/dev/zero --config-dir=/tmp --shell-completion --shell-completion=install=bash -sc=query=bash -c -p -- -x --run
--experimental-rerun=x
"""


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
    flags = [dice.choice(FLAGS.split())] if dice.random() < 0.15 else []
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


SECRETS = {"MY_TOKEN": "qwertz-1", "WANDB_API_KEY": "hunter22", "DB_PASSWORD": 'it is "so"'}

OF_SECRETS = (
    "notes='x${oc.env:MY_TOKEN}'",
    "train.steps=${oc.env:MY_TOKEN}",
    "data.path=${oc.env:DB_PASSWORD}",
    "model=${oc.env:MY_TOKEN}",
    "ckpt.load=/${oc.env:WANDB_API_KEY}",
    "notes=hf_abcdefghijklmnopqrstuvwx",
    "cluster.additional={api_token: hunter22}",
)
"""Requests of which Hydra makes a secret's value, or a rule refuses it."""


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    folder = tmp_path_factory.mktemp("nonsense")
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
        outcome = asker.ask(words)
        quiet = "Traceback" not in outcome.err + outcome.out and not outcome.torch_imported
        if outcome.code not in (0, 2) or not quiet or outcome.left_behind:
            shown = " ".join(word[:80] for word in words)
            wrong.append(
                f"seed {seed}: {shown!r} ended with {outcome.code}, left {outcome.left_behind}: {outcome.err[-600:]}"
            )
    return wrong


@pytest.mark.parametrize("word", OF_SECRETS)
def test_a_secret_that_a_refusal_comes_across_is_not_said(word: str, asker: Asker) -> None:
    outcome = asker.ask((word, DRY))
    assert outcome.code == 2, outcome.out
    assert not [each for each in (*SECRETS.values(), "hf_abcde") if each in outcome.err + outcome.out], outcome.err


def test_nonsense_is_refused_in_words(asker: Asker) -> None:
    assert not found_wrong(asker, range(40))


REFUSED = r"""
shardng=optim => did you mean sharding
engine.name=natve => did you mean engine.name=native?
engine=horovod => ddp, deepspeed, ext, fsdp1
train.steps= => a whole number
train.steps={digits} => more digits than are read
+new=1 => cannot be added
~engine => cannot be removed
--verbose => run.py --help
train.steps=5 train.steps=6 => is given 2 times
sharding=optim,no_shard => run.py -m sharding=optim,no_shard
data=text "data.path=it's" => cannot be read
launch.root=/proc/runs => /proc/runs: No such file
study=parity_pair => run.py -m study=parity_pair
-m study=parity_par => did you mean study=parity_pair?
--from 0123abcd => 0123abcd
-m engine=ddp,native sharding=optim_grads => in 1 of 2 cells
study.skip_if=[[1]] => takes a list of texts
study.skip_if=${measure.capture_steps} => takes a list of texts
"measure.callbacks=[{a: 1}]" => takes a list of texts
-m study.grid.x=${train.steps} => takes axes
-m study.control=${optimizer} => takes pairs
--resolve launch.dry_run=true => goes with --cfg
--package=train launch.dry_run=true => goes with --cfg
"""
"""Words and a part of the refusal: lists and tables of something else than they hold, too, which OmegaConf lets
through, and flags without what they go with."""


def refusal(asker: Asker, words: Sequence[str]) -> str:
    outcome = asker.ask(words)
    assert outcome.code == 2, outcome.err[-600:]
    assert (outcome.out, outcome.torch_imported, outcome.left_behind) == ("", False, ())
    assert "Traceback" not in outcome.err
    assert not re.search(r"append|use \+", outcome.err), "a typo must never be met with advice to append it"
    assert outcome.err.count("bad request") <= 1
    return outcome.err


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_bad_request_is_refused_and_explained(row: str, asker: Asker) -> None:
    words, _, told = row.replace("{digits}", "9" * 5000).rpartition(" => ")
    assert told in refusal(asker, shlex.split(words)).replace("run.py' ", "run.py ")  # quoted in a path with spaces


@pytest.mark.parametrize("name", [*OPTIONS, "waits"])
def test_a_file_of_ones_own_that_is_no_option(name: str, asker: Asker) -> None:
    told = refusal(asker, ("--config-dir={tmp}/own", f"model={name}", DRY))
    assert OPTIONS.get(name, (b"", "is no regular file"))[1] in told


def test_torch_would_be_noticed(tmp_path: Path) -> None:
    poison_torch(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "poison")}
    assert subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True).returncode == 1
    assert (tmp_path / "torch-was-imported").exists()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_all_nonsense_is_refused_in_words(part: int, asker: Asker) -> None:
    assert not found_wrong(asker, range(1000 + 150 * part, 1150 + 150 * part))
