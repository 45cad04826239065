"""Which partition a message goes to."""

from __future__ import annotations

import pytest

from penstock.broker.intake import Stored
from penstock.errors import BadRequest
from penstock.model.headers import hash_key
from penstock.model.run import Run
from penstock.testing import FaultyFiles
from tests.support.broker_logs import NUMBERS, stored_in
from tests.support.brokers import Life, Recorder, in_loop, run_of


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
