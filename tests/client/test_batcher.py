"""The core of a producer without I/O: gathering, sending, asking for routes."""

from __future__ import annotations

from itertools import chain

import pytest

from penstock.client.lane import IN_FLIGHT_MAX, SealedBatch
from penstock.client.outgoing import Prepared
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.client.values import read_headers
from penstock.errors import (
    BadSubject,
    BatchTooLarge,
    LogFailed,
    OutOfSequence,
    Overloaded,
    StaleLayout,
    UnknownTopic,
)
from penstock.model.batch import Compression, accept
from penstock.model.run import open_batch
from tests.support.client_core import Bench


def values_of(sealed: SealedBatch) -> list[bytes]:
    return accept(sealed.batch.data).columns().values()


def numbers(*batches: SealedBatch) -> list[tuple[int, int]]:
    return [(each.batch.producer, each.batch.sequence) for each in batches]


class TestGathering:
    def test_a_batch_is_sealed_when_it_is_large_enough(self) -> None:
        bench = Bench()

        bench.add(*[b"x" * 250] * 3)
        assert bench.pump() == []
        bench.add(b"x" * 250)

        (sealed,) = bench.pump()
        assert len(values_of(sealed)) == 4

    def test_or_when_it_has_waited_long_enough(self) -> None:
        bench = Bench()
        bench.add(b"0")

        assert bench.woken == 1
        assert bench.pump() == []
        assert bench.batcher.next_at == bench.now + 0.005
        (sealed,) = bench.pump(after=0.005)

        assert values_of(sealed) == [b"0"]

    def test_while_too_many_are_unanswered_it_grows_instead(self) -> None:
        bench = Bench()
        sent = [bench.seal(b"%d" % number) for number in range(IN_FLIGHT_MAX)]
        bench.add(b"a")
        assert bench.pump() == []
        bench.pump(after=1.0)
        bench.add(b"b")
        assert bench.pump(after=1.0) == []

        bench.answer(sent[0])

        (grown,) = bench.pump(after=1.0)
        assert values_of(grown) == [b"a", b"b"]

    def test_more_than_fits_is_not_taken_until_there_is_room(self) -> None:
        bench = Bench(buffer_bytes=500)
        bench.add(b"x" * 600)

        assert not bench.batcher.add("t", b"x")
        assert bench.batcher.is_full
        (sealed,) = bench.pump(after=1) or bench.pump(after=1)
        bench.answer(sealed)

        assert bench.batcher.bytes == 0
        assert bench.batcher.add("t", b"x")

    def test_a_value_that_the_broker_would_not_take_is_refused_at_once(self) -> None:
        bench = Bench()
        bench.batcher.value_bytes_max = 10

        with pytest.raises(BatchTooLarge, match="11 bytes"):
            bench.batcher.add("t", b"x" * 11)
        with pytest.raises(BatchTooLarge, match="11 bytes"):
            bench.batcher.add_prepared(Prepared("t", b"x" * 11))

    def test_a_subject_of_a_topic_that_is_not_known_is_not_taken(self) -> None:
        bench = Bench()

        assert not bench.batcher.add("other", b"x")
        assert not bench.batcher.knows("other.x")
        assert bench.batcher.knows("t.any.below")
        with pytest.raises(BadSubject):
            bench.batcher.add("t..x", b"x")

    def test_keys_and_subjects_choose_partitions_as_the_broker_does(self) -> None:
        bench, layout = Bench(partitions=4), Layout(b"t", 5, 4)
        for number in range(20):
            bench.add(b"k", key=b"%d" % number)
            bench.add(b"s", subject=f"t.{number}")
        bench.batcher.mark()

        for sealed in bench.pump():
            run = open_batch(sealed.batch, b"t")
            for index, subject in enumerate(run.subjects):
                assert layout.choose(subject, run.keys.get(index)) == sealed.lane.partition

    def test_the_rest_goes_to_each_partition_in_turn_batch_by_batch(self) -> None:
        bench = Bench(partitions=3)

        batches = [bench.seal(b"0", b"1") for _ in range(6)]

        assert [len(values_of(each)) for each in batches] == [2] * 6
        turns = [each.lane.partition for each in batches]
        assert turns[:3] == turns[3:]
        assert sorted(turns[:3]) == [0, 1, 2]

    def test_batches_of_any_sizes_give_each_partition_as_much(self) -> None:
        bench = Bench(partitions=4)
        counts = [0] * 4
        # Small ones at the turns of one partition, large ones at those of the others.
        for number in range(200):
            sealed = bench.seal(*[b"x"] * (1 if number % 4 == 0 else 9))
            counts[sealed.lane.partition] += len(values_of(sealed))
            bench.answer(sealed)

        assert max(counts) - min(counts) <= 2 * PIECE_MESSAGES

    def test_another_producer_begins_with_another_partition(self) -> None:
        firsts = set()
        for number in range(4):
            bench = Bench(partitions=4, draw=lambda number=number: number)
            firsts.add(bench.seal(b"x").lane.partition)

        assert firsts == {0, 1, 2, 3}

    def test_what_a_message_has_is_in_its_batch(self) -> None:
        bench = Bench(compression=Compression.ZSTD)
        bench.add(b"plain" * 100)
        bench.add(b"", subject="t.x", key=b"k", headers=b"A: 1\r\n", is_tombstone=True)
        bench.batcher.mark()

        (sealed,) = bench.pump()

        run = open_batch(accept(sealed.batch.data), b"t")
        assert sealed.batch.compression is Compression.ZSTD
        assert (run.subjects, run.values) == ([b"t", b"t.x"], [b"plain" * 100, b""])
        assert (run.keys, run.headers, run.tombstones) == ({1: b"k"}, {1: b"A: 1\r\n"}, {1})

    def test_a_flood_of_subjects_is_not_remembered(self) -> None:
        bench = Bench(buffer_bytes=1 << 30, batch_bytes=1 << 29)

        bench.add(*[b""] * 70_000, subject="t.first")
        for number in range(70_000):
            bench.batcher.add(f"t.{number}", b"")

        assert len(bench.batcher._routes.known) <= 65_536


class TestDelivery:
    def test_batches_are_numbered_and_sent_in_order(self) -> None:
        bench = Bench()

        sent = [bench.seal(b"%d" % number) for number in range(3)]

        assert numbers(*sent) == [(1, 0), (1, 1), (1, 2)]

    def test_after_a_reconnect_what_is_unanswered_is_sent_again_under_its_numbers(self) -> None:
        bench = Bench()
        first, second, third = (bench.seal(b"%d" % number) for number in range(3))
        bench.answer(first)
        bench.batcher.lost()
        assert bench.pump(is_connected=False) == []

        again = bench.pump()

        assert again == [second, third]
        assert numbers(*again) == [(1, 1), (1, 2)]
        for each in again:
            bench.answer(each)
        assert (bench.batcher.stored, bench.batcher.bytes) == (3, 0)

    def test_a_busy_broker_is_asked_again_in_order_and_later(self) -> None:
        bench = Bench()
        first, second = bench.seal(b"0"), bench.seal(b"1")
        bench.answer(first, Overloaded("busy"))

        assert bench.pump(after=10) == []
        bench.answer(second, OutOfSequence("0 is next"))
        again = bench.pump(after=10)

        assert again == [first, second]
        assert numbers(*again) == [(1, 0), (1, 1)]

    def test_it_waits_longer_each_time(self) -> None:
        bench = Bench()
        sealed = bench.seal(b"0")
        waits = []
        for _ in range(8):
            bench.answer(sealed, Overloaded("busy"))
            assert bench.pump() == []
            assert bench.batcher.next_at is not None
            waits.append(round(bench.batcher.next_at - bench.now, 3))
            assert bench.pump(after=waits[-1] + 0.001) == [sealed]

        assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1]

    def test_messages_that_are_refused_for_good_fail_once_and_those_behind_them_go_on_under_another_id(self) -> None:
        bench = Bench()
        first, second = bench.seal(b"0", b"1"), bench.seal(b"2")

        bench.answer(first, LogFailed("disk"))
        assert not bench.batcher.add("t", b"x")
        assert bench.pump() == []
        bench.answer(second, OutOfSequence("0 is next"))
        (again,) = bench.pump()

        assert again is second
        assert numbers(again) == [(2, 0)]
        assert values_of(again) == [b"2"]
        failed = bench.batcher.take_failed()
        assert [(subject, value, type(error)) for subject, value, error in failed] == [
            ("t", b"0", LogFailed),
            ("t", b"1", LogFailed),
        ]
        assert bench.batcher.take_failed() == []
        assert bench.batcher.add("t", b"x")

    def test_nothing_is_numbered_anew_while_somethings_fate_is_unknown(self) -> None:
        bench = Bench()
        first, second, third = bench.seal(b"0"), bench.seal(b"1"), bench.seal(b"2")
        bench.answer(first, LogFailed("disk"))
        bench.batcher.take_failed()
        bench.add(b"3")
        bench.batcher.mark()
        bench.batcher.lost()

        again = bench.pump()
        assert (again, numbers(*again)) == ([second, third], [(1, 1), (1, 2)])
        bench.answer(second)
        bench.answer(third, OutOfSequence("gap"))
        renumbered = bench.pump()

        assert [values_of(each) for each in renumbered] == [[b"2"], [b"3"]]
        assert numbers(*renumbered) == [(2, 0), (2, 1)]

    def test_a_producer_that_the_broker_has_forgotten_fails_and_begins_again(self) -> None:
        bench = Bench()
        first, second = bench.seal(b"0"), bench.seal(b"1")
        bench.answer(first)

        bench.answer(second, OutOfSequence("not known here"))

        assert [value for _, value, _ in bench.batcher.take_failed()] == [b"1"]
        assert numbers(bench.seal(b"2")) == [(2, 0)]

    def test_what_is_not_stored_in_time_fails_with_the_last_reason(self) -> None:
        bench = Bench(timeout=5.0)
        sealed = bench.seal(b"0")
        bench.answer(sealed, Overloaded("busy"))

        bench.pump(after=5.1)

        ((_, _, error),) = bench.batcher.take_failed()
        assert isinstance(error, Overloaded)
        assert bench.batcher.bytes == 0

    @pytest.mark.parametrize("is_sent", [True, False])
    def test_without_an_answer_or_a_connection_it_fails_too(self, is_sent: bool) -> None:
        bench = Bench(timeout=5.0)
        bench.add(b"0")
        bench.batcher.mark()
        sent = bench.pump(is_connected=is_sent)

        bench.pump(after=5.1, is_connected=is_sent)
        for late in sent:
            bench.answer(late)

        ((_, _, error),) = bench.batcher.take_failed()
        assert str(error) == (
            "no answer within 5 s: the message may or may not be stored" if is_sent else "not sent within 5 s"
        )
        assert bench.batcher.stored == 0

    def test_a_topic_that_is_gone_is_asked_for_again(self) -> None:
        bench = Bench()

        bench.answer(bench.seal(b"0"), UnknownTopic("gone"))

        assert not bench.batcher.knows("t")
        assert [value for _, value, _ in bench.batcher.take_failed()] == [b"0"]

    def test_a_flush_is_done_when_all_before_it_is_decided(self) -> None:
        bench = Bench(partitions=2)
        bench.add(b"0")
        mark = bench.batcher.mark()
        (first,) = bench.pump()
        later = bench.seal(b"1")
        bench.answer(later)

        assert not bench.batcher.is_done(mark)
        bench.answer(first)
        assert bench.batcher.is_done(mark)

    def test_after_close_nothing_is_taken(self) -> None:
        bench = Bench()
        bench.batcher.close()

        assert not bench.batcher.add("t", b"x")
        assert not bench.batcher.add_prepared(Prepared("t", b"x"))


class TestAsking:
    def test_messages_with_an_id_or_a_delay_are_in_batches_without_a_number_in_their_place(self) -> None:
        bench = Bench()
        bench.add(b"0")
        bench.add(b"1", b"2", headers=b"Msg-ID: m\r\n", asks=True, has_identity=True)
        bench.add(b"3")
        bench.batcher.mark()

        (first,) = bench.pump()
        assert bench.pump() == []
        bench.answer(first)
        (asking,) = bench.pump()
        assert bench.pump() == []
        bench.answer(asking)
        (last,) = bench.pump()

        assert [values_of(each) for each in (first, asking, last)] == [[b"0"], [b"1", b"2"], [b"3"]]
        assert numbers(first, asking, last) == [(1, 0), (0, 0), (1, 1)]
        assert [each.batch.asks for each in (first, asking, last)] == [False, True, False]

    def test_one_for_later_gets_an_id_which_it_keeps(self) -> None:
        bench = Bench()
        bench.add(b"0", b"1", headers=b"Delay: 5s\r\n", asks=True)
        bench.batcher.mark()
        (sealed,) = bench.pump()

        bench.answer(sealed, StaleLayout("more"))
        bench.pump()
        bench.batcher.relay(bench.batcher.stale()[0], Layout(b"t", 5, 2))
        bench.batcher.mark()
        again = bench.pump()

        before, after = (
            [read_headers(block or b"") for block in accept(each.batch.data).columns().headers() or []]
            for each in (sealed, again[0])
        )
        assert before == after
        assert before[0]["Msg-ID"] != before[1]["Msg-ID"]
        assert before[0]["Delay"] == "5s"

    def test_one_that_fails_leaves_no_gap(self) -> None:
        bench = Bench()
        asking = bench.seal(b"0", headers=b"Msg-ID: m\r\n", asks=True, has_identity=True)

        bench.answer(asking, LogFailed("disk"))
        bench.batcher.take_failed()

        assert numbers(bench.seal(b"1")) == [(1, 0)]


class TestRelay:
    def test_what_is_not_stored_is_distributed_anew_in_order(self) -> None:
        bench = Bench()
        for number in range(40):
            bench.add(b"%d" % number, key=b"%d" % (number % 7))
            if number % 10 == 9:
                bench.batcher.mark()
        first, *rest = bench.pump()
        bench.answer(first)
        bench.add(b"40", key=b"0")
        for each in rest:
            assert bench.batcher.stale() == []
            bench.answer(each, StaleLayout("it has 3"))

        assert bench.pump() == []
        (topic,) = bench.batcher.stale()
        assert bench.batcher.stale() == []
        bench.batcher.relay(topic, Layout(b"t", 5, 3))
        bench.batcher.mark()

        seen: dict[bytes, list[int]] = {}
        layout = Layout(b"t", 5, 3)
        for sealed in bench.pump():
            run = open_batch(sealed.batch, b"t")
            assert sealed.lane.topic.layout == layout
            for index, value in enumerate(run.values):
                assert layout.choose(b"t", run.keys[index]) == sealed.lane.partition
                seen.setdefault(run.keys[index], []).append(int(value))
        assert sorted(chain.from_iterable(seen.values())) == list(range(10, 41))
        assert all(numbers == sorted(numbers) for numbers in seen.values())

    def test_what_may_be_stored_is_asked_for_first(self) -> None:
        bench = Bench()
        first, second = bench.seal(b"0"), bench.seal(b"1")
        bench.answer(second, StaleLayout("more"))
        bench.batcher.lost()

        assert bench.batcher.stale() == []
        assert bench.pump() == [first]
        bench.answer(first)

        assert len(bench.batcher.stale()) == 1

    def test_a_flush_waits_for_what_is_distributed_anew(self) -> None:
        bench = Bench()
        bench.add(b"0")
        mark = bench.batcher.mark()
        (sealed,) = bench.pump()
        bench.answer(sealed, StaleLayout("more"))
        bench.batcher.relay(bench.batcher.stale()[0], Layout(b"t", 5, 2))

        assert not bench.batcher.is_done(mark)
        (again,) = bench.pump(after=1) or bench.pump(after=1)
        bench.answer(again)

        assert bench.batcher.is_done(mark)
        assert bench.batcher.bytes == 0

    def test_when_nobody_can_say_where_they_belong_they_fail(self) -> None:
        bench = Bench()
        bench.answer(bench.seal(b"0", b"1"), StaleLayout("more"))
        bench.add(b"2")

        bench.batcher.abandon(bench.batcher.stale()[0], UnknownTopic("gone"))

        assert [value for _, value, _ in bench.batcher.take_failed()] == [b"0", b"1", b"2"]
        assert (bench.batcher.bytes, bench.batcher.is_done(bench.batcher.mark())) == (0, True)
