"""A bug in one connection closes that connection, and everyone else is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from penstock import Broker
from penstock.doors import publishing
from penstock.doors.binary.dialect import Binary
from penstock.doors.cursus import dialect as cursus
from penstock.doors.cursus.consuming import Consuming
from penstock.doors.cursus.dialect import Cursus as CursusDialect
from penstock.doors.provider.dialect import Provider
from penstock.doors.qb.dialect import Qb as QbDialect
from penstock.doors.session import Session
from penstock.doors.text.dialect import Text
from penstock.doors.text.publisher import TextPublisher
from penstock.doors.text.reading import Reading
from penstock.server.server import Server
from penstock.wire import binary, text
from penstock.wire.binary import Type
from tests.support.frames import Bare, Frames
from tests.support.lengths import CREATE_SUBSCRIPTION, CREATE_TOPIC, PUBLISH, SUBSCRIBE, Cursus, Qb
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Raw, Serve

BOOM: Final = "BOOM"


class Bug(Exception):
    """What no code of ours raises."""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(listen="127.0.0.1:0", settings={"server.heartbeat_s": 1}) as broker:
        yield broker


@pytest.fixture(scope="module")
def inside(broker: Broker) -> Server:
    server = broker._server_thread._server
    assert server is not None
    return server


@pytest.fixture(scope="module")
def server(inside: Server) -> Serve:
    return cast(Serve, SimpleNamespace(ports=inside.ports, port=inside.ports["text"]))


@pytest.fixture(autouse=True)
def bystander(broker: Broker, inside: Server, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each test causes at least one fault, and another client does not notice."""
    caplog.set_level(logging.CRITICAL, logger="penstock.health")
    before = inside.broker.store.health.faults["session"]
    with broker.subscribe("others") as others:
        yield
        assert inside.broker.store.health.faults["session"] > before
        broker.publish("others", b"x")
        assert others.get(PATIENCE_S).value == b"x"


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    broker.create_topic(name)
    return name


def breaks(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, only: Callable[..., bool] | None = None) -> None:
    """Let a function raise, if its arguments say so: by default, if the word BOOM is in one of them."""
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if only(*args) if only is not None else BOOM in repr(args):
            raise Bug
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def ends(client: Raw) -> str:
    told = client.rest()
    assert "internal error" in told.lower()
    return told


# What comes in.


def test_the_parser(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, text.TextParser, "feed")
    with Flux(server) as client:
        client.send("BOOM\r\n")
        ends(client)


def test_a_command(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Text, "do")
    with Flux(server) as client:
        client.send("PING\r\nSTATS BOOM\r\n")
        ends(client)


def test_a_command_behind_one_that_waits(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Text, "do")
    with Flux(server) as client:
        client.send("SUB a 1 g\r\nSTATS BOOM\r\n")
        ends(client)


def test_a_command_that_waits(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Reading, "_join")
    with Flux(server) as client:
        client.send("SUB BOOM 1 g\r\n")
        ends(client)


def test_frames(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Binary, "do")
    with Frames(server) as client:
        client.request(Type.CALL, {"call": BOOM})
        ends(client)
    with Frames(server) as client:
        # Behind one that waits.
        client.send(
            binary.json_frame(Type.OPEN, 1, {"subscription": 1, "pattern": "a", "group": "g"})
            + binary.json_frame(Type.CALL, 2, {"call": BOOM})
        )
        ends(client)


def test_a_call(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Binary, "_call")
    with Frames(server) as client:
        client.request(Type.CALL, {"call": BOOM})
        ends(client)


def test_the_provider(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Provider, "do")
    with Bare(server) as client:
        client.send(binary.json_frame(Type.DATA, 1, {"topic": BOOM}))
        ends(client)


def test_cursus(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, CursusDialect, "_run")
    breaks(monkeypatch, cursus, "_read")
    with Cursus(server) as client:
        client.command("BOOM")
        ends(client)
    with Cursus(server) as client:
        # Behind one that waits.
        client.send(b"\0\0\0\x04LIST\0\0\0\x04BOOM")
        ends(client)


def test_cursus_while_it_follows(server: Serve, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Consuming, "_write", lambda *_: True)
    broker.publish(topic, b"BOOM")
    with Cursus(server) as client:
        client.command(f"STREAM {topic} 0 0")
        ends(client)


def test_qb(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, QbDialect, "_create_topic")
    breaks(monkeypatch, QbDialect, "_publish")
    with Qb(server) as client:
        client.begin(CREATE_TOPIC, topic=BOOM)
        ends(client)
    with Qb(server) as client:
        client.send(client.frame(CREATE_TOPIC, 1, topic="a") + client.frame(PUBLISH, 2, topic=BOOM))
        ends(client)


# What the broker says.


def test_a_delivery(server: Serve, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, text, "messages", lambda run, *_: b"BOOM" in run.values)
    breaks(monkeypatch, binary, "messages_frame")
    with Nats(server) as nats, Frames(server) as frames, Flux(server) as whole:
        nats.send(f"SUB {topic} 1\r\n")
        assert nats.ask("PING") == "PONG"
        frames.result(Type.OPEN, {"subscription": 1, "pattern": topic})
        whole.subscribe(topic, "1")
        with Frames(server) as publisher:
            publisher.publish(topic, b"BOOM")
        assert whole.message().payload == b"BOOM"
        ends(nats)
        ends(frames)


def test_a_delivery_to_qb_and_cursus(
    server: Serve, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, QbDialect, "send", lambda *_: True)
    breaks(monkeypatch, CursusDialect, "send", lambda *_: True)
    with Qb(server) as qb, Cursus(server) as cursus:
        qb.done(CREATE_SUBSCRIPTION, subscription_id=topic, topic=topic)
        qb.done(SUBSCRIBE, subscription_id=topic, subscriber_id="me")
        cursus.subscribe(topic)
        broker.publish(topic, b"x")
        ends(qb)
        ends(cursus)


def test_the_end_of_a_group(server: Serve, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, QbDialect, "fail", lambda *_: True)
    with Qb(server) as qb:
        qb.done(CREATE_SUBSCRIPTION, subscription_id=topic, topic=topic)
        qb.done(SUBSCRIBE, subscription_id=topic, subscriber_id="me")
        broker.delete_group(topic)
        ends(qb)


def test_the_answer_to_a_publish(server: Serve, broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, TextPublisher, "_lines", lambda *_: True)
    breaks(monkeypatch, publishing, "_decided", lambda *_: True)
    with Flux(server) as flux:
        flux.send(f"PUB {topic} 1\r\nx\r\n")
        ends(flux)
    with Qb(server) as qb:
        qb.begin(PUBLISH, b"x", topic=topic, publisher_id="me")
        ends(qb)


def test_the_answer_to_an_acknowledgement(server: Serve, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Flux(server) as flux:
        flux.subscribe(topic, "1", "g")
        assert flux.publish(topic, b"x") == "+OK"
        message = flux.message()
        breaks(monkeypatch, Text, "ok_line", lambda *_: True)
        flux.send(f"ACK {message.sequence}\r\n")
        ends(flux)


# The server's timers.


def test_a_ping(server: Serve, inside: Server) -> None:
    with Nats(server, name="victim") as nats:
        [session] = [each for each in inside.sessions if each.name == "victim"]
        session.unanswered = "x"  # type: ignore[assignment]
        ends(nats)


def test_words_that_cannot_be_said(server: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, Text, "do")
    breaks(monkeypatch, Text, "disconnect", lambda *_: True)
    with Flux(server) as client:
        client.send("STATS BOOM\r\n")
        assert client.rest() == ""


def test_an_end_that_fails_takes_the_connection_off_the_table(
    server: Serve, inside: Server, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch, Session, "unsubscribe", lambda *_: True)
    with Nats(server, name="victim") as nats:
        nats.send(f"SUB {topic} 1\r\n")
        assert nats.ask("PING") == "PONG"
    until = time.monotonic() + PATIENCE_S
    while any(each.name == "victim" for each in inside.sessions) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(each.name == "victim" for each in inside.sessions)
