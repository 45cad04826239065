"""An unexpected exception at any seam harms whoever caused it, visibly, and nobody else.

Each case breaks one function for one victim: it raises what no code expects. Then the victim does what leads there. In
the end the fault is counted, a neighbour with another topic has been served all the time, and new clients are welcome.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, cast

import pytest
import uvloop

from penstock.broker.dedup_windows import DedupWindows
from penstock.broker.dispatcher import Dispatcher
from penstock.broker.intake import Intake
from penstock.broker.partition import Partition
from penstock.broker.position_writer import PositionWriter
from penstock.broker.subscription import Subscription
from penstock.broker.topic import ServedTopic
from penstock.doors.binary.dialect import Binary
from penstock.doors.binary.producing import Producing
from penstock.doors.cursus.dialect import Cursus as CursusDialect
from penstock.doors.gate import Gate
from penstock.doors.provider.dialect import Provider
from penstock.doors.qb.dialect import Qb as QbDialect
from penstock.doors.session import Session
from penstock.doors.text.publisher import TextPublisher
from penstock.doors.text.reading import Reading
from penstock.log import appender
from penstock.log.flush import Write
from penstock.log.flusher import Flusher
from penstock.log.segment_writer import SegmentWriter
from penstock.log.upkeep import Upkeep
from penstock.server import server as servers
from penstock.server.config import load
from penstock.server.server import Server
from penstock.server.statistics import Statistics
from penstock.wire import binary, prefixed, text, websocket
from penstock.wire.binary import Type, json_frame
from tests.support import web
from tests.support.frames import Bare, Frames, messages
from tests.support.lengths import CREATE_TOPIC, PUBLISH, Cursus, Qb
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Raw, Serve, hpub, pub
from tests.support.websocket import WebSocketRaw

VICTIM: Final = b"victim"
# What victims publish: nothing else has these bytes.
POISON: Final = b"poison"


class Running:
    """A server in a thread of this process, so that its functions can be broken."""

    def __init__(self, directory: Path) -> None:
        flags: dict[str, Any] = {
            "server.port": 0,
            "server.quiet_port": 0,
            "server.http_port": 0,
            "server.qb_port": "none",
            "server.heartbeat_s": 1,
            "storage.data_dir": str(directory),
            "storage.upkeep_ms": 20,
            "topic.durability": "flush",
        }
        self._server = Server(load(path=None, environ={}, flags=flags).config)
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "it does not get ready"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.run(self._stop, lambda _: self._ready.set()))

    @property
    def doors(self) -> Serve:
        """As clients know a server: by its ports."""
        return cast(Serve, self)

    @property
    def ports(self) -> dict[str, int]:
        return self._server.ports

    @property
    def port(self) -> int:
        return self.ports["text"]

    @property
    def faults(self) -> dict[str, int]:
        return dict(self._server.broker.health.faults)

    @property
    def connections(self) -> int:
        return len(self._server.sessions)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self.is_alive:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(PATIENCE_S)
        assert not self.is_alive, "it does not stop"


class Neighbour:
    """It publishes, and reads what it published, over connections that must never end."""

    def __init__(self, server: Serve) -> None:
        self._publisher, self._reader = Nats(server), Nats(server)
        self._count = 0
        assert self._ask(self._reader, "SUB neighbour 1\r\nPING") == "PONG"

    def check(self) -> None:
        """It is served."""
        self._count += 1
        self._publisher.send(pub("neighbour", b"%d" % self._count))
        assert self._ask(self._publisher, "PING") == "PONG"
        while (line := self._reader.line()) == "PING":
            self._reader.send("PONG\r\n")
        assert line.startswith("MSG neighbour 1 "), line
        assert self._reader.line() == str(self._count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
        self._reader.close()

    @staticmethod
    def _ask(client: Nats, line: str) -> str:
        """The server asks as well."""
        answer = client.ask(line)
        while answer == "PING":
            client.send("PONG\r\n")
            answer = client.line()
        return answer


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(servers, "_SWEEP_S", 0.02)
    server = Running(tmp_path / "data")
    yield server
    server.stop()


class Seam(NamedTuple):
    """Where to break what, for whom; and what the victim does, and sees."""

    name: str
    owner: Any
    function: str
    # With the arguments of the function.
    is_victim: Callable[..., bool]
    suffer: Callable[[Serve], None]
    # Whether the victim's topic has failed for good: `/healthz` says so.
    fails_topic: bool = False


# What victims do.


def _ends(client: Raw) -> None:
    """The server ends the connection."""
    client.rest()


def publish_flux(server: Serve) -> None:
    with Flux(server) as client:
        client.send(pub("victim", POISON))
        _ends(client)


def publish_flux_refused(server: Serve) -> None:
    """The connection stays: a publisher is told what became of each message."""
    with Flux(server) as client:
        assert client.publish("victim", POISON).startswith("-ERR")
        assert client.publish("elsewhere", b"x") == "+OK"


def publish_flux_stored(server: Serve) -> None:
    with Flux(server) as client:
        assert client.publish("victim", POISON) == "+OK"


def publish_behind_something_awaited(server: Serve) -> None:
    with Flux(server) as client:
        client.send(b"SUB elsewhere 1 group\r\n" + pub("victim", POISON))
        _ends(client)


def publish_websocket(server: Serve) -> None:
    with WebSocketRaw(server) as client:
        client.send(pub("victim", POISON))
        _ends(client)


def subscribe_flux(server: Serve) -> None:
    with Flux(server) as client:
        client.send("SUB victim 1\r\n")
        _ends(client)


def publish_binary(server: Serve) -> None:
    with Frames(server) as client:
        client.request(Type.PUBLISH, messages(["victim"], [POISON]).data)
        _ends(client)


def call_binary(server: Serve) -> None:
    with Frames(server) as client:
        client.request(Type.CALL, {"call": "topic", "name": "victim"})
        _ends(client)


def open_binary(server: Serve) -> None:
    with Frames(server) as client:
        client.request(Type.OPEN, {"subscription": 1, "pattern": "victim"})
        _ends(client)


def publish_provider(server: Serve) -> None:
    with Bare(server) as client:
        client.send(json_frame(Type.DATA, 1, {"topic": "victim", "data": "x"}))
        _ends(client)


def publish_qb(server: Serve) -> None:
    with Qb(server) as client:
        client.begin(CREATE_TOPIC, topic="victim")
        client.begin(PUBLISH, POISON, topic="victim", client_id="victim")
        _ends(client)


def publish_cursus(server: Serve) -> None:
    with Cursus(server) as client:
        client.command("CREATE victim 1")
        client.command(b"PUBLISH victim " + POISON)
        _ends(client)


def read_text(server: Serve) -> None:
    """Its subscription ends, and so does the connection, which could not tell otherwise."""
    with Nats(server) as reader:
        reader.send("SUB victim victim\r\n")
        assert reader.ask("PING") == "PONG"
        publish_flux_stored(server)
        _ends(reader)


def read_flux(server: Serve) -> None:
    with Flux(server) as reader:
        reader.subscribe("victim", "victim")
        publish_flux_stored(server)
        _ends(reader)


def read_what_was_before(server: Serve) -> None:
    """Its subscription ends, and the connection goes on."""
    publish_flux_stored(server)
    with Frames(server) as reader:
        reader.open(1, "victim", start="earliest")
        assert b"internal error" in reader.of_type(Type.ENDED, 1).payload
        assert reader.topic_id("elsewhere")


def create_compacted(server: Serve) -> None:
    """Its keys are there several times, in sealed segments."""
    with Frames(server) as client:
        client.call("create_topic", name="victim", policy={"cleanup": "compact", "segment_bytes": 4096})
    with Flux(server) as client:
        for _ in range(3):
            assert client.publish_with_headers("victim", bytes(5000), penstock_key="k") == "+OK"


def read_binary(server: Serve) -> None:
    with Frames(server) as reader:
        reader.open(1, "victim")
        publish_flux_stored(server)
        _ends(reader)


def read_qb(server: Serve) -> None:
    with Qb(server) as reader:
        reader.create("victim", "victim")
        reader.subscribe("victim")
        publish_flux_stored(server)
        reader.rest()


def read_in_a_group(server: Serve) -> None:
    with Nats(server) as reader:
        reader.send("SUB victim DURABLE:victim 1\r\n")
        assert reader.ask("PING") == "PONG"
        publish_flux_stored(server)
        _ends(reader)


def read_later(server: Serve) -> None:
    """What it missed comes when the partition is well again, or it is told that it does not."""
    with Nats(server) as reader:
        reader.send("SUB victim 1\r\n")
        assert reader.ask("PING") == "PONG"
        publish_flux_stored(server)


def pass_over_in_a_group(server: Serve) -> None:
    """Where a group is that wants other subjects is written now and then."""
    with Flux(server) as client:
        client.subscribe("victim.wanted", "1", "victim")
        assert client.publish("victim.other", POISON) == "+OK"


def publish_for_later(server: Serve) -> None:
    """Both are due together, and only one cannot be moved."""
    with Flux(server) as client:
        client.subscribe("other", "1")
        assert client.publish_with_headers("victim", POISON, delay="20ms") == "+OK"
        client.send(hpub("other", b"late", delay="20ms"))
        found, _ = client.until_ok()
        assert [message.payload for message in found or [client.message()]] == [b"late"]


def ask_varz(server: Serve) -> None:
    assert web.get(server, "/varz").status == 500


def leave(server: Serve) -> None:
    with Nats(server) as client:
        client.send("SUB victim victim\r\n")
        assert client.ask("PING") == "PONG"


def _has_subject(_: Any, run: Any, *__: Any) -> bool:
    return VICTIM in run.subjects


SEAMS: Final = (
    Seam("text parser", text.TextParser, "feed", lambda _, data: VICTIM in data, publish_flux),
    Seam(
        "binary parser",
        binary.FrameReader,
        "filled",
        lambda reader, count: VICTIM in bytes(reader.buffer().obj)[: count + 100],
        publish_binary,
    ),
    Seam("prefixed parser, QB", prefixed.PrefixedReader, "feed", lambda _, data: VICTIM in data, publish_qb),
    Seam("prefixed parser, Cursus", prefixed.PrefixedReader, "feed", lambda _, data: VICTIM in data, publish_cursus),
    Seam("WebSocket parser", websocket.WebSocketParser, "_take_payload", lambda *_: True, publish_websocket),
    Seam("text verb", Reading, "subscribe", lambda _, event: event.subject == VICTIM, subscribe_flux),
    Seam("text verb, awaited", Reading, "_join", lambda _, event: event.subject == VICTIM, subscribe_flux),
    Seam("text verb, behind another", TextPublisher, "_publish", _has_subject, publish_behind_something_awaited),
    Seam("binary verb", Producing, "publish", lambda *_: True, publish_binary),
    Seam("binary verb, awaited", Binary, "_open", lambda *_: True, open_binary),
    Seam("binary call", Binary, "_call", lambda *_: True, call_binary),
    Seam("Provider verb", Provider, "_publish", lambda *_: True, publish_provider),
    Seam("QB verb", QbDialect, "_publish", lambda *_: True, publish_qb),
    Seam("QB verb, awaited", QbDialect, "_create_topic", lambda *_: True, publish_qb),
    Seam("Cursus verb", CursusDialect, "do", lambda *_: True, publish_cursus),
    Seam("Cursus verb, awaited", CursusDialect, "_create", lambda *_: True, publish_cursus),
    Seam("prepare", DedupWindows, "open", lambda _, topic: topic.name == VICTIM, publish_flux),
    Seam("intake, text", Intake, "publish", _has_subject, publish_flux),
    Seam("intake, binary", Intake, "publish", _has_subject, publish_binary),
    Seam("intake, Provider", Intake, "publish", _has_subject, publish_provider),
    Seam("intake, QB", Intake, "publish", _has_subject, publish_qb),
    Seam("intake, Cursus", Intake, "publish", _has_subject, publish_cursus),
    Seam("gather", appender, "batch_bytes", lambda run: VICTIM in run.subjects, publish_flux),
    Seam("encode", Write, "_encode", lambda write, *_: write.log.terms.subject == VICTIM, publish_flux_refused),
    Seam(
        "write",
        SegmentWriter,
        "write",
        lambda _, batches: any(POISON in bytes(batch.data) for batch in batches),
        publish_flux_refused,
        fails_topic=True,
    ),
    Seam(
        "begin",
        Flusher,
        "begin_write",
        lambda flusher: flusher.terms.subject == VICTIM and flusher.marks.end,
        publish_flux_refused,
        fails_topic=True,
    ),
    Seam(
        "finish",
        Flusher,
        "finish_write",
        lambda flusher, _: flusher.terms.subject == VICTIM,
        publish_flux_refused,
        fails_topic=True,
    ),
    Seam(
        "finish of a sync",
        Flusher,
        "finish_sync",
        lambda flusher, *_: flusher.terms.subject == VICTIM and flusher.marks.end,
        publish_flux_refused,
        fails_topic=True,
    ),
    Seam(
        "commit",
        Flusher,
        "commit",
        lambda flusher: flusher.terms.subject == VICTIM and flusher.marks.end,
        publish_flux_refused,
        fails_topic=True,
    ),
    Seam("deliver, partition", Partition, "serve", lambda place, _: place.name == VICTIM, read_later),
    Seam("deliver, text", text, "messages", lambda _, sid, **__: sid == VICTIM, read_text),
    Seam("deliver, Flux", text, "numbered_messages", lambda _, sid, __: sid == VICTIM, read_flux),
    Seam(
        "deliver, behind",
        Subscription,
        "_read_next",
        lambda _, cursor, __: cursor.partition.name == VICTIM,
        read_what_was_before,
    ),
    Seam("deliver, binary", binary, "messages_frame", lambda *_: True, read_binary),
    Seam("deliver, QB", QbDialect, "send", lambda *_: True, read_qb),
    Seam("group", Dispatcher, "_serve", lambda _, position: position.partition.name == VICTIM, read_in_a_group),
    Seam("timer", PositionWriter, "_write_later", lambda writer: VICTIM in writer._group, pass_over_in_a_group),
    Seam("mover", ServedTopic, "choose", lambda _, subject, *__: subject == VICTIM, publish_for_later),
    Seam("retention", Upkeep, "retain", lambda upkeep: upkeep._terms.subject == VICTIM, publish_flux_stored),
    Seam("compaction", Upkeep, "compact", lambda upkeep, _: upkeep._terms.subject == VICTIM, create_compacted),
    Seam("HTTP", Statistics, "__call__", lambda _: True, ask_varz),
    Seam("sweep", Gate, "sweep", lambda *_: True, lambda _: None),
    Seam("end of a connection", Session, "unsubscribe", lambda _, sid: sid == VICTIM, leave),
)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_an_unexpected_exception_harms_only_its_victim(
    running: Running, monkeypatch: pytest.MonkeyPatch, seam: Seam
) -> None:
    server = running.doors
    with Neighbour(server) as neighbour:
        neighbour.check()
        raised = _break(monkeypatch, seam)
        seam.suffer(server)
        _wait_until(raised.is_set)
        # It is broken all the while: what is tried again fails again.
        for _ in range(5):
            neighbour.check()
        _wait_until(lambda: running.faults != {})
        assert running.is_alive
        if seam.fails_topic:
            answer = web.get(server, "/healthz")
            assert (answer.status, "victim" in answer.json["error"]) == (503, True), answer.body
        with Neighbour(server) as newcomer:
            newcomer.check()
    _wait_until(lambda: not running.connections)


def _break(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> threading.Event:
    """Let a function raise for its victim; set when it has."""
    raised = threading.Event()
    whole = getattr(seam.owner, seam.function)

    def broken(*args: Any, **named: Any) -> Any:
        if seam.is_victim(*args, **named):
            raised.set()
            raise RuntimeError(f"a bug in {seam.name}")
        return whole(*args, **named)

    monkeypatch.setattr(seam.owner, seam.function, broken)
    return raised


def _wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it does not come to that"
        time.sleep(0.005)
