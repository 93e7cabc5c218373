"""HMAC of messages between ranks of this start, under a key that only their user can read."""

from __future__ import annotations

import hmac
import pickle
import secrets
import struct
from typing import IO, Any

from torch.distributed import distributed_c10d

from harness.store.commands import page

KEY_BYTES = 32
_HEAD, _SALT_BYTES, _PROOF_BYTES = struct.Struct("<I"), 8, 32
_PICKLE = "pickle of torch.distributed"


class NotOfThisStart(RuntimeError):
    """Bytes from no rank of this start: somebody else answers in the place of a rank."""


class Signer:
    """Key of one rank.

    Args: key: `KEY_BYTES` random bytes, of this start alone. rank: signer.
    """

    def __init__(self, key: bytes, rank: int) -> None:
        self._key = key
        self.rank = rank

    def signed(self, name: str, value: bytes) -> bytes:
        """`value` with this rank's number and proof, valid for `name` alone; never the same bytes twice."""
        head = _HEAD.pack(self.rank) + secrets.token_bytes(_SALT_BYTES)
        return head + self._proof(name, head, value) + value

    def verified(self, name: str, signed: bytes) -> bytes:
        """Value signed by some rank for this name.

        Raises `NotOfThisStart`: it is forged, cut, of another name, or of another start.
        """
        at = _HEAD.size + _SALT_BYTES
        head, proof, value = signed[:at], signed[at : at + _PROOF_BYTES], signed[at + _PROOF_BYTES :]
        if not hmac.compare_digest(proof, self._proof(name, head, value)):
            raise NotOfThisStart(
                f"{name!r} was not written by a rank of this run: another user of this network answers in the place of"
                f" a rank, and nothing of it was used. See {page('security.md')}"
            )
        return value

    def _proof(self, name: str, head: bytes, value: bytes) -> bytes:
        text = name.encode()
        return hmac.digest(self._key, struct.pack("<Q", len(text)) + text + head + value, "sha256")


def sign_pickles(signer: Signer) -> None:
    """Make torch's object collectives of this process sign their pickles, and read nothing else.

    DCP, torch's FSDP and other engines pickle over open sockets. Raises `RuntimeError`: this torch pickles in another
    way.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(signer.signed(_PICKLE, pickle.dumps(value)))

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(signer.verified(_PICKLE, self._file.read()))

    for name, ours in {"_pickler": Pickler, "_unpickler": Unpickler}.items():
        if not hasattr(distributed_c10d, name):
            raise RuntimeError(f"distributed_c10d has no {name}: this torch's pickles cannot be signed")
        setattr(distributed_c10d, name, ours)
