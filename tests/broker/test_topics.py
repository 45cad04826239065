"""Topics of a broker: created, altered, deleted, and refused if they are damaged."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.broker.broker import Settings
from penstock.broker.intake import Stored
from penstock.errors import BadSubject, PenstockError, TooManyTopics, TopicConflict, UnknownTopic
from penstock.log.policy import Dedup, OnDamage, Policy
from penstock.testing import FaultyFiles, ManualClock
from tests.support.broker_logs import NUMBERS, stored_in
from tests.support.brokers import DATA, SECOND, Life, Recorder, in_loop, refuse

STATE_LOG = "topics/0/0/" + "0" * 20 + ".log"


def damage(disk: FaultyFiles, path: Path) -> None:
    content = bytearray(disk.content(path))
    content[len(content) // 2] ^= 1
    disk.set_content(path, content)


# ---- topics


@in_loop
async def test_topics_are_there_after_a_restart_with_their_partitions_policy_and_messages(tmp_path: Path) -> None:
    policy = Policy(segment_bytes=4096, dedup=Dedup.OFF)
    async with Life(tmp_path) as life:
        made = await life.do(life.broker.changes.create(b"orders.eu", partitions=3, policy=policy))
        await life.stored(b"orders.eu.new", *NUMBERS)
        before = stored_in(life, b"orders.eu")
    async with Life(tmp_path) as life:
        served = life.broker.topics.get(b"orders.eu")
        assert served is not None
        assert served.topic == made
        assert stored_in(life, b"orders.eu") == before


@in_loop
async def test_a_topic_is_altered_and_the_new_partitions_are_used() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.changes.create(b"orders"))
        await life.stored(b"orders", b"a")
        policy = Policy(ack_deadline_ms=1)
        altered = await life.do(life.broker.changes.alter(b"orders", partitions=3, policy=policy))
        assert (altered.partitions, altered.policy) == (3, policy)
        assert life.partition(b"orders").policy == policy
        for number in NUMBERS:
            await life.publish(b"orders." + number, number)
        assert all(stored_in(life, b"orders"))
        with pytest.raises(ValueError, match="fewer"):
            await life.do(life.broker.changes.alter(b"orders", partitions=2))
        with pytest.raises(UnknownTopic):
            await life.do(life.broker.changes.alter(b"bills", partitions=2))
    async with Life(disk) as life:
        assert sorted(value for values in stored_in(life, b"orders") for value in values) == sorted([b"a", *NUMBERS])


@in_loop
async def test_a_deleted_topic_is_gone_with_its_files() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        topic = await life.do(life.broker.changes.create(b"orders", partitions=2))
        await life.stored(b"orders", b"a")
        await life.do(life.broker.changes.delete(b"orders"))
        assert life.broker.topics.get(b"orders") is None
        assert str(topic.id) not in disk.sizes(DATA / "topics")
        with pytest.raises(UnknownTopic):
            await life.do(life.broker.changes.delete(b"orders"))
        await life.stored(b"orders", b"b")
        assert life.in_log(b"orders") == [b"b"]
    async with Life(disk) as life:
        assert life.in_log(b"orders") == [b"b"]


@in_loop
async def test_who_is_behind_in_a_topic_that_is_deleted_gets_nothing_more_and_goes_on_elsewhere() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        ann = Recorder()
        subscription, _ = life.subscribe(b">", ann)
        ann.is_open = False
        await life.stored(b"orders", b"a")
        await life.stored(b"bills", b"b")
        await life.do(life.broker.changes.delete(b"orders"))
        ann.is_open = True
        subscription.wake()
        await life.settle()
        await life.stored(b"orders", b"c")
        assert ann.values == [b"b", b"c"]


@in_loop
async def test_a_deletion_that_fails_leaves_the_topic_as_it_was() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        disk.fail("write", errno.ENOSPC, path_suffix=STATE_LOG)
        with pytest.raises(PenstockError):
            await life.do(life.broker.changes.delete(b"orders"))
        await life.stored(b"orders", b"b")
        assert life.in_log(b"orders") == [b"a", b"b"]
        assert [topic.name for topic in life.store.topics].count("orders") == 1
    async with Life(disk) as life:
        assert life.in_log(b"orders") == [b"a", b"b"]


@pytest.mark.parametrize(
    "name", [b"", b"a..b", b".a", b"a.", b"a b", b"a.*", b">", b"a.>", b"$a", b"$delayed", b"_a", b"\xff", b"x" * 1025]
)
@in_loop
async def test_a_topic_cannot_have_a_bad_or_reserved_name(name: bytes) -> None:
    async with Life(FaultyFiles()) as life:
        with pytest.raises(BadSubject):
            await life.do(life.broker.changes.create(name))


@in_loop
async def test_no_topic_lies_at_above_or_below_another() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"a.b"))
        for name in (b"a", b"a.b", b"a.b.c"):
            with pytest.raises(TopicConflict):
                await life.do(life.broker.changes.create(name))
        await life.do(life.broker.changes.create(b"a.bc"))
        await life.do(life.broker.changes.create(b"a.c"))


@in_loop
async def test_no_topic_lies_above_or_below_another_that_is_made_at_the_same_time() -> None:
    async with Life(FaultyFiles()) as life:
        results = await asyncio.gather(
            life.broker.changes.create(b"a.b"), life.broker.changes.create(b"a"), return_exceptions=True
        )
        assert [isinstance(result, TopicConflict) for result in results].count(True) == 1


@in_loop
async def test_a_subject_whose_first_token_lies_above_a_topic_has_no_topic() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders.eu"))
        error = (await life.publish(b"orders.us", b"a")).error
        assert isinstance(error, TopicConflict)
        await life.stored(b"orders.eu.new", b"a")


@in_loop
async def test_the_brokers_own_topics_cannot_be_written_altered_or_deleted() -> None:
    async with Life(FaultyFiles()) as life:
        for subject in (b"$delayed", b"$delayed.x", b"$new", b"$JS.API.INFO"):
            assert (await life.publish(subject, b"a")).stored() == [Stored(b"_", -1, -1, False)]
        assert life.log(b"$delayed").end == 0
        with pytest.raises(PenstockError):
            await life.do(life.broker.changes.alter(b"$delayed", partitions=2))
        with pytest.raises(PenstockError):
            await life.do(life.broker.changes.delete(b"$delayed"))
        assert [topic.name for topic in life.store.topics] == ["$delayed"]


# ---- topics that make themselves


@in_loop
async def test_a_subject_without_a_topic_makes_one_named_by_its_first_token() -> None:
    policy = Policy(segment_bytes=5000)
    async with Life(FaultyFiles(), settings=Settings(partitions=2, policy=policy)) as life:
        await life.stored(b"orders.eu.new", b"a")
        served = life.broker.topics.get(b"orders")
        assert served is not None
        assert (served.topic.partitions, served.topic.policy) == (2, policy)


@in_loop
async def test_many_who_need_the_same_new_topic_at_once_get_the_same() -> None:
    async with Life(FaultyFiles()) as life:
        receipts = await asyncio.gather(*(life.publish(b"orders.x", number) for number in NUMBERS))
        assert all(receipt.error is None for receipt in receipts)
        await life.settle()
        assert sorted(life.in_log(b"orders")) == sorted(NUMBERS)
        assert [topic.name for topic in life.store.topics] == ["$delayed", "orders"]


@in_loop
async def test_no_topic_makes_itself_if_that_is_turned_off() -> None:
    async with Life(FaultyFiles(), settings=Settings(auto_create=False)) as life:
        error = (await life.publish(b"orders", b"a")).error
        assert isinstance(error, UnknownTopic)
        await life.do(life.broker.changes.create(b"orders"))
        await life.stored(b"orders", b"a")


@in_loop
async def test_no_more_than_so_many_topics_make_themselves() -> None:
    async with Life(FaultyFiles(), settings=Settings(topics_max=4)) as life:
        receipts = await asyncio.gather(*(life.publish(b"t" + number, b"a") for number in NUMBERS))
        refused = sum(isinstance(receipt.error, TooManyTopics) for receipt in receipts)
        made = [topic.name for topic in life.store.topics if not topic.name.startswith("$")]
        assert len(made) == len(NUMBERS) - refused
        assert len(made) in (3, 4)
        await life.do(life.broker.changes.create(b"by.name"))
        await life.stored(b"by.name", b"a")


@in_loop
async def test_who_publishes_to_a_topic_that_cannot_be_made_is_told_and_the_next_one_may_make_it() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        disk.fail("write", errno.ENOSPC, path_suffix=STATE_LOG)
        error = (await life.publish(b"orders", b"a")).error
        assert isinstance(error, PenstockError)
        await life.stored(b"orders", b"b")
        assert life.in_log(b"orders") == [b"b"]


# ---- damage


@in_loop
async def test_a_topic_whose_log_cannot_be_opened_is_refused_with_the_reason_and_others_are_served() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a", b"b")
        await life.stored(b"bills", b"c")
        refused = life.log(b"orders").segments[0].path
        await life.do(life.broker.groups.create(b"g", b">"))
    refuse(disk, refused)
    async with Life(disk) as life:
        assert life.broker.refused == ["orders"]
        ann, bob = Recorder(), Recorder()
        life.subscribe(b">", ann)
        await life.join(b"g", b">", bob)
        for headers in (b"", b"Colour: red\r\n"):
            error = (await life.publish(b"orders.eu", b"x", headers=headers)).error
            assert isinstance(error, PenstockError)
            assert "notes.txt" in str(error)
        await life.stored(b"bills", b"d")
        assert ann.values == bob.values == [b"d"]
        assert life.in_log(b"bills") == [b"c", b"d"]


@in_loop
async def test_a_refused_topic_can_be_deleted_and_made_again() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.groups.create(b"g", b">"))
        await life.stored(b"orders", b"a")
        refused = life.log(b"orders").segments[0].path
    refuse(disk, refused)
    async with Life(disk) as life:
        await life.do(life.broker.changes.delete(b"orders"))
        await life.stored(b"orders", b"b")
        ann = Recorder()
        await life.join(b"g", b">", ann)
        assert ann.values == [b"b"]


@in_loop
async def test_the_broker_serves_though_a_delayed_message_is_damaged() -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        await life.stored(b"orders", b"a")
        await life.stored(b"orders", b"b", headers=b"Delay: 1h\r\n")
        damaged = life.log(b"$delayed").segments[0].path
    damage(disk, damaged)
    async with Life(disk, clock=clock) as life:
        assert [(topic, number) for topic, number, _ in life.broker.damage()] == [("$delayed", 0)]
        await life.stored(b"orders", b"c")
        await life.stored(b"orders", b"d", headers=b"Delay: 1h\r\n")
        await life.advance(3600 * SECOND)
        assert life.in_log(b"orders") == [b"a", b"c", b"d"]
        assert "delayed messages, damaged" in life.broker.store.health.problems


@in_loop
async def test_a_topic_with_a_damaged_message_serves_the_others_and_takes_more() -> None:
    """The damaged one is named, and readers stop there with an error or skip it, as the topic says."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.groups.create(b"g", b"orders"))
        for value in (b"a", b"b", b"c"):
            await life.stored(b"orders", value, headers=b"Msg-ID: %s\r\n" % value)
        damaged = life.log(b"orders").segments[0].path
    damage(disk, damaged)
    async with Life(disk) as life:
        [(topic, number, known)] = life.broker.damage()
        assert (topic, number, known.path, known.first, known.last) == ("orders", 0, damaged, 1, 2)
        # Also one that has to be compared with those that are stored.
        await life.stored(b"orders", b"d", headers=b"Msg-ID: d\r\n")
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        assert ann.values == [b"a"]
        [failure] = {str(error) for error in ann.errors}
        assert f"{damaged}: damaged at byte {known.position}, offsets 1 to 2" in failure
        assert "penstock log repair" in failure
        assert [position.stopped is not None for position in group.positions.values()] == [True]

        served = life.broker.topics.get(b"orders")
        assert served is not None
        topic_ = served.topic
        policy = replace(topic_.policy, on_damage=OnDamage.SKIP)
        await life.do(life.broker.store.alter_topic_async(replace(topic_, policy=policy)))
        group.wake()
        await life.settle()
        assert ann.values == [b"a", b"c", b"d"]
        assert life.log(b"orders").reader.skipped_offsets == 1


@in_loop
async def test_damage_stops_a_group_in_that_partition_only() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.do(life.broker.groups.create(b"g", b">"))
        for topic in (b"bills", b"orders"):
            for value in (b"a", b"b", b"c"):
                await life.stored(topic, topic + b" " + value)
        damaged = life.log(b"orders").segments[0].path
    damage(disk, damaged)
    async with Life(disk) as life:
        ann, bob = Recorder(), Recorder()
        group, member = await life.join(b"g", b">", ann)
        assert [str(damaged) in str(error) for error in ann.errors] == [True], "it is told of it once"
        life.broker.groups.leave(group, member)
        await life.join(b"g", b">", bob)
        await life.stored(b"bills", b"bills d")
        assert b"bills d" in bob.values
        assert b"orders c" not in bob.values
        assert bob.errors == []
