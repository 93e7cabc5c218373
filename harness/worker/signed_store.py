"""A store with authenticated values, over one that anybody on the network may write to.

[Note: What the store underneath is believed] torch's TCPStore asks for no password: whoever reaches its port lists,
reads, replaces and removes keys. Here every value carries a proof over its key (`harness.worker.signing`), and values
and keys without one are ignored. Counters, which the server would add up itself, are replaced by compare-and-set. An
attacker can still remove a key, or restore its earlier value.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

# torch exports its stores without declaring them
from torch.distributed import Store  # type: ignore[attr-defined]

from harness.worker.signing import Signer


class SignedStore(Store):
    """`inner` restricted to values of this start; a foreign value raises `NotOfThisStart`.

    Keys are those that `inner` knows, with all prefixes. Values are `bytes`, or `str` as UTF-8.
    """

    timeout: timedelta

    def __init__(self, inner: Store, signer: Signer) -> None:
        super().__init__()
        self._inner: Any = inner  # torch declares a part of what a store does and takes
        self._signer = signer
        self._clones: list[SignedStore] = []  # torch holds a clone's C++ half alone, whose methods are those in here

    @property
    def underlying_store(self) -> Any:
        """As of torch's PrefixStore."""
        return self._inner

    def set(self, key: str, value: bytes | str) -> None:
        self._inner.set(key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        self._inner.wait([key], self.timeout)
        return self._read(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(list(keys), self.timeout if timeout is None else timeout)
        for key in keys:
            self._read(key)

    def check(self, keys: Sequence[str]) -> bool:
        if not self._inner.check(list(keys)):
            return False
        for key in keys:
            self._read(key)
        return True

    def add(self, key: str, amount: int) -> int:
        while True:
            held = self._held(key)
            total = int(self._verified(key, held) or 0) + amount
            if self._replaced(key, held, str(total)):
                return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        while True:
            held = self._held(key)
            found = self._verified(key, held)
            if found != _bytes(expected):
                return found or _bytes(expected)  # as TCPStore does of a key that is not there
            if self._replaced(key, held, desired):
                return _bytes(desired)

    def delete_key(self, key: str) -> bool:
        gone: bool = self._inner.delete_key(key)
        return gone

    def num_keys(self) -> int:
        number: int = self._inner.num_keys()
        return number

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SignedStore:
        clone = SignedStore(self._inner.clone(), self._signer)
        clone.set_timeout(self.timeout)
        self._clones.append(clone)
        return clone

    def _signed(self, key: str, value: bytes | str) -> bytes:
        return self._signer.signed(key, _bytes(value))

    def _read(self, key: str) -> bytes:
        return self._signer.verified(key, self._inner.get(key))

    def _held(self, key: str) -> bytes:
        return self._inner.get(key) if self._inner.check([key]) else b""

    def _verified(self, key: str, held: bytes) -> bytes:
        return self._signer.verified(key, held) if held else b""

    def _replaced(self, key: str, held: bytes, value: bytes | str) -> bool:
        new = self._signed(key, value)
        found: bytes = self._inner.compare_set(key, held, new)
        return found == new


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
