"""Telling a cause from its echoes."""

from __future__ import annotations

import pytest

from harness.store import failure
from harness.store.failure import Failure

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x\n'


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "RuntimeError: [..pair.cc:553] Read error [127.0.0.1]:7310: Connection reset by peer",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: NCCL error in: X.cpp:1\nncclRemoteError: A call failed",
        "RuntimeError: [..pair.cc:1] Broken pipe",
        "harness.watchdog.waits.CollectiveError: a collective failed: rank 0 failed in backward of (root); "
        "the backend of rank 0 said: [..pair.cc:537] Read error [127.0.0.1]:29: Connection reset by peer",
    ],
)
def test_echoes(message):
    assert failure.Failure(0, TRACE + message + "\n").echo


CAUSES = {
    "ValueError: connection closed by a reader of the book\n": "",
    "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)\n": "",
    "ConnectionRefusedError: [Errno 111] Connection refused\n": "",
    f"RuntimeError: Connection closed by peer\n\nDuring handling:\n\n{TRACE}KeyError: 'x'\n": "KeyError: 'x'",
    "pkg.mod.Bad: two\nlines\n": "pkg.mod.Bad: two",
}


@pytest.mark.parametrize("message", CAUSES)
def test_causes_are_judged_by_their_end_and_named_by_its_first_line(message):
    assert not failure.Failure(0, TRACE + message).echo
    assert failure.last_line(TRACE + message) == (CAUSES[message] or message.strip())


def test_of_two_causes_the_earlier_is_first():
    late, early = Failure(0, "KeyError: late", 2.0), Failure(1, "killed by SIGKILL", 1.0)
    assert failure.ordered([late, early]) == [early, late]
    assert failure.last_line("") == "unknown"


def test_the_report_has_the_cause_whole_and_the_others_in_a_line(tmp_path):
    failure.rank_file(tmp_path, 0).write_text(TRACE + "RuntimeError: Connection closed by peer\n")
    failure.rank_file(tmp_path, 2).write_text(TRACE + "KeyError: 'x'\n")
    found = failure.collect(tmp_path)
    assert [one.rank for one in found] == [2, 0]
    text = failure.report(found)
    assert text.startswith("rank 2 failed first:\n\nTraceback")
    assert text.endswith("then rank 0: RuntimeError: Connection closed by peer\n")
    assert not found[0].echo
    failure.forget(tmp_path, 2)
    assert all(one.echo for one in failure.collect(tmp_path))
