"""HMAC of pickles between ranks of this start, under a key that only their user can read."""

from __future__ import annotations

import hmac
import pickle
from typing import IO, Any

from torch.distributed import distributed_c10d

from harness.store.commands import page

KEY_BYTES = 32
_PROOF_BYTES = 32


class NotOfThisStart(RuntimeError):
    """Bytes from no rank of this start: somebody else answers in the place of a rank."""


class Signer:
    """Args: key: `KEY_BYTES` random bytes, of this start alone."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def signed(self, value: bytes) -> bytes:
        return self._proof(value) + value

    def verified(self, signed: bytes) -> bytes:
        """Value signed by some rank.

        Raises `NotOfThisStart`: it is forged, cut, or of another start.
        """
        proof, value = signed[:_PROOF_BYTES], signed[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(value)):
            raise NotOfThisStart(
                "a pickle was not written by a rank of this run: another user of this network answers in the place of a"
                f" rank, and nothing of it was used. See {page('security.md')}"
            )
        return value

    def _proof(self, value: bytes) -> bytes:
        return hmac.digest(self._key, value, "sha256")


def sign_pickles(signer: Signer) -> None:
    """Make torch's object collectives of this process sign their pickles, and read nothing else.

    DCP, torch's FSDP and other engines pickle over open sockets. Raises `RuntimeError`: this torch pickles in another
    way.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(signer.signed(pickle.dumps(value)))

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(signer.verified(self._file.read()))

    for name, ours in {"_pickler": Pickler, "_unpickler": Unpickler}.items():
        if not hasattr(distributed_c10d, name):
            raise RuntimeError(f"distributed_c10d has no {name}: this torch's pickles cannot be signed")
        setattr(distributed_c10d, name, ours)
