"""The frames of a refresh, bare and of the Provider."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client.feed import Feed, SubscriptionOptions
from penstock.errors import BadFrame
from penstock.wire import binary
from penstock.wire.binary import Type, Verb, json_frame
from tests.support.client_core import Wire, nothing
from tests.support.client_core import delivered as delivery
from tests.support.frames import Frames, delivered, read_json
from tests.support.provider_door import ACK, READY, RESET
from tests.support.provider_door import Client as ProvidersClient
from tests.support.refresh_clients import VALUES, new_topic, wait_for
from tests.support.server import Serve

RESET_ACK, READY_ACK = 0x0B, 0x0C


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def topic() -> str:
    return new_topic()


# ---- bare frames


def test_the_frames_of_a_refresh(server: Serve, topic: str) -> None:
    with Frames(server) as client:
        client.publish(topic, *VALUES)
        client.open(7, topic, group=topic, start="earliest", refresh=True)
        place = client.delivered(4, 7)[-1]
        client.settle(Verb.ACK, place, 0, 1, 2, 3, subscription=7)
        client.call("refresh_topic", name=topic)
        reset = client.of_type(Type.RESET)
        assert read_json(reset) == {"subscription": 7, "topic": topic}
        client.send(binary.frame(Type.ACK, reset.id))
        again = delivered(client.of_type(Type.MESSAGES, 7))
        assert [message.offset for message in again] == [0, 1, 2, 3]
        assert client.settle(Verb.ACK, place, 0, subscription=7) == [0], "that was before"
        client.settle(Verb.ACK, again[0], 0, 1, 2, 3, subscription=7)
        ready = client.of_type(Type.READY)
        assert (read_json(ready), ready.id > reset.id) == ({"subscription": 7, "topic": topic}, True)
        client.send(binary.frame(Type.READY_ACK, ready.id))
        client.sync()
        wait_for(lambda: client.call("refresh_status", name=topic)["state"] == "COMPLETED")
        client.send(binary.frame(Type.ACK, ready.id))
        client.sync()


def test_an_answer_that_was_not_asked_for_ends_the_connection(server: Serve) -> None:
    with Frames(server) as client:
        client.send(binary.frame(Type.ACK, 1))
        assert client.goodbye()["code"] == "BAD_FRAME"


def test_only_members_of_a_group_can_be_told(server: Serve, topic: str) -> None:
    with Frames(server) as client:
        assert client.open_refused(1, topic, refresh=True)["code"] == "BAD_REQUEST"


def test_who_comes_while_it_waits_is_answered_before_it_is_told(server: Serve, topic: str) -> None:
    with Frames(server) as first, Frames(server) as second:
        first.publish(topic, *VALUES)
        first.open(1, topic, group=topic, refresh=True)
        first.call("refresh_topic", name=topic)
        first.of_type(Type.RESET)
        number = second.request(Type.OPEN, {"subscription": 1, "pattern": topic, "group": topic, "refresh": True})
        assert [second.frame()[:2], second.frame().type] == [(Type.RESULT, number), Type.RESET]
        assert first.open_refused(2, topic, group=topic)["code"] == "REFRESH_CONFLICT"


@pytest.mark.parametrize("fields", [{}, {"subscription": "1", "topic": "t"}, {"subscription": 1, "topic": 2}])
def test_a_client_refuses_a_word_that_lacks_something(fields: dict[str, Any]) -> None:
    wire = Wire()
    with pytest.raises(BadFrame):
        wire.receive(json_frame(Type.RESET, 1, fields))


def make_feed() -> Feed:
    options = SubscriptionOptions(pattern="t", group="g", mode="shared", start="latest", buffer=10, refreshes=True)
    return Feed(options, lock=threading.Lock(), wake=nothing, arrived=nothing, respond=lambda _: None)


def test_a_word_is_answered_behind_what_was_said_of_the_messages_before_it() -> None:
    wire = Wire()
    feed = make_feed()
    number = wire.open(feed)
    wire.receive(delivery(number, b"a") + json_frame(Type.RESET, 9, {"subscription": number, "topic": "t"}))
    wire.receive(delivery(number, b"b", offset=1))
    message = feed.take()
    assert message is not None
    assert (feed.take(), feed.is_ready) == (None, True)
    notice = feed.notice()
    assert notice is not None
    assert (notice.word, notice.topic, feed.notice(), feed.is_ready) == ("RESET", "t", None, False)
    assert [each.value for each in feed.unread()] == [b"b"]
    assert feed.take() is None
    feed.complete(notice)
    wire.connection.confirm(feed)
    assert wire.sent() == [(Type.ACK, 9, b"")]
    behind = feed.take()
    assert (behind and behind.value) == b"b"


def test_a_word_of_a_connection_that_is_gone_is_not_answered_on_another() -> None:
    wire = Wire()
    feed = make_feed()
    number = wire.open(feed)
    wire.receive(json_frame(Type.RESET, 1, {"subscription": number, "topic": "t"}))
    notice = feed.notice()
    assert notice is not None
    wire.connection.lost("cut")
    wire = Wire()
    number = wire.open(feed)
    wire.receive(json_frame(Type.RESET, 1, {"subscription": number, "topic": "t"}) + delivery(number, b"a"))
    assert (feed.take(), feed.notice(), feed.is_ready) == (None, None, False), "the first is still being heeded"
    feed.complete(notice)
    wire.connection.confirm(feed)
    assert wire.sent() == []
    second = feed.notice()
    assert second is not None
    feed.complete(second)
    wire.connection.confirm(feed)
    assert wire.sent() == [(Type.ACK, 1, b"")]


# ---- the Provider's frames


@pytest.mark.parametrize(("to_reset", "to_ready"), [(ACK, ACK), (RESET_ACK, READY_ACK)])
def test_a_client_of_the_provider_is_refreshed(server: Serve, topic: str, to_reset: int, to_ready: int) -> None:
    """WI-35, WI-36, WI-44, CA-05"""
    with ProvidersClient(server) as client, Frames(server) as asker:
        for value in "0123":
            client.publish(topic, value)
        client.subscribe(topic)
        old, records = client.data()
        while len(records) < 4:
            client.write(ACK, old)
            old, more = client.data()
            records += more
        asker.call("refresh_topic", name=topic)
        reset = client.frame()
        assert (reset.type, json.loads(reset.payload)) == (RESET, {"topic": topic})
        client.write(to_reset, reset.id)
        number, records = client.data()
        assert records[0]["data"] == "0"
        client.write(ACK, old)
        assert asker.call("refresh_status", name=topic)["state"] == "REPLAYING", "that was of the old state"
        client.write(ACK, number)
        client.records(4 - len(records))
        ready = client.frame()
        assert (ready.type, json.loads(ready.payload)) == (READY, {"topic": topic})
        assert asker.call("refresh_status", name=topic)["state"] == "READY_SENT"
        client.write(to_ready, ready.id)
        wait_for(lambda: asker.call("refresh_status", name=topic)["state"] == "COMPLETED")
        client.publish(topic, "live")
        assert [record["data"] for record in client.records(1)] == ["live"]


def test_one_that_vanishes_is_told_again_when_it_is_back(server: Serve, topic: str) -> None:
    with Frames(server) as asker:
        with ProvidersClient(server) as client:
            client.publish(topic, "0")
            client.subscribe(topic)
            client.records(1)
            asker.call("refresh_topic", name=topic)
            assert client.frame().type == RESET
        wait_for(lambda: not asker.call("group", name=f"{topic}:viewers")["members"])
        [group] = asker.call("refresh_status", name=topic)["groups"]
        assert (group["group"], group["waits_for"]) == (f"{topic}:viewers", ["127.0.0.1"])
        with ProvidersClient(server) as client:
            client.subscribe(topic)
            reset = client.frame()
            assert reset.type == RESET
            client.write(ACK, reset.id)
            assert [record["data"] for record in client.records(1)] == ["0"]
            assert client.frame().type == READY


def test_one_that_never_answers_is_disconnected_with_the_reason(server: Serve, topic: str) -> None:
    with Frames(server) as asker, ProvidersClient(server) as client:
        asker.call("create_topic", name=topic, policy={"refresh_wait_ms": 200})
        client.publish(topic, "0")
        client.subscribe(topic)
        client.records(1)
        asker.call("refresh_topic", name=topic)
        goodbye = client.goodbye()
        assert goodbye["code"] == "REFRESH_ABORTED"
        assert "127.0.0.1 did not answer RESET within 0.2 s" in goodbye["text"]
        assert asker.call("refresh_status", name=topic)["state"] == "ABORTED"
