"""Where readers begin: each gets all from there on, once, whatever is on its way at that moment."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from penstock.broker.cursor import Cursor, Part
from penstock.broker.flow import Flow
from penstock.broker.group_state import Mode
from penstock.broker.member import Member
from penstock.broker.start import AtOffset, AtPositions, AtTime, Begin, Start, offset_of
from penstock.broker.subscription import Subscription
from penstock.errors import BadSubject, GroupConflict, UnknownGroup, UnknownTopic
from penstock.log.policy import Durability, Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of
from tests.support.ends import End, ends

VALUES: Final = [b"%d" % number for number in range(6)]


Positions = list[tuple[int, int, int]]


async def subscribe(life: Life, pattern: bytes, begin: Begin, sink: Recorder) -> tuple[Subscription, Positions]:
    """Where it begins must be asked at once: then it reads on."""
    subscription = await life.broker.subscriptions.subscribe_from(pattern, Member(b"1", sink), begin)
    return subscription, life.broker.subscriptions.positions(subscription)


async def publish_over_time(life: Life) -> int:
    """Six messages, a second apart, the fourth when the time is what is returned."""
    moments = []
    for value in VALUES:
        moments.append(life.clock.now_us())
        await life.stored(b"orders", value)
        life.clock.advance(SECOND)
    return moments[3]


def begin_of(name: str, life: Life, moment_us: int) -> Begin:
    place = (life.partition(b"orders").topic_id, 0)
    begins: dict[str, Begin] = {
        "earliest": Start.EARLIEST,
        "latest": Start.LATEST,
        "an offset": AtOffset(2),
        "an offset beyond": AtOffset(1 << 60),
        "a time": AtTime(moment_us),
        "a time between": AtTime(moment_us + 1),
        "long ago": AtTime(-1),
        "to come": AtTime(1 << 62),
        "positions": AtPositions({place: 5}),
        "positions beyond": AtPositions({place: 1 << 60}),
        "positions elsewhere": AtPositions({(place[0] + 1, 0): 5, (place[0], 1): 5}),
    }
    return begins[name]


PLACES: Final = {
    "earliest": 0,
    "latest": 6,
    "an offset": 2,
    "an offset beyond": 6,
    "a time": 3,
    "a time between": 4,
    "long ago": 0,
    "to come": 6,
    "positions": 5,
    "positions beyond": 6,
    "positions elsewhere": 0,
}


@pytest.mark.parametrize("name", list(PLACES))
@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
@in_loop
async def test_a_subscription_begins_where_it_is_asked_to(name: str, tail_bytes: int) -> None:
    async with Life(FaultyFiles(), tail_bytes_max=tail_bytes) as life:
        begin = begin_of(name, life, await publish_over_time(life))
        ann = Recorder()
        _, positions = await subscribe(life, b"orders", begin, ann)
        topic_id = life.partition(b"orders").topic_id
        assert positions == [(topic_id, 0, PLACES[name])]
        await life.settle()
        await life.stored(b"orders", b"new")
        assert ann.values == [*VALUES[PLACES[name] :], b"new"]


@pytest.mark.parametrize("name", list(PLACES))
@in_loop
async def test_a_new_group_begins_where_it_is_asked_to(name: str) -> None:
    async with Life(FaultyFiles()) as life:
        begin = begin_of(name, life, await publish_over_time(life))
        group = await life.do(life.broker.groups.create(b"g", b"orders", start=begin))
        assert group.lag() == 6 - PLACES[name]
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert ann.values == VALUES[PLACES[name] :]


@in_loop
async def test_what_retention_dropped_is_not_where_anyone_begins() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=8192)
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=policy))
        for _ in range(20):
            await life.stored(b"orders", bytes(2000))
        life.log(b"orders").upkeep.retain()
        partition = life.partition(b"orders")
        assert partition.start > 2
        place = (partition.topic_id, 0)
        for begin in (Start.EARLIEST, AtOffset(1), AtTime(0), AtPositions({place: 1})):
            assert await life.do(offset_of(begin, partition)) == partition.start


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ["earliest", "an offset", "a time", "positions", "not listed"])
@in_loop
async def test_what_is_on_its_way_when_a_reader_begins_before_it_is_not_lost(name: str, is_first: bool) -> None:
    """It is appended, and not committed yet: it lies behind where the reader begins, so it is for the reader."""
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders"))
        before = [] if is_first else [b"a", b"b"]
        for value in before:
            await life.stored(b"orders", value)
        partition = life.partition(b"orders")
        begins: dict[str, Begin] = {
            "earliest": Start.EARLIEST,
            "an offset": AtOffset(partition.served),
            "a time": AtTime(0),
            "positions": AtPositions({(partition.topic_id, 0): partition.served}),
            "not listed": AtPositions({}),
        }
        on_the_way = life.offer(run_of(b"orders", b"on the way"))
        ann = Recorder()
        _, [(_, _, offset)] = await subscribe(life, b"orders", begins[name], ann)
        await on_the_way
        await life.settle()
        await life.stored(b"orders", b"new")
        expected = [*before, b"on the way", b"new"]
        assert ann.values == expected[offset:]
        assert offset == (len(before) if name in ("an offset", "positions") else 0)


@in_loop
async def test_what_is_on_its_way_is_not_for_who_wants_only_what_comes() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders"))
        on_the_way = life.offer(run_of(b"orders", b"on the way"))
        ann = Recorder()
        _, positions = await subscribe(life, b"orders", Start.LATEST, ann)
        assert [offset for _, _, offset in positions] == [1]
        await on_the_way
        await life.stored(b"orders", b"new")
        assert ann.values == [b"new"]


@in_loop
async def test_who_resumes_again_and_again_while_messages_come_misses_and_doubles_nothing() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=200) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=2))
        begin: Begin = Start.EARLIEST
        got: dict[tuple[int, int], list[int]] = {}
        published = 0
        for step in range(40):
            waiting = []
            for _ in range(step % 4):
                run = run_of(b"orders.%d" % published, b"%d" % published)
                waiting.append(life.offer(run))
                published += 1
                if published % 3 == 0:
                    await asyncio.sleep(0)
            ann = Recorder()
            subscription, begins = await subscribe(life, b"orders.>", begin, ann)
            positions = {(topic_id, number): at for topic_id, number, at in begins}
            if step % 3:
                await life.settle()
            life.broker.subscriptions.unsubscribe(subscription, subscription.members[0])
            for message in ann.got:
                got.setdefault(message.place, []).append(message.offset)
                positions[message.place] = message.offset + 1
            begin = AtPositions(positions)
            await asyncio.gather(*waiting)
        ann = Recorder()
        await subscribe(life, b"orders.>", begin, ann)
        await life.settle()
        for message in ann.got:
            got.setdefault(message.place, []).append(message.offset)
        assert sum(map(len, got.values())) == published
        for offsets in got.values():
            assert offsets == list(range(len(offsets)))


@in_loop
async def test_a_topic_that_is_made_later_is_read_from_its_beginning() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, positions = await subscribe(life, b"*.eu", Start.LATEST, ann)
        assert positions == []
        await life.stored(b"orders.eu", b"a")
        await life.stored(b"bills.eu", b"b")
        assert ann.values == [b"a", b"b"]
        assert sorted(offset for _, _, offset in life.broker.subscriptions.positions(subscription)) == [1, 1]


@in_loop
async def test_of_several_partitions_each_has_its_own_position() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        for number in range(30):
            await life.stored(b"orders.%d" % number, b"%d" % number)
        topic_id = life.partition(b"orders").topic_id
        ends_at = [life.partition(b"orders", number).served for number in range(3)]
        wanted = AtPositions({(topic_id, 0): ends_at[0] - 1, (topic_id, 1): 0})
        ann = Recorder()
        _, positions = await subscribe(life, b"orders.>", wanted, ann)
        assert positions == [
            (topic_id, 0, ends_at[0] - 1),
            (topic_id, 1, 0),
            (topic_id, 2, 0),
        ]
        await life.settle()
        counts = [sum(message.place == (topic_id, number) for message in ann.got) for number in range(3)]
        assert counts == [1, ends_at[1], ends_at[2]]


@in_loop
async def test_after_a_crash_who_reads_from_the_beginning_also_gets_what_comes() -> None:
    """Behind the last message there are offsets that are not given out again: nobody may wait for them."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(durability=Durability.FLUSH)))
        await life.stored(b"orders", b"a", b"b")
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await subscribe(life, b"orders", Start.EARLIEST, ann)
        await life.settle()
        assert ann.values == [b"a", b"b"]
        await life.stored(b"orders", b"c")
        assert ann.values == [b"a", b"b", b"c"]


# Groups that are set by hand


@in_loop
async def test_a_reset_group_delivers_from_there_on_in_all_that_it_reads_or_in_some_of_it() -> None:
    async with Life(FaultyFiles()) as life:
        for subject in (b"orders.eu", b"bills.eu"):
            await life.stored(subject, *VALUES)
        ann = Recorder()
        await life.do(life.broker.groups.create(b"g", b"*.eu", start=Start.EARLIEST))
        group, _ = await life.join(b"g", b"*.eu", ann)
        await life.ack(group, *ann.take())
        assert group.lag() == 0
        generation = group.state.generation
        await life.do(life.broker.groups.reset(b"g", AtOffset(4), topic=b"orders"))
        await life.settle()
        assert [(message.subject, message.value) for message in ann.take()] == [
            (b"orders.eu", b"4"),
            (b"orders.eu", b"5"),
        ]
        assert group.state.generation > generation
        await life.do(life.broker.groups.reset(b"g", Start.EARLIEST))
        await life.settle()
        assert len(ann.take()) == 12
        await life.do(life.broker.groups.reset(b"g", Start.LATEST))
        assert group.lag() == 0


@in_loop
async def test_what_a_group_does_not_read_cannot_be_reset() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a")
        await life.stored(b"bills", b"a")
        await life.do(life.broker.groups.create(b"g", b"orders"))
        with pytest.raises(UnknownGroup):
            await life.do(life.broker.groups.reset(b"h", Start.EARLIEST))
        for topic, partition in ((b"nothing", None), (b"bills", None), (b"orders", 1), (None, 7)):
            with pytest.raises(UnknownTopic):
                await life.do(life.broker.groups.reset(b"g", Start.EARLIEST, topic=topic, partition=partition))


@ends
@in_loop
async def test_a_reset_counts_once_it_is_answered(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", *VALUES)
        await life.do(life.broker.groups.create(b"g", b"orders", start=Start.LATEST))
        await life.do(life.broker.groups.reset(b"g", AtOffset(4)))
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert ann.values == VALUES[4:]


@ends
@in_loop
async def test_a_commit_beyond_what_was_delivered_counts(end: End) -> None:
    """For who keeps its position elsewhere, and shows it here."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", *VALUES)
        group = await life.do(life.broker.groups.create(b"g", b"orders", Mode.PARTITIONED, start=Start.EARLIEST))
        place = (life.partition(b"orders").topic_id, 0)
        saved: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        group.commit(place, 4, group.state.generation, Outcome(saved.set_result))
        assert await saved is None
        assert (group.positions[place].inflight.floor, group.lag()) == (4, 2)
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann, mode=Mode.PARTITIONED)
        assert ann.values == VALUES[4:]


@in_loop
async def test_a_group_has_a_name_a_pattern_and_no_twin() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.groups.create(b"g", b"orders"))
        with pytest.raises(GroupConflict):
            await life.do(life.broker.groups.create(b"g", b"orders"))
        with pytest.raises(BadSubject):
            await life.do(life.broker.groups.create(b"h", b"a..b"))
        with pytest.raises(BadSubject):
            await life.do(life.broker.groups.create(b"\xff", b"orders"))


# Who asks, and goes away before it is done


async def cancelled(life: Life, work: object) -> None:
    """The client is gone: the connection cancels what it has asked for, when it has begun."""
    assert asyncio.iscoroutine(work)
    task = asyncio.create_task(work)
    for _ in range(2):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await life.settle()


@in_loop
async def test_a_topic_whose_change_was_asked_for_by_someone_who_is_gone_is_changed_as_a_whole_or_not_at_all() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a")
        await cancelled(life, life.broker.changes.alter(b"orders", partitions=3))
        [stored] = [topic for topic in life.store.topics if topic.name == "orders"]
        served = life.broker.topics.named(b"orders")
        assert (served.topic, len(served.partitions)) == (stored, stored.partitions)


@in_loop
async def test_a_topic_whose_deletion_was_asked_for_by_someone_who_is_gone_is_gone_or_there() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a")
        await cancelled(life, life.broker.changes.delete(b"orders"))
        await life.stored(b"orders", b"b")
        assert life.in_log(b"orders") in ([b"a", b"b"], [b"b"])


@in_loop
async def test_a_group_that_was_asked_for_by_someone_who_is_gone_is_there_or_not() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        await cancelled(life, life.broker.groups.create(b"g", b"orders"))
        there = {group.name for group in life.broker.groups}
    async with Life(disk) as life:
        assert {group.name for group in life.broker.groups} == there


@in_loop
async def test_a_topic_that_cannot_be_made_so_ends_nobody() -> None:
    async with Life(FaultyFiles()) as life:
        for partitions in (257, 1 << 40):
            with pytest.raises(ValueError, match="partitions"):
                await life.do(life.broker.changes.create(b"orders", partitions=partitions))
        await life.stored(b"orders", b"a")


@in_loop
async def test_room_that_comes_while_one_partition_is_read_is_for_the_others_too() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=2))
        for number in range(8):
            await life.stored(b"orders.%d" % number, b"%d" % number)
        ann = Recorder()
        member = Member(b"1", ann, Flow(rate=0, burst=1, buffer=100))
        member.credit = life.partition(b"orders").end
        read = Cursor.read

        async def read_while_credit_comes(cursor: Cursor, until: int | None = None) -> Part | None:
            found = await read(cursor, until)
            if cursor.partition.number == 1:
                member.credit = 100
                for subscription in life.broker.subscriptions.interest.match(b"orders.1"):
                    subscription.wake()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cursor, "read", read_while_credit_comes)
            await life.do(life.broker.subscriptions.subscribe_from(b"orders.>", member, Start.EARLIEST))
            await life.settle()
        assert sorted(ann.values) == [b"%d" % number for number in range(8)]
