"""Callers that wait until a member of a subscription has received the messages below certain offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.broker.member import Member
from penstock.broker.partition import Waiting


@dataclass(slots=True, eq=False)
class _Wait:
    member: Member
    marks: dict[Waiting, int]
    done: Callable[[], None]


class DeliveryWaits:
    __slots__ = ("_on_change", "_position", "_waits", "watched")

    def __init__(self, position: Callable[[Waiting], int], on_change: Callable[[], None]) -> None:
        """`position` returns the offset up to which a partition is delivered. `on_change` is called when messages of a
        watched partition were committed or taken back."""
        self._position = position
        self._on_change = on_change
        self._waits: list[_Wait] = []
        # Partitions with messages that are not committed yet and that somebody waits for.
        self.watched: set[Waiting] = set()

    def add(self, member: Member, marks: Mapping[Waiting, int], done: Callable[[], None]) -> None:
        """Call `done` once the messages below these offsets are delivered or gone, or the member has left."""
        self._waits.append(_Wait(member, dict(marks), done))
        for partition, mark in marks.items():
            if partition.served < mark:
                self.watched.add(partition)
                partition.groups[self._on_change] = None
        self.settle()

    def lower(self, partition: Waiting, end: int) -> None:
        """Messages of a partition were taken back: it ends here."""
        for wait in self._waits:
            if wait.marks.get(partition, 0) > end:
                wait.marks[partition] = end

    def settle(self) -> None:
        """End the waits whose messages are delivered."""
        for wait in self._waits:
            for partition, mark in list(wait.marks.items()):
                if partition.is_closed or self._position(partition) >= mark:
                    del wait.marks[partition]
        self._finish([wait for wait in self._waits if not wait.marks])

    def leave(self, member: Member) -> None:
        self._finish([wait for wait in self._waits if wait.member is member])

    def _finish(self, waits: list[_Wait]) -> None:
        self._waits = [wait for wait in self._waits if wait not in waits]
        if not self._waits:
            for partition in self.watched:
                partition.groups.pop(self._on_change, None)
            self.watched.clear()
        for wait in waits:
            wait.done()
