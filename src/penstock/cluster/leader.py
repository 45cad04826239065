"""The leader's end of the log: rounds at consecutive positions, several in flight.

A record is committed when it is stored and every position between the LEAD and it is known to hold something. At a
gap, the next leader would begin, and everything behind it would be void.

    answer                          then
    stored, or taken by the same    the position is known
    unknown                         the same bytes again, at the same position, until it is known
    taken by a void record          the record there, and all after it, again behind the last position used;
                                    their first copies are still appended: they are void, but leave no gap
    taken by a later epoch          deposed
"""

from __future__ import annotations

from collections import deque

from penstock.cluster.actions import Answer, Append, Stored, Unknown
from penstock.cluster.record import Kind, Record, decode


class Leader:
    __slots__ = ("_committed", "_known", "_lead", "_number", "_pending", "_sent", "_top", "_unknown_from", "deposed_by")

    def __init__(self, lead: Record) -> None:
        """Lead since the record `lead`, which is stored."""
        self._lead = lead
        # Of the last record, and of the last committed one.
        self._number = 0
        self._committed = 0
        # The highest position used.
        self._top = lead.position
        # Every position below holds something; above, these do.
        self._unknown_from = lead.position + 1
        self._known: set[int] = set()
        # What is being created at each position that is not known.
        self._sent: dict[int, bytes] = {}
        # What is not committed, in order, each with its newest position. These ascend too.
        self._pending: deque[Record] = deque()
        # The later epoch that has begun.
        self.deposed_by: int | None = None

    @property
    def epoch(self) -> int:
        return self._lead.epoch

    @property
    def pending(self) -> int:
        """Return how many records are appended and not committed."""
        return len(self._pending)

    def append(self, kind: Kind, body: bytes) -> tuple[int, Append]:
        """Append a record; return its number."""
        assert self.deposed_by is None, "deposed"
        self._number += 1
        record = Record(kind, self._lead.epoch, self._lead.incarnation, self._number, 0, body)
        return self._number, self._send(record)

    def awaits(self, append: Append) -> bool:
        """Whether this is an append of this leader, and its position is not known."""
        return self._sent.get(append.position) == append.data

    def answered(self, append: Append, answer: Answer) -> list[Append]:
        """Return what must be appended now: the same again, or what was displaced."""
        assert self.awaits(append)
        if isinstance(answer, Unknown):
            return [append]
        position = append.position
        resent = []
        if not isinstance(answer, Stored) and answer.data != append.data:
            there = decode(answer.data, position)
            if there.epoch > self.epoch:
                self.deposed_by = there.epoch
                return []
            resent = self._displaced(position)
        del self._sent[position]
        self._known.add(position)
        return resent

    def take_committed(self) -> list[Record]:
        """Return what is committed since the last call, in order."""
        while self._unknown_from in self._known:
            self._known.remove(self._unknown_from)
            self._unknown_from += 1
        committed = []
        while self._pending and self._is_committed(self._pending[0].position):
            committed.append(self._pending.popleft())
            self._committed = committed[-1].number
        return committed

    def _is_committed(self, position: int) -> bool:
        return position < self._unknown_from

    def _displaced(self, position: int) -> list[Append]:
        """Append again what was to be at `position`, and all after it. If a copy was, nothing is missing."""
        keep: list[Record] = []
        again: list[Record] = []
        for record in self._pending:
            (again if again or record.position == position else keep).append(record)
        self._pending = deque(keep)
        return [self._send(record) for record in again]

    def _send(self, record: Record) -> Append:
        """Append a record, or a copy of it, behind everything else."""
        self._top += 1
        record = record.at(self._top, self._committed)
        self._pending.append(record)
        data = self._sent[record.position] = record.encode()
        return Append(record.position, data)
