"""A refusal says no secret back: whatever was typed, wherever it stood, and whatever the environment holds."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from harness.cli import failure
from harness.cli.failure import tell
from harness.cli.main import main
from harness.config.errors import BadRequest
from harness.store import redaction
from harness.store.errors import StoreError
from tests.support.composing import compose
from tests.support.mutants import Slip, kills

FORMS = (
    "hunter2",
    "correcthorse",
    "it's a kitten",
    "a,b-hunter2",
    "hf_abcdefghijklmnopqrstuvwx",
    "5f4dcc3b5aa765d61d83",
    "pässwort-ü",
    "12ab",
)
"""Values that a person may have for a secret."""

TYPED = (
    *("wandb.api_key={}", "+password={}", "++auth.token={}", "~secret={}", "api_key='{}'", "notes.token={}"),
    *("WANDB_API_KEY={}", "trian.password={}", "--api-key={}", "token={}=x"),
    *("train.steps={{password: {}}}", "optimizer.options.secret={}", 'model={{"client_secret": "{}"}}', "password {}"),
)
"""Places in which one may be typed, each a word of a request that is refused."""

VARIABLES = {"WANDB_API_KEY": "hunter2"}


def said(word: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The refusal of a word, as it is printed."""
    with pytest.raises(BadRequest) as caught:
        compose([word])
    assert tell(caught.value, [word]) == 2
    return capsys.readouterr().err


def leaks(capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = []
    for place, secret in itertools.product(TYPED, FORMS):
        told = said(word := place.format(secret), capsys)
        found += [word] * any(piece in told for piece in (secret, *re.findall(r"[\w-]{4,}", secret)))
    return found


def test_what_is_typed_as_a_secret_is_not_said_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert not leaks(capsys)


@kills("The terminal", "a typed secret", "A refusal repeats the value that was typed to a name such as api_key")
def test_a_secret_that_is_repeated_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "without_secrets", lambda message, *_: redaction.redacted(message))
    assert leaks(capsys)


def test_verbs_say_none_back_either(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["watch", "x", "--api-token=hunter2"], ["compare", "--code", "a", "b", "wandb.api_key=hunter2"]):
        assert main([*words, "--root", str(tmp_path)]) == 2
        assert "hunter2" not in capsys.readouterr().err


def test_a_name_that_the_schema_knows_hides_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model.experts_per_token=abcd" in said("model.experts_per_token=abcd", capsys)


@kills("The terminal", "a variable's secret", "A refusal repeats the value of a secret variable that Hydra put in")
def test_a_variable_that_is_repeated_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VARIABLES["WANDB_API_KEY"])

    def told() -> str:
        tell(StoreError(f"no run {VARIABLES['WANDB_API_KEY']!r}"))
        return capsys.readouterr().err

    assert VARIABLES["WANDB_API_KEY"] not in told()
    Slip(redaction, "without_secrets", "secrets_of(environment, LEAST_TOLD)", "{}").put(monkeypatch)
    assert VARIABLES["WANDB_API_KEY"] in told()
