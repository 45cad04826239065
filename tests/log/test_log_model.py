"""One log against a stupid one, a list of batches: whatever is done to both, in any order, they agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import OffsetOutOfRange, OutOfSequence, PenstockError
from penstock.log.flush import Sync, Write
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.log.producers import IN_FLIGHT_MAX
from penstock.log.retention import part_bytes
from penstock.log.segment import ReadMode
from penstock.model.batch import Batch, Compression, encode
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support.batches import Lists, expected, read
from tests.support.logs import open_log
from tests.support.sampling import examples

DIRECTORY = Path("/data/log")
READERS: tuple[ReadMode, ...] = ("pread", "mmap")
TAIL_BYTES = (1 << 20, 5000, 0)
PERCENT = st.integers(0, 201)
BOOLEANS = st.booleans()
BYTES_MAX = st.sampled_from((0, 1, 500, 5000, 1 << 20))
POLICIES = {
    "keep": Policy(segment_bytes=4096),
    "keep, flush": Policy(segment_bytes=4096, durability=Durability.FLUSH),
    "bytes": Policy(segment_bytes=4096, retain_bytes=9000),
    "age, flush": Policy(segment_bytes=4096, retain_ms=2000, durability=Durability.FLUSH),
    "compact": Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=1),
    "compact, flush": Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=1, durability=Durability.FLUSH),
}
# Columns that a batch may have, each as the values of its places tell.
COLUMNS: dict[str, Callable[[int], Any]] = {
    "subjects": lambda place: b"subject.%d" % place,
    "replies": lambda place: None if place % 2 else b"",
    "headers": lambda place: b"Number: %d\r\n" % place,
    "timestamps": lambda place: 1000 - place,
    "tombstones": lambda place: place % 3 == 0,
}


class Shape(NamedTuple):
    """A batch to make, told in a few words so that a failing example can be read."""

    keys: list[bytes | None]  # one for each message
    columns: set[str]
    filler: int

    def lists(self, number: int) -> Lists:
        """The columns of the batch; `number` makes its values unlike all others."""
        values = [b"%d.%d" % (number, place) for place in range(len(self.keys))]
        values[-1] += Random(number).randbytes(self.filler // 2) + bytes(self.filler // 2)
        lists: Lists = {"values": values, "timestamp": number}
        lists |= {name: [COLUMNS[name](place) for place in range(len(values))] for name in self.columns - {"keys"}}
        return lists | {"keys": self.keys} if "keys" in self.columns else lists


SHAPES = st.builds(
    Shape,
    st.lists(st.sampled_from((None, b"", b"a", b"b", b"c")), min_size=1, max_size=5),
    st.sets(st.sampled_from(["keys", *COLUMNS])).map(lambda columns: columns ^ {"keys"}),
    st.sampled_from((0, 700, 2500, 5000)),
)
SMALL = Shape([None], set(), 0)


@dataclass
class Entry:
    """A batch that was appended. Compaction leaves only some places of it."""

    base: int
    lists: Lists
    producer: int = 0
    sequence: int = 0
    append_time: int = 0
    kept: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = list(range(self.count))

    @property
    def count(self) -> int:
        return len(self.lists["values"])

    @property
    def end(self) -> int:
        return self.base + self.count

    def columns(self, kept: list[int]) -> Lists:
        lists = {
            name: None if column is None else [column[place] for place in kept]
            for name, column in expected(self.lists).items()
        }
        lists["deltas"] = kept if len(kept) < self.count else None
        return lists


@dataclass
class Waiter:
    """Who is told `offset` once all up to `end` is committed."""

    end: int
    offset: int
    told: list[tuple[int, PenstockError | None]] = field(default_factory=list)


class LogMachine(RuleBasedStateMachine):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.disk = FaultyFiles()
        self.clock = ManualClock()
        self.log: Log
        # What was appended and not yet taken, what a write took and has or has not run, and what is stored.
        self.pending: list[Entry] = []
        self.taken: list[Entry] = []
        self.stored: list[Entry] = []
        self.write: Write | None = None
        self.ran = False
        self.sync: Sync | None = None
        self.waiters: list[Waiter] = []
        self.end = self.written = self.durable = self.committed = 0
        self.reserved = self.reserved_written = False
        self.appended = 0
        self.append_time = 0
        self.seen_end = 0  # readers may have seen all below: nobody else may ever get these offsets
        # (sequence, offset) of each producer, (position, offset) of each source: what is in the log, or was dropped.
        self.sent: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.seen: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.published: dict[int, int] = {}  # producer -> the highest sequence that was ever written

    @initialize(reader=st.sampled_from(READERS), tail=st.sampled_from(TAIL_BYTES))
    def begin(self, reader: ReadMode, tail: int) -> None:
        self.append_time = self.clock.now_us()
        self._open(reader, tail)

    # In.

    @rule(
        shapes=st.lists(SHAPES, min_size=1, max_size=4),
        compression=st.sampled_from(Compression),
        then=st.sampled_from(("flush", "write", "wait")),
    )
    def append(self, shapes: list[Shape], compression: Compression, then: str) -> None:
        for shape in shapes:
            self._append(shape, compression=compression)
        if then == "flush":
            self.flush()
        elif then == "write":
            self._finish_rounds()
            self.begin_write()
            self._finish_rounds()

    @rule(shape=SHAPES, producer=st.integers(1, 2), batches=st.integers(1, IN_FLIGHT_MAX + 2))
    def append_as_producer(self, shape: Shape, producer: int, batches: int) -> None:
        if self.sent[producer] and not self._known_again(producer):
            return  # all that the log surely knows of it was truncated: it must begin again under a new id
        for _ in range(batches):
            sent = self.sent[producer]
            sequence = sent[-1][0] + 1 if sent else 0
            sent.append((sequence, self.end))
            self._append(shape, producer=producer, sequence=sequence)
            shape = SMALL

    @rule(shape=SHAPES, producer=st.integers(1, 3), back=st.integers(-2, IN_FLIGHT_MAX + 2))
    def append_again_or_out_of_sequence(self, shape: Shape, producer: int, back: int) -> None:
        sent = dict(self.sent[producer])
        sequence = max(1, max(sent, default=0) - back)
        if sequence - 1 == max(sent, default=None):
            return
        batch = encode(**shape.lists(0), producer=producer, sequence=sequence)
        if sequence in self._known_again(producer):
            self._append_again(batch, sent[sequence])
        elif sequence not in sent:
            with pytest.raises(OutOfSequence):
                self.log.append(batch)

    def _known_again(self, producer: int) -> list[int]:
        """The sequences that the log must know again: the last few that were ever published, and what waits."""
        oldest = self.published.get(producer, -1) - IN_FLIGHT_MAX
        return [sequence for sequence, _ in self.sent[producer] if sequence > oldest]

    @rule(shape=SHAPES, source=st.integers(1, 2), step=st.integers(0, 3))
    def append_from_source(self, shape: Shape, source: int, step: int) -> None:
        seen = self.seen[source]
        position = seen[-1][0] + step if seen else 100
        if seen and not step:
            self._append_again(encode(**shape.lists(0)), seen[-1][1], source=source, position=position)
        else:
            seen.append((position, self.end))
            self._append(shape, source=source, position=position)

    def _append(self, shape: Shape, *, source: int = 0, position: int = 0, **fields: Any) -> None:
        self.appended += 1
        lists = shape.lists(self.appended)
        waiter = Waiter(self.end + len(lists["values"]), self.end)
        outcome = Outcome(lambda error: waiter.told.append((waiter.offset, error)))
        offset = self.log.append(encode(**lists, **fields), source=source, position=position, outcome=outcome)
        assert offset == self.end
        assert offset >= self.seen_end
        entry = Entry(offset, lists, fields.get("producer", 0), fields.get("sequence", 0))
        self.pending.append(entry)
        self.end = entry.end
        self.waiters.append(waiter)

    def _append_again(self, batch: Batch, offset: int, **fields: int) -> None:
        waiter = Waiter(self.end, offset)
        outcome = Outcome(lambda error: waiter.told.append((offset, error)))
        assert self.log.append(batch, **fields, outcome=outcome) == offset
        self.waiters.append(waiter)

    # The rounds, whole and in their parts.

    @rule()
    def flush(self) -> None:
        self._finish_rounds()
        self.log.flush()
        self._stamp(self.pending)
        self._store(self.pending)
        self.pending = []
        self._made_durable()

    @precondition(lambda self: self.write is None)
    @rule()
    def begin_write(self) -> None:
        self.write = self.log.flusher.begin_write()
        if self.write is None:
            assert not self.pending or self.sync, "what waits is not written"
        else:
            self.taken, self.pending = self.pending, []
            self.ran = False

    @precondition(lambda self: self.write is not None and not self.ran)
    @rule()
    def run_write(self) -> None:
        assert self.write is not None
        self.write.run()
        self.ran = True
        self._stamp(self.taken)

    @precondition(lambda self: self.ran)
    @rule()
    def finish_write(self) -> None:
        assert self.write is not None
        self.log.flusher.finish_write(self.write)
        self._written()

    @precondition(lambda self: self.ran and self.sync is None)
    @rule()
    def sync_and_finish_write(self) -> None:
        assert self.write is not None
        sync = self.write.sync()
        sync.file.sync()
        self.log.flusher.finish_write(self.write)
        self.log.flusher.finish_sync(sync, None)
        self._written()
        self._made_durable()

    @precondition(lambda self: self.sync is None)
    @rule()
    def begin_sync(self) -> None:
        self.sync = self.log.flusher.begin_sync()
        if self.sync is None:
            assert self.durable == self.written or self.write, "what is written is not synced"
        self.syncing = self.written, self.reserved_written

    @precondition(lambda self: self.sync is not None)
    @rule()
    def finish_sync(self) -> None:
        assert self.sync is not None
        self.sync.file.sync()
        self.log.flusher.finish_sync(self.sync, None)
        self.sync = None
        written, reserved = self.syncing
        self.durable = max(self.durable, written)
        self.reserved |= reserved
        self._commit()

    def _stamp(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.append_time = entry.append_time = max(self.append_time, self.clock.now_us())

    def _written(self) -> None:
        self._store(self.taken)
        self.taken = []
        self.write = None
        self.ran = False

    def _store(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.stored.append(entry)
            self.written = entry.end
            self.reserved_written = True
            self.published[entry.producer] = max(self.published.get(entry.producer, 0), entry.sequence)
        self._commit()

    def _made_durable(self) -> None:
        self.durable = self.written
        self.reserved = self.reserved_written
        self._commit()

    def _commit(self) -> None:
        flush = self.policy.durability is Durability.FLUSH
        self.committed = max(self.committed, self.written if flush and self.reserved else self.durable)
        self.seen_end = max(self.seen_end, self.committed)

    def _finish_rounds(self) -> None:
        if self.sync is not None:
            self.finish_sync()
        if self.write is not None:
            if not self.ran:
                self.run_write()
            self.finish_write()

    # Out.

    @rule(percent=PERCENT, bytes_max=BYTES_MAX, back_us=st.sampled_from((-1, 0, 1, 1000, 1_000_000)))
    def look(self, percent: int, bytes_max: int, back_us: int) -> None:
        self._read(self._offset(percent), bytes_max)
        self._read_out_of_range(1 + percent)
        times = [entry.append_time for entry in self.stored] or [self.append_time]
        self._find_offset_at(times[(len(times) - 1) * (percent % 101) // 100] - back_us)

    def _read(self, offset: int, bytes_max: int) -> None:
        in_tail = self.log.read_tail(offset, bytes_max)
        if in_tail is not None:
            self._check_read(in_tail, offset, bytes_max)
        from_disk = self.log.read_disk(offset, bytes_max)
        self._check_read(from_disk, offset, bytes_max)
        found = self.log.read(offset, bytes_max)
        served = from_disk if in_tail is None else in_tail
        assert [bytes(batch.data) for batch in found] == [bytes(batch.data) for batch in served]

    def _read_out_of_range(self, beyond: int) -> None:
        for offset in (self.log.start - beyond, self.end + beyond):
            for read_at in (self.log.read, self.log.read_disk):
                with pytest.raises(OffsetOutOfRange):
                    read_at(offset, 1000)

    def _find_offset_at(self, time: int) -> None:
        later = [entry.base for entry in self._committed() if entry.kept and entry.append_time >= time]
        assert self.log.offset_at(time) == min([*later, self.committed])

    def _offset(self, percent: int) -> int:
        """An offset of the log. Above 100 percent one among the batches, for there may be a wide hole behind them."""
        low, high = self.log.start, self.end
        if percent > 100 and self.stored:
            low, high = self.stored[0].base, self.stored[-1].end
        return low + (high - low) * (percent % 101) // 100

    def _committed(self) -> Iterable[Entry]:
        return (entry for entry in self.stored if entry.end <= self.committed)

    def _check_read(self, found: list[Batch], offset: int, bytes_max: int) -> None:
        there = [entry for entry in self._committed() if entry.end > offset and entry.kept]
        assert bool(found) == bool(there), "at least one, if there is any"
        assert len(found) <= len(there)
        sizes = [len(batch.data) for batch in found]
        assert sum(sizes) <= bytes_max or len(sizes) == 1
        for batch, entry in zip(found, there, strict=False):
            assert (batch.base_offset, batch.span, batch.append_time) == (entry.base, entry.count, entry.append_time)
            assert read(batch.columns()) == entry.columns(entry.kept)

    # Time, upkeep, and the end.

    @rule(us=st.sampled_from((1, 1000, 1_000_000, 5_000_000)), back=BOOLEANS)
    def turn_the_clock(self, us: int, back: bool) -> None:
        if back:
            self.clock.set_wall(self.clock.now_us() - us)
        else:
            self.clock.advance(us)

    @rule(percent=st.sampled_from((201, 100, 200, 195, 190, 99, 150, 50, 0)))
    def truncate(self, percent: int) -> None:
        self.flush()
        offset = self._offset(percent)
        active = self.log.segments[-1].base
        self.log.upkeep.truncate(offset)
        assert self.log.end in (self.end, self.end + 1)
        if self.log.segments[-1].base != active:
            self.append_time = max(self.append_time, self.clock.now_us())
        cut = [entry.base for entry in self.stored if entry.end > offset]
        self.stored = [entry for entry in self.stored if entry.end <= offset]
        self.end = self.written = self.durable = self.committed = self.log.end
        self.seen_end = max(self.seen_end, self.end)
        self._forget_lost(min([offset, *cut]))
        self._check_all()

    @precondition(lambda self: self.policy.cleanup is not Cleanup.COMPACT)
    @rule()
    def retain(self) -> None:
        sizes = {segment.base: segment.size for segment in self.log.segments}
        bases = list(sizes)
        dropped = self.log.upkeep.retain()
        assert [segment.base for segment in self.log.segments] == bases[dropped:], "oldest first"
        droppable = sum(base <= self.committed for base in bases[1:])
        assert dropped <= droppable, "never the active one, nor what is not committed"
        horizon_us = self.clock.now_us() - (self.policy.retain_ms or 0) * 1000
        if self.policy.retain_bytes is not None:
            left = sum(sizes[base] for base in bases[dropped:])
            least = self.policy.retain_bytes - part_bytes(self.policy.retain_bytes)
            is_needed = dropped < len(bases) and left - sizes[bases[dropped]] < least
            assert left <= self.policy.retain_bytes or dropped == droppable or is_needed
            assert not dropped or left + sizes[bases[dropped - 1]] > self.policy.retain_bytes
        elif self.policy.retain_ms is not None:
            old = [entry for entry in self.stored if entry.base < self.log.start]
            assert all(entry.append_time <= horizon_us for entry in old)
            assert dropped == droppable or self.log.segments[1].begun_at() > horizon_us
        else:
            assert not dropped
        self.stored = [entry for entry in self.stored if entry.base >= self.log.start]
        names = self.disk.sizes(DIRECTORY).keys()
        assert [base for base in bases if f"{base:020d}.log" in names] == bases[dropped:]

    @precondition(lambda self: self.policy.cleanup is Cleanup.COMPACT)
    @rule()
    def compact(self) -> None:
        sealed_end = self.log.segments[-1].base
        dropped = self.log.upkeep.compact()
        latest: dict[bytes, int] = {}
        for entry in self.stored:
            if entry.end <= self.durable:
                latest |= {key: entry.base + place for place in entry.kept if (key := _key(entry, place)) is not None}
        horizon_us = self.clock.now_us() - self.policy.tombstone_ms * 1000
        expected_dropped = 0
        for entry in self.stored:
            if entry.base < sealed_end:
                kept = [place for place in entry.kept if _stays(entry, place, latest, horizon_us)]
                expected_dropped += len(entry.kept) - len(kept)
                entry.kept = kept
        assert dropped == expected_dropped
        self._check_all()

    @rule(kill=BOOLEANS, reader=st.sampled_from(READERS), tail=st.sampled_from(TAIL_BYTES))
    def reopen(self, kill: bool, reader: ReadMode, tail: int) -> None:
        if kill:
            self._kill()
        else:
            self.flush()
            self.log.close()
        self._open(reader, tail)
        assert self.log.end >= max(self.seen_end, self.written)
        if not kill or self.policy.durability is Durability.FSYNC:
            assert self.log.end == self.written, "no hole without need"
        self._forget_lost(self.written)
        # What was found is served, and stays.
        self.end = self.written = self.durable = self.committed = self.seen_end = self.log.end
        self.reserved = self.reserved_written = False
        self._check_all()

    def _kill(self) -> None:
        self.disk.kill()
        for segment in self.log.segments:
            segment.release()  # what a process has mapped into memory goes with it
        if self.ran:
            self._store(self.taken)
        self.pending = []
        self.taken = []
        self.waiters = []
        self.write = None
        self.ran = False
        self.sync = None

    def _open(self, reader: ReadMode, tail: int) -> None:
        self.log = open_log(
            DIRECTORY, files=self.disk, clock=self.clock, policy=self.policy, reader=reader, tail_bytes=tail
        )

    def _forget_lost(self, end: int) -> None:
        """Batches behind `end` are in the log no more, and may be sent again."""
        for known in (*self.sent.values(), *self.seen.values()):
            known[:] = [(number, offset) for number, offset in known if offset < end]

    def _check_all(self) -> None:
        offset = self.log.start
        there = [entry for entry in self._committed() if entry.kept]
        while found := self.log.read_disk(offset, 1 << 20):
            self._check_read(found, offset, 1 << 20)
            del there[: len(found)]
            offset = found[-1].end
        assert not there
        report = self.log.verify()
        assert not report.damage
        assert not report.torn_bytes

    @invariant()
    def marks_and_answers_are_as_expected(self) -> None:
        log = self.log
        assert log.start <= log.committed <= log.marks.written <= log.end
        assert (log.committed, log.marks.written, log.end) == (self.committed, self.written, self.end)
        for waiter in self.waiters:
            assert waiter.told == ([(waiter.offset, None)] if waiter.end <= self.committed else [])
        self.waiters = [waiter for waiter in self.waiters if waiter.end > self.committed]

    @invariant()
    def content_is_as_expected(self) -> None:
        last = max((entry.base for entry in self._committed()), default=self.log.start)
        for offset in {self.log.start, last}:
            self._read(offset, 1 << 20)


def _key(entry: Entry, place: int) -> bytes | None:
    keys = entry.lists.get("keys")
    return None if keys is None else keys[place]


def _stays(entry: Entry, place: int, latest: dict[bytes, int], horizon_us: int) -> bool:
    key = _key(entry, place)
    if key is None:
        return True
    tombstones = entry.lists.get("tombstones")
    if tombstones is not None and tombstones[place] and entry.append_time <= horizon_us:
        return False
    return latest.get(key, -1) <= entry.base + place


SETTINGS = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None, print_blob=True, report_multiple_bugs=False
)


@pytest.mark.timeout(600)  # where they disagree, hypothesis makes the example smaller for up to 300 s
@pytest.mark.parametrize("name", POLICIES)
def test_a_log_does_what_a_list_does(name: str) -> None:
    run_state_machine_as_test(lambda: LogMachine(POLICIES[name]), settings=SETTINGS)  # type: ignore[arg-type]
