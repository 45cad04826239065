"""Which messages of a partition a group has taken, and which of those are not done yet.

All offsets below `floor` are done. In [`floor`, `next`) the pending ones are not done, and all others are. The group
continues at `next`. A pending message is in one of three states:

    OUT    a member has it, until its deadline
    BACK   it waits to be redelivered, from a moment on
    DEAD   its last attempt failed; it waits until its dead letter is stored

    take                                     → OUT
    nack, release, release_all, expire   OUT → BACK
    retake                              BACK → OUT
    kill_exhausted                      BACK → DEAD
    kill                         OUT or BACK → DEAD
    ack                          OUT or BACK → done
    finish_dead                         DEAD → done
    requeue                             done → BACK

Messages are delivered in runs, and most messages of a run change together: all expire, or all go back when their member
leaves. So attempts, member and moment are stored once for a lot of messages; a message that changes alone moves to a
lot of its own. In a run, taking a message costs 0.05 µs, and acknowledging one 0.1 µs.

The state is stored as a snapshot followed by records of changes, so that one ack among 10,000 pending messages costs
a few bytes. `restore` applies them in order; each record overrides earlier ones for the offsets that it lists:

    floor, next   as above
    lots          pending messages: [attempts, delay in µs (null: DEAD), offsets]
    done          offsets that are done; only in records of changes
    reasons       why pending messages failed: [delivery, reason, offsets]; omitted if there are none

Offsets are stored as runs, relative to the record's `floor`: [skipped, taken, skipped, taken, …].
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat, takewhile
from typing import Any, Final

# Stale entries of a queue are removed when there are this many more than others: seldom, and never in a short queue.
_STALE_MAX: Final = 64
# The reasons of one position, in characters; the oldest are forgotten first.
REASONS_MAX: Final = 256 << 10

# About what a number takes in a record.
_NUMBER_BYTES: Final = 4

PositionRecord = dict[str, Any]


class Inflight:
    """Moments are monotonic microseconds.

    One class with many methods: each of the transitions above keeps the same tables consistent.
    """

    __slots__ = (
        "floor",
        "next",
        "pending_max",
        "_lots",
        "_dead",
        "_order",
        "_out",
        "_back",
        "_deadlines",
        "_delays",
        "_ready",
        "_changed",
        "_reasons",
        "_reasons_size",
    )

    def __init__(self, floor: int, pending_max: int = 10_000) -> None:
        self.pending_max = pending_max
        self.reset(floor)

    def reset(self, offset: int) -> None:
        """Start again at `offset`, with nothing pending. Only this can lower `next`, and only this and `requeue` the
        floor."""
        self.floor = offset
        self.next = offset
        # The lot of each message that is OUT or BACK. Ascending: offsets are taken in order.
        self._lots: dict[int, _Lot] = {}
        self._dead: dict[int, int] = {}  # offset -> attempts
        self._order: deque[int] = deque()  # all pending, ascending, and some that are done; the first is pending
        self._out: dict[int, set[_Lot]] = {}  # by member
        self._back: dict[int, set[_Lot]] = {}  # by attempts
        self._deadlines = _Timeline()  # of all OUT
        self._delays = _Timeline()  # of those BACK that were not yet found due
        self._ready: list[int] = []  # a heap: all BACK that were found due, and some that are not any more
        # Offsets whose stored state has changed since `mark`; None: unknown.
        self._changed: set[int] | None = None
        # Of pending messages: the last delivery that failed for a known reason, and the reason.
        self._reasons: dict[int, tuple[int, str]] = {}
        self._reasons_size = 0

    def __len__(self) -> int:
        return len(self._lots) + len(self._dead)

    def room(self) -> int:
        """Return how many more messages may be taken."""
        return max(0, self.pending_max - len(self))

    def owner(self, offset: int) -> int | None:
        """Return the member that has a message OUT."""
        lot = self._lots.get(offset)
        return None if lot is None else lot.member

    def is_pending(self, offset: int) -> bool:
        """Return whether a message is OUT, BACK or DEAD."""
        return offset in self._lots or offset in self._dead

    def attempts(self, offset: int) -> int:
        """Return how often a message was delivered; 0 if it is not pending."""
        lot = self._lots.get(offset)
        return self._dead.get(offset, 0) if lot is None else lot.attempts

    def reason(self, offset: int) -> tuple[int, str] | None:
        """Return the last delivery of a pending message that failed for a known reason, and the reason."""
        return self._reasons.get(offset)

    # Out.

    def take(self, offsets: Sequence[int], upto: int, member: int, due_us: int) -> None:
        """Deliver `offsets`, which ascend, for the first time. The others below `upto` are not for this group."""
        assert upto >= self.next
        if offsets:
            assert self.next <= offsets[0] <= offsets[-1] < upto
            assert len(offsets) <= self.room()
            if len(self._order) > 2 * len(self) + _STALE_MAX:
                self._order = deque(sorted((*self._lots, *self._dead)))
            before = len(self._lots)
            self._begin(tuple(offsets), 1, member, due_us)
            assert len(self._lots) == before + len(offsets)
            self._order.extend(offsets)
            self._note(offsets)
        self.next = upto
        self._raise_floor()

    def share(self, shares: Sequence[tuple[int, Sequence[int]]], upto: int, due_us: int) -> None:
        """As `take`, for several members: (member, its offsets, which ascend)."""
        offsets = sorted(chain.from_iterable(each for _, each in shares))
        self.take(offsets, upto, shares[0][0], due_us)
        for member, each in shares[1:]:
            lot = self._lots[each[0]]
            self._begin(tuple(each), 1, member, due_us)
            self._leave(lot, len(each))

    def held(self) -> dict[int, int]:
        """Return how many messages each member has OUT."""
        return {member: sum(lot.size for lot in lots) for member, lots in self._out.items()}

    def taken_by(self, member: int) -> list[int]:
        """Return the messages that a member has OUT, ascending."""
        return sorted(offset for lot in self._out.get(member, ()) for offset in self._left(lot))

    def back(self, now_us: int, limit: int) -> list[int]:
        """Return the first offsets that are BACK and due, ascending, for `retake`."""
        ready = self._ready
        for lot in self._delays.pop(now_us):
            for offset in self._left(lot):
                heapq.heappush(ready, offset)
        if len(ready) > 2 * len(self._lots) + _STALE_MAX:
            self._ready = ready = list(filter(self._is_ready, self._lots))
        found: list[int] = []
        while ready and len(found) < limit:
            offset = heapq.heappop(ready)
            if self._is_ready(offset) and offset not in found[-1:]:
                found.append(offset)
        for offset in found:
            heapq.heappush(ready, offset)
        return found

    def retake(self, offsets: Iterable[int], member: int, due_us: int) -> None:
        """Redeliver `offsets`, which are BACK."""
        by_attempts: dict[int, list[int]] = {}
        left: Counter[_Lot] = Counter()
        for offset in offsets:
            lot = self._lots[offset]
            assert lot.member is None
            by_attempts.setdefault(lot.attempts, []).append(offset)
            left[lot] += 1
        for attempts, together in by_attempts.items():
            self._begin(tuple(together), attempts + 1, member, due_us)
        for lot, count in left.items():
            self._leave(lot, count)
        for together in by_attempts.values():
            self._note(together)

    def extend(self, offset: int, due_us: int) -> bool:
        """Set the deadline of a message that is OUT. Return False if it is not."""
        lot = self._lots.get(offset)
        if lot is None or lot.member is None:
            return False
        self._begin((offset,), lot.attempts, lot.member, due_us)
        self._leave(lot)
        return True

    # Done.

    def ack(self, offset: int) -> bool:
        """Mark a message that is OUT or BACK as done. Return False if it is neither."""
        lot = self._lots.pop(offset, None)
        if lot is None:
            return False
        self._leave(lot)
        self._forget_reasons((offset,))
        self._note((offset,))
        if offset == self.floor:
            self._raise_floor()
        return True

    def ack_many(self, offsets: Sequence[int]) -> int:
        """Call `ack` for each, and return how many of them were OUT or BACK."""
        before = len(self._lots)
        lots = list(map(self._lots.pop, offsets, repeat(None)))
        for lot, count in Counter(lots).items():
            if lot is not None:
                self._leave(lot, count)
        self._forget_reasons(compress(offsets, lots))
        self._note(compress(offsets, lots))
        self._raise_floor()
        return before - len(self._lots)

    def ack_upto(self, offset: int) -> int:
        """Call `ack` for all up to and including `offset`, and return how many of them were OUT or BACK."""
        return self.ack_many(list(takewhile(lambda pending: pending <= offset, self._order)))

    def forget_below(self, offset: int) -> int:
        """Drop all messages below `offset`. Return how many of them were pending, including DEAD ones."""
        dropped = list(takewhile(lambda pending: pending < offset, self._order))
        lost = self.ack_many(dropped) + self.finish_dead(dropped)
        self.next = max(self.next, offset)
        self._raise_floor()
        return lost

    # Back.

    def nack(self, offset: int, back_us: int, reason: str = "") -> bool:
        """Redeliver a message from `back_us` on. Return False if it is neither OUT nor BACK."""
        lot = self._lots.get(offset)
        if lot is None:
            return False
        self._remember_reason(offset, lot.attempts, reason)
        self._begin((offset,), lot.attempts, None, back_us)
        self._leave(lot)
        self._note((offset,))
        return True

    def release(self, offset: int, now_us: int) -> bool:
        """Redeliver a message at once, without counting its last delivery. Return False if it is not OUT."""
        lot = self._lots.get(offset)
        if lot is None or lot.member is None:
            return False
        self._begin((offset,), lot.attempts - 1, None, now_us)
        self._leave(lot)
        self._note((offset,))
        return True

    def release_all(self, member: int, now_us: int) -> int:
        """Redeliver all messages of a member that left at once, and return their number."""
        lots = list(self._out.get(member, ()))
        for lot in lots:
            self._deadlines.drop(lot)
            self._turn_back(lot, now_us)
        return sum(lot.size for lot in lots)

    def expire(self, now_us: int) -> int:
        """Redeliver all messages whose deadline is over at once, and return their number."""
        lots = self._deadlines.pop(now_us)
        for lot in lots:
            self._turn_back(lot, now_us)
        return sum(lot.size for lot in lots)

    def next_us(self) -> int | None:
        """Return the next moment at which a deadline or a delay is over.

        A message that `back` has returned waits for a member, not for a moment.
        """
        moments = (self._deadlines.first_us(), self._delays.first_us())
        return min((moment for moment in moments if moment is not None), default=None)

    # Dead.

    def kill_exhausted(self, deliveries_max: int) -> list[tuple[int, int]]:
        """Turn all messages DEAD that are BACK after their last delivery. Return their (offset, attempts), ascending.

        Call it before `back`, which would return them once more.
        """
        exhausted = []
        for attempts in [attempts for attempts in self._back if attempts >= deliveries_max]:
            for lot in list(self._back[attempts]):
                exhausted += [(offset, attempts) for offset in self._left(lot)]
        for offset, _ in exhausted:
            self.kill(offset)
        return sorted(exhausted)

    def kill(self, offset: int, reason: str = "") -> bool:
        """Turn a message DEAD, regardless of its attempts. Return False if it is neither OUT nor BACK."""
        lot = self._lots.pop(offset, None)
        if lot is None:
            return False
        self._remember_reason(offset, lot.attempts, reason)
        self._dead[offset] = lot.attempts
        self._leave(lot)
        self._note((offset,))
        return True

    def dead(self) -> list[tuple[int, int]]:
        """Return (offset, attempts) of all DEAD messages, ascending."""
        return sorted(self._dead.items())

    def finish_dead(self, offsets: Iterable[int]) -> int:
        """Mark DEAD messages as done: their dead letters are stored. Return how many of `offsets` were DEAD."""
        finished = [offset for offset in offsets if self._dead.pop(offset, None) is not None]
        self._forget_reasons(finished)
        self._note(finished)
        self._raise_floor()
        return len(finished)

    def is_dead(self, offset: int) -> bool:
        """Return whether a message is DEAD: its dead letter may be stored, but it is not done."""
        return offset in self._dead

    def requeue(self, offsets: Iterable[int], now_us: int) -> None:
        """Redeliver messages that are done at once, as if for the first time. Others stay as they are. This sorts all
        pending messages, and the next record is a snapshot."""
        again = tuple(sorted({each for each in offsets if each < self.next and not self.is_pending(each)}))
        if not again:
            return
        self._begin(again, 0, None, now_us)
        self._lots = dict(sorted(self._lots.items()))
        self._order = deque(sorted((*self._lots, *self._dead)))
        self.floor = self._order[0]
        # A record of changes does not list messages that are done below its floor.
        self._changed = None

    # Records.

    def snapshot(self, now_us: int) -> PositionRecord:
        """Return the whole state. Moments become delays; messages that are OUT have none: they will be BACK."""
        return self._record(sorted(chain(self._lots, self._dead)), now_us)

    def changes(self, now_us: int) -> PositionRecord | None:
        """Return what changed since `mark`, or None if that is unknown: then take a `snapshot`."""
        if self._changed is None:
            return None
        changed = sorted(self._changed)
        done = [offset for offset in changed if offset >= self.floor and not self.is_pending(offset)]
        return {**self._record(changed, now_us), "done": _runs(done, self.floor)}

    def mark(self) -> None:
        """Track changes from here on: a record of everything before was written."""
        self._changed = set()

    def unmark(self) -> None:
        """Stop tracking changes: the last record may not be stored."""
        self._changed = None

    @classmethod
    def restore(cls, records: Sequence[PositionRecord], now_us: int, pending_max: int = 10_000) -> Inflight:
        """Restore the state. What was OUT is BACK. There may be more than `pending_max` pending messages."""
        said: dict[int, tuple[int, int | None]] = {}
        reasons: dict[int, tuple[int, str]] = {}
        for record in map(_upgrade, records):
            for attempts, delay_us, runs in record["lots"]:
                said.update(dict.fromkeys(_offsets(runs, record["floor"]), (attempts, delay_us)))
            for offset in _offsets(record.get("done", ()), record["floor"]):
                said.pop(offset, None)
            for delivery, reason, runs in record.get("reasons", ()):
                reasons.update(dict.fromkeys(_offsets(runs, record["floor"]), (delivery, reason)))
        last = records[-1]
        found = cls(last["floor"], pending_max)
        alike: dict[tuple[int, int], list[int]] = {}
        for offset, (attempts, delay_us) in sorted(said.items()):
            if offset < last["floor"]:
                continue
            if delay_us is None:
                found._dead[offset] = attempts
            else:
                alike.setdefault((attempts, delay_us), []).append(offset)
        for (attempts, delay_us), offsets in alike.items():
            found._begin(tuple(offsets), attempts, None, now_us + delay_us)
        found._lots = dict(sorted(found._lots.items()))
        found._order = deque(sorted((*found._lots, *found._dead)))
        for offset, (delivery, reason) in reasons.items():
            if found.is_pending(offset):
                found._remember_reason(offset, delivery, reason)
        found.next = last["next"]
        found._raise_floor()
        assert found.floor == last["floor"]
        return found

    def _record(self, offsets: Sequence[int], now_us: int) -> PositionRecord:
        """Return a record of the pending messages among `offsets`, which ascend."""
        alike: dict[tuple[int, int | None], list[int]] = {}
        for offset in offsets:
            lot = self._lots.get(offset)
            if lot is not None:
                delay_us = max(0, lot.at_us - now_us) if lot.member is None else 0
                alike.setdefault((lot.attempts, delay_us), []).append(offset)
            elif offset in self._dead:
                alike.setdefault((self._dead[offset], None), []).append(offset)
        lots = [[*of, _runs(together, self.floor)] for of, together in alike.items()]
        record: PositionRecord = {"floor": self.floor, "next": self.next, "lots": lots}
        if self._reasons:
            failed: dict[tuple[int, str], list[int]] = {}
            for offset in offsets:
                if offset in self._reasons:
                    failed.setdefault(self._reasons[offset], []).append(offset)
            record["reasons"] = [[*of, _runs(together, self.floor)] for of, together in failed.items()]
        return record

    def _note(self, offsets: Iterable[int]) -> None:
        if self._changed is not None:
            self._changed.update(offsets)

    # Reasons.

    def _remember_reason(self, offset: int, delivery: int, reason: str) -> None:
        if not reason:
            return
        self._forget_reasons((offset,))
        self._reasons[offset] = (delivery, reason)
        self._reasons_size += len(reason)
        while self._reasons_size > REASONS_MAX:
            self._forget_reasons((next(iter(self._reasons)),))

    def _forget_reasons(self, offsets: Iterable[int]) -> None:
        if not self._reasons:
            return
        for offset in offsets:
            if (found := self._reasons.pop(offset, None)) is not None:
                self._reasons_size -= len(found[1])

    # Lots.

    def _begin(self, offsets: tuple[int, ...], attempts: int, member: int | None, at_us: int) -> None:
        lot = _Lot(offsets, attempts, member, at_us)
        self._lots.update(dict.fromkeys(offsets, lot))
        if member is None:
            self._back.setdefault(attempts, set()).add(lot)
            self._delays.push(lot)
        else:
            self._out.setdefault(member, set()).add(lot)
            self._deadlines.push(lot)

    def _turn_back(self, lot: _Lot, now_us: int) -> None:
        """Turn a whole lot from OUT, and off its timeline, to BACK."""
        assert lot.member is not None
        _remove(self._out, lot.member, lot)
        lot.member = None
        lot.at_us = now_us
        self._back.setdefault(lot.attempts, set()).add(lot)
        self._delays.push(lot)

    def _leave(self, lot: _Lot, count: int = 1) -> None:
        """Remove messages from a lot; `_lots` does not refer to it for them any more."""
        lot.size -= count
        if lot.size <= lot.size_min:
            self._shrink(lot)

    def _shrink(self, lot: _Lot) -> None:
        if lot.size:
            lot.offsets = self._left(lot)
            lot.size_min = lot.size // 4
            return
        if lot.timeline is not None:
            lot.timeline.drop(lot)
        if lot.member is None:
            _remove(self._back, lot.attempts, lot)
        else:
            _remove(self._out, lot.member, lot)

    def _left(self, lot: _Lot) -> tuple[int, ...]:
        return tuple(offset for offset in lot.offsets if self._lots.get(offset) is lot)

    def _is_ready(self, offset: int) -> bool:
        lot = self._lots.get(offset)
        return lot is not None and lot.member is None and lot.timeline is None

    def _raise_floor(self) -> None:
        order, lots, dead = self._order, self._lots, self._dead
        if not lots and not dead:
            order.clear()
        while order:
            first = order[0]
            if first in lots or first in dead:
                self.floor = first
                return
            order.popleft()
        self.floor = self.next


class _Lot:
    """Messages that changed together: OUT with `member` until `at_us`, or BACK from `at_us` on."""

    __slots__ = ("offsets", "size", "size_min", "attempts", "member", "at_us", "timeline")

    def __init__(self, offsets: tuple[int, ...], attempts: int, member: int | None, at_us: int) -> None:
        self.offsets = offsets  # also those that left, until it shrinks
        self.size = len(offsets)  # without those that left
        self.size_min = self.size // 4  # it shrinks then: one message must not keep the offsets of hundreds in memory
        self.attempts = attempts
        self.member = member  # None: BACK
        self.at_us = at_us
        self.timeline: _Timeline | None = None  # where it waits for `at_us`


class _Timeline:
    """Lots by their moment. A lot is never pushed to the same timeline again."""

    __slots__ = ("_heap", "_pushed", "_size")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Lot]] = []  # also those that were dropped, until they are removed
        self._pushed = 0
        self._size = 0  # without those that were dropped

    def push(self, lot: _Lot) -> None:
        lot.timeline = self
        self._size += 1
        self._pushed += 1  # orders lots of the same moment
        heapq.heappush(self._heap, (lot.at_us, self._pushed, lot))

    def drop(self, lot: _Lot) -> None:
        lot.timeline = None
        self._size -= 1
        if len(self._heap) > 2 * self._size + _STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[2].timeline is self]
            heapq.heapify(self._heap)

    def pop(self, now_us: int) -> list[_Lot]:
        """Remove and return the lots whose moment has come."""
        lots = []
        while (at_us := self.first_us()) is not None and at_us <= now_us:
            lot = heapq.heappop(self._heap)[2]
            lot.timeline = None
            self._size -= 1
            lots.append(lot)
        return lots

    def first_us(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].timeline is not self:
            heapq.heappop(heap)
        return heap[0][0] if heap else None


def _remove(table: dict[int, set[_Lot]], key: int, lot: _Lot) -> None:
    lots = table[key]
    lots.remove(lot)
    if not lots:
        del table[key]


def weight(record: PositionRecord) -> int:
    """Return the size of a record, in numbers."""
    reasons = sum(len(runs) + 2 + len(reason) // _NUMBER_BYTES for _, reason, runs in record.get("reasons", ()))
    return sum(len(runs) + 2 for *_, runs in record["lots"]) + len(record.get("done", ())) + reasons + 2


def _runs(offsets: Iterable[int], floor: int) -> list[int]:
    """Encode ascending offsets as [skipped, taken, skipped, taken, …], starting at `floor`."""
    runs: list[int] = []
    at = floor
    for offset in offsets:
        if offset == at and runs:
            runs[-1] += 1
        else:
            runs += (offset - at, 1)
        at = offset + 1
    return runs


def _offsets(runs: Sequence[int], floor: int) -> Iterator[int]:
    at = floor
    for skipped, taken in zip(runs[::2], runs[1::2], strict=True):
        at += skipped
        yield from range(at, at + taken)
        at += taken


def _upgrade(record: PositionRecord) -> PositionRecord:
    """Return a record in the current format. Older records list [offset, attempts, delay] for each pending message."""
    if "pending" not in record:
        return record
    floor = record["floor"]
    lots = [[attempts, delay_us, [offset - floor, 1]] for offset, attempts, delay_us in record["pending"]]
    lots += [[attempts, None, [offset - floor, 1]] for offset, attempts in record["dead"]]
    return {**record, "lots": lots}
