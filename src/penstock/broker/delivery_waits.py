"""Callers that wait until a member of a subscription has received the messages below certain offsets.

The subscription passes itself with each call. It is not kept, so that the two form no reference cycle: a client can
make and end subscriptions faster than the garbage collector finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.broker.member import Member
from penstock.broker.partition import Waiting


@dataclass(slots=True, eq=False)
class _Wait:
    member: Member
    marks: dict[Waiting, int]
    done: Callable[[], None]


class DeliveringReader(Protocol):
    def position(self, partition: Waiting, /) -> int:
        """Return up to where it has delivered what it wants of a partition."""
        ...

    def on_change(self) -> None:
        """Called when messages of a watched partition were committed or taken back."""
        ...


class DeliveryWaits:
    __slots__ = ("_waits", "watched")

    def __init__(self) -> None:
        self._waits: list[_Wait] = []
        # Partitions with messages that are not committed yet and that somebody waits for.
        self.watched: set[Waiting] = set()

    def add(
        self, reader: DeliveringReader, member: Member, marks: Mapping[Waiting, int], done: Callable[[], None]
    ) -> None:
        """Call `done` once the messages below these offsets are delivered or gone, or the member has left."""
        self._waits.append(_Wait(member, dict(marks), done))
        for partition, mark in marks.items():
            if partition.served < mark:
                self.watched.add(partition)
                partition.groups[reader.on_change] = None
        self.settle(reader)

    def lower(self, partition: Waiting, end: int) -> None:
        """Messages of a partition were taken back: it ends here."""
        for wait in self._waits:
            if wait.marks.get(partition, 0) > end:
                wait.marks[partition] = end

    def settle(self, reader: DeliveringReader) -> None:
        """End the waits whose messages are delivered."""
        for wait in self._waits:
            for partition, mark in list(wait.marks.items()):
                if partition.is_closed or reader.position(partition) >= mark:
                    del wait.marks[partition]
        self._finish(reader, [wait for wait in self._waits if not wait.marks])

    def leave(self, reader: DeliveringReader, member: Member) -> None:
        self._finish(reader, [wait for wait in self._waits if wait.member is member])

    def _finish(self, reader: DeliveringReader, waits: list[_Wait]) -> None:
        self._waits = [wait for wait in self._waits if wait not in waits]
        if not self._waits:
            for partition in self.watched:
                partition.groups.pop(reader.on_change, None)
            self.watched.clear()
        for wait in waits:
            wait.done()
