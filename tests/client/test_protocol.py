"""A client's connection without I/O: greeting, replies and heartbeats."""

from __future__ import annotations

from typing import Any, Final

import pytest

from penstock.client.protocol import UNANSWERED_MAX, Batches
from penstock.errors import (
    BadFrame,
    Closed,
    ConnectionLost,
    GroupConflict,
    OffsetOutOfRange,
    Unauthorized,
)
from penstock.wire.binary import (
    Type,
    batches_head,
    frame,
    json_frame,
    read_json,
)
from tests.support.client_core import HELLO, Wire

INFO: Final = b'INFO {"server_id":"s"}\r\n'


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
