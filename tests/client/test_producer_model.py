"""A producer against a broker that loses connections at random: each message is stored once and in order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from penstock.client.lane import SealedBatch
from penstock.client.partitioner import Layout
from penstock.errors import (
    Closed,
    LogFailed,
    OutOfSequence,
    Overloaded,
    PenstockError,
    StaleLayout,
)
from penstock.log.producers import Producers
from penstock.model import headers
from penstock.model.batch import Batch, accept
from penstock.model.run import open_batch
from tests.support.client_core import Bench
from tests.support.sampling import examples


class Partition:
    """What a broker's log makes of batches: numbers as the log itself judges them, ids as the dedup does."""

    def __init__(self, identities: set[bytes]) -> None:
        """`identities`: those of the whole topic."""
        self.values: list[bytes] = []
        self._producers = Producers()
        self._identities = identities

    def append(self, batch: Batch) -> None:
        run = open_batch(batch, b"t")
        if batch.asks:
            for value, identity in zip(run.values, _identities(batch), strict=True):
                if identity not in self._identities:
                    self._identities.add(identity)
                    self.values.append(value)
            return
        if self._producers.find(batch, 0, 0) is None:
            batch.stamp(len(self.values), append_time=0)
            self._producers.note(batch)
            self._producers.settle(batch)
            self.values += run.values

    def holds(self, batch: Batch) -> bool:
        if batch.asks:
            return self._identities.issuperset(_identities(batch))
        try:
            return self._producers.find(batch, 0, 0) is not None
        except OutOfSequence:
            return False


def _identities(batch: Batch) -> list[bytes]:
    return [headers.identity(block or b"") or b"" for block in batch.columns().headers() or []]


class Broker:
    """Partitions, and a connection to them that can break at any point. It refuses what it likes to, for a while."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self.layout = Layout(b"t", 5, 1)
        self._identities: set[bytes] = set()
        self.partitions = [Partition(self._identities)]
        self.is_calm = False
        self._requests: list[tuple[SealedBatch, bytes, int]] = []
        self._answers: list[tuple[SealedBatch, PenstockError | None]] = []

    def send(self, batches: list[SealedBatch]) -> None:
        for each in batches:
            self._requests.append((each, bytes(each.batch.data), each.lane.topic.layout.partitions))

    def work(self, bench: Bench) -> None:
        """Some requests are done and some answers arrive, in order."""
        for _ in range(self.random.randrange(4) if not self.is_calm else len(self._requests)):
            if self._requests:
                sealed, data, partitions = self._requests.pop(0)
                self._answers.append((sealed, self._append(accept(data), sealed.lane.partition, partitions)))
        for _ in range(self.random.randrange(4) if not self.is_calm else len(self._answers)):
            if self._answers:
                bench.answer(*self._answers.pop(0))

    def cut(self, bench: Bench) -> None:
        """Whatever is on the way, there or back, is lost."""
        self._requests.clear()
        self._answers.clear()
        bench.batcher.lost()

    def grow(self) -> None:
        self.partitions.append(Partition(self._identities))
        self.layout = self.layout._replace(partitions=len(self.partitions))

    def _append(self, batch: Batch, partition: int, partitions: int) -> PenstockError | None:
        log = self.partitions[partition]
        if partitions != len(self.partitions) and not log.holds(batch) and not batch.asks:
            return StaleLayout("grown")
        if not self.is_calm and self.random.random() < 0.1 and not log.holds(batch):
            return self.random.choice([Overloaded("busy"), LogFailed("disk"), Closed("stopping")])
        try:
            log.append(batch)
        except PenstockError as error:
            return error
        return None


@pytest.mark.parametrize("seed", range(examples(150)))
def test_every_message_is_stored_once_and_in_order_or_known_to_have_failed(seed: int) -> None:
    generator = random.Random(seed)
    broker, bench = Broker(generator), Bench(batch_bytes=200, linger=0.01, buffer_bytes=1 << 30, timeout=1e9)
    published = 0
    failed: list[bytes] = []

    def turn(*, is_connected: bool = True) -> None:
        broker.send(bench.pump(after=0.02, is_connected=is_connected))
        broker.work(bench)
        for topic in bench.batcher.stale():
            bench.batcher.relay(topic, broker.layout)
        for _, value, _ in bench.batcher.take_failed():
            assert value is not None
            failed.append(value)

    for _ in range(150):
        for _ in range(generator.randrange(6)):
            key, value = b"%d" % generator.randrange(5), b"%d" % published
            if generator.random() < 0.1:
                fields: dict[str, Any] = {"headers": b"Msg-ID: %d\r\n" % published, "asks": True, "has_identity": True}
                bench.add(value, key=key, **fields)
            else:
                bench.add(value, key=key)
            published += 1
        turn(is_connected=generator.random() < 0.9)
        if generator.random() < 0.05:
            broker.cut(bench)
        if generator.random() < 0.01 and len(broker.partitions) < 4:
            broker.grow()
    broker.is_calm = True
    broker.cut(bench)
    mark = bench.batcher.mark()
    for _ in range(1000):
        turn()

    assert bench.batcher.is_done(mark)
    stored = [value for partition in broker.partitions for value in partition.values]
    assert Counter(stored) + Counter(failed) == Counter(b"%d" % number for number in range(published))
    assert bench.batcher.stored == len(stored)
    if len(broker.partitions) == 1:
        assert [int(value) for value in stored] == sorted(int(value) for value in stored)
