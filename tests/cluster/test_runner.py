"""Nodes in an event loop, on a directory: leaders that are deposed, trimmed logs, and a store that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.cluster.record import Kind
from penstock.cluster.shared_log import SharedLog
from penstock.errors import Closed, CorruptRecord, ReadFailed
from penstock.object_store import ObjectStore
from tests.cluster.running import Running

pytest.importorskip("obstore")


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    (tmp_path / "shared").mkdir()
    store = ObjectStore.open(f"file://{tmp_path}/shared", ReadFailed)
    SharedLog.begin(store)
    return store


def test_a_leader_that_another_one_deposes_follows_it(store: ObjectStore) -> None:
    async def run() -> None:
        first, second = Running("first", store), Running("second", store)
        await first.lead()
        await first.publish(10)
        await second.lead()
        await second.publish(10)
        first.runner.append(Kind.ROUND, b"too late")
        await first.ledger.until(lambda: len(first.ledger.rounds) == 20)

        assert first.ledger.deposed_by == [2]
        assert first.ledger.rounds == second.ledger.rounds
        assert first.node.place.leader == "second"
        with pytest.raises(Closed, match="first does not lead the cluster: publish to 'second'"):
            first.runner.append(Kind.ROUND, b"again")
        await first.kill()
        await second.kill()

    asyncio.run(run())


def test_a_new_node_begins_at_the_checkpoint_of_a_trimmed_log(store: ObjectStore) -> None:
    async def run() -> None:
        leader = Running("leader", store)
        await leader.lead()
        for _ in range(2):
            await leader.publish(10)
            await leader.checkpoint()
        await leader.publish(3)
        names = store.names("log/")
        follower = Running("follower", store)
        await follower.ledger.until(lambda: len(follower.ledger.rounds) == 23)

        assert follower.ledger.rounds == leader.ledger.rounds
        assert len(names) == 1 + 2 + 3  # LEAD, the checkpoints, and what is behind them
        await leader.kill()
        await follower.kill()

    asyncio.run(run())


class Unreliable(ObjectStore):
    """A store that executes some creates without an answer, and fails some reads."""

    requests = 0

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        self._fail()

    def read_whole(self, name: str, bytes_max: int) -> bytes:
        self._fail()
        return super().read_whole(name, bytes_max)

    def _fail(self) -> None:
        self.requests += 1
        if self.requests % 3 == 0:
            raise ReadFailed(f"{self.url}: connection reset")


def test_a_store_that_fails_is_reported_until_it_works_again() -> None:
    import obstore.store

    async def run() -> None:
        store = Unreliable(obstore.store.MemoryStore(), "memory://", ReadFailed)
        node = Running("node", store)
        await node.lead()
        await node.publish(10)
        while node.health.problems:
            await asyncio.sleep(0.01)
        await node.kill()

        assert node.ledger.acknowledged == [b"node:%d" % number for number in range(10)]
        assert set(node.health.reports) == {"memory:: connection reset"}
        assert not node.health.problems

    asyncio.run(run())


def test_a_record_that_someone_damaged_ends_the_node_and_is_named(store: ObjectStore) -> None:
    async def run() -> None:
        node = Running("node", store)
        await node.lead()
        store.create(f"log/{node.node.place.position:020}", b"junk")
        node.runner.append(Kind.ROUND, b"x")
        with pytest.raises(ExceptionGroup) as raised:
            await node.task

        assert raised.group_contains(CorruptRecord, match="record 1 of the shared log is damaged: 4 bytes")
        assert not node.ledger.acknowledged

    asyncio.run(run())


def test_a_node_that_has_stopped_takes_nothing() -> None:
    import obstore.store

    async def run() -> None:
        node = Running("node", ObjectStore(obstore.store.MemoryStore(), "memory://", ReadFailed))
        await node.lead()
        await node.kill()

        with pytest.raises(Closed, match="node has stopped"):
            node.runner.append(Kind.ROUND, b"x")

    asyncio.run(run())
