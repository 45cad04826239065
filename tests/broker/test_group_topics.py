"""Topics that appear, disappear or lose messages while a group reads them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from penstock.broker.broker import Settings
from penstock.broker.group_state import Mode
from penstock.broker.start import Start
from penstock.errors import PenstockError
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop
from tests.support.ends import DEADLINE, End, attempts, ends

LARGE = bytes(3000)


@in_loop
async def test_a_new_topic_that_matches_is_read_from_its_beginning() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a")
        await life.do(life.broker.changes.create(b"bills", partitions=3))
        await life.stored(b"bills", b"b")
        await life.do(life.broker.changes.alter(b"orders", partitions=2))
        await life.stored(b"orders", b"c")
        await life.stored(b"orders", b"d")
        assert sorted(ann.values) == [b"a", b"b", b"c", b"d"]


@in_loop
async def test_a_group_without_a_name_reads_a_topic_that_is_made_later() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(None, b"orders", ann)
        await life.stored(b"orders", b"a")
        assert ann.values == [b"a"]


@in_loop
async def test_a_group_does_not_read_what_the_broker_keeps_for_itself() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a", headers=b"Delay: 5s\r\n")
        assert not ann.got
        await life.advance(5 * SECOND)
        assert ann.values == [b"a"]


@ends
@in_loop
async def test_a_topic_that_matches_and_was_made_while_the_group_was_away_is_read_after_a_restart(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.groups.create(b"g", b">"))
        await life.stored(b"orders", b"a")
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        assert ann.values == [b"a"]


@in_loop
async def test_a_deleted_topic_is_forgotten_by_its_groups_and_made_again_is_another_one() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b">", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.stored(b"bills", b"c")
        await life.ack(group, ann.got[0])
        old = life.partition(b"orders")
        await life.do(life.broker.changes.delete(b"orders"))
        assert life.store.state.get("position", group.writer.key(old)) is None
        await life.stored(b"orders", b"new")
        ann.take()
        await life.advance(DEADLINE)
        assert sorted(attempts(ann)) == [(b"c", 2), (b"new", 2)]
        await life.settle()
        assert life.store.state.get("position", group.writer.key(old)) is None
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b">", ann)
        assert sorted(ann.values) == [b"c", b"new"]


@in_loop
async def test_an_acknowledgement_on_its_way_when_its_topic_is_deleted_is_answered() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        answers: list[PenstockError | None] = []
        first, second = ann.got
        assert group.ack(first.place, first.offset, Outcome(answers.append))
        await asyncio.sleep(0)  # its write begins
        assert group.ack(second.place, second.offset, Outcome(answers.append))
        await life.do(life.broker.changes.delete(b"orders"))
        await life.settle()
        assert len(answers) == 2


@in_loop
async def test_an_acknowledgement_just_before_its_topic_is_deleted_is_answered() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, ann.got[0].offset, Outcome(answers.append))
        await life.do(life.broker.changes.delete(b"orders"))
        await life.settle()
        assert len(answers) == 1


@in_loop
async def test_what_retention_drops_before_it_is_acknowledged_is_counted_as_lost() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        await life.ack(group, ann.got[1])
        life.store.upkeep()
        kept = life.log(b"orders").start
        assert kept > 2
        group.wake()
        await life.settle()
        assert group.lost == kept - 1
        await life.ack(group, *(message for message in ann.got if message.offset >= kept))
        assert group.lag() == 0
        await life.stored(b"orders", b"next")
        assert ann.values[-1] == b"next"


@ends
@in_loop
async def test_retention_waits_for_the_group_that_the_policy_names(end: End) -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1, retain_for="archive")
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        for number in range(6):
            await life.stored(b"orders", b"%d" % number + LARGE)
        life.store.upkeep()
        assert life.log(b"orders").start == 0, "the group does not exist yet"
        group = await life.do(life.broker.groups.create(b"archive", b"orders", Mode.PARTITIONED, start=Start.EARLIEST))
        life.store.upkeep()
        assert life.log(b"orders").start == 0
        (place,) = group.positions
        committed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        group.commit(place, 3, group.state.generation, Outcome(committed.set_result))
        await life.settle()
        assert committed.done()
        life.store.upkeep()
        assert life.log(b"orders").start == 3
        disk = await end(life)
    async with Life(disk, settings=Settings(policy=policy)) as life:
        life.store.upkeep()
        assert life.log(b"orders").start == 3
        await life.do(life.broker.groups.delete(b"archive"))
        life.store.upkeep()
        assert life.log(b"orders").start == 3
        topic = life.broker.topics.named(b"orders").topic
        await life.do(life.broker.changes.alter(b"orders", policy=replace(topic.policy, retain_for=None)))
        life.store.upkeep()
        assert life.log(b"orders").start == 5


@in_loop
async def test_what_retention_drops_before_it_is_delivered_is_counted_as_lost() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        group = await life.do(life.broker.groups.create(b"g", b"orders"))
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        life.store.upkeep()
        kept = life.log(b"orders").start
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert [message.offset for message in ann.got] == list(range(kept, 4))
        assert group.lost == kept


@ends
@in_loop
async def test_a_group_remembers_how_many_messages_it_lost(end: End) -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        group = await life.do(life.broker.groups.create(b"g", b"orders"))
        for number in range(4):
            await life.stored(b"orders", b"%d" % number + LARGE)
        life.store.upkeep()
        group.dispatcher.keep_up()
        await life.settle()
        lost = group.lost
        assert lost == life.log(b"orders").start
        disk = await end(life)
    async with Life(disk) as life:
        assert life.broker.groups[b"g"].lost == lost
