"""The client's core: bytes and the time are arguments, so there are no sockets and no sleeps here."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, Final

import pytest

from penstock.broker.topic import ServedTopic as BrokersTopic
from penstock.client.batcher import Batcher
from penstock.client.feed import Feed, SubscriptionOptions
from penstock.client.lane import IN_FLIGHT_MAX, SealedBatch
from penstock.client.ledger import Ledger
from penstock.client.message import Delivery, Message
from penstock.client.outgoing import ABSENT, Prepared, prepare
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.client.protocol import UNANSWERED_MAX, Answer, Batches, ClientConnection, PendingRequest
from penstock.client.values import read_headers
from penstock.errors import (
    BadFrame,
    BadHeader,
    BadSubject,
    BatchTooLarge,
    Closed,
    ConnectionLost,
    GroupConflict,
    LogFailed,
    NotOutstanding,
    OffsetOutOfRange,
    OutOfSequence,
    Overloaded,
    PenstockError,
    StaleLayout,
    Unauthorized,
    UnknownTopic,
)
from penstock.log.policy import Policy, Topic
from penstock.log.producers import Producers
from penstock.model import headers
from penstock.model.batch import Batch, Compression, accept, encode, parse
from penstock.model.run import open_batch
from penstock.wire.binary import (
    SCRATCH_BYTES,
    SETTLE_MAX,
    FrameReader,
    Messages,
    Type,
    Verb,
    batches_head,
    frame,
    json_frame,
    messages_frame,
    read_credit,
    read_end,
    read_json,
)

HELLO: Final = {"server_id": "s", "version": "1", "node_id": "n", "payload_bytes_max": 1000, "heartbeat_s": 10}
INFO: Final = b'INFO {"server_id":"s"}\r\n'


def nothing() -> None:
    pass


class Wire:
    """A connection, and the broker's end of it."""

    def __init__(self, *, greeted: bool = True, **credentials: str) -> None:
        self.connection = ClientConnection(bytearray(SCRATCH_BYTES), credentials, now=0.0)
        self.now = 0.0
        self._reader = FrameReader(bytearray(SCRATCH_BYTES))
        if greeted:
            self.sent()
            self.receive(json_frame(Type.RESULT, 1, HELLO))

    def receive(self, data: bytes) -> None:
        buffer = self.connection.buffer()
        buffer[: len(data)] = data
        self.connection.filled(len(data), self.now)

    def sent(self) -> list[tuple[int, int, bytes]]:
        return [
            (each.type, each.id, bytes(each.payload)) for each in self._reader.feed(b"".join(self.connection.take()))
        ]

    def ask(self, *, is_repeatable: bool = False) -> tuple[int, list[Answer]]:
        """The number of a new request, and where its answer will be."""
        answers: list[Answer] = []
        request = PendingRequest(
            lambda number: json_frame(Type.CALL, number, {}), answers.append, is_repeatable=is_repeatable
        )
        self.connection.request(request)
        return self.sent()[-1][1], answers

    def open(self, feed: Feed, *positions: list[int]) -> int:
        """A subscription that the broker has agreed to; its number there."""
        self.connection.open(feed, lambda _: None)
        _, number, payload = self.sent()[-1]
        self.receive(json_frame(Type.RESULT, number, {"positions": list(positions), "generation": 7}))
        subscription: int = read_json(payload)["subscription"]
        return subscription


def make_feed(
    *, group: str | None = None, mode: str = "shared", buffer: int = 10, wake: Callable[[], None] = nothing
) -> Feed:
    options = SubscriptionOptions(pattern="t.>", group=group, mode=mode, start="latest", buffer=buffer)
    return Feed(options, lock=threading.Lock(), wake=wake, arrived=nothing, respond=lambda _: None)


def delivered(subscription: int, *values: bytes, offset: int = 0, partition: int = 0, **fields: Any) -> bytes:
    batch = encode(values, timestamp=1, **fields)
    batch.stamp(offset, append_time=0)
    return messages_frame(subscription, Messages(5, partition, 7, b"t", {}, batch.data))


class TestGreeting:
    def test_hello_is_sent_at_once_with_who_we_are(self) -> None:
        wire = Wire(greeted=False, name="n", token="secret")

        assert [(kind, read_json(payload)) for kind, _, payload in wire.sent()] == [
            (Type.HELLO, {"version": 1, "name": "n", "token": "secret"})
        ]

    @pytest.mark.parametrize("greeting", [b"", INFO])
    @pytest.mark.parametrize("size", [1, 2, 7, 1000])
    def test_it_is_skipped_wherever_it_is_split(self, greeting: bytes, size: int) -> None:
        wire = Wire(greeted=False)
        data = greeting + json_frame(Type.RESULT, 1, HELLO)

        for at in range(0, len(data), size):
            wire.receive(data[at : at + size])

        assert wire.connection.hello is not None
        assert wire.connection.hello.payload_bytes_max == 1000

    def test_one_without_an_end_is_refused(self) -> None:
        wire = Wire(greeted=False)

        with pytest.raises(BadFrame, match="greeting"):
            wire.receive(b"I" * (64 << 10) + b"I")

    def test_a_broker_that_does_not_want_us_says_why(self) -> None:
        wire = Wire(greeted=False)

        wire.receive(json_frame(Type.ERROR, 1, {"code": "UNAUTHORIZED", "text": "no"}))

        assert isinstance(wire.connection.refused, Unauthorized)
        assert wire.connection.hello is None

    @pytest.mark.parametrize("answer", [{}, HELLO | {"payload_bytes_max": "many"}])
    def test_one_that_does_not_say_what_must_be_known_is_refused(self, answer: dict[str, Any]) -> None:
        wire = Wire(greeted=False)

        with pytest.raises(BadFrame, match="HELLO"):
            wire.receive(json_frame(Type.RESULT, 1, answer))


class TestAnswers:
    def test_they_find_their_requests_in_any_order(self) -> None:
        wire = Wire()
        first, answers_of_first = wire.ask()
        second, answers_of_second = wire.ask()

        wire.receive(json_frame(Type.RESULT, second, {"n": 2}) + json_frame(Type.RESULT, first, {"n": 1}))

        assert (answers_of_first, answers_of_second) == ([{"n": 1}], [{"n": 2}])

    def test_batches_come_as_they_are(self) -> None:
        wire = Wire()
        number, answers = wire.ask()

        wire.receive(batches_head(number, 3, 9, 5) + b"bytes")

        (answer,) = answers
        assert isinstance(answer, Batches)
        assert (answer.start, answer.committed, bytes(answer.data)) == (3, 9, b"bytes")

    def test_errors_are_those_that_were_raised_there(self) -> None:
        wire = Wire()
        number, answers = wire.ask()

        wire.receive(json_frame(Type.ERROR, number, {"code": "GROUP_CONFLICT", "text": "it is another"}))

        assert isinstance(answers[0], GroupConflict)
        assert str(answers[0]) == "it is another"

    def test_an_offset_that_is_not_there_tells_what_is(self) -> None:
        wire = Wire()
        number, answers = wire.ask()
        told = {"code": "OFFSET_OUT_OF_RANGE", "text": "gone", "offset": 1, "start": 5, "end": 9}

        wire.receive(json_frame(Type.ERROR, number, told))

        error = answers[0]
        assert isinstance(error, OffsetOutOfRange)
        assert (error.offset, error.start, error.end) == (1, 5, 9)

    def test_one_to_a_request_that_was_not_made_is_refused(self) -> None:
        wire = Wire()

        with pytest.raises(BadFrame, match="17"):
            wire.receive(json_frame(Type.RESULT, 17, {}))

    def test_a_frame_that_no_broker_sends_is_refused(self) -> None:
        wire = Wire()

        with pytest.raises(BadFrame, match="0x10"):
            wire.receive(frame(Type.HELLO, 1))

    def test_a_broker_that_ends_the_connection_says_why(self) -> None:
        wire = Wire()

        with pytest.raises(Closed, match="stopping"):
            wire.receive(json_frame(Type.DISCONNECT, 0, {"code": "CLOSED", "text": "stopping"}))

    def test_after_a_loss_what_may_be_repeated_is_given_back_in_order_and_the_rest_is_told(self) -> None:
        wire = Wire()
        _, first = wire.ask(is_repeatable=True)
        _, told = wire.ask()
        _, second = wire.ask(is_repeatable=True)

        again = wire.connection.lost("cut")

        for request, number in zip(again, (1, 2), strict=True):
            request.done({"n": number})
        assert (first, second) == ([{"n": 1}], [{"n": 2}])
        assert isinstance(told[0], ConnectionLost)


class TestHeartbeats:
    def test_one_is_sent_when_nothing_was_heard_for_long_enough(self) -> None:
        wire = Wire()

        assert wire.connection.tick(9.9) == 10
        assert wire.sent() == []
        assert wire.connection.tick(10.0) == 20
        ((kind, number, _),) = wire.sent()
        assert kind == Type.HEARTBEAT
        assert number > 0

    def test_two_without_an_answer_are_the_end(self) -> None:
        wire = Wire()
        for count in range(1, UNANSWERED_MAX + 1):
            wire.connection.tick(10.0 * count)

        with pytest.raises(ConnectionLost, match=r"30\.0 s"):
            wire.connection.tick(10.0 * (UNANSWERED_MAX + 1))

    def test_whatever_is_heard_is_a_sign_of_life(self) -> None:
        wire = Wire()
        wire.connection.tick(10.0)
        wire.connection.tick(20.0)
        wire.now = 21.0

        wire.receive(frame(Type.HEARTBEAT, wire.sent()[-1][1]))

        assert wire.connection.tick(30.0) == 31
        assert (wire.connection.tick(31.0), wire.connection.tick(41.0)) == (41, 51)
        with pytest.raises(ConnectionLost):
            wire.connection.tick(51.0)

    def test_the_brokers_own_is_answered(self) -> None:
        wire = Wire()

        wire.receive(frame(Type.HEARTBEAT, 0))

        assert wire.sent() == [(Type.HEARTBEAT, 0, b"")]


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
        assert (opening["credit"], feed.credit()) == (0, 0)
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


def stored(*values: bytes, offset: int = 0, **fields: Any) -> Batch:
    batch = encode(values, timestamp=1_700_000_000_123_456, **fields)
    batch.stamp(offset, append_time=0)
    return batch


class TestMessage:
    def test_it_has_what_its_batch_says(self) -> None:
        batch = stored(
            b'{"a":1}',
            b"",
            offset=7,
            keys=[None, b"k"],
            subjects=[b"t.x", None],
            headers=[b"Msg-ID: m\r\nName: w\xc3\xb6rt: x\r\n", None],
            tombstones=[False, True],
        )
        first, second = Delivery(parse(batch.data), "t", 5, 3, attempts={1: 4}).messages()

        assert (first.topic, first.partition, first.offset, first.subject) == ("t", 3, 7, "t.x")
        assert (first.value, first.key, first.json(), first.deleted) == (b'{"a":1}', None, {"a": 1}, False)
        assert first.headers == {"Msg-ID": "m", "Name": "wört: x"}
        assert (first.message_id, first.attempts) == ("m", 1)
        assert first.timestamp == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
        assert (second.subject, second.offset, second.key, second.deleted) == ("t", 8, b"k", True)
        assert (second.headers, second.message_id, second.attempts) == ({}, None, 4)
        assert repr(second) == "<Message t 3/8, 0 bytes>"

    def test_a_delivery_gives_those_of_a_range_though_there_are_holes(self) -> None:
        batch = stored(b"0", b"3", b"4", b"9", offset=10, deltas=[0, 3, 4, 9], span=10)
        delivery = Delivery(parse(batch.data), "t", 5, 0)

        assert [message.offset for message in delivery.messages(11, 19)] == [13, 14]
        assert [message.offset for message in delivery.messages(14)] == [14, 19]
        assert delivery.messages(20) == []

    def test_headers_are_read_as_they_were_stored(self) -> None:
        block = b"NATS/1.0 503\r\nA: 1\r\nA: 2\r\n folded: no\r\nB:x \r\n"

        assert read_headers(block) == {"A": "1", "B": "x"}


def make(subject: str = "t", value: bytes | None = b"v", **options: Any) -> Prepared:
    given: dict[str, Any] = {
        "json": ABSENT,
        "key": None,
        "headers": None,
        "message_id": None,
        "delay": None,
        "ttl": None,
    } | options
    return prepare(subject, value, now_us=1_000_000_000_000, **given)


class TestPreparing:
    def test_json_is_written_small_and_as_text(self) -> None:
        assert make(value=None, json={"a": [1, None], "ö": "x"}).value == '{"a":[1,null],"ö":"x"}'.encode()
        assert make(value=None, json=None).value == b"null"

    def test_without_a_value_it_deletes_its_key(self) -> None:
        message = make(value=None, key="k")

        assert (message.value, message.key, message.is_tombstone) == (b"", b"k", True)
        with pytest.raises(TypeError, match="key"):
            make(value=None)

    @pytest.mark.parametrize(("value", "hint"), [("text", "json="), (7, "json="), ([b"x"], "bytes")])
    def test_what_is_not_bytes_is_refused(self, value: Any, hint: str) -> None:
        with pytest.raises(TypeError, match=hint):
            make(value=value)

    def test_a_value_and_json_are_one_too_many(self) -> None:
        with pytest.raises(TypeError, match="not both"):
            make(json=1)

    @pytest.mark.parametrize("subject", ["", "a..b", "a b", "a.*", ">", "a\n", "\ud800", "x" * 2000])
    def test_what_is_no_subject_is_refused(self, subject: str) -> None:
        with pytest.raises(BadSubject, match="invalid subject"):
            make(subject)

    @pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "ö"])
    def test_bad_names_of_headers_are_refused(self, name: str) -> None:
        with pytest.raises(BadHeader, match="name"):
            make(headers={name: "x"})

    @pytest.mark.parametrize("text", ["a\r\nInjected: x", "a\nb", "a\0", " a", "a\t"])
    def test_values_that_would_not_come_back_are_refused(self, text: str) -> None:
        with pytest.raises(BadHeader, match="line break"):
            make(headers={"A": text})
        with pytest.raises(BadHeader, match="line break"):
            make(message_id=text)

    def test_headers_that_are_no_text_are_refused(self) -> None:
        with pytest.raises(TypeError, match="text"):
            make(headers={"A": 1})

    @pytest.mark.parametrize("ttl", [True, False, "", b"5", [5], {}, datetime(2030, 1, 1, tzinfo=UTC), 1j, 0, "x"])
    def test_what_is_no_ttl_is_refused(self, ttl: Any) -> None:
        with pytest.raises(BadHeader, match=r"must be seconds \(1 or more\), a duration like 90s"):
            make(ttl=ttl)

    def test_a_ttl_is_a_number_a_timedelta_or_text(self) -> None:
        for ttl in (5, 5.0, timedelta(seconds=5), "5", "5s"):
            assert make(ttl=ttl).ttl_us == 5_000_000
        assert make(ttl="never").ttl_us is None

    def test_what_is_asked_of_the_broker_is_what_it_reads(self) -> None:
        due = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
        now_us = 1_760_000_000_000_000

        def asked(delay: Any) -> int | None:
            message = prepare("t", b"v", ABSENT, None, None, None, delay, None, now_us)
            assert message.asks
            assert message.headers is not None
            return headers.read(message.headers, now_us).due_us

        assert asked(1.25) == now_us + 1_250_000
        assert asked(timedelta(days=1, microseconds=1)) == now_us + 86_400_000_001
        assert asked(due) == pytest.approx(due.timestamp() * 1_000_000, abs=1)
        assert headers.identity(make(message_id="m").headers or b"") == b"m"

    @pytest.mark.parametrize("delay", [-1, timedelta(days=400), datetime(9000, 1, 1, tzinfo=UTC)])
    def test_delays_that_cannot_be_are_refused(self, delay: Any) -> None:
        with pytest.raises(BadHeader, match="year"):
            make(delay=delay)

    def test_a_time_without_a_zone_is_refused(self) -> None:
        with pytest.raises(ValueError, match="time zone"):
            make(delay=datetime(2026, 1, 1))  # noqa: DTZ001

    def test_headers_of_a_message_that_is_passed_on_ask_again_unless_they_are_given_anew(self) -> None:
        old = {"Nats-Msg-Id": "old", "Other": "x"}

        passed_on, renewed = make(headers=old), make(headers=old, message_id="new")

        assert (passed_on.asks, passed_on.has_identity) == (True, True)
        assert read_headers(renewed.headers or b"") == {"Msg-ID": "new", "Other": "x"}
        assert make(headers={"Penstock-Key": "k"}).key == b"k"


class TestLedger:
    def test_a_mark_is_done_when_all_before_it_is(self) -> None:
        ledger = Ledger()
        first, second = ledger.enter(), ledger.enter()
        mark = ledger.mark()
        later = ledger.enter()

        assert not ledger.is_done(mark)
        ledger.leave(second)
        assert not ledger.is_done(mark)
        ledger.leave(first)
        assert ledger.is_done(mark)
        assert not ledger.is_done(ledger.mark())
        ledger.leave(later)
        assert ledger.is_done(ledger.mark())

    def test_what_goes_on_in_another_shape_is_as_old_as_before(self) -> None:
        ledger = Ledger()
        since = ledger.enter()
        mark = ledger.mark()
        again = ledger.enter(since)
        ledger.leave(since)

        assert not ledger.is_done(mark)
        ledger.leave(again)
        assert ledger.is_done(mark)


def test_a_client_chooses_the_partition_that_the_broker_would() -> None:
    generator = random.Random(7)
    topic = Topic(9, "t", 5, Policy())
    partitions: list[Any] = list(range(5))
    brokers = BrokersTopic(topic, partitions)
    layout = Layout(b"t", 9, 5)

    for _ in range(1000):
        subject = b"t.%d" % generator.randrange(50)
        key = generator.choice([None, generator.randbytes(5)])
        assert layout.choose(subject, key) == partitions.index(brokers.choose(subject, key))
    assert layout.choose(b"t", None) is None
    assert Layout(b"t", 9, 1).choose(b"t", None) == 0


class Bench:
    """A batcher, and the time."""

    def __init__(self, *, partitions: int = 1, timeout: float = 30.0, **options: Any) -> None:
        self.now = 100.0
        self.woken = 0
        ids = iter(range(1, 1_000_000))
        given: dict[str, Any] = {
            "batch_bytes": 1000,
            "linger": 0.005,
            "buffer_bytes": 100_000,
            "compression": Compression.NONE,
            "draw": lambda: next(ids),
        }
        self.batcher = Batcher(
            **given | options,
            timeout=timeout,
            now_us=lambda: 1,
            lock=threading.Lock(),
            wake=self._wake,
        )
        self.batcher.learn(Layout(b"t", 5, partitions))

    def add(self, *values: bytes, subject: str = "t", key: bytes | None = None, **fields: Any) -> None:
        for value in values:
            if key is None and not fields:
                assert self.batcher.add(subject, value)
            else:
                assert self.batcher.add_prepared(Prepared(subject, value, key, **fields))

    def pump(self, after: float = 0.0, *, is_connected: bool = True) -> list[SealedBatch]:
        self.now += after
        return self.batcher.pump(self.now, is_connected=is_connected)

    def seal(self, *values: bytes, **options: Any) -> SealedBatch:
        """A batch of its own, and sent."""
        self.add(*values, **options)
        self.batcher.mark()
        return self.pump()[-1]

    def answer(self, sealed: SealedBatch, error: PenstockError | None = None) -> None:
        self.batcher.answered(sealed, error, self.now)

    def _wake(self) -> None:
        self.woken += 1


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


@pytest.mark.parametrize("seed", range(150))
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
