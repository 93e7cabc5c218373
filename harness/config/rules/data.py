"""Whether the data is there, long enough, and made of ids the model knows."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import DataKind

_BYTE_KINDS = (DataKind.stdlib, DataKind.text)


@rule("model.vocab_size")
def bytes_fit_the_vocabulary(request: Request) -> Iterator[Violation]:
    """Text is read as bytes: ids go up to 255."""
    kind, vocab = request.config.data.kind, request.config.model.vocab_size
    if kind in _BYTE_KINDS and vocab < 256:
        yield Violation(
            request.show("model.vocab_size"), f"data={kind.name} has ids up to 255", "256 or more", "model.vocab_size=256"
        )


RULES: tuple[Rule, ...] = (bytes_fit_the_vocabulary,)
