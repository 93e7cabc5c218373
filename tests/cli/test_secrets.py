"""A refusal repeats no secret that has a service's form, is assigned to a telling name, or stands in a variable."""

from __future__ import annotations

import pytest

from harness.cli import failure
from harness.cli.failure import tell
from harness.store.errors import StoreError
from tests.support.mutants import kills

SECRET = "hunter2-hunter2"


@kills("The terminal", "a variable's secret", "A refusal repeats the value of a secret variable that Hydra put in")
def test_a_variable_that_is_repeated_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)

    def told() -> str:
        tell(StoreError(f"no run {SECRET!r}, password='{SECRET[:7]}', hf_{'a1' * 16}"))
        return capsys.readouterr().err

    assert "hunter2" not in told()
    assert "a1a1" not in told()
    monkeypatch.setattr(failure, "redacted", lambda message: message)
    assert SECRET in told()
