"""Topics, routing, and who gets what is published: live, late, and after whatever went wrong."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.broker.broker import Settings
from penstock.broker.flow import Flow, Overflow
from penstock.broker.intake import Stored
from penstock.errors import BadRequest, BadSubject, PenstockError, TooManyTopics, TopicConflict, UnknownTopic
from penstock.log.policy import Dedup, OnDamage, Policy
from penstock.model.headers import hash_key
from penstock.model.run import Run
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import DATA, SECOND, Life, Recorder, in_loop, refuse, run_of

NUMBERS = [b"%d" % number for number in range(100)]
STATE_LOG = "topics/0/0/" + "0" * 20 + ".log"


def stored_in(life: Life, topic: bytes) -> list[list[bytes]]:
    served = life.broker.topics.get(topic)
    assert served is not None
    return [life.in_log(topic, number) for number in range(len(served.partitions))]


def damage(disk: FaultyFiles, path: Path) -> None:
    content = bytearray(disk.content(path))
    content[len(content) // 2] ^= 1
    disk.set_content(path, content)


# Topics


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


# Topics that make themselves


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


# Damage


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


# Routing


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"foobar", 0x85944171F73967E8),
    ],
)
def test_a_key_is_hashed_by_fnv_1a_with_64_bits(key: bytes, number: int) -> None:
    """RT-04"""
    assert hash_key(key) == number
    slow = 14695981039346656037
    for byte in key:
        slow = ((slow ^ byte) * 1099511628211) % 2**64
    assert slow == number


@pytest.mark.parametrize("by_header", [True, False], ids=["by header", "by run"])
@in_loop
async def test_a_key_decides_the_partition(by_header: bool) -> None:
    """RT-02"""
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=7))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        for key in NUMBERS:
            if by_header:
                await life.stored(b"orders", key, headers=b"Penstock-Key: " + key + b"\r\n")
            else:
                assert (await life.publish(b"orders", key, key=key)).error is None
        await life.settle()
        for message in ann.got:
            assert (message.key, message.place[1]) == (message.value, hash_key(message.value) % 7)
        assert len(ann.got) == 100


@in_loop
async def test_a_publisher_may_choose_the_partition() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        for number, headers in [(2, b""), (0, b"Penstock-Key: k\r\n"), (2, b"Msg-ID: 1\r\n")]:
            run = run_of(b"orders", b"x", b"y", headers=headers)
            run.partition = number
            assert (await life.publish_run(run)).error is None
        await life.settle()
        assert [message.place[1] for message in ann.got] == [2, 2, 0, 0, 2]
        for number, headers, reason in [(3, b"", "no partition 3"), (0, b"Delay: 5s\r\n", "cannot choose")]:
            run = run_of(b"orders", b"x", headers=headers)
            run.partition = number
            error = (await life.publish_run(run)).error
            assert isinstance(error, BadRequest)
            assert reason in str(error)


@in_loop
async def test_without_a_key_the_subject_below_the_topics_name_decides() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=7))
        ann = Recorder()
        life.subscribe(b"orders.>", ann)
        for number in NUMBERS:
            await life.publish(b"orders." + number, number, number)
        await life.settle()
        for message in ann.got:
            assert message.place[1] == hash_key(b"orders." + message.value) % 7
        assert len(ann.got) == 200


@in_loop
async def test_at_the_topics_name_runs_go_to_each_partition_in_turn() -> None:
    """RT-03"""
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        for number in range(6):
            await life.stored(b"orders", b"%d" % number, b"%d!" % number)
        assert stored_in(life, b"orders") == [
            [b"0", b"0!", b"3", b"3!"],
            [b"1", b"1!", b"4", b"4!"],
            [b"2", b"2!", b"5", b"5!"],
        ]


@pytest.mark.parametrize("headers", [{}, {0: b"Colour: red\r\n"}], ids=["plain", "headers"])
@in_loop
async def test_messages_without_a_key_are_spread_evenly_over_the_partitions(headers: dict[int, bytes]) -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=4))
        run = Run([b"orders"] * 1000, [b"%d" % number for number in range(1000)])
        run.headers = headers
        receipt = await life.publish_run(run)
        places = [place for place in receipt.stored() if isinstance(place, Stored)]
        stored = stored_in(life, b"orders")
        assert [len(values) for values in stored] == [250] * 4
        assert [stored[place.partition][place.offset] for place in places] == [b"%d" % number for number in range(1000)]


@in_loop
async def test_runs_of_any_sizes_are_spread_evenly() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=2))
        for _ in range(20):
            for count in (1, 15, 40):
                await life.publish_run(Run([b"orders"] * count, [b"x"] * count))
        counts = [len(values) for values in stored_in(life, b"orders")]
        assert sum(counts) == 20 * 56
        assert abs(counts[0] - counts[1]) <= 20


@in_loop
async def test_new_partitions_are_not_given_everything() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=2))
        await life.publish_run(Run([b"orders"] * 100, [b"x"] * 100))
        await life.do(life.broker.changes.alter(b"orders", partitions=4))
        await life.publish_run(Run([b"orders"] * 100, [b"x"] * 100))
        assert [len(values) for values in stored_in(life, b"orders")] == [75, 75, 25, 25]


@in_loop
async def test_with_headers_and_without_a_key_too() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        for number in range(6):
            await life.stored(b"orders", b"%d" % number, headers=b"Colour: red\r\n")
        assert stored_in(life, b"orders") == [[b"0", b"3"], [b"1", b"4"], [b"2", b"5"]]


@in_loop
async def test_one_run_may_go_to_many_places_and_each_keeps_its_order() -> None:
    async with Life(FaultyFiles()) as life:
        for name in (b"orders", b"bills"):
            await life.do(life.broker.changes.create(name, partitions=3))
        ann = Recorder()
        life.subscribe(b">", ann)
        life.subscribe(b"_INBOX.>", ann, sid=b"2")
        subjects = [b"orders.a", b"bills", b"_INBOX.x", b"orders", b"bills.b"] * 20
        run = Run(subjects, NUMBERS[:])
        receipt = await life.publish_run(run)
        await life.settle()
        assert receipt.error is None
        assert sum(len(indices) for _, _, indices in receipt.places) == 100
        own = [message for message in ann.got if not message.subject.startswith(b"_") or message.sid == b"2"]
        assert sorted(message.value for message in own) == sorted(NUMBERS)
        for subject in set(subjects):
            at = [int(message.value) for message in own if message.subject == subject]
            assert at == sorted(at)
        for topic in (b"orders", b"bills"):
            for values in stored_in(life, topic):
                assert values == sorted(values, key=int)


# Live delivery


@in_loop
async def test_each_subscriber_gets_each_message_with_all_that_belongs_to_it() -> None:
    """RT-10"""
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders.eu", ann)
        life.subscribe(b"orders.eu", bob)
        await life.stored(b"orders.eu", b"a", b"b", headers=b"Colour: red\r\n")
        assert ann.got == bob.got
        first, second = ann.got
        assert (first.subject, first.value, first.headers, first.attempts) == (
            b"orders.eu",
            b"a",
            b"Colour: red\r\n",
            1,
        )
        assert second.offset == first.offset + 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (b"orders", [b"orders"]),
        (b"orders.eu", [b"orders.eu"]),
        (b"orders.*", [b"orders.eu", b"orders.us"]),
        (b"*.eu", [b"orders.eu", b"bills.eu"]),
        (b"orders.>", [b"orders.eu", b"orders.us", b"orders.eu.new"]),
        (b"*.*.new", [b"orders.eu.new"]),
        (b"*", [b"orders", b"bills"]),
        (b">", [b"orders", b"orders.eu", b"orders.us", b"bills", b"bills.eu", b"orders.eu.new"]),
    ],
)
@in_loop
async def test_a_subscriber_gets_the_subjects_that_match_and_no_others(pattern: bytes, expected: list[bytes]) -> None:
    """RT-07, RT-08, RT-09"""
    subjects = [b"orders", b"orders.eu", b"orders.us", b"bills", b"bills.eu", b"orders.eu.new"]
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        live, late = Recorder(), Recorder()
        life.subscribe(pattern, live)
        subscription, _ = life.subscribe(pattern, late)
        late.is_open = False
        for subject in subjects:
            await life.stored(subject, subject)
        await life.publish_run(Run(subjects[:], subjects[:]))
        await life.settle()
        late.is_open = True
        subscription.wake()
        await life.settle()
        assert live.values[: len(expected)] == expected
        assert sorted(live.values) == sorted(expected * 2)
        assert sorted(late.values) == sorted(live.values)


@in_loop
async def test_nothing_that_was_published_before_comes_though_it_is_stored_later() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        before = life.offer(run_of(b"orders", b"on its way"))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        after = life.offer(run_of(b"orders", b"new"))
        await asyncio.gather(before, after)
        await life.settle()
        assert ann.values == [b"new"]
        await life.stored(b"orders", b"next")
        assert ann.values == [b"new", b"next"]


@in_loop
async def test_nor_what_was_published_before_in_a_write_of_its_own() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        log = life.log(b"orders")
        before = life.offer(run_of(b"orders", b"on its way", b"this too"))
        while not log.flusher.is_busy:
            await asyncio.sleep(0)
        ann = Recorder()
        life.subscribe(b"orders", ann)
        assert log.flusher.is_busy
        after = life.offer(run_of(b"orders", b"new"))
        await asyncio.gather(before, after)
        await life.settle()
        assert ann.values == [b"new"]


@in_loop
async def test_what_is_published_after_something_that_could_not_be_stored_comes() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"old")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        failed = life.offer(run_of(b"orders", b"x", b"y"))
        ann = Recorder()
        life.subscribe(b"orders", ann)
        assert (await failed).error is not None
        for value in (b"a", b"b", b"c"):
            await life.stored(b"orders", value)
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_after_it_is_over_a_subscriber_gets_nothing() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", b"a")
        life.broker.subscriptions.unsubscribe(subscription, member)
        await life.stored(b"orders", b"b")
        assert (ann.values, bob.values) == ([b"a"], [b"a", b"b"])


@in_loop
async def test_a_subscriber_gets_no_more_than_it_asked_for() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        _, member = life.subscribe(b"orders", ann)
        member.remaining = 3
        await life.stored(b"orders", b"a", b"b")
        await life.stored(b"orders", b"c", b"d")
        await life.stored(b"orders", b"e")
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_who_wants_no_echo_gets_what_others_publish() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(echo=False), Recorder()
        life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", b"first")
        receipt = life.broker.intake.publish(run_of(b"orders", b"ann's", b"ann's too"))
        [(target, offset, indices)] = receipt.places
        ann.published |= {(target.topic_id, target.number, offset + index) for index in indices}
        await life.stored(b"orders", b"bob's")
        assert ann.values == [b"first", b"bob's"]
        assert bob.values == [b"first", b"ann's", b"ann's too", b"bob's"]


@in_loop
async def test_nothing_is_delivered_or_acknowledged_that_is_not_stored() -> None:
    """DE-07"""
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders", ann)
        await life.join(b"g", b"orders", bob)
        await life.stored(b"orders", b"a")
        for call in ("write", "write"):
            disk.fail(call, errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
            receipt = await life.publish(b"orders", b"x", b"y")
            assert receipt.error is not None
            assert receipt.error.code == "APPEND_FAILED"
        await life.stored(b"orders", b"b")
        disk.fail("sync", errno.EIO, path_suffix=str(life.log(b"orders").segments[0].path))
        receipt = await life.publish(b"orders", b"z")
        assert receipt.error is not None
        assert receipt.error.code == "LOG_FAILED"
        receipt = await life.publish(b"orders", b"z")
        assert receipt.error is not None
        await life.settle()
        assert ann.values == bob.values == [b"a", b"b"]
        await life.stored(b"bills", b"others are served")


@in_loop
async def test_a_run_of_which_a_part_fails_is_told_as_failed() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"a")
        await life.stored(b"bills", b"a")
        disk.fail("write", errno.ENOSPC, path_suffix=str(life.log(b"orders").segments[0].path))
        receipt = await life.publish_run(Run([b"orders", b"bills"], [b"b", b"b"]))
        assert list(receipt.failed) == [0]
        assert life.in_log(b"orders") == [b"a"]


# Who falls behind


@pytest.mark.parametrize("tail_bytes", [1, 1 << 20], ids=["from disk", "from memory"])
@in_loop
async def test_who_falls_behind_gets_everything_later_in_order_and_once(tail_bytes: int) -> None:
    async with Life(FaultyFiles(), tail_bytes_max=tail_bytes) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders.>", ann)
        life.subscribe(b"orders.>", bob)
        for number in NUMBERS[:10]:
            await life.stored(b"orders.x", number)
        ann.is_open = False
        for number in NUMBERS[10:90]:
            await life.publish(b"orders.x" if int(number) % 3 else b"orders", number)
        await life.settle()
        assert bob.values == [number for number in NUMBERS[:90] if int(number) % 3 or int(number) < 10]
        assert ann.values == NUMBERS[:10]
        assert subscription.lag() == 80
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == bob.values
        assert subscription.lag() == 0
        for number in NUMBERS[90:]:
            await life.stored(b"orders.x", number)
        assert ann.values == bob.values
        assert bob.values[-10:] == NUMBERS[90:]


@in_loop
async def test_who_reads_on_while_more_is_published_misses_and_doubles_nothing() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        ann = Recorder()
        subscription, _ = life.subscribe(b"orders", ann)
        await life.stored(b"orders", b"0")
        for number in NUMBERS[1:]:
            ann.is_open = int(number) % 7 < 3
            if ann.is_open:
                subscription.wake()
            await life.publish(b"orders", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == NUMBERS


@in_loop
async def test_who_is_behind_in_several_partitions_keeps_the_order_of_each() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=1) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=3))
        ann = Recorder()
        subscription, _ = life.subscribe(b">", ann)
        ann.is_open = False
        for number in NUMBERS:
            await life.publish(b"orders", number)
            await life.publish(b"bills", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        by_place: dict[tuple[int, int], list[bytes]] = {}
        for message in ann.got:
            by_place.setdefault(message.place, []).append(message.value)
        assert len(by_place) == 4
        assert sorted(ann.values) == sorted(NUMBERS * 2)
        for values in by_place.values():
            assert values == sorted(values, key=int)


@in_loop
async def test_what_retention_dropped_before_a_reader_came_to_it_is_counted() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=1)
    async with Life(FaultyFiles(), settings=Settings(policy=policy), tail_bytes_max=1) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        await life.stored(b"orders", b"first")
        ann.is_open = False
        for _ in range(5):
            await life.stored(b"orders", bytes(3000))
        life.store.upkeep()
        kept = life.log(b"orders").start
        assert kept > 2
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert [message.offset for message in ann.got] == [0, *range(kept, 6)]
        assert member.dropped == kept - 1


@in_loop
async def test_a_reader_whose_disk_fails_is_told() -> None:
    disk = FaultyFiles()
    async with Life(disk, tail_bytes_max=1) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders", ann)
        life.subscribe(b"orders", bob)
        ann.is_open = False
        await life.stored(b"orders", b"a")
        disk.fail("read", errno.EIO, times=5)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert [error.code for error in ann.errors] == ["READ_FAILED"]
        disk.heal()
        await life.stored(b"orders", b"b")
        assert bob.values == [b"a", b"b"]


# Flow


@in_loop
async def test_a_token_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    """FC-01, FC-03"""
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"orders", ann, flow=Flow(rate=10, burst=5))
        life.subscribe(b"orders", bob)
        await life.stored(b"orders", *NUMBERS[:20])
        assert len(bob.got) == 20
        assert ann.values == NUMBERS[:5]
        await life.advance(SECOND // 2)
        assert 5 < len(ann.got) <= 10
        for _ in range(20):
            await life.advance(SECOND // 10)
        assert ann.values == NUMBERS[:20]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        (Overflow.BLOCK, NUMBERS[:50]),
        (Overflow.DROP, NUMBERS[:11]),
        (Overflow.SHED, [*NUMBERS[:1], *NUMBERS[40:50]]),
    ],
)
@in_loop
async def test_what_becomes_of_who_is_too_far_behind(overflow: Overflow, expected: list[bytes]) -> None:
    """FC-06"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann, flow=Flow(buffer=10, overflow=overflow))
        await life.stored(b"orders", NUMBERS[0])
        ann.is_open = False
        for number in NUMBERS[1:50]:
            await life.stored(b"orders", number)
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == expected
        assert member.dropped == 50 - len(expected)
        assert member.delivered == len(expected)
        await life.stored(b"orders", b"next")
        assert ann.values == [*expected, b"next"]


@pytest.mark.parametrize(
    ("overflow", "expected"), [(Overflow.DROP, NUMBERS[:11]), (Overflow.SHED, [*NUMBERS[:1], *NUMBERS[40:50]])]
)
@in_loop
async def test_a_batch_that_is_larger_than_the_buffer_is_cut(overflow: Overflow, expected: list[bytes]) -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann, flow=Flow(buffer=10, overflow=overflow))
        await life.stored(b"orders", NUMBERS[0])
        ann.is_open = False
        await life.stored(b"orders", *NUMBERS[1:50])
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == expected
        assert member.dropped == 50 - len(expected)


@in_loop
async def test_who_pulls_gets_what_it_asks_for() -> None:
    """FC-04"""
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        subscription, member = life.subscribe(b"orders", ann)
        member.set_flow(Flow(), 0)
        await life.stored(b"orders", *NUMBERS[:10])
        assert not ann.got
        for count in (3, 4, 5):
            member.credit = count
            await life.do(subscription.drain())
        assert ann.values == NUMBERS[:10]


# Queue groups


@in_loop
async def test_of_a_queue_each_message_goes_to_one_member() -> None:
    """GR-11"""
    async with Life(FaultyFiles()) as life:
        sinks = [Recorder() for _ in range(3)]
        other = Recorder()
        for sink in sinks:
            life.subscribe(b"orders", sink, queue=b"q")
        life.subscribe(b"orders", other, queue=b"other")
        for number in NUMBERS[:60]:
            await life.publish(b"orders", number)
        await life.publish(b"orders", *NUMBERS[60:])
        await life.settle()
        assert sorted(value for sink in sinks for value in sink.values) == sorted(NUMBERS)
        assert {len(sink.got) for sink in sinks} == {33, 34}
        assert other.values == NUMBERS


@in_loop
async def test_when_a_member_of_a_queue_leaves_the_others_get_its_share() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, member = life.subscribe(b"orders", ann, queue=b"q")
        _, last = life.subscribe(b"orders", bob, queue=b"q")
        await life.stored(b"orders", b"a", b"b")
        life.broker.subscriptions.unsubscribe(subscription, member)
        await life.stored(b"orders", b"c", b"d")
        assert bob.values[1:] == [b"c", b"d"]
        life.broker.subscriptions.unsubscribe(subscription, last)
        await life.stored(b"orders", b"gone with its last member")
        again = Recorder()
        life.subscribe(b"orders", again, queue=b"q")
        await life.stored(b"orders", b"e")
        assert again.values == [b"e"]


@in_loop
async def test_a_member_of_a_queue_that_takes_nothing_does_not_hold_up_the_others() -> None:
    async with Life(FaultyFiles()) as life:
        ann, bob = Recorder(), Recorder()
        subscription, _ = life.subscribe(b"orders", ann, queue=b"q")
        life.subscribe(b"orders", bob, queue=b"q")
        ann.is_open = False
        await life.stored(b"orders", *NUMBERS[:10])
        assert bob.values == NUMBERS[:10]
        bob.is_open = False
        await life.stored(b"orders", *NUMBERS[10:20])
        ann.is_open = True
        subscription.wake()
        await life.settle()
        assert ann.values == NUMBERS[10:20]


# Inboxes


@in_loop
async def test_inboxes_are_live_only_and_nothing_of_them_is_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann, bob = Recorder(), Recorder()
        life.subscribe(b"_INBOX.ann.>", ann)
        _, member = life.subscribe(b"_INBOX.bob.>", bob)
        before = disk.calls
        assert (await life.publish(b"_INBOX.ann.1", b"a", headers=b"Colour: red\r\n")).error is None
        assert (await life.publish(b"_INBOX.ann.2", b"b", b"c")).error is None
        assert ann.values == [b"a", b"b", b"c"], "at once"
        assert not bob.got
        bob.is_open = False
        await life.publish(b"_INBOX.bob.1", b"x")
        bob.is_open = True
        assert member.dropped == 1
        await life.publish(b"_INBOX.bob.1", b"y")
        assert bob.values == [b"y"]
        await life.settle()
        assert disk.calls == before
        assert [topic.name for topic in life.store.topics] == ["$delayed"]


@in_loop
async def test_whether_anyone_gets_what_is_published() -> None:
    async with Life(FaultyFiles()) as life:
        assert not life.broker.is_served(b"orders.eu")
        ann = Recorder()
        subscription, member = life.subscribe(b"orders.*", ann)
        assert life.broker.is_served(b"orders.eu")
        assert not life.broker.is_served(b"orders")
        life.broker.subscriptions.unsubscribe(subscription, member)
        assert not life.broker.is_served(b"orders.eu")
        for name in (b"g", None):
            group, joined = await life.join(name, b"orders.>", ann)
            assert life.broker.is_served(b"orders.eu"), name
            life.broker.groups.leave(group, joined)
            assert not life.broker.is_served(b"orders.eu"), name
