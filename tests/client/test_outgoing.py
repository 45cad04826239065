"""Messages as a client sees them, and those that it prepares to send."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.broker.topic import ServedTopic as BrokersTopic
from penstock.client.ledger import Ledger
from penstock.client.message import Delivery
from penstock.client.outgoing import ABSENT, Prepared, prepare
from penstock.client.partitioner import Layout
from penstock.client.values import read_headers
from penstock.errors import (
    BadHeader,
    BadSubject,
)
from penstock.log.policy import Policy, Topic
from penstock.model import headers
from penstock.model.batch import parse
from tests.support.client_core import stored


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
