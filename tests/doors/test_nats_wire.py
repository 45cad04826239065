"""What NATS clients are sent, byte by byte: the same commands go to nats-server and to Penstock, and the answers are
compared."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import pytest
from nats.micro import add_service
from nats.micro.service import EndpointConfig, ServiceConfig

from tests.support.process import PATIENCE_S
from tests.support.server import Nats, Raw, Serve, hpub, pub, reserve_port

_NATS_SERVER: Final = Path(sys.executable).with_name("nats-server")
_INFO: Final = re.compile(rb"^INFO (.*?) *$")


class NatsServer:
    """nats-server on free ports, until its block ends."""

    def __init__(self, *flags: str) -> None:
        self.port, self.http_port = reserve_port(self), reserve_port(self)
        command = [str(_NATS_SERVER), "-a", "127.0.0.1", "-p", str(self.port), "-m", str(self.http_port), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                Raw(self.port).close()
            except ConnectionRefusedError:
                assert time.monotonic() < until, "nats-server does not start"
                time.sleep(0.01)
            else:
                break

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)


QUEUES: Final = count()


@pytest.fixture(scope="module")
def real() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("wire")) as server:
        yield server


def transcript(port: int, commands: bytes, **options: object) -> list[bytes]:
    """What comes up to the PONG of a PING behind the commands, or the end, as lines; without INFO."""
    with Raw(port) as client:
        client.send(b"CONNECT %b\r\n%bPING\r\n" % (json.dumps(options).encode(), commands))
        found: list[str] = []
        try:
            while not found or found[-1] != "PONG":
                found.append(client.line())
        except AssertionError:
            found.append("the end")
    return [line.encode() for line in found if not line.startswith("INFO ")]


def infos(port: int, **options: object) -> list[dict[str, Any]]:
    """The INFO of a new connection, and that behind its first PONG, if there is one."""
    with Raw(port) as client:
        client.send(
            b"CONNECT %b\r\nPING\r\nSUB x 1\r\nPUB x 0\r\n\r\n" % json.dumps({"verbose": False} | options).encode()
        )
        lines: list[str] = []
        while not lines or not lines[-1].startswith("MSG "):
            lines.append(client.line())
    return [json.loads(line.removeprefix("INFO ")) for line in lines if line.startswith("INFO ")]


# ---- INFO

# What nats-server has and Penstock does not: the key for encrypted calls to an authorization service.
_ABSENT: Final = {"xkey"}


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize("flags", [(), ("--user", "u", "--pass", "p"), ("--auth", "t")], ids=["open", "user", "token"])
def test_info_has_the_fields_of_nats_server(tmp_path: Path, flags: tuple[str, ...], protocol: int) -> None:
    options: dict[str, object] = {"user": "u", "pass": "p", "auth_token": "t", "protocol": protocol}
    settings = {(): {}, ("--user", "u", "--pass", "p"): {"auth_user": "u", "auth_password": "p"}}
    real = NatsServer(*flags)
    wanted = infos(real.port, **options)
    real.close()
    with Serve(tmp_path, **settings.get(flags, {"auth_token": "t"})) as server:
        found = infos(server.port, **options)
    assert len(found) == len(wanted) == 1 + protocol
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.keys() - ours.keys() == _ABSENT
        assert {name: type(ours[name]) for name in theirs.keys() - _ABSENT} == {
            name: type(theirs[name]) for name in theirs.keys() - _ABSENT
        }
        same = (
            "proto",
            "host",
            "headers",
            "max_payload",
            "client_ip",
            "auth_required",
            "connect_info",
            "remote_account",
        )
        assert {name: ours.get(name, False) for name in same} == {name: theirs.get(name, False) for name in same}


# ---- Subjects that begin with $

DOLLAR: Final = [
    b"$JS.API.INFO",
    b"$SYS.REQ.SERVER.PING",
    b"$KV.b.k",
    b"$O.b.C.x",
    b"$SRV.PING",
    b"$mine.x",
    b"$",
    b"$delayed",
]


@pytest.mark.parametrize("subject", DOLLAR)
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("no_responders", [False, True])
def test_a_request_to_a_dollar_subject_is_answered_as_by_nats_server(
    server: Serve, real: NatsServer, subject: bytes, verbose: bool, no_responders: bool
) -> None:
    commands = b"SUB r 1\r\nPUB %b r 0\r\n\r\nPUB %b 1\r\nx\r\n" % (subject, subject)
    options = {"verbose": verbose, "headers": True, "no_responders": no_responders}
    found, wanted = (transcript(each.port, commands, **options) for each in (server, real))
    assert found[-1] == wanted[-1] == b"PONG"
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("subject", DOLLAR)
def test_a_dollar_subject_is_live(server: Serve, real: NatsServer, subject: bytes) -> None:
    commands = b"SUB %b 1\r\nSUB > 2\r\nPUB %b r 1\r\nx\r\nHPUB %b 18 19\r\nNATS/1.0\r\nA: b\r\n\r\ny\r\n"
    commands %= (subject, subject, subject)
    options = {"verbose": False, "headers": True, "no_responders": True}
    found, wanted = (transcript(each.port, commands, **options) for each in (server, real))
    assert found[-1] == wanted[-1] == b"PONG"
    assert sorted(found) == sorted(wanted)


def test_a_header_asks_nothing_of_a_message_that_is_not_stored(server: Serve, real: NatsServer) -> None:
    commands = b"SUB _I.1 1\r\nHPUB _I.1 26 27\r\nNATS/1.0\r\nDelay: never\r\n\r\nx\r\n"
    options = {"verbose": False, "headers": True}
    assert transcript(server.port, commands, **options) == transcript(real.port, commands, **options)


def test_headers_that_ask_for_a_trace_are_delivered_and_nothing_is_traced(server: Serve) -> None:
    with Nats(server) as client:
        client.send("SUB traced 1\r\nSUB traces 2\r\n")
        head = b"NATS/1.0\r\nNats-Trace-Dest: traces\r\nNats-Trace-Only: true\r\n\r\n"
        client.send(b"HPUB traced %d %d\r\n%bx\r\n" % (len(head), len(head) + 1, head))
        message = client.message()
        assert (message.subject, message.payload) == ("traced", b"x")
        assert message.headers == head
        assert client.ask("PING") == "PONG"


def test_nothing_under_a_dollar_subject_is_stored(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as client:
        client.send(b"".join(pub(subject.decode(), b"x") for subject in DOLLAR))
        assert client.ask("PING") == "PONG"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/admin/topics") as answer:
            assert json.load(answer)["topics"] == []


# nats-py's services ask for the time in a way that Python 3.12 warns of.
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
def test_a_service_of_nats_micro_is_found_and_answers(server: Serve) -> None:
    async def work() -> None:
        one, other = await nats.connect(server.url), await nats.connect(server.url)
        service = await add_service(one, ServiceConfig(name="echo", version="1.0.0"))

        async def echo(request: Any) -> None:
            await request.respond(request.data)

        await service.add_endpoint(EndpointConfig(name="say", subject="echo.say", handler=echo))
        await one.flush()
        assert json.loads((await other.request("$SRV.PING", timeout=PATIENCE_S)).data)["name"] == "echo"
        assert json.loads((await other.request("$SRV.INFO.echo", timeout=PATIENCE_S)).data)["version"] == "1.0.0"
        assert (await other.request("echo.say", b"hello", timeout=PATIENCE_S)).data == b"hello"
        assert json.loads((await other.request("$SRV.STATS.echo", timeout=PATIENCE_S)).data)["endpoints"]
        await service.stop()
        await one.close()
        await other.close()

    bounded(work)


# ---- Messages that cannot be stored

ODD: Final = [
    *(b"a.*", b"a.>", b"a.>.b", b"*", b">", b"a..b", b"a.", b".a"),
    *(b"a.\xff", b"a.\x01b", b"a." + b"x" * 1100, b"a.\x7f"),
]


@pytest.mark.parametrize("pedantic", [False, True])
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd[:8]))
def test_what_cannot_be_stored_is_delivered_as_by_nats_server(
    server: Serve, real: NatsServer, odd: bytes, verbose: bool, pedantic: bool
) -> None:
    """As the subject, as a reply, as a pattern, and with headers."""
    # A queue of its own: nats-server may not know yet that the connection of another case is closed.
    queue = b"q%d" % next(QUEUES)
    commands = b"SUB %b 1\r\nSUB > 2\r\nSUB a.* %b 3\r\n" % (odd, queue)
    commands += b"PUB %b 1\r\nx\r\nPUB _a %b 1\r\ny\r\n" % (odd, odd)
    commands += b"HPUB %b r 18 19\r\nNATS/1.0\r\nA: b\r\n\r\nz\r\n" % odd
    options = {"verbose": verbose, "pedantic": pedantic, "headers": True, "no_responders": True}
    found, wanted = (transcript(each.port, commands, **options) for each in (server, real))
    assert found[-1] == wanted[-1] == b"PONG"
    assert sorted(found) == sorted(wanted)


def test_what_is_not_stored_is_counted(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as client:
        client.send(b"PUB orders 1\r\nx\r\nPUB orders..x 1\r\nx\r\nPUB orders reply.* 1\r\nx\r\nPUB orders 1\r\ny\r\n")
        assert client.ask("PING") == "PONG"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/varz") as answer:
            assert json.load(answer)["since_start"]["unstored"] == 2
        client.close()
        server.stop()
        assert [message["value"] for message in server.dump("orders")] == ["x", "y"]


def test_when_storing_is_refused_an_error_names_the_message_before_the_pong(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_topics_max=1) as server, Nats(server) as client:
        late = hpub("one", b"never", delay="never")
        client.send(pub("one", b"a"))
        assert client.ask("PING") == "PONG"
        client.send(pub("two.x", b"b") + late + pub("one", b"c") + b"PING\r\n")
        assert client.line().startswith('-ERR \'Permissions Violation for Publish to "two.x": STORAGE TOO_MANY_TOPICS')
        assert client.line().startswith('-ERR \'Permissions Violation for Publish to "one": STORAGE BAD_HEADER')
        assert client.line() == "PONG"
        # What was refused is not held against what comes later.
        client.send(pub("one", b"d"))
        assert client.ask("PING") == "PONG"
        client.close()
        server.stop()
        assert [message["value"] for message in server.dump("one")] == ["a", "c", "d"]


def test_a_verbose_client_gets_an_error_in_place_of_ok(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_topics_max=1) as server, Raw(server.port) as client:
        client.line()
        client.send(b"CONNECT {}\r\n" + pub("one", b"a"))
        answers = [client.line() for _ in range(2)]
        client.send(pub("two", b"b") + pub("one", b"c") + b"PING\r\n")
        answers += [client.line() for _ in range(3)]
        assert [answer[:4] for answer in answers] == ["+OK", "+OK", "-ERR", "+OK", "PONG"]


def test_a_client_survives_that_storing_is_refused(tmp_path: Path) -> None:
    async def work(server: Serve) -> None:
        told: list[str] = []

        async def note(error: Exception) -> None:
            told.append(str(error))

        client = await nats.connect(server.url, error_cb=note, allow_reconnect=False)
        await client.publish("one", b"a")
        for _ in range(2):
            await client.flush()
        await client.publish("two", b"b")
        for _ in range(2):  # the PING of the first goes ahead of the messages
            await client.flush()
        assert len(told) == 1
        assert 'permissions violation for publish to "two"' in told[0].lower()
        assert "two" in str(client.last_error)
        subscription = await client.subscribe("one")
        await client.publish("one", b"c")
        assert (await subscription.next_msg(PATIENCE_S)).data == b"c"
        await client.close()

    with Serve(tmp_path, topic_topics_max=1) as server:
        bounded(lambda: work(server))


def bounded(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            await work()

    asyncio.run(run())
