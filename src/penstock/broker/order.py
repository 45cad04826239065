"""Deliver what one connection publishes in the order in which it published it, also where it goes to several logs.

Each log is committed for itself, with others in a round of the disk or alone, and what is not stored needs no disk at
all. So a connection that publishes here and there could be overtaken by itself. Where it goes from one place to
another while the first is still to be served, a link is noted: the second is not served beyond that point before the
first is served up to it. Links come in the order of publishing, so they never form a circle, and each is done with
when its first place is served: within a round of the disk or two.

A connection that publishes to one place only has no links, and a request that nothing precedes waits for nothing.
A subscription that is behind reads the logs itself, in the order that `broker/trail.py` keeps. Around messages that
could not be written, and where a transaction holds a log, order holds only within each partition: nobody waits for
these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.broker.member import Sink
from penstock.broker.partition import LiveQueue, Partition, Waiting
from penstock.broker.topic import Target
from penstock.broker.trail import Trail
from penstock.health import Health
from penstock.model.subject import matches


class Publisher:
    """A connection that publishes: where its last message went, and its messages that wait and are not stored."""

    __slots__ = ("_cuts", "end", "live", "place")

    def __init__(self) -> None:
        self.place: Waiting | None = None
        self.end = 0
        # How often messages had been taken back there.
        self._cuts = 0
        self.live: LiveQueue | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether its last message is still to be delivered."""
        place = self.place
        if place is None:
            return False
        if place.is_closed or place.served >= self.end or place.cuts != self._cuts:
            self.place = None
            return False
        return True

    def went_to(self, place: Waiting, end: int) -> None:
        self.place = place
        self.end = end
        self._cuts = place.cuts


@dataclass(slots=True, eq=False)
class _Link:
    """One publisher's messages end at `until` in one place, and continue at `since` in another."""

    before: Waiting
    until: int
    then: Waiting
    since: int

    @property
    def is_over(self) -> bool:
        before, then = self.before, self.then
        return (
            before.served >= min(self.until, before.end)
            or before.is_held
            or before.is_closed
            or then.is_closed
            or then.served > self.since
        )


class Order:
    def __init__(self, find_sinks: Callable[[Iterable[bytes]], set[Sink]], trail: Trail, health: Health) -> None:
        """`find_sinks` returns the connections that get what is published under these subjects."""
        self._find_sinks = find_sinks
        self._trail = trail
        self._health = health
        self._links: list[_Link] = []
        # Places that may be served, or have to wait for another one.
        self._waiting: dict[Waiting, None] = {}
        self._is_serving = False
        self._is_changed = False

    def note(self, publisher: Publisher, places: Sequence[tuple[Target, int, Sequence[int]]]) -> None:
        """Note where a run of a publisher went: place, first offset, and which messages of the run."""
        if all(type(indices) is range for _, _, indices in places):
            # Pieces of the run, in order.
            for target, offset, indices in places:
                self._go(publisher, target, offset, offset + len(indices))
            return
        steps: dict[int, tuple[Target, int]] = {}
        for target, offset, indices in places:
            steps.update((index, (target, offset + step)) for step, index in enumerate(indices))
        for index in sorted(steps):
            target, offset = steps[index]
            self._go(publisher, target, offset, offset + 1)

    def _go(self, publisher: Publisher, target: Target, offset: int, end: int) -> None:
        if not isinstance(target, Waiting):
            return  # it was delivered at once, because nothing was to wait for
        if publisher.place is not target and publisher.is_waiting:
            assert publisher.place is not None
            self._links.append(_Link(publisher.place, publisher.end, target, offset))
        publisher.went_to(target, end)

    def add(self, target: Waiting) -> None:
        """There is something that may be served, at the next `serve`."""
        self._waiting[target] = None
        self._is_changed = True

    def take_back(self, target: Waiting) -> None:
        """Stop waiting for messages beyond the end of a place: they were taken back."""
        for link in self._links:
            if link.before is target:
                link.until = min(link.until, target.end)
            if link.then is target:
                link.since = min(link.since, target.end)
        self._is_changed = True

    def waiting_live(self, pattern: bytes) -> list[LiveQueue]:
        """Return where messages wait that match and are not stored."""
        return [
            target
            for target in self._waiting
            if isinstance(target, LiveQueue) and any(matches(pattern, each) for each in target.waiting_subjects())
        ]

    def serve(self) -> None:
        """Serve what may be served."""
        self._is_changed = True
        if self._is_serving:
            return  # the serving call looks again
        self._is_serving = True
        try:
            while self._is_changed:
                self._is_changed = False
                if self._links:
                    self._serve_in_order()
                else:
                    waiting, self._waiting = self._waiting, {}
                    for target in waiting:
                        self._serve(target, target.available)
        finally:
            self._is_serving = False

    def _serve_in_order(self) -> None:
        links, self._links = self._links, []
        waiting, self._waiting = self._waiting, {}
        is_needed = self._have_common_readers(waiting)
        limits: dict[Waiting, int] = {}
        left = []
        for link in links:
            if link.is_over:
                continue
            before, then = link.before, link.then
            if min(before.available, limits.get(before, link.until)) < link.until:
                limits[then] = min(link.since, limits.get(then, link.since))
                left.append(link)
            elif is_needed:
                self._serve(before, link.until)
        for target in waiting:
            until = min(target.available, limits.get(target, target.available))
            if until > target.served:
                self._serve(target, until)
            if until < target.available:
                self._waiting[target] = None
        # Publishers that were notified may have published more meanwhile.
        self._links = [*left, *self._links]

    def _have_common_readers(self, targets: Iterable[Waiting]) -> bool:
        """Return whether a connection gets what waits in more than one place."""
        seen: set[Sink] = set()
        for target in targets:
            found = self._find_sinks(target.waiting_subjects())
            if not seen.isdisjoint(found):
                return True
            seen |= found
        return False

    def _serve(self, target: Waiting, until: int) -> None:
        try:
            target.serve(until)
        except Exception as fault:  # noqa: BLE001 - a commit does not depend on the readers
            self._health.fault("deliver", target.name.decode(errors="replace"), fault)
        if isinstance(target, Partition):
            self._trail.note(target)
        target.tell(until)
