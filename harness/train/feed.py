"""Sequences of `forward_backward` against those of the data source.

The loader is not trusted: microbatches are copied before a step and hashed after it; what they should be is read again
without loader and sources (`harness.data.reread`). Neither counts for a step's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from harness.config.schema import Config
from harness.data.loader import sequence_digest
from harness.data.order import MASK64
from harness.data.reread import Reread
from harness.data.sources import Tokens
from harness.engines.protocol import Microbatch


class Feed:
    """Reader of one rank's sequences. data_rank: as in `Loader`.

    Raises `ValueError`: the source is missing, empty or malformed.
    """

    def __init__(self, config: Config, data_rank: int) -> None:
        self._again = Reread(config, data_rank)

    def digests(self, step: int, given: Microbatch) -> tuple[int, int]:
        """Hashes of what the data holds for a step, and of its microbatches, unsigned 64-bit; equal for right data.

        Waits for the device.
        """
        first, right, fed = self._again.first(step), self._again.sequences(step), _sequences(given)
        held = _digest(first, right)
        return held, held if np.array_equal(fed, right) else _digest(first, fed)


def joined(microbatches: Sequence[Microbatch]) -> Microbatch:
    """Copy of all of a step's microbatches as one, on their device."""
    tokens, targets = (torch.cat(rows) for rows in zip(*microbatches, strict=True))
    return Microbatch(tokens, targets)


def _sequences(given: Microbatch) -> Tokens:
    """Sequences of tokens and targets, [sequences, seq_len + 1]; both in full where targets are not the next tokens."""
    tokens, targets = (rows.cpu().numpy() for rows in given)
    shifted = np.array_equal(tokens[:, 1:], targets[:, :-1])
    return np.concatenate([tokens, targets[:, -1:] if shifted else targets], axis=1)


def _digest(first: int, rows: Tokens) -> int:
    """Sum of the hashes of sequences from a position on, modulo 2**64."""
    return sum(sequence_digest(position, row) for position, row in enumerate(rows, start=first)) & MASK64
