"""The global order of sequences: a pure function of position, the only state.

Each epoch is a permutation of all sequences: a Feistel network over the smallest square power of two that holds them,
repeated until it lands inside. It takes no storage, and does not depend on a random number library.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

MASK64 = (1 << 64) - 1
MIN_HALF_BITS = 4
"""Feistel networks over fewer than 256 numbers show which permutations they cannot make."""

NUM_ROUNDS = 4
"""Enough for a strong pseudo-random permutation where the round function is one (Luby and Rackoff)."""


@lru_cache(maxsize=65536)
def sequence_at(position: int, num_sequences: int, seed: int) -> int:
    """Index of the sequence at a position of the endless global stream (0, 1, 2, ...).

    Epoch e is positions [e * num_sequences, (e + 1) * num_sequences): every sequence once, in an order of its own.
    """
    epoch, index = divmod(position, num_sequences)
    half_bits = max(MIN_HALF_BITS, ((num_sequences - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    while True:
        index = _feistel(index, half_bits, keys)
        if index < num_sequences:
            return index


def mix64(value: int) -> int:
    """Finaliser of splitmix64: a well-mixed 64-bit function of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def _feistel(index: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for key in keys:
        left, right = right, left ^ (mix64(key ^ right) & mask)
    return (left << half_bits) | right


@lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    material = hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    return tuple(int.from_bytes(material[8 * r : 8 * r + 8], "little") for r in range(NUM_ROUNDS))
