"""The gather pipeline: which units have their weights, which are on the way, what is fetched ahead.

Every sweep over the model (a forward, a backward) issues the gathers of all units in one static order, forwards or in
reverse, each exactly once: a unit that this rank skips is gathered and dropped when its turn has passed. So ranks may
use different units, if each runs those it uses in definition order and once a forward. A unit asked for after its turn
(its module runs late, or again) is gathered again out of turn, and the order modules ran in becomes the static one; all
ranks must then run the same modules in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from harness.fsdp.runtime.units import Unit, buckets_of


class GatherPipeline:
    """Weights of units under `optim_grads_params`; elsewhere weights are resident and nothing happens here.

    A unit is sharded, on its way (its gather is begun: it is wanted, or prefetched), or whole until it is resharded.

    Args:
        units: in forward order, the root first. The root stays gathered from the forward's begin to the backward's end.
        prefetch: units gathered ahead of the one in use, at least 0.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int) -> None:
        self.prefetch = prefetch
        self.order = [unit for unit in units if any(not bucket.is_resident for bucket in unit.buckets)]
        self._gathered = frozenset(self.order)
        self._roots = {unit for unit in self.order if unit.is_root}
        axes = (axis for bucket in buckets_of(units) for axis in (bucket.mesh.gather, bucket.mesh.outer))
        self._groups = [axis for axis in dict.fromkeys(axes) if axis is not None]
        self._on_way: dict[Unit, None] = {}
        self._whole: set[Unit] = set()
        self.held: set[Unit] = set()
        self._sweep: list[Unit] = []
        self._places: dict[Unit, int] = {}
        self._next = self._passed = 0  # places in the sweep: of the first unit not begun, and not passed
        self._ran: list[Unit] = []
        self._late = False

    @property
    def last(self) -> Unit | None:
        """The unit a forward ends with, if its weights are kept for the backward that begins with it."""
        return self.order[-1] if self.order else None

    # -- sweeps ----------------------------------------------------------------------------------------------------

    def pre_forward(self) -> None:
        """The model's forward begins: sweep in forward order, unshard the root, prefetch what comes after it.

        A unit that the forward before kept for its backward leaves a buffer that it shares with others.
        """
        for unit in self.order:
            if unit.shares_buffers:
                self.reshard(unit)
        self._begin([unit for unit in self.order if unit not in self._whole])
        self._ran, self._late = [], False
        for unit in self._roots:
            self.unshard(unit)

    def post_forward(self, *, backward_follows: bool, inside: bool = False) -> None:
        """The model's forward ends: units that did not run take their turn in the sweep, and are resharded; the last
        one stays unsharded if a backward follows. Whether a rank has used it must not matter: the next sweep begins
        with what is sharded. inside: a method that stands for a forward goes on, and the root stays unsharded."""
        keep = self.last if backward_follows else None
        self._take_turns(len(self._sweep), keep=keep)
        for unit in self.order:  # the last one, where no backward follows
            if unit is not keep:
                self.reshard(unit)
        if self._late:
            self._learn_order()
        if not backward_follows and not inside:
            self.reshard_all()

    def pre_backward(self) -> None:
        """A backward begins: sweep over the units in reverse order, after the root, where another forward has resharded
        that since: whatever a rank uses first, the root's weights are wanted before or beside it."""
        order = [*self._roots, *(unit for unit in reversed(self.order) if not unit.is_root)]
        self._begin([unit for unit in order if unit not in self._whole])

    def post_backward(self) -> None:
        """A backward ends: units that it did not reach take their turn in the sweep; all are resharded."""
        self._take_turns(len(self._sweep))
        self.reshard_all()

    def _begin(self, sweep: list[Unit]) -> None:
        self._sweep, self._next, self._passed = sweep, 0, 0
        self._places = {unit: place for place, unit in enumerate(sweep)}

    def _take_turns(self, until: int, keep: Unit | None = None) -> None:
        """Gather the units before place `until` that have not had their turn; drop those fetched and not in use."""
        for place in range(self._passed, until):
            unit = self._sweep[place]
            if place >= self._next:
                self._next = place + 1
                self._start_unshard(unit)
            if unit in self._on_way:
                self._wait_for_unshard(unit)
                if unit is not keep:
                    self.reshard(unit)
            self._passed = place + 1

    def _prefetch(self) -> None:
        while self._next < len(self._sweep):
            following, ahead = self._sweep[self._next], self._on_way.keys() - self._roots
            if len(ahead) >= self.prefetch or not self._has_room(following):
                return
            self._next += 1
            self._start_unshard(following)

    def _learn_order(self) -> None:
        """Adopt the order in which units ran; units that did not run stay behind their present predecessor."""
        learned = list(dict.fromkeys([*self._roots, *self._ran]))
        for place, unit in enumerate(self.order):
            if unit not in learned:
                learned.insert(learned.index(self.order[place - 1]) + 1 if place else 0, unit)
        self.order = learned

    def pass_turn(self, unit: Unit, *, keeps: bool = False) -> None:
        """Bring the sweep past a unit that this rank is done with; others may still want its part of the weights.

        keeps: this rank may still use it: its gather is begun, where there is room, and not dropped. The root stands
        for the end of the sweep, where nothing is used any more.
        """
        if unit.is_root:
            self._take_turns(len(self._sweep))
        elif unit in self._places:
            place = self._places[unit]
            self._take_turns(place if keeps else place + 1)
            if keeps and place == self._next and self._has_room(unit):
                self._next += 1
                self._start_unshard(unit)

    # -- unshard ---------------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Have a unit's weights whole for what the caller does next, and prefetch the units that follow."""
        if unit not in self._gathered:
            unit.receive()
            return
        self._ran.append(unit)
        if unit in self._whole:
            for bucket in unit.buckets:
                bucket.use()
        else:
            place = self._places.get(unit, -1)
            self._take_turns(max(place, 0))
            if place == self._next:
                self._next += 1
            elif unit not in self._on_way:
                self._late = True
            self._start_unshard(unit)
            self._wait_for_unshard(unit)
        self._prefetch()

    def unshard_next(self, unit: Unit | None = None) -> None:
        """Have the unit whole that is wanted next, before it is asked for; None: the one the sweep comes to, if it is
        used here: others may come to one that is not much later."""
        to_come = enumerate(self._sweep[self._passed :], self._passed)
        following = unit or next((each for place, each in to_come if place >= self._next or each in self._on_way), None)
        if following is None or not (unit or following.readiness.is_called):
            return
        if self._has_room(following) or following in self._on_way:
            self.unshard(following)

    def _has_room(self, unit: Unit) -> bool:
        return not unit.shares_buffers or all(bucket.memory.has_room(bucket.compute) for bucket in unit.buckets)

    def _start_unshard(self, unit: Unit) -> None:
        if unit in self._on_way or unit in self._whole:
            return
        for bucket in unit.buckets:
            bucket.unshard()
        self._on_way[unit] = None

    def _wait_for_unshard(self, unit: Unit) -> None:
        del self._on_way[unit]  # a gather that raises brings nothing
        for bucket in unit.buckets:
            bucket.wait_for_unshard()
        self._whole.add(unit)

    def is_whole(self, unit: Unit) -> bool:
        return unit in self._whole or unit not in self._gathered

    # -- reshard ---------------------------------------------------------------------------------------------------

    def reshard(self, unit: Unit, *, root_too: bool = False) -> None:
        """Drop a unit's whole weights, each rank keeping its part; the root's stay until the backward ends."""
        if unit in self.held or (unit.is_root and not root_too) or unit not in self._whole:
            return
        self._whole.discard(unit)
        for bucket in unit.buckets:
            bucket.reshard()

    def reshard_all(self) -> None:
        """Reshard every unit, the root too, waiting for gathers under way; a sweep that had begun is over."""
        self._begin([])
        self.wait_for_readers()
        for unit in self.order:
            self.reshard(unit, root_too=True)

    def wait_for_readers(self) -> None:
        """Have no gather under way that reads main weights, here or on peers: they are written next."""
        on_way = list(self._on_way)
        for unit in on_way:
            self._wait_for_unshard(unit)
        self.rest(on_way)
        self.wait_for_peers()

    def rest(self, units: Iterable[Unit]) -> None:
        """Show sharded parameters of units, but of those that are held."""
        for bucket in buckets_of([unit for unit in units if unit not in self.held]):
            bucket.show(unsharded=False)

    def wait_for_peers(self) -> None:
        """Wait until peers have read this rank's part of what was gathered."""
        for group in self._groups:
            group.settle()

    # -- hold ------------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Have units whole in the body, whatever begins and ends meanwhile; gives those that were not held.
        *Collective.* Raises ValueError: under double_buffer there is no room for them."""
        found = [unit for unit in units if unit not in self.held]
        try:
            for unit in sorted(found, key=lambda unit: self.order.index(unit) if unit in self.order else 0):
                if not self.is_whole(unit):
                    self._start_unshard(unit)
                    self._wait_for_unshard(unit)
                self.held.add(unit)
            yield found
        finally:
            self.held.difference_update(found)
            for unit in found:
                self.reshard(unit, root_too=True)
            self.rest(found)
