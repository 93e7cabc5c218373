"""What ranks of one start write is read, and nothing else: forged, cut, swapped and replayed values, and pickles."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.worker import signed_store, signing
from harness.worker.signed_store import SignedStore
from harness.worker.signing import KEY_BYTES, NotOfThisStart, Signer
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks
from tests.worker.strangers import Code

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
SOON = timedelta(seconds=0.2)


def refused(call: Callable[[], object]) -> bool:
    """Whether a call hears somebody who is no rank."""
    try:
        call()
    except NotOfThisStart:
        return True
    except ValueError:  # believed, and no number
        return False
    return False


def forged() -> list[str]:
    """What of a value can be changed without anybody noticing, or is not known again."""
    signer, wrong = Signer(KEY, 1), []
    value = signer.signed("a", b"value")
    wrong += [] if Signer(KEY, 0).verified("a", value) == b"value" else ["another rank does not read it"]
    wrong += [] if refused(lambda: Signer(OTHER, 1).verified("a", value)) else ["another start's"]
    wrong += [] if refused(lambda: signer.verified("b", value)) else ["another name's"]
    head, proof = value[:12], value[12:44]
    moved = head[1:] + b"v" + proof + b"alue"
    wrong += [] if refused(lambda: signer.verified("a\1", moved)) else ["a name that ends elsewhere"]
    for at in range(len(value)):
        changed = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        wrong += [] if refused(lambda changed=changed: signer.verified("a", changed)) else [f"byte {at}"]
        wrong += [] if refused(lambda at=at: signer.verified("a", value[:at])) else [f"cut to {at}"]
    wrong += [] if refused(lambda: signer.verified("a", value + b"x")) else ["longer"]
    return wrong + ([] if signer.signed("a", b"value") != value else ["two writes are alike"])


class Overtaken(dist.HashStore):
    """Store in which another rank does something once, between what one reads and what it writes."""

    meanwhile: Callable[[], object] | None = None

    def get(self, key: str) -> bytes:
        held: bytes = super().get(key)
        overtaking, self.meanwhile = self.meanwhile, None
        if overtaking is not None:
            overtaking()
        return held


def stored() -> list[str]:
    """What a stranger who may write to the store underneath is believed, and what ranks do not know of each other."""
    inner = Overtaken()
    first, second = SignedStore(inner, Signer(KEY, 0)), SignedStore(inner, Signer(KEY, 1))
    first.set("address", "here")
    wrong = [] if second.get("address") == b"here" and second.check(["address"]) else ["a rank is not read"]
    inner.set("forged", "there")
    inner.set("swapped", inner.get("address"))
    for key in ("forged", "swapped"):
        calls: dict[str, Callable[[], object]] = {
            "get": lambda key=key: second.get(key),
            "wait": lambda key=key: second.wait([key], SOON),
            "check": lambda key=key: second.check([key]),
            "add": lambda key=key: second.add(key, 1),
            "compare_set": lambda key=key: second.compare_set(key, "there", "x"),
        }
        wrong += [f"{name} of what was {key}" for name, call in calls.items() if not refused(call)]
    wrong += [] if second.compare_set("new", "", "a") == b"a" and first.get("new") == b"a" else ["a new value"]
    wrong += [] if second.compare_set("new", "b", "c") == b"a" == first.compare_set("new", "b", "c") else ["compared"]
    wrong += [] if first.compare_set("new", "a", "c") == b"c" == second.get("new") else ["not replaced"]
    totals: list[int] = []
    first.set("count", "0")
    inner.meanwhile = lambda: totals.append(first.add("count", 1))
    totals.append(second.add("count", 1))
    wrong += [] if [first.add("count", 0), *sorted(totals)] == [2, 1, 2] else ["two counts are alike"]
    return wrong + ([] if second.delete_key("count") and not first.check(["count"]) else ["not removed"])


def through_torch(rank: int, slip: str) -> list[str]:
    """A group that meets in such a store, its prefixes and clones; a clone that only torch holds still has methods."""
    if slip:
        SLIPS[slip].put(pytest.MonkeyPatch())
    inner = dist.distributed_c10d._get_default_store()
    store = SignedStore(inner, Signer(KEY, rank))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group: Any = dist.new_group(backend="gloo")
    found: Any = dist.distributed_c10d._get_process_group_store(group)
    clone = dist.PrefixStore("mine", found.clone())
    clone.set_timeout(SOON)
    dist.barrier(group=group)
    wrong = [] if clone.add("count", 1) in (1, 2) else ["counts"]
    dist.barrier(group=group)
    wrong += [] if clone.add("count", 0) == 2 else ["a count is not shared"]
    try:
        clone.get("never")
        return [*wrong, "what nobody wrote"]
    except RuntimeError:
        return wrong


def pickled(rank: int, folder: Path, slip: str) -> list[str]:
    """Rank 1 is a stranger who has come into a group: what it sends is not unpickled. Two that sign hear each other."""
    if slip:
        SLIPS[slip].put(pytest.MonkeyPatch())
    signing.sign_pickles(Signer(KEY, rank))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, {"rank": rank})
    wrong = [] if everyone == [{"rank": 0}, {"rank": 1}] else [f"heard {everyone}"]
    if rank == 1:
        signing.sign_pickles(Signer(OTHER, rank))
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
    "nothing compared": Slip(signing.Signer, "verified", "hmac.compare_digest(", "max("),
    "no name": Slip(signing.Signer, "_proof", "+ text + head", "+ head"),
    "no length": Slip(signing.Signer, "_proof", 'struct.pack("<Q", len(text)) + ', ""),
    "no rank": Slip(signing.Signer, "_proof", " + head + value", " + value"),
    "no value": Slip(signing.Signer, "_proof", " + head + value", " + head"),
    "no key": Slip(signing.Signer, "_proof", "self._key", 'b""'),
    "no salt": Slip(signing.Signer, "signed", "secrets.token_bytes(_SALT_BYTES)", "bytes(_SALT_BYTES)"),
    "check": Slip(signed_store.SignedStore, "check", "self._read(key)", "pass"),
    "wait": Slip(signed_store.SignedStore, "wait", "self._read(key)", "pass"),
    "get": Slip(signed_store.SignedStore, "_read", "self._signer.verified(key, self._inner.get(key))",
                "self._inner.get(key)[44:]"),
    "held": Slip(signed_store.SignedStore, "_verified", "self._signer.verified(key, held) if", "held[44:] if"),
    "lost counts": Slip(signed_store.SignedStore, "add", "if self._replaced(key, held, str(total))",
                        "self.set(key, str(total))\n        if True"),
    "clones let go": Slip(signed_store.SignedStore, "clone", "self._clones.append(clone)", "pass"),
    "unpickled first": Slip(signing, "sign_pickles", "signer.verified(_PICKLE, self._file.read())",
                            "self._file.read()[44:]"),
}  # fmt: skip
OF_VALUES = [
    ("nothing compared", "A proof is not compared"),
    ("no name", "A proof does not hold for a name"),
    ("no length", "A proof does not say where the name ends"),
    ("no rank", "A proof does not cover who wrote"),
    ("no value", "A proof does not cover the value"),
    ("no key", "A proof needs no key"),
    ("no salt", "Two writes of the same value are the same bytes"),
]
OF_STORES = [
    ("check", "A key counts as present whoever wrote it"),
    ("wait", "Waiting for a key ends whoever wrote it"),
    ("get", "A value is read without its proof"),
    ("held", "A value is replaced without a look at its proof"),
    ("lost counts", "A counter is read and written, and what came between is lost"),
]


def test_a_value_is_believed_whole_under_its_name_and_in_its_start_or_not_at_all() -> None:
    assert forged() == []


@pytest.mark.parametrize("slip", each("signatures", OF_VALUES))
def test_a_hole_in_the_proof_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[slip].put(monkeypatch)
    assert forged()


def test_a_store_hands_out_what_ranks_of_this_start_wrote() -> None:
    assert stored() == []


@pytest.mark.parametrize("slip", each("signatures", OF_STORES))
def test_a_way_past_the_proof_is_found(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[slip].put(monkeypatch)
    assert stored()


def test_ranks_meet_in_it_through_torchs_prefixes_and_clones() -> None:
    assert run_ranks(through_torch, 2, "") == [[], []]


@pytest.mark.parametrize("slip", each("signatures", [("clones let go", "Nobody holds the Python half of a clone")]))
def test_a_clone_without_methods_is_found(slip: str) -> None:
    with pytest.raises(Exception, match="pure virtual function"):
        run_ranks(through_torch, 2, slip)


def test_torch_unpickles_nothing_that_a_stranger_sends(tmp_path: Path) -> None:
    assert run_ranks(pickled, 2, tmp_path, "") == [[], []]


@pytest.mark.parametrize("slip", each("signatures", [("unpickled first", "A pickle is read without its proof")]))
def test_code_that_runs_is_found(slip: str, tmp_path: Path) -> None:
    assert "its code has run" in run_ranks(pickled, 2, tmp_path, slip)[0]
