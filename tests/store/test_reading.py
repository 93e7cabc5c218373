"""What others left in a run's directory: one bad file is named with its fault, and hides nothing else."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from harness.store import provenance, redaction, shapes
from harness.store.errors import StoreError
from harness.store.files import write_atomic
from harness.store.metrics import iter_metrics, tail
from harness.store.reading import read_json
from harness.store.reading_yaml import Loader, parse_yaml, read_yaml
from harness.store.redaction import HIDDEN, redacted
from tests.support.mutants import kills

DEEP = 20_000


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "not UTF-8": (lambda path: path.write_bytes(b"a: \xff\xfe\n"), "is not UTF-8"),
    "a folder": (lambda path: path.mkdir(), "is no regular file"),
    "a FIFO": (lambda path: os.mkfifo(path), "is no regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    "a loop of links": (lambda path: path.symlink_to(path), "cannot be read"),
    "nested in brackets": (lambda path: path.write_text("[" * DEEP), ""),
    "nested by indentation": (lambda path: path.write_text("- " * DEEP + "x\n"), ""),
    "referring to itself": (lambda path: path.write_text("a: &a [*a]\n"), ""),
    "another kind at the top": (lambda path: path.write_text("[1]\n"), "it is a list, not a table"),
    "a thirteenth month": (lambda path: path.write_text("a: 2020-13-45\n"), ""),
    "empty": (lambda path: path.write_text(""), ""),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_every_strange_file_is_named_with_its_fault(kind: str, tmp_path: Path) -> None:
    make, told = STRANGE[kind]
    path = tmp_path / "file"
    make(path)
    for read in (lambda: read_yaml(path, shapes.CONFIG), lambda: read_json(path, shapes.SUMMARY)):
        with pytest.raises(StoreError, match=told or None) as error:
            read()
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"accounted_bytes": {"weights": "many"}}, "accounted_bytes.weights is a text, not a whole number"),
        ({"collectives": [{"bucket": None, "count": 1, "kind": "all_gather"}]}, "collectives.0.bytes is missing"),
        ({"load": {"at_start": True, "at_end": 0, "others_cores": 0}}, "load.at_start is true or false, not a number"),
        ({"step_time_s": None, "unknown": object}, ""),
    ],
)
def test_shapes(value: object, told: str) -> None:
    assert shapes.fault(value, shapes.SUMMARY) == told


LINES = ["[]", "3", '{"step": "one"}', '{"loss": 1}', '{"step": 1, "comm": 3}', "[" * DEEP, "\\ud800"]


CONFIGS = {
    "a configuration": "train:\n  steps: 3\nmodel: {name: tiny}\nmeasure:\n  capture_steps:\n  - 1\nnotes: ''\n",
    "a key twice": "a: 1\nb: 2\na: 3\n",
    "remarks and empty lines": "# x\na: 1  # y\n\n# z\nb:\n  # c: 4\n  d: 2\n",
    "a text over lines": "a: |\n  b: 1\n\n  c: 2\nb: >-\n  x\n  y\nc: 1\n",
    "a text in quotes that goes on at the margin": 'a: "x\nb: y"\nc: 1\n',
    "brackets that go on at the margin": "a: {x: 1,\nb: 2}\nc: [1,\n2]\n",
    "a list at the margin": "a:\n- 1\n- b: 2\nc: 3\n",
    "keys that are no texts": "on: 1\n2: 3\nno: {yes: 4}\n",
    "one document after another": "a: 1\n---\nb: 2\n",
    "too little indentation": "a:\n    b: 1\n  c: 2\nd: 3\n",
    "merged": "a: 1\n<<: {b: 2}\n",
    "a date and a number": "a: 2026-02-30\nb: 1\n",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_read_by_entries_is_what_is_read_whole(kind: str) -> None:
    text = CONFIGS[kind]
    try:
        wanted = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError):
        with pytest.raises(StoreError, match="is not valid YAML"):
            parse_yaml(text, "here", dict)
        return
    assert parse_yaml(text, "here", dict) == wanted
    assert [*parse_yaml(text, "here", dict)] == [*wanted], "in the order in which they stand"


def test_who_changes_what_was_read_changes_nothing_for_others() -> None:
    text = "measure:\n  capture_steps:\n  - 1\n"
    parse_yaml(text, "here", dict)["measure"]["capture_steps"].append(2)
    assert parse_yaml(text, "here", dict) == {"measure": {"capture_steps": [1]}}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_another_shape_is_damage(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(StoreError, match="is not a record"):
        list(iter_metrics(path))
    with pytest.raises(StoreError, match="is not a record"):
        tail(path)


# -- shared hosts ------------------------------------------------------------------------------------------------------


SECRETS = {
    "WANDB_API_KEY": "w4ndb-0123456789",
    "MY_DB_PASSWORD": "correct horse",
    "DB_PASS": "battery staple",
    "AWS_SECRET_ACCESS_KEY": "/bPxRfi/CYEXAMPLE",
    "TOKEN_FILE": "/run/secrets/token",
    "MAX_TOKENS": "20000000",
    "HF_TOKENIZER": "my-tokenizer",
}
SAID = ("TOKEN_FILE", "MAX_TOKENS", "HF_TOKENIZER")
"""Those that hold no secret."""


@pytest.mark.parametrize(
    "text",
    [
        "read /run/secrets/token",
        "tokens: 20000000\ntarget: my-tokenizer",
        "+    password: str = field(); token: Token = next()",
        "+    secret = config.password2.value",
        "git@github.com:me/x.git and ssh://git@host/x",
        "+    tokens = batch.tokens; key = 'train.steps'",
        "KEY=VALUE HF_TOKEN=$HF_TOKEN",
    ],
)
def test_code_is_told_from_secrets(text: str) -> None:
    assert redacted(text, SECRETS) == text


PLANTED = (
    "aws_access_key_id = {AKIAIOSFODNN7EXAMPLE}",
    "aws_secret_access_key = {wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY}",
    '-H "Authorization: Bearer {s3cr3tabcdefghijkl}"',
    '"Authorization": "Bearer {thesecretwithoutdigits}"',
    "Authorization: Basic {dXNlcjpwYXNzd29yZA==}",
    "password={hunter2}",
    "password={correcthorse}",
    'password = "{correcthorse}"',
    "password: {correcthorse}",
    "db_password: '{correct horse}'",
    'passwd = "{letmein99}"',
    "PGPASSWORD={letmein} psql",
    "postgres://user:{pa%20ss}@db/x",
    '{{"token": "{abcdefghijkl}"}}',
    "api_key: {letmeinplease}",
    'apiKey = "{letmeinplease}"',
    "client_secret: {letmeinplease}",
    "export MY_TOKEN={letmein99}",
    "export my_token={letmeinplease}",
    'wandb.login(key="{0123456789abcdef0123456789abcdef01234567}")',
    "{wandb_v1_abcdefghijklmnopqrstuvwxyz}",
    "{hf_abcdefghijklmnopqrstuvwx}",
    "{ghp_abcdefghijklmnopqrstuvwxyz0123456789}",
    "{glpat-abcdefghij0123456789}",
    "https://{a1b2c3d4e5f6a7b8c9}@dev.example.com/x",
    "wandb login {0123456789abcdef}",
    "huggingface-cli login --token {hf0123456789}",
    "{sk-proj-abcdefghijklmnopqrstuvwx}",
    "AccountKey={abcdefghijklmnop==};",
    'os.environ["HF_TOKEN"] = "{letmeinplease}"',
    'os.environ.setdefault("HF_TOKEN", "{letmeinplease}")',
    "plain text with {w4ndb-0123456789} of a variable",
    'escaped "{line one\\nline two}"',
    'TOKEN = (\n{sign}    "{abcdefghijklmnop}"',
    "password: |\n{sign}  {correcthorse}",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{sign}{b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2}",
    "{MIIEpAIBAAKCAQEA7bq98mDkZ3v1x0Yw5uJfQ2nRr6sTtUuVvWwXxYyZz012345a}\n{sign}and so on",
    "{c2hvcnRsaW5l}\n{sign}-----END RSA PRIVATE KEY-----",
)
"""Secrets in braces, as they stand in files that are edited; a later line begins with its sign."""
IN_VARIABLES = {"A_TOKEN": "w4ndb-0123456789", "A_KEY": "line one\nline two"}


def left_in(diff: Callable[[str], str]) -> list[str]:
    """Planted forms that are still there, once they were added, taken away, or stood beside a change."""
    left = []
    for text, sign in itertools.product(PLANTED, "+- "):
        line = text.replace("{sign}", sign).replace("{{", "\0").replace("}}", "\1")
        (secret,) = re.findall(r"\{([^{}]+)\}", line)
        line = line.replace(f"{{{secret}}}", secret).replace("\0", "{").replace("\1", "}")
        found = diff(f"@@ -1,3 +1,3 @@\n context\n{sign}{line}\n context\n")
        assert found.startswith("@@ -1,3 +1,3 @@\n context\n")
        assert found.endswith("context\n") or "PRIVATE" in found
        left += [f"{sign}{text}"] * (secret in found)
    return left


def test_no_planted_form_stays_in_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in IN_VARIABLES.items():
        monkeypatch.setenv(name, value)

    assert not left_in(redacted)
    provenance.record_start(tmp_path, {}, "+password: correcthorse\n")
    assert (tmp_path / "diff.patch").read_text() == f"+password: {HIDDEN}\n"


@kills("The store", "a diff as it is", "diff.patch keeps the secrets of a file of settings that was edited")
def test_a_diff_that_keeps_secrets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_ASSIGNED", ())
    assert len(left_in(lambda diff: redacted(diff, {}))) == 3 * len(PLANTED)


def test_code_is_kept_as_it_is() -> None:
    """All of this repository's own, in which nothing is secret."""
    folders = ("harness/config", "harness/launch", "harness/train", "conf", "sweeps")
    files = [path for folder in folders for path in (provenance.ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".yaml")}
    assert len(texts) > 120
    changed = [path.name for path, text in texts.items() if redacted(text, {}) != text]
    assert not changed


def test_no_file_of_ours_holds_a_planted_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place: whatever is written whole goes through it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    provenance.record_start(tmp_path, {"submit_host": "correct horse"}, "+w4ndb-0123456789")
    write_atomic(tmp_path / "error.txt", "ValueError: correct horse")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(found) == 3
    for text in found.values():
        assert HIDDEN in text
        assert not any(value in text for name, value in SECRETS.items() if name not in SAID)


EARLY = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it starts in the background
sys.argv = [{program!r}, *{words!r}]
class Press:
    def find_spec(self, name, *_):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
import runpy
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "at"), [("run.py", "pathlib"), ("run.py", "hydra"), ("harness/__main__.py", "harness.cli.main")]
)
def test_ctrl_c_while_modules_load_ends_with_130_and_no_traceback(program: str, at: str) -> None:
    root = Path(__file__).parents[2]
    text = EARLY.format(program=str(root / program), words=["watch"], at=at)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, cwd=root)
    assert (done.returncode, done.stderr) == (130, "")
