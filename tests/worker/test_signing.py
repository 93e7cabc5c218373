"""Pickles of ranks of one start are read, and nothing else: forged, cut and replayed ones are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.worker import rendezvous
from harness.worker.rendezvous import KEY_BYTES, NotOfThisStart, Signer
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)


class Code:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def refused(call: Callable[[], object]) -> bool:
    """Whether a call hears somebody who is no rank."""
    try:
        call()
    except NotOfThisStart:
        return True
    return False


def forged() -> list[str]:
    """What of a value can be changed without anybody noticing, or is not known again."""
    wrong = []
    value = Signer(KEY).signed(b"value")
    wrong += [] if Signer(KEY).verified(value) == b"value" else ["another rank does not read it"]
    wrong += [] if refused(lambda: Signer(OTHER).verified(value)) else ["another start's"]
    for at in range(len(value)):
        changed = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        wrong += [] if refused(lambda changed=changed: Signer(KEY).verified(changed)) else [f"byte {at}"]
        wrong += [] if refused(lambda at=at: Signer(KEY).verified(value[:at])) else [f"cut to {at}"]
    return wrong + ([] if refused(lambda: Signer(KEY).verified(value + b"x")) else ["longer"])


def pickled(rank: int, folder: Path, slip: str) -> list[str]:
    """Rank 1 is a stranger who has come into a group: what it sends is not unpickled. Two that sign hear each other."""
    if slip:
        SLIPS[slip].put(pytest.MonkeyPatch())
    rendezvous.sign_pickles(Signer(KEY))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    wrong = [] if everyone == [{"rank": 0}, {"rank": 1}] else [f"heard {everyone}"]
    if rank == 1:
        rendezvous.sign_pickles(Signer(OTHER))
    code: Any = Code(f"touch {folder}/ran-$PPID") if rank else None
    calls: dict[str, Callable[[], object]] = {
        "all_gather_object": lambda: dist.all_gather_object(everyone, code),
        "broadcast_object_list": lambda: dist.broadcast_object_list([code], src=1),
        "gather_object": lambda: dist.gather_object(code, None if rank else everyone, dst=0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [code, code] if rank else None, src=1),
        "send_object_list": lambda: dist.send_object_list([code], 0) if rank else dist.recv_object_list([None], 1),
    }
    heard = [name for name, call in calls.items() if not refused(call) and rank == 0]
    return wrong + heard + (["its code has run"] if rank == 0 and (folder / f"ran-{os.getpid()}").exists() else [])


SLIPS = {
    "nothing compared": Slip(rendezvous.Signer, "verified", "hmac.compare_digest(", "max("),
    "no value": Slip(rendezvous.Signer, "_proof", "self._key, value", 'self._key, b""'),
    "no key": Slip(rendezvous.Signer, "_proof", "self._key", 'b""'),
    "unpickled first": Slip(rendezvous, "sign_pickles", "signer.verified(self._file.read())", "self._file.read()[32:]"),
}
OF_VALUES = [
    ("nothing compared", "A proof is not compared"),
    ("no value", "A proof does not cover the value"),
    ("no key", "A proof needs no key"),
]


def test_a_value_is_believed_whole_and_in_its_start_or_not_at_all() -> None:
    assert forged() == []


@pytest.mark.parametrize("slip", each("signatures", OF_VALUES))
def test_a_hole_in_the_proof_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[slip].put(monkeypatch)
    assert forged()


def test_torch_unpickles_nothing_that_a_stranger_sends(tmp_path: Path) -> None:
    assert run_ranks(pickled, 2, tmp_path, "") == [[], []]


@pytest.mark.parametrize("slip", each("signatures", [("unpickled first", "A pickle is read without its proof")]))
def test_code_that_runs_is_found(slip: str, tmp_path: Path) -> None:
    assert "its code has run" in run_ranks(pickled, 2, tmp_path, slip)[0]
