"""A subscription without I/O: delivery, credit, and settling messages."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from penstock.client.feed import Feed, SubscriptionOptions
from penstock.client.message import Delivery, Message
from penstock.errors import (
    BadFrame,
    Closed,
    LogFailed,
    NotOutstanding,
    PenstockError,
)
from penstock.model.batch import parse
from penstock.wire.binary import (
    SETTLE_MAX,
    Type,
    Verb,
    json_frame,
    read_credit,
    read_end,
    read_json,
)
from tests.support.client_core import Wire, delivered, nothing, stored


def make_feed(
    *, group: str | None = None, mode: str = "shared", buffer: int = 10, wake: Callable[[], None] = nothing
) -> Feed:
    options = SubscriptionOptions(pattern="t.>", group=group, mode=mode, start="latest", buffer=buffer)
    return Feed(options, lock=threading.Lock(), wake=wake, arrived=nothing, respond=lambda _: None)


class TestFeed:
    def test_half_of_the_buffer_is_given_back_at_once(self) -> None:
        woken: list[None] = []
        wire, feed = Wire(), make_feed(buffer=4, wake=lambda: woken.append(None))
        number = wire.open(feed)
        wire.receive(delivered(number, b"0", b"1", b"2", b"3"))

        feed.take()
        feed.take()
        assert woken == [], "whoever does not come back is not sent more"
        feed.take()
        wire.connection.credit(feed)

        ((kind, _, payload),) = wire.sent()
        assert (kind, read_credit(payload), len(woken)) == (Type.CREDIT, (number, 3), 1)
        feed.take()
        wire.connection.credit(feed)
        assert wire.sent() == []

    def test_what_is_read_while_it_is_opened_again_is_asked_for_then(self) -> None:
        woken: list[None] = []
        wire, feed = Wire(), make_feed(buffer=2, wake=lambda: woken.append(None))
        wire.receive(delivered(wire.open(feed), b"0", b"1"))
        feed.lost()

        opening = feed.opening(9)
        while feed.take() is not None:
            pass
        assert (opening["credit"], feed.credit()) == (0, None)
        woken.clear()
        feed.opened(9, [])

        assert (len(woken), feed.credit()) == (1, 2)

    def test_more_than_there_is_credit_for_is_refused(self) -> None:
        wire, feed = Wire(), make_feed(buffer=2)
        number = wire.open(feed)
        wire.receive(delivered(number, b"0", b"1"))

        with pytest.raises(BadFrame, match="more messages"):
            wire.receive(delivered(number, b"2", offset=2))

    def test_a_plain_one_resumes_behind_what_came_and_keeps_what_is_unread(self) -> None:
        feed = make_feed(buffer=10)
        wire = Wire()
        number = wire.open(feed, [5, 0, 3], [5, 1, 8])
        wire.receive(delivered(number, b"3", b"4", offset=3))
        wire.connection.lost("cut")

        opening = feed.opening(2)

        assert opening["start"] == {"positions": [[5, 0, 5], [5, 1, 8]]}
        assert opening["credit"] == 8
        assert [message.value for message in feed.take_many(None)] == [b"3", b"4"]

    def test_messages_that_come_before_the_agreement_count(self) -> None:
        wire, feed = Wire(), make_feed()
        wire.connection.open(feed, lambda _: None)
        _, request, payload = wire.sent()[-1]

        wire.receive(delivered(read_json(payload)["subscription"], b"0", offset=3))
        wire.receive(json_frame(Type.RESULT, request, {"positions": [[5, 0, 3]], "generation": 0}))

        assert feed.opening(9)["start"] == {"positions": [[5, 0, 4]]}

    def test_a_member_drops_what_is_unread_because_it_comes_again(self) -> None:
        wire, feed = Wire(), make_feed(group="g")
        wire.receive(delivered(wire.open(feed), b"0", b"1"))

        wire.connection.lost("cut")

        assert feed.take() is None
        assert (feed.opening(2)["credit"], feed.opening(2)["start"]) == (10, "latest")

    def test_one_that_nobody_waits_for_any_more_is_ended_when_it_is_agreed_to(self) -> None:
        wire, feed = Wire(), make_feed()
        wire.connection.open(feed, lambda _: None)
        _, request, payload = wire.sent()[-1]
        feed.close()

        wire.receive(json_frame(Type.RESULT, request, {"positions": [], "generation": 0}))

        ((kind, _, ended),) = wire.sent()
        assert (kind, read_end(ended)) == (Type.END, read_json(payload)["subscription"])

    def test_what_came_can_be_read_before_it_raises_what_ended_it(self) -> None:
        wire, feed = Wire(), make_feed()
        number = wire.open(feed)
        wire.receive(delivered(number, b"0") + json_frame(Type.ENDED, number, {"code": "LOG_FAILED", "text": "disk"}))

        message = feed.take()

        assert message is not None
        with pytest.raises(LogFailed, match="disk"):
            feed.take()

    def test_a_batch_that_is_damaged_ends_it(self) -> None:
        wire, feed = Wire(), make_feed()
        data = bytearray(delivered(wire.open(feed), b"0123"))
        data[-12] ^= 1

        wire.receive(bytes(data))

        with pytest.raises(PenstockError, match="checksum"):
            feed.take()

    def test_after_close_there_is_nothing(self) -> None:
        wire, feed = Wire(), make_feed()
        number = wire.open(feed)
        wire.receive(delivered(number, b"0"))

        feed.close()
        wire.receive(delivered(number, b"1", offset=1))

        assert feed.is_over
        assert feed.take_many(None) == []

    def test_one_that_leaves_takes_its_credit_back_before_it_releases_what_is_unread(self) -> None:
        """Otherwise the broker might deliver it to the same member once more before it has left."""
        wire, feed = Wire(), make_feed(group="g", buffer=2)
        number = wire.open(feed)
        wire.receive(delivered(number, b"0", b"1"))

        feed.take()
        feed.give_back()
        wire.connection.credit(feed)

        ((kind, _, payload),) = wire.sent()
        assert (kind, read_credit(payload)) == (Type.CREDIT, (number, 0))
        assert [(about.verb, offsets) for _, about, offsets in feed.take_settlements()] == [(Verb.RELEASE, [1])]

    @pytest.mark.parametrize(("mode", "buffer"), [("other", 1), ("shared", 0)])
    def test_what_cannot_be_is_refused(self, mode: str, buffer: int) -> None:
        with pytest.raises(ValueError, match="must be"):
            make_feed(mode=mode, buffer=buffer)


class TestSettling:
    def test_acknowledgements_of_a_partition_go_in_one_frame_and_others_apart(self) -> None:
        woken: list[None] = []
        feed, (first, second, third), (other,) = self._delivered(wake=lambda: woken.append(None))

        first.ack()
        second.nack(delay=1.5)
        other.ack()
        third.ack()

        said = [(about.verb, about.partition, about.delay_us, offsets) for _, about, offsets in feed.take_settlements()]
        assert said == [
            (Verb.ACK, 0, 0, [first.offset, third.offset]),
            (Verb.NACK, 0, 1_500_000, [second.offset]),
            (Verb.ACK, 1, 0, [other.offset]),
        ]
        assert len(woken) == 1

    def test_a_frame_has_no_more_than_it_may(self) -> None:
        feed, (message, *_), _ = self._delivered()

        for _ in range(SETTLE_MAX + 1):
            message.extend()

        assert [len(offsets) for _, _, offsets in feed.take_settlements()] == [SETTLE_MAX, 1]

    def test_in_a_partitioned_group_the_last_acknowledgement_counts_for_all_before_it(self) -> None:
        feed, (first, second, third), _ = self._delivered(mode="partitioned")

        third.ack()
        first.ack()

        ((_, about, offsets),) = feed.take_settlements()
        assert (about.verb, about.generation, offsets) == (Verb.COMMIT, 7, [third.offset + 1])
        for refused in (second.nack, second.extend, second.reject):
            with pytest.raises(TypeError, match="shared groups"):
                refused()

    def test_only_messages_of_a_group_are_acknowledged(self) -> None:
        wire, feed = Wire(), make_feed()
        wire.receive(delivered(wire.open(feed), b"0"))
        message = feed.take()
        assert message is not None
        fetched = Message(Delivery(parse(stored(b"0").data), "t", 5, 0), 0)

        for each in (message, fetched):
            with pytest.raises(TypeError, match="group"):
                each.ack()

    def test_what_the_broker_did_not_answer_is_said_again(self) -> None:
        feed, (first, second, _), _ = self._delivered()
        mark = self._say(feed, first)
        ((since, about, offsets),) = feed.take_settlements()
        second.ack()

        feed.settlements.repeat(since, about, offsets)

        assert not feed.settlements.is_done(mark)
        ((since, _, again),) = feed.take_settlements()
        assert sorted(again) == [first.offset, second.offset]
        feed.settlements.settled(since, 0)
        assert feed.settlements.is_done(mark)

    def test_a_flush_waits_for_what_was_said_before_it_and_for_nothing_later(self) -> None:
        feed, (first, second, _), _ = self._delivered()
        mark = self._say(feed, first)
        (before,) = feed.take_settlements()
        second.ack()
        list(feed.take_settlements())

        assert not feed.settlements.is_done(mark)
        feed.settlements.settled(before[0], 0)

        assert feed.settlements.is_done(mark)

    def test_what_came_too_late_is_told_once(self) -> None:
        feed, (first, *_), _ = self._delivered()
        self._say(feed, first)
        ((since, _, _),) = feed.take_settlements()

        feed.settlements.settled(since, late=1)

        with pytest.raises(NotOutstanding, match="too late for 1 message"):
            feed.settlements.check()
        feed.settlements.check()

    def test_an_error_is_told_once(self) -> None:
        feed, (first, *_), _ = self._delivered()
        self._say(feed, first)
        ((since, _, _),) = feed.take_settlements()

        feed.settlements.settled(since, 0, LogFailed("disk"))

        with pytest.raises(LogFailed, match="disk"):
            feed.settlements.check()
        feed.settlements.check()

    def test_after_close_nothing_is_taken(self) -> None:
        feed, (first, *_), _ = self._delivered()
        feed.close()

        with pytest.raises(Closed, match="delivered again"):
            first.ack()

    def test_another_process_that_inherited_it_is_told(self) -> None:
        feed, (first, *_), _ = self._delivered()

        feed.disown(threading.Lock(), Closed("subscribe again"))

        for each in (first.ack, feed.take):
            with pytest.raises(Closed, match="subscribe again"):
                each()

    @staticmethod
    def _say(feed: Feed, message: Message) -> int:
        message.ack()
        return feed.settlements.mark()

    @staticmethod
    def _delivered(
        mode: str = "shared", wake: Callable[[], None] = nothing
    ) -> tuple[Feed, list[Message], list[Message]]:
        """Three messages of one partition, one of another."""
        wire, feed = Wire(), make_feed(group="g", mode=mode, buffer=100, wake=wake)
        number = wire.open(feed)
        wire.receive(delivered(number, b"0", b"1", b"2", offset=40))
        wire.receive(delivered(number, b"3", offset=90, partition=1))
        messages = feed.take_many(None)
        return feed, messages[:3], messages[3:]
