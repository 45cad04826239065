"""A broker with topics that are copies, in this process: who may write to them, and what a power cut takes."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.awaiting import settled
from penstock.broker.broker import Settings
from penstock.broker.group_state import Mode
from penstock.errors import (
    AppendFailed,
    BadSubject,
    NoBroker,
    OriginConflict,
    PenstockError,
    ReadOnlyTopic,
    TimedOut,
    TopicConflict,
)
from penstock.log.policy import Durability, Policy
from penstock.model.batch import Batch, accept, encode
from penstock.model.run import open_batch
from penstock.outcome import Outcome
from penstock.pipe.backoff import Backoff
from penstock.pipe.batches import BatchSplitter, check_stored
from penstock.pipe.connector import Caller, Piece, PushSource, Remote, RemotePartition, RemoteTopic
from penstock.pipe.down import Down, OnGap
from penstock.pipe.gaps import Gaps
from penstock.pipe.http import _RecordParent
from penstock.pipe.parent import Parent
from penstock.pipe.topology import Role, Topology
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, Recorder, in_loop

RECORD: dict[str, Any] = {"offset": 0, "msgKey": "AAPL", "eventType": "MESSAGE", "data": "1"}

FLUSH = Settings(policy=Policy(durability=Durability.FLUSH))


def at(offset: int, *values: bytes) -> Batch:
    batch = encode(values, timestamp=1)
    batch.stamp(offset, append_time=1, log=3)
    return batch


async def copy(life: Life, name: bytes, *batches: Batch, partitions: int = 1) -> None:
    """A topic that is piped here, with these in its first partition."""
    served = await life.do(life.broker.changes.pipe(name, "there/1", partitions))
    for batch in batches:
        served.partitions[0].append_at(batch)
    await life.settle()


# ---- a topic that is a copy


@in_loop
async def test_a_copy_is_made_with_the_partitions_of_its_origin_and_gets_those_that_are_added() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await copy(life, b"t", partitions=2)
        await copy(life, b"t", partitions=3)
        await copy(life, b"t", partitions=2)
    async with Life(disk) as life:
        topic = life.broker.topics.named(b"t")
        assert (len(topic.partitions), topic.topic.origin) == (3, "there/1")
        assert all(partition.log.terms.is_piped for partition in topic.partitions)


@in_loop
async def test_an_empty_topic_becomes_a_copy_and_one_with_messages_does_not() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"empty"))
        await copy(life, b"empty", at(3, b"a"), partitions=2)
        assert life.in_log(b"empty") == [b"a"]
        await life.stored(b"used", b"mine")
        with pytest.raises(OriginConflict, match="messages of its own"):
            await copy(life, b"used")
        await life.stored(b"used", b"still mine")
        with pytest.raises(OriginConflict, match="is a copy of there/1, and the parent's is elsewhere/9"):
            await life.do(life.broker.changes.pipe(b"empty", "elsewhere/9", 2))
        await life.do(life.broker.changes.create(b"wide", partitions=4))
        with pytest.raises(OriginConflict, match="4 partitions here, 1 at its origin"):
            await copy(life, b"wide")
        with pytest.raises(TopicConflict):
            await copy(life, b"used.below")


@in_loop
async def test_a_publish_while_a_topic_becomes_a_copy_is_refused_or_the_copy_is() -> None:
    async with Life(FaultyFiles()) as life:
        outcomes = set()
        for turns in range(20):
            name = b"t%d" % turns
            await life.do(life.broker.changes.create(name))
            piping = asyncio.ensure_future(life.broker.changes.pipe(name, "there/1", 1))
            for _ in range(turns):
                await asyncio.sleep(0)
            receipt = await life.publish(name, b"mine")
            await asyncio.wait([piping])
            is_copy = piping.exception() is None
            assert isinstance(receipt.error, ReadOnlyTopic) == is_copy
            assert life.in_log(name) == ([] if is_copy else [b"mine"])
            outcomes.add(is_copy)
        assert True in outcomes


@in_loop
async def test_nothing_from_within_is_appended_to_a_copy() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.open_transactions())
        assert life.broker.transactions is not None
        await life.do(life.broker.changes.create(b"t"))
        topic = life.broker.topics.named(b"t").topic
        outcome = Outcome()
        staged = life.broker.transactions.stage(
            (topic.id, 0, 1), b"job", 0, accept(encode([b"staged"], timestamp=1).data), outcome
        )
        await settled(outcome)
        await life.stored(b"t", b"late", headers=b"Delay: 5s\r\n")
        await copy(life, b"t", at(0, b"copied"))

        assert life.broker.transactions is not None
        with pytest.raises(ReadOnlyTopic):
            await life.do(life.broker.transactions.commit(b"job", 0, [staged]))
        with pytest.raises(ReadOnlyTopic):
            life.broker.intake.append(topic.id, 0, 1, accept(encode([b"x"], timestamp=1).data), outcome)
        with pytest.raises(ReadOnlyTopic):
            life.broker.transactions.stage(
                (topic.id, 0, 1), b"job", 1, accept(encode([b"x"], timestamp=1).data), outcome
            )
        receipt = await life.publish(b"t", b"x", headers=b"Msg-ID: 1\r\n")
        assert isinstance(receipt.error, ReadOnlyTopic)
        await life.advance(10 * SECOND)
        assert life.in_log(b"t") == [b"copied"]
        # And it can still be written to by nobody but the pipe.
        await copy(life, b"t", at(1, b"more"))
        assert life.in_log(b"t") == [b"copied", b"more"]


@in_loop
async def test_a_copy_with_a_gap_is_delivered_over_it() -> None:
    async with Life(FaultyFiles()) as life:
        await copy(life, b"t")
        live, grouped = Recorder(), Recorder()
        life.subscribe(b"t", live)
        group, _ = await life.join(b"g", b"t", grouped)
        await copy(life, b"t", at(5, b"a"), at(1 << 20, b"b"))
        assert live.values == grouped.values == [b"a", b"b"]
        await life.ack(group, *grouped.got)
        assert group.lag() == 0


# ---- what the power takes comes again


@in_loop
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_group_waits_for_what_the_power_took_from_a_copy(mode: Mode) -> None:
    """Under `flush` the end of a copy goes back, and groups were further on: nothing is gone, and nothing doubled."""
    ends = [await _lose_power(mode, seed) for seed in range(12)]
    assert min(ends) < 3, "the power took nothing: the test shows nothing"


async def _lose_power(mode: Mode, seed: int) -> int:
    """Where the log ended after it."""
    life = Life(FaultyFiles(seed=seed), settings=FLUSH)
    async with life:
        await copy(life, b"t", at(0, b"a"))
        life.log(b"t").flush()
        await life.do(life.broker.groups.create(b"g", b"t", mode))
        first = Recorder()
        group, _ = await life.join(b"g", b"t", first, mode=mode)
        await copy(life, b"t", at(1, b"b"), at(2, b"c"), at(3, b"d"))
        assert first.values == [b"b", b"c", b"d"]
        if mode is Mode.SHARED:
            await life.ack(group, first.got[0], first.got[2])
        else:
            saved: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
            group.commit((life.partition(b"t").topic_id, 0), 3, group.state.generation, Outcome(saved.set_result))
            await life.do(_wait(saved))
        disk = await life.power_cut()
    async with Life(disk, settings=FLUSH) as life:
        end = life.log(b"t").end
        again = Recorder()
        await life.join(b"g", b"t", again, mode=mode)
        await life.advance(60 * SECOND)
        assert not [got for got in again.got if got.offset >= end], f"seed {seed}"
        await copy(life, b"t", *[at(offset, value) for offset, value in enumerate((b"a", b"b", b"c", b"d"))])
        await life.advance(60 * SECOND)
        assert set(again.values) == ({b"c"} if mode is Mode.SHARED else {b"d"}), f"seed {seed}"
    return end


async def _wait(saved: asyncio.Future[PenstockError | None]) -> None:
    assert await saved is None


# ---- gaps


@in_loop
async def test_gaps_are_remembered_and_those_of_deleted_topics_are_not() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        gaps = Gaps(life.store, life.clock)
        await life.do(gaps.record((5, 0), 10, 20, direction="down", passes=True, begins=False, parent="p"))
        await life.do(gaps.record((5, 0), 20, 30, direction="down", passes=True, begins=False, parent="p"))
        await life.do(gaps.record((5, 1), 0, 7, direction="down", passes=True, begins=True, parent="p"))
        await life.do(gaps.record((6, 0), 3, 9, direction="down", passes=False, begins=False, parent="p"))
        await life.do(gaps.record((7, 0), 3, 9, direction="up", passes=True, begins=False, parent="p"))
    async with Life(disk) as life:
        gaps = Gaps(life.store, life.clock)
        assert [gaps.behind((5, 0), offset) for offset in (9, 10, 15, 29, 30)] == [9, 30, 30, 30, 30]
        assert [gaps.next((5, 0), offset) for offset in (0, 10, 11, 21)] == [10, 10, 20, None]
        assert gaps.behind((6, 0), 5) == 5, "it waits there"
        assert gaps.behind((7, 0), 5) == 5, "what is missing above is here"
        assert [gaps.count(topic) for topic in (5, 6, 7)] == [2, 1, 1]
        await life.do(gaps.heal((5, 0), 10))
        await life.do(gaps.heal((6, 0), 3))
        assert [gaps.count(topic) for topic in (5, 6, 7)] == [2, 0, 1]
        await life.do(gaps.forget_others({7}))
    async with Life(disk) as life:
        assert [Gaps(life.store, life.clock).count(topic) for topic in (5, 6, 7)] == [0, 0, 1]


# ---- following


class Script:
    """A parent whose answers are written down: pieces of batches, and what happens before each."""

    def __init__(self, life: Life, *batches: Batch) -> None:
        self._life = life
        self._batches = [bytes(batch.data) for batch in batches]
        self.asked: list[int] = []
        # The disk is full before this batch arrives.
        self.full_before: int | None = None

    async def stream(self, _: RemoteTopic, __: int, offset: int) -> AsyncGenerator[Piece, None]:
        self.asked.append(offset)
        for data in self._batches:
            batch = Batch(bytearray(data))
            if batch.base_offset == self.full_before:
                # What came before it is refused, and taken back.
                await self._life.settle()
            if batch.end > offset:
                yield Piece([batch], 4)

    async def topics(self) -> Remote:
        raise NotImplementedError

    async def pushed(self, source: PushSource) -> int:
        raise NotImplementedError

    async def push(self, source: PushSource, after: int, batches: Sequence[Batch]) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Following:
    def __init__(self, life: Life, on_gap: OnGap = OnGap.STOP) -> None:
        self.store: Store = life.store
        self.gaps = Gaps(life.store, life.clock)
        self.on_gap = on_gap

    def note_reply(self) -> None:
        pass


TOPIC = RemoteTopic("t", "there/1", (RemotePartition(0, 4),))


@in_loop
async def test_what_comes_behind_a_batch_that_the_disk_refused_is_not_stored_before_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await copy(life, b"t")
        down = Down(life.partition(b"t"), Following(life))
        parent = Script(life, *[at(offset, b"%d" % offset) for offset in range(4)])
        parent.full_before = 2
        disk.fail("write", errno.ENOSPC, path_suffix=".log")
        await life.do(down.step(parent, TOPIC, "p"))
        assert life.in_log(b"t") == [], "the first two were refused, so the others are not taken"
        disk.heal()
        with pytest.raises(AppendFailed):
            await life.do(down.step(parent, TOPIC, "p"))
        await life.do(down.step(parent, TOPIC, "p"))
        await life.settle()
        assert life.in_log(b"t") == [b"0", b"1", b"2", b"3"]
        assert parent.asked == [0, 0]
        assert (down.position, down.lag()) == (4, 0)


@in_loop
async def test_a_batch_that_cannot_be_opened_is_not_stored() -> None:
    async with Life(FaultyFiles()) as life:
        await copy(life, b"t")
        down = Down(life.partition(b"t"), Following(life))
        wrong = encode([b"x"], timestamp=1, subjects=[b"of.another.topic"])
        wrong.stamp(1, append_time=1)
        with pytest.raises(BadSubject):
            await life.do(down.step(Script(life, at(0, b"a"), wrong), TOPIC, "p"))
        await life.settle()
        assert life.in_log(b"t") == [b"a"]


# ---- batches as bytes


def test_batches_are_taken_from_bytes_however_they_are_cut() -> None:
    data = b"".join(bytes(at(offset, b"x" * offset).data) for offset in range(1, 6))
    for size in (1, 7, 96, 100, len(data)):
        reader = BatchSplitter()
        found = [batch for begin in range(0, len(data), size) for batch in reader.feed(data[begin : begin + size])]
        assert [batch.base_offset for batch in found] == [1, 2, 3, 4, 5]
        assert reader.is_empty
        for batch in found:
            check_stored(batch, b"t")
    assert not BatchSplitter().feed(data[:95])


@pytest.mark.parametrize("place", [0, 4, 8, 60, 66, 96, 110])
def test_a_batch_with_a_wrong_bit_is_not_stored(place: int) -> None:
    data = bytearray(at(1, b"value").data)
    data[place] ^= 4
    with pytest.raises(PenstockError):
        _check_all(bytes(data))


def _check_all(data: bytes) -> None:
    for batch in BatchSplitter().feed(data) or [Batch(data)]:
        check_stored(batch, b"t")


# ---- how the parent is


def test_a_parent_that_fails_is_asked_less_and_less_often_and_at_once_when_it_is_back() -> None:
    """TP-16"""
    backoff = Backoff()
    for longest_s in (0.1, 0.3, 0.9, 2.7, 5.0, 5.0):
        assert 0.75 * longest_s <= backoff.failed() <= longest_s * 1.000001
    backoff.reset()
    assert backoff.failed() <= 0.1


@in_loop
async def test_a_parent_that_has_only_records_is_polled_less_often_while_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TP-16"""
    slept: list[float] = []
    answers = [[], [], [], [], [RECORD], [], [], [RECORD, RECORD | {"offset": 1}], []]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def poll(_topic: str, _offset: int, _limit: int) -> list[Any]:
        return answers[len(slept) - 1]

    monkeypatch.setattr(asyncio, "sleep", sleep)
    caller = Caller(
        node="child", topics=("prices",), poll_ms=1000, batch_size=2, clock=ManualClock(), authorization=None
    )
    parent = _RecordParent(caller)
    for _ in answers:
        await parent.next(poll, "prices", 0)
    assert slept == [0, 1, 2, 4, 5, 0.1, 0.2, 0.4, 0]


@in_loop
async def test_records_that_name_another_topic_are_not_taken_for_those_of_this_one() -> None:
    """The Provider's cloud-test-server.py answers every poll with the records of all its topics."""
    names = ["prices", "places", "prices", *["places"] * 7, "prices", "places"]
    everything = [{"msgKey": "k", "topic": name, "data": str(at)} for at, name in enumerate(names)]

    async def poll(_topic: str, offset: int, limit: int) -> list[Any]:
        return everything[offset : offset + limit]

    parent = _RecordParent(Caller(node="child", topics=("prices",), poll_ms=10, batch_size=3, clock=ManualClock()))
    found: list[tuple[int, bytes]] = []
    end = 0
    while len(found) < 3:
        for batch in (await parent.next(poll, "prices", end)).batches:
            run = open_batch(batch, b"prices")
            found += zip(run.all_offsets(), run.values, strict=True)
            end = batch.end
    assert found == [(0, b"0"), (2, b"2"), (10, b"10")]
    assert (await parent.next(poll, "prices", end)).batches == []


@in_loop
async def test_a_parent_that_says_nothing_for_a_minute_is_told_and_so_is_one_that_never_did() -> None:
    async with Life(FaultyFiles()) as life:
        node = cast(Any, SimpleNamespace(broker=life.broker, node="child"))
        parent = Parent(node, Topology(node_id="child", role=Role.L2, parents=("http://root:8222",)))
        assert parent.health() == ("UNHEALTHY", "connecting to http://root:8222")
        parent.replied_us = life.clock.monotonic_us()
        # One request that took too long is no reason yet.
        parent.error = TimedOut("no answer within 10 s")
        await life.advance(60 * SECOND)
        assert parent.health() == ("HEALTHY", "")
        await life.advance(1)
        assert parent.health() == ("DEGRADED", "http://root:8222 has not answered for 60 s")
        parent.error = NoBroker("nobody answers")
        assert parent.health() == ("UNHEALTHY", "nobody answers")
