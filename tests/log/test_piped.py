"""A piped log is a copy of another one: the same batches at the same offsets, whatever happens on the way."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from penstock.errors import AppendFailed, LogFailed, OriginConflict, PenstockError, ReadOnlyTopic
from penstock.log.appender import LogState
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.model.batch import Batch, Compression, encode
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support import logs
from tests.support.brokers import in_loop
from tests.support.sampling import sampled

DATA = Path("/data")
TIMESTAMP = 1_600_000_000_000_000
FLUSH = Policy(durability=Durability.FLUSH)


def at(offset: int, *values: bytes, **columns: object) -> Batch:
    """A batch as another log has it."""
    batch = encode(values, timestamp=TIMESTAMP, **columns)  # type: ignore[arg-type]
    batch.stamp(offset, append_time=1, log=7, durable_bytes=8, source=9, position=10)
    return batch


def piped(files: FaultyFiles, policy: Policy = logs.DEFAULT_POLICY) -> Log:
    return logs.open_log(DATA, files=files, policy=policy, piped=True)


# ---- one log


def test_a_batch_is_at_the_offset_that_it_has_at_its_origin() -> None:
    log = piped(FaultyFiles())
    assert log.append_at(at(5, b"a", b"b"))
    assert log.append_at(at(7, b"c"))
    log.flush()
    assert logs.messages(log) == {5: b"a", 6: b"b", 7: b"c"}
    assert log.end == log.committed == 8


def test_a_gap_in_the_offsets_stays_and_is_read_over() -> None:
    disk = FaultyFiles()
    log = piped(disk)
    log.append_at(at(0, b"a"))
    log.append_at(at(1 << 20, b"b"))
    log.flush()
    assert logs.messages(log) == {0: b"a", 1 << 20: b"b"}
    log.close()
    assert logs.messages(piped(disk)) == {0: b"a", 1 << 20: b"b"}


@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_there_already_is_not_stored_again(offset: int) -> None:
    log = piped(FaultyFiles())
    told: list[PenstockError | None] = []
    log.append_at(at(0, b"a"))
    log.append_at(at(1, b"b"))
    assert not log.append_at(at(offset, b"x"), Outcome(told.append))
    assert not told, "it is as durable as the one that is there"
    log.flush()
    assert told == [None]
    assert logs.messages(log) == {0: b"a", 1: b"b"}


def test_a_batch_of_which_a_part_is_there_is_refused() -> None:
    log = piped(FaultyFiles())
    log.append_at(at(0, b"a", b"b"))
    with pytest.raises(OriginConflict, match="offsets 1 to 3, but 2 is next"):
        log.append_at(at(1, b"b", b"c"))
    log.flush()
    assert logs.messages(log) == {0: b"a", 1: b"b"}


def test_what_the_producer_signed_is_not_touched() -> None:
    log = piped(FaultyFiles())
    batch = at(3, b"a" * 100, keys=[b"k"], producer=5, sequence=8, compression=Compression.ZSTD)
    signed = bytes(batch.data[56:])
    log.append_at(batch)
    log.flush()
    [stored] = log.read(0, 1000)
    assert bytes(stored.data[56:]) == signed
    assert (stored.log, stored.source, stored.position) == (log.number, 0, 0)
    stored.columns().check()


def test_the_sequences_of_producers_are_the_origins_business() -> None:
    disk = FaultyFiles()
    log = piped(disk)
    log.append_at(at(0, b"a", producer=5, sequence=8))
    log.append_at(at(1, b"b", producer=5, sequence=3))
    log.close()
    again = logs.open_log(DATA, files=disk, piped=True)
    again.append_at(at(2, b"c", producer=5, sequence=0))
    again.flush()
    assert logs.messages(again) == {0: b"a", 1: b"b", 2: b"c"}


def test_nothing_else_is_appended_to_it() -> None:
    log = piped(FaultyFiles())
    with pytest.raises(ReadOnlyTopic):
        logs.append(log, b"a")
    with pytest.raises(ReadOnlyTopic):
        log.gather(Run([b"a"], [b"b"]))
    assert log.end == 0


def test_under_flush_the_end_goes_back_to_what_is_there() -> None:
    """Its origin never gives the offsets out again, so what the power took comes again."""
    disk = FaultyFiles()
    log = piped(disk, FLUSH)
    log.append_at(at(0, b"a"))
    log.flush()
    log.append_at(at(1, b"b"))
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)
    assert log.committed == 2, "it is with the operating system, and may be read"
    disk = disk.power_cut()
    log = piped(disk, FLUSH)
    assert log.end in (1, 2), "no offsets were reserved"
    log.append_at(at(1, b"b"))
    log.flush()
    assert logs.messages(log) == {0: b"a", 1: b"b"}


def test_a_write_that_fails_is_taken_back_and_comes_again() -> None:
    disk = FaultyFiles()
    log = piped(disk)
    log.append_at(at(0, b"a"))
    log.flush()
    disk.fail("write", errno.ENOSPC, path_suffix=".log")
    told: list[PenstockError | None] = []
    log.append_at(at(10, b"b"), Outcome(told.append))
    log.flush()
    assert isinstance(told[0], AppendFailed)
    assert log.end == 1
    disk.heal()
    log.append_at(at(10, b"b"))
    log.flush()
    assert logs.messages(log) == {0: b"a", 10: b"b"}


# ---- its topic


def open_store(disk: FaultyFiles) -> Store:
    return Store(DATA, files=disk, clock=ManualClock(), meta=logs.memory_meta())


def test_a_topic_remembers_its_origin() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("t", partitions=2, origin="there/1")
        store.log(topic.id, 1).append_at(at(3, b"a"))
    with open_store(disk) as store:
        [topic] = store.topics
        assert topic.origin == "there/1"
        assert logs.messages(store.log(topic.id, 1)) == {3: b"a"}
        with pytest.raises(ReadOnlyTopic):
            logs.append(store.log(topic.id, 0), b"b")


def test_an_empty_topic_can_become_a_copy_and_one_with_messages_cannot() -> None:
    with open_store(FaultyFiles()) as store:
        empty, used = store.create_topic("empty"), store.create_topic("used")
        logs.append(store.log(used.id), b"mine")
        store.alter_topic(type(empty)(empty.id, "empty", 2, empty.policy, "there/1"))
        assert [store.log(empty.id, number).terms.is_piped for number in range(2)] == [True, True]
        with pytest.raises(ValueError, match="messages of its own"):
            store.alter_topic(type(used)(used.id, "used", 1, used.policy, "there/2"))
        with pytest.raises(ValueError, match="messages of its own"):
            store.alter_topic(type(empty)(empty.id, "empty", 2, empty.policy, "there/3"))
        assert not store.log(used.id).terms.is_piped


@in_loop
async def test_a_store_has_one_identity_for_ever() -> None:
    disk = FaultyFiles()
    found: list[str] = []
    for _ in range(2):
        store = open_store(disk)
        running = asyncio.create_task(store.run())
        found += await asyncio.gather(store.identity(), store.identity())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        store.close()
    assert len(set(found)) == 1
    assert len(found[0]) == 32


# ---- power cuts


@dataclass
class Origin:
    """A log elsewhere: batches by offset, with gaps."""

    batches: list[bytes]
    messages: dict[int, bytes]

    @classmethod
    def draw(cls, random: Random) -> Origin:
        batches: list[bytes] = []
        messages: dict[int, bytes] = {}
        offset = random.choice((0, 3))
        for number in range(random.randint(1, 60)):
            if random.random() < 0.1:
                offset += random.choice((1, 100, 1 << 20))
            values = [b"%d.%d:" % (number, place) + random.randbytes(random.choice((0, 20, 900))) for place in range(3)]
            producer = random.choice((0, 5))
            batch = at(offset, *values, keys=[b"%d.%d" % (number, place) for place in range(3)], producer=producer)
            batches.append(bytes(batch.data))
            messages |= dict(zip(range(offset, offset + 3), values, strict=True))
            offset = batch.end
        return cls(batches, messages)

    def from_offset(self, offset: int) -> list[Batch]:
        found = [Batch(bytearray(data)) for data in self.batches]
        return [batch for batch in found if batch.end > offset]


POLICIES = (
    Policy(segment_bytes=4096),
    Policy(segment_bytes=4096, durability=Durability.FLUSH),
    Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, durability=Durability.FLUSH),
    Policy(segment_bytes=4096, retain_bytes=8000),
)


class Copying:
    """A child in several lives, each cut off somewhere; judged after every start."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.origin = Origin.draw(self.random)
        self.policy = self.random.choice(POLICIES)
        self.disk = FaultyFiles(seed=seed)
        self.clock = ManualClock()
        self.acknowledged: set[int] = set()
        # What the operating system has of a process that was killed: a power cut can still take it.
        self.written: set[int] = set()
        self.cuts = 0
        with self._open() as store:
            store.create_topic("t", policy=self.policy, origin="there/1")

    def run(self) -> None:
        for _ in range(self.random.randint(2, 6)):
            self._life()
        self.disk.heal()
        self.disk.cut_after = None
        with self._open() as store:
            log = self._judge(store)
            for batch in self.origin.from_offset(log.end):
                log.append_at(batch)
            store.flush()
            kept = {offset: value for offset, value in self.origin.messages.items() if offset >= log.start}
            assert logs.messages(log) == kept, "in the end it is the same"

    def _life(self) -> None:
        if self.random.random() < 0.7:
            self.disk.cut_after = self.disk.calls + self.random.choice((3, 10, 30)) * self.random.randint(0, 4)
        try:
            store = self._open()
            log = self._judge(store)
            for _ in range(self.random.randint(1, 12)):
                self._step(store, log)
            if self.random.random() < 0.3:
                store.close()
                return
            if self.random.random() < 0.5:
                self._keep_written(log)
                self.disk.kill()
                return
        except (PowerCut, OSError, AppendFailed, LogFailed):
            pass
        self.cuts += 1
        self.written.clear()
        self.disk = self.disk.power_cut()

    def _open(self) -> Store:
        settings = StoreSettings(tail_bytes_max=self.random.choice((0, 2000, 1 << 20)))
        return Store(DATA, settings=settings, files=self.disk, clock=self.clock, meta=logs.memory_meta())

    def _step(self, store: Store, log: Log) -> None:
        self.clock.advance(1000)
        match self.random.randint(0, 9):
            case 0 | 1 | 2:
                store.flush()
            case 3:
                store.upkeep()
            case 4:
                self._drive(store)
            case 5 if self.random.random() < 0.2:
                self.disk.fail(self.random.choice(("write", "sync", "create")), errno.ENOSPC, path_suffix=".log")
            case _:
                self._follow(log)

    def _follow(self, log: Log) -> None:
        if log.state is not LogState.OPEN:
            return
        # A parent may give what is there already: after a change of parents, or when an answer is asked for twice.
        begin = log.end if self.random.random() < 0.7 else self.random.choice((0, log.end // 2))
        for batch in self.origin.from_offset(begin)[: self.random.randint(1, 8)]:
            offsets = range(batch.base_offset, batch.end)

            def done(error: PenstockError | None, offsets: range = offsets) -> None:
                if error is None and self.policy.durability is Durability.FSYNC:
                    self.acknowledged.update(offsets)

            if batch.base_offset > log.end and self._between(log.end, batch.base_offset):
                return  # only a child that skips leaves out what is there
            log.append_at(batch, Outcome(done))

    def _between(self, first: int, last: int) -> bool:
        return any(first <= offset < last for offset in self.origin.messages)

    def _drive(self, store: Store) -> None:
        """The two lanes of an event loop at once, in some order of their steps."""
        rounds = [store.rounds.take_written_round(), store.rounds.take_synced_round()]
        for round_ in self.random.sample(rounds, 2):
            if round_ is not None:
                round_.run()
        for round_ in self.random.sample(rounds, 2):
            if round_ is not None:
                store.rounds.finish(round_)

    def _keep_written(self, log: Log) -> None:
        """The process ends, and the operating system does not: what was committed stays."""
        self.written.update(offset for offset in self.origin.messages if offset < log.committed)

    def _judge(self, store: Store) -> Log:
        [topic] = store.topics
        assert topic.origin == "there/1"
        log = store.log(topic.id)
        present = logs.messages(log)
        below = {offset: value for offset, value in self.origin.messages.items() if log.start <= offset < log.end}
        assert present == below, "all below the end is there, as at the origin, and nothing else"
        last = max(self.origin.messages)
        assert log.end <= last + 1, "the end is not beyond what its origin gave out"
        missing = {offset for offset in self.acknowledged | self.written if offset >= log.end}
        assert not missing, f"acknowledged, and gone: {sorted(missing)[:5]}"
        # What a start found is durable.
        self.acknowledged |= self.written
        self.written.clear()
        return log


@pytest.mark.parametrize("part", range(4))
def test_a_copy_is_a_copy_after_any_power_cut(part: int) -> None:
    cuts = 0
    numbers = sampled(range(100))
    for number in numbers:
        seed = part + 4 * number
        copying = Copying(seed)
        try:
            copying.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        cuts += copying.cuts
    assert 2 * cuts > len(numbers), "the power was hardly ever cut"
