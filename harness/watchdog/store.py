"""Agreement of ranks that no collective joins any more, through the store of their process group.

While nothing is late, a rank has one request there: a wait, by a connection of its own, for a key that is set when a
rank asks for positions. The first rank with a reason calls the roll. Each rank answers with its position and waits for
the verdict of the one that asked: a message that all raise, or none. Of a FileStore, whose file torch's wait would read
a hundred times a second, the size of the file is looked at instead.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from harness.watchdog.waits import CollectiveError, Position, by_value, ranks_text

ANSWER_S, VERDICT_S, READ_S = 3.0, 6.0, 2.0
"""Seconds that ranks are given to answer; that one waits for the verdict; and that others are given to read a message
before this one fails and perhaps ends."""

_users: defaultdict[str, count[int]] = defaultdict(count)
"""Numbers the users of each group's store in order of construction, which is the same on all its ranks."""


def stores_of(group: dist.ProcessGroup, clones: int) -> list[Any]:
    """Stores with the same keys, which no one else uses, each with a connection of its own."""
    prefix = f"watchdog/{next(_users[group.group_name])}"
    store: Any = group.get_group_store()
    return [dist.distributed_c10d.PrefixStore(prefix, store.clone()) for _ in range(clones)]


class RollCalls:
    """Roll calls of all ranks, numbered alike on all of them.

    Args:
        ear: store of the thread that waits and answers. voice: of the one that asks.
        tick_s: seconds between two looks at the size of a FileStore.
    """

    def __init__(self, ear: Any, voice: Any, ranks: Sequence[int], rank: int, tick_s: float) -> None:
        self._ear, self._voice, self._ranks, self._rank = ear, voice, ranks, rank
        while (inner := getattr(ear, "underlying_store", None)) is not None:
            ear = inner
        self._path: str | None = getattr(ear, "path", None)  # of a FileStore
        self._tick_s, self.number = tick_s, 1

    def wait(self) -> bool:
        """Block until the roll is called; false after `close`."""
        key, size = f"{self.number}/call/{self._rank}", 0
        while self._path is not None:
            if size != (size := os.stat(self._path).st_size) and self._ear.check([key]):
                break
            time.sleep(self._tick_s)
        self._ear.wait([key], timedelta(days=3650))
        return bool(int(self._ear.get(key)))

    def close(self) -> None:
        """End this rank's `wait`."""
        self._voice.set(f"{self.number}/call/{self._rank}", "0")

    def answer(self, position: Position) -> str:
        """Give this rank's position; returns the verdict, "" if all go on."""
        ear, roll = self._ear, self.number
        ear.set(f"{roll}/position/{self._rank}", json.dumps(asdict(position)))
        if ear.add(f"{roll}/answered", 1) == len(self._ranks):
            ear.set(f"{roll}/all answered", "1")
        message, answered = "", 0
        with suppress(RuntimeError):  # the one that asked has ended
            ear.wait([f"{roll}/verdict"], timedelta(seconds=VERDICT_S))
            message, answered = json.loads(ear.get(f"{roll}/verdict"))
        if not message:
            ear.delete_key(f"{roll}/position/{self._rank}")
            self.number += 1
            return ""
        if ear.add(f"{roll}/readers", 1) >= answered:
            ear.set(f"{roll}/all read", "1")
        with suppress(RuntimeError):  # some did not read it in time
            ear.wait([f"{roll}/all read"], timedelta(seconds=READ_S))
        return str(message)

    def ask(self, judge: Callable[[dict[int, Position]], str]) -> bool:
        """Call the roll and give the verdict on the positions that come; false if another rank has asked."""
        voice, roll = self._voice, self.number
        if voice.add(f"{roll}/asked", 1) != 1:
            return False
        voice.multi_set([f"{roll}/call/{rank}" for rank in self._ranks], ["1"] * len(self._ranks))
        places = {rank: f"{roll}/position/{rank}" for rank in self._ranks}
        try:
            voice.wait([f"{roll}/all answered"], timedelta(seconds=ANSWER_S))
        except RuntimeError:
            places = {rank: place for rank, place in places.items() if voice.check([place])}
        texts = voice.multi_get(list(places.values()))
        positions = {rank: Position(**json.loads(text)) for rank, text in zip(places, texts, strict=True)}
        voice.set(f"{roll}/verdict", json.dumps([judge(positions), len(positions)]))
        return True


class CollectiveCheck:
    """Compares each announced collective over all ranks before its data moves. Slow: each one waits for all ranks.

    It compares through the store: NCCL would take mismatched calls for one collective and mix up their data. The rank
    that comes last compares.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int) -> None:
        self._store, self.ranks, self.rank = store, ranks, rank
        self._number = 0

    def compare(self, label: object, data: Sequence[Any], limit_s: float) -> None:
        """Raise CollectiveError on all ranks if one is about to issue another collective; an error of the store if
        one does not come within the limit."""
        self._number += 1
        here, before = f"check/{self._number}", f"check/{self._number - 1}"
        self._store.set(f"{here}/{self.rank}", f"{label} of {_contents(data)}")
        is_last = self._store.add(f"{here}/came", 1) == len(self.ranks)
        if is_last:
            found = self._store.multi_get([f"{here}/{rank}" for rank in self.ranks])
            ranks = by_value({rank: text.decode() for rank, text in zip(self.ranks, found, strict=True)})
            texts = [f"{text} on {ranks_text(those)}" for text, those in ranks.items()]
            self._store.set(f"{here}/verdict", "; ".join(texts) if len(texts) > 1 else "alike")
        self._store.wait([f"{here}/verdict"], timedelta(seconds=limit_s))
        if (verdict := self._store.get(f"{here}/verdict").decode()) != "alike":
            raise CollectiveError(
                f"check_collectives: ranks are about to issue different collectives as number {self._number}:"
                f" {verdict}. No data of it has moved. All ranks must run the same modules in the same order"
            )
        # All have come here, so all have read the verdict before.
        for old in (self.rank, *(("came", "verdict") if is_last else ())):
            self._store.delete_key(f"{before}/{old}")


def _contents(data: Sequence[Any]) -> str:
    tensors = [getattr(each, "tensor", each) for each in data]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    lengths = "+".join(str(tensor.numel()) for tensor in tensors)
    return f"{lengths or 'unknown'} elements {', '.join(kinds)}".rstrip()
