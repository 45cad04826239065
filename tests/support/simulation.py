"""A store on a disk that loses what was not synced: random work, power cuts at random calls, and a judge.

One seed is one life of a store, of several starts. The judge knows every message that was ever appended, and what
was told about it. After each start, whatever happened before it:

- every acknowledged message is there, at its offset, once (under `flush`: unless the power was cut before its sync);
- nothing else is there: only messages that were appended, at the offset they were given;
- no offset that a reader may have seen holds another message, now or ever;
- nothing below a purge that was acknowledged is read again;
- nothing is taken for damaged: `meta.db` outlives every power cut, and never claims more than there is.
"""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest import mock

from penstock.errors import AppendFailed, LogFailed, OutOfSequence, PenstockError
from penstock.log import compaction
from penstock.log.appender import LogState
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, Policy
from penstock.model.batch import Compression, encode
from penstock.outcome import Outcome
from penstock.store.meta import Meta
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut

DATA = Path("/data")
START_US = 1_700_000_000_000_000

POLICIES = (
    Policy(segment_bytes=4096),
    Policy(segment_bytes=4096, durability=Durability.FLUSH),
    Policy(segment_bytes=4096, retain_bytes=12_000),
    Policy(segment_bytes=4096, retain_ms=5_000, durability=Durability.FLUSH),
    Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=10_000),
    Policy(segment_bytes=6000, cleanup=Cleanup.COMPACT, durability=Durability.FLUSH),
    # These roll by age and size before a segment is full.
    Policy(retain_ms=1_000),
    Policy(retain_bytes=30_000, durability=Durability.FLUSH),
    Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, retain_ms=3_000),
)


@dataclass
class Message:
    value: bytes
    key: bytes | None
    tombstone: bool


@dataclass
class Producer:
    number: int
    sequence: int = 0
    unacknowledged: list[Message] = field(default_factory=list)


@dataclass
class Topic:
    """What the judge knows of one topic."""

    policy: Policy
    producer: Producer = field(default_factory=lambda: Producer(1))
    # offset -> all that were ever given it, and the one that was acknowledged there
    given: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))
    acknowledged: dict[int, Message] = field(default_factory=dict)
    # Acknowledged offsets that no power cut may take any more.
    durable: set[int] = field(default_factory=set)
    ever_durable: set[int] = field(default_factory=set)
    # Acknowledged under `flush`, and gone with the power. Nobody else may get these offsets.
    lost: set[int] = field(default_factory=set)
    # Up to where it may have been purged, and up to where that was acknowledged.
    purging: int = 0
    purged: int = 0


class LastingMeta(Meta):
    """A `meta.db` that no power cut takes anything from: the furthest ahead that there can be."""

    def __init__(self) -> None:
        super().__init__(None)

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.disk = FaultyFiles(seed=seed)
        self.clock = ManualClock(now_us=START_US)
        self.topics: dict[int, Topic] = {}
        self.values = 0
        self.cuts = 0
        self.meta = LastingMeta()
        # The last process ended without a power cut since: nothing that it acknowledged may be missing.
        self._killed = False

    def run(self) -> None:
        try:
            for _ in range(self.random.randint(2, 5)):
                self._life()
            self.disk.heal()
            with self._open() as store:
                self._judge(store)
            self.meta.end()
        except Exception as error:
            error.add_note(
                f"seed {self.seed}: python -m tests.soak --seed {self.seed} --cuts 1 --kills 0 --serves 0 --fuzz 0"
            )
            raise

    def _life(self) -> None:
        """From a start to a stop, a kill or a power cut."""
        if self.random.random() < 0.8:
            self.disk.cut_after = self.disk.calls + self.random.choice((3, 10, 30, 100, 200)) * self.random.randint(
                0, 4
            )
        try:
            store = self._open()
            try:
                self._judge(store)
                for _ in range(self.random.randint(1, 30)):
                    self._step(store)
                if self.random.random() < 0.5:
                    store.close()
                    return
            except (AppendFailed, LogFailed):
                pass  # a planned fault; what it means for the messages, their callbacks were told
            self._note_durable(store)
            if self.random.random() < 0.5:
                self.disk.kill()
                self._killed = True
                return
        except PowerCut:
            pass
        except (OSError, AppendFailed, LogFailed):
            pass  # a planned fault that was left for this start
        self.cuts += 1
        self.disk = self.disk.power_cut()
        self._killed = False

    def _open(self) -> Store:
        settings = StoreSettings(
            reader=self.random.choice(("pread", "mmap")), tail_bytes_max=self.random.choice((0, 2000, 1 << 20))
        )
        return Store(DATA, settings=settings, files=self.disk, clock=self.clock, meta=self.meta)

    def _step(self, store: Store) -> None:
        self.clock.advance(self.random.choice((0, 1, 1000, 60_000, 2_000_000)))
        known = {topic.id for topic in store.topics}
        match self.random.randint(0, 19):
            case 0 if len(known) < 3:
                policy = self.random.choice(POLICIES)
                topic = store.create_topic(f"topic-{len(self.topics)}", policy=policy)
                self.topics[topic.id] = Topic(policy)
            case 1 | 2 | 3 | 4:
                store.flush()
            case 5 | 6:
                store.upkeep()
            case 7:
                self.clock.set_wall(START_US + self.random.randint(-10_000_000, 10_000_000))
            case 8 if self.random.random() < 0.3:
                call = self.random.choice(("write", "sync", "create", "sync_directory", "truncate"))
                self.disk.fail(call, self.random.choice((errno.ENOSPC, errno.EIO)), path_suffix=".log")
            case 9:
                self._drive_lanes_by_hand(store)
            case 10 if known and self.random.random() < 0.3:
                self._purge(store, self.random.choice(sorted(known)))
            case _ if known:
                log = store.log(self.random.choice(sorted(known)))
                for _ in range(self.random.randint(1, 5)):
                    self._append(log, self.topics[self._topic_id(log)])
            case _:
                pass
        self._note_durable(store)

    def _drive_lanes_by_hand(self, store: Store) -> None:
        """The two lanes of an event loop at once, in some order of their steps."""
        rounds = [store.rounds.take_written_round(), store.rounds.take_synced_round()]
        for round_ in self.random.sample(rounds, 2):
            if round_ is not None:
                round_.run()
        for round_ in self.random.sample(rounds, 2):
            if round_ is not None:
                store.rounds.finish(round_)

    def _purge(self, store: Store, number: int) -> None:
        log, topic = store.log(number), self.topics[number]
        offset = self.random.randint(log.start, log.committed)
        topic.purging = max(topic.purging, offset)
        store.purge_topic(number, {0: offset})
        topic.purged = max(topic.purged, offset)

    def _append(self, log: Log, topic: Topic) -> None:
        if log.state is not LogState.OPEN:
            return
        messages = [self._message() for _ in range(self.random.choice((1, 1, 2, 5, 20)))]
        producer = topic.producer if self.random.random() < 0.5 else None
        if producer is not None and producer.unacknowledged:
            messages = producer.unacknowledged  # the same batch again, as a client does that got no answer
        batch = encode(
            [message.value for message in messages],
            keys=[message.key for message in messages],
            tombstones=[message.tombstone for message in messages],
            timestamp=self.clock.now_us(),
            compression=self.random.choice(list(Compression)),
            producer=producer.number if producer else 0,
            sequence=producer.sequence if producer else 0,
        )
        span = batch.span

        def done(error: PenstockError | None) -> None:
            if error is None:
                if producer is not None and producer.unacknowledged is messages:
                    producer.sequence += 1
                    producer.unacknowledged = []
                for offset, message in zip(range(first, first + span), messages, strict=True):
                    before = topic.acknowledged.setdefault(offset, message)
                    assert before is message, f"offset {offset} was acknowledged for {before}, now for {message}"

        if producer is not None:
            producer.unacknowledged = messages
        try:
            outcome = Outcome()
            first = log.append(batch, outcome=outcome)
        except OutOfSequence:
            assert topic.lost, "nothing was lost, and yet a producer's batch is missing"
            topic.producer = Producer(topic.producer.number + 1)
            return
        # A duplicate may be settled already, so `done` is added when its offset is known.
        outcome.then(done)
        for offset, message in zip(range(first, first + span), messages, strict=True):
            if message not in topic.given[offset]:
                topic.given[offset].append(message)

    def _message(self) -> Message:
        self.values += 1
        value = b"%d:" % self.values + self.random.randbytes(self.random.choice((0, 10, 100, 1500)))
        key = self.random.choice((None, b"", b"a", b"b", b"c"))
        return Message(value, key, self.random.random() < 0.2)

    def _note_durable(self, store: Store) -> None:
        for number, topic in self.topics.items():
            if number in {known.id for known in store.topics}:
                log = store.log(number)
                fsync = topic.policy.durability is Durability.FSYNC
                synced = {offset for offset in topic.acknowledged if fsync or offset < log.marks.durable}
                topic.durable |= synced - topic.lost

    # The judge.

    def _judge(self, store: Store) -> None:
        known = {topic.id: topic for topic in store.topics}
        assert not store.catalogue.damage, "something is taken for damaged"
        assert self.topics.keys() <= known.keys(), "a topic is gone"
        for number, topic in known.items():
            if number not in self.topics:
                # The power went while it was being created: it is there, and nobody was told.
                self.topics[number] = Topic(topic.policy)
            self._judge_topic(store.log(number), self.topics[number])

    def _judge_topic(self, log: Log, topic: Topic) -> None:
        assert log.start >= min(topic.purged, log.end), "what was purged is back"
        present = self._read_all(log)
        for offset, value in present.items():
            given = [other.value for other in topic.given[offset]]
            assert value in given, f"offset {offset} holds what was never given it"
            if offset in topic.acknowledged:
                assert value == topic.acknowledged[offset].value, f"offset {offset} holds another message"
        assert len(set(present.values())) == len(present), "a message is there twice"
        if self._killed or topic.policy.durability is Durability.FSYNC:
            topic.durable |= topic.acknowledged.keys() - topic.lost
        seen_end = max(topic.acknowledged, default=-1) + 1
        assert log.end >= seen_end, f"offsets from {log.end} to {seen_end} will be given out again"
        topic.ever_durable |= topic.durable
        missing = topic.durable - present.keys()
        for offset in sorted(missing):
            dropped = self._may_be_missing(topic, offset, log.start, present)
            assert dropped, f"offset {offset} was acknowledged and is gone"
        # What a start found is durable, whatever became of those who appended it.
        for offset, value in present.items():
            message = next(other for other in topic.given[offset] if other.value == value)
            topic.acknowledged[offset] = message
            topic.durable.add(offset)
        topic.lost = topic.acknowledged.keys() - present.keys()
        topic.durable -= topic.lost

    def _may_be_missing(self, topic: Topic, offset: int, start: int, present: dict[int, bytes]) -> bool:
        """Whether retention or compaction may have dropped a durable message."""
        if offset < start:
            has_retention = topic.policy.retain_ms is not None or topic.policy.retain_bytes is not None
            return has_retention or offset < topic.purging
        message = topic.acknowledged[offset]
        if topic.policy.cleanup is not Cleanup.COMPACT or message.key is None:
            return False
        return message.tombstone or any(
            place in present or (place in topic.ever_durable and later.tombstone)
            for place, later in topic.acknowledged.items()
            if place > offset and later.key == message.key
        )

    def _read_all(self, log: Log) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        offset = log.start
        while batches := log.read(offset, self.random.choice((1, 500, 4000, 100_000))):
            for batch in batches:
                columns = batch.columns()
                assert batch.end > offset
                for place, value in zip(columns.offsets(), columns.values(), strict=True):
                    assert place not in found
                    if place >= log.start:
                        found[place] = value
                offset = batch.end
        assert list(found) == sorted(found)
        return found

    def _topic_id(self, log: Log) -> int:
        return int(log.directory.parent.name)


def simulate(seed: int) -> Simulation:
    logger = logging.getLogger("penstock")
    logger.setLevel(logging.CRITICAL)
    simulation = Simulation(seed)
    try:
        # Its logs have few segments: two of them are enough to be merged.
        with mock.patch.object(compaction, "MERGED_MIN", 2):
            simulation.run()
    finally:
        # Other tests of this process read what is logged.
        logger.setLevel(logging.NOTSET)
    return simulation
