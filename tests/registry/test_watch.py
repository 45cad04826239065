"""A broker and its registry: what it takes from it, what it does without it, and what it never acts upon."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.errors import BadTopology, NoBroker, Overloaded, TimedOut, UnknownNode
from penstock.pipe.ask import ask, http_client
from penstock.pipe.registry import delay_s, watch
from penstock.pipe.topology import Role, Topology
from tests.support.process import PATIENCE_S
from tests.support.registries import Answer, Answers, Registry, as_json, until
from tests.support.server import Serve

NODE: Final = "shop-1"
# It is asked again at once, so that a test waits for answers and not for time.
POLL_MS: Final = 5
NOBODY: Final = "http://127.0.0.1:1"


def topology(version: int = 1, **changes: Any) -> Topology:
    found = Topology(node_id=NODE, role=Role.POS, parents=("http://l3:8222",), version=version)
    return replace(found, **changes)


def right(version: int = 1, **changes: Any) -> Answer:
    return as_json(topology(version, **changes).to_json() | {"cloudDataUrl": "", "cloudDataUrlFallback": ""})


class Broker:
    """What a broker has of the registry."""

    def __init__(self) -> None:
        self.followed: asyncio.Queue[Topology] = asyncio.Queue()
        self.fails = 0

    async def follow(self, topology: Topology) -> None:
        if self.fails:
            self.fails -= 1
            raise Overloaded("not now")
        self.followed.put_nowait(topology)

    async def next(self) -> Topology:
        return await asyncio.wait_for(self.followed.get(), PATIENCE_S)


@asynccontextmanager
async def watching(url: str, path: Path) -> AsyncIterator[Broker]:
    broker = Broker()
    task = asyncio.create_task(watch(url, NODE, POLL_MS, path, broker.follow))
    try:
        yield broker
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def asked_again(answers: Answers, times: int = 3) -> None:
    """Until so many requests more were answered."""
    count = len(answers.asked) + times + 1
    await asyncio.to_thread(until, lambda: len(answers.asked) >= count)


def kept_in(path: Path) -> Topology:
    return Topology.from_json(json.loads(path.read_text()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topology.json"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock")
    return caplog


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# ---- an answer that is right


async def follow_changes(path: Path) -> None:
    with Answers(lambda _: right(1)) as answers:
        async with watching(answers.url + "/", path) as broker:
            assert await broker.next() == topology(1)
            assert kept_in(path) == topology(1)
            await asked_again(answers)
            assert broker.followed.empty(), "it is the same"

            answers.answer = lambda _: right(2, parents=("http://other:8222",), topics=("prices",))
            assert await broker.next() == topology(2, parents=("http://other:8222",), topics=("prices",))
            # Nobody to follow is a change like any other.
            answers.answer = lambda _: right(3, parents=())
            assert await broker.next() == topology(3, parents=())
            assert kept_in(path) == topology(3, parents=())
        asked = urlsplit(answers.asked[0])
        assert (asked.path, parse_qs(asked.query)) == ("/registry/topology", {"nodeId": [NODE]})


def test_a_topology_is_kept_and_followed_and_so_is_every_change(path: Path, log: pytest.LogCaptureFixture) -> None:
    asyncio.run(follow_changes(path))

    assert log.messages == [
        "topology, version 1: POS, follows http://l3:8222",
        "topology, version 2: POS, follows http://other:8222",
        "topology, version 3: POS, follows no broker",
    ]


async def follow_without_versions(path: Path) -> None:
    with Answers(lambda _: right(0)) as answers:
        async with watching(answers.url, path) as broker:
            await broker.next()
            answers.answer = lambda _: right(0, role=Role.LOCAL)
            assert await broker.next() == topology(0, role=Role.LOCAL)


def test_a_registry_that_counts_no_versions_is_followed(path: Path) -> None:
    asyncio.run(follow_without_versions(path))


# ---- an answer that is wrong

OLDER: Final = (
    "the registry replied with version 4, which is older than 5: ignored; if it is right, remove FILE and "
    "restart this broker"
)
DEEP: Final = b"[" * 100_000
WRONG: Final[dict[str, tuple[Answer, str]]] = {
    "an error": (Answer(b"<html>", 500), "ASKED replied with status 500"),
    "an error with a code": (
        as_json({"code": "UNKNOWN_NODE", "text": "there is no node 'shop-1'"}, 404),
        "there is no node 'shop-1'",
    ),
    "an error that writes into the log": (
        as_json({"code": "X", "text": "a\nb" + "c" * 1000}, 400),
        "X: 'a\\nb" + "c" * 297 + "'",
    ),
    "another place": (
        Answer(b"", 302, (("Location", "http://127.0.0.1:1/"),)),
        "ASKED replied with status 302",
    ),
    "nothing": (Answer(b""), "ASKED replied with invalid JSON"),
    "no JSON": (Answer(b"<html>"), "ASKED replied with invalid JSON"),
    "no text": (Answer(b"\xff\xfe\x00"), "ASKED replied with invalid JSON"),
    "too deep": (Answer(DEEP), "ASKED replied with invalid JSON"),
    "too much": (Answer(b'"' + b"x" * (1 << 20) + b'"'), "ASKED replied with more than 1048576 bytes"),
    "packed": (
        Answer(gzip.compress(right(2).body), headers=(("Content-Encoding", "gzip"),)),
        "ASKED replied with invalid JSON",
    ),
    "a list": (as_json([]), "a topology must be a JSON object, not []"),
    "an unknown role": (
        as_json(topology(2).to_json() | {"role": "L9"}),
        "role is 'L9': it must be ROOT, L2, L3, POS or LOCAL",
    ),
    "no parents at all": (
        as_json({"nodeId": NODE, "role": "L2", "topologyVersion": 2}),
        (
            "requestToFollow is null: it must be a list, each of it a URL such as http://host:8222, "
            "without user, password and query"
        ),
    ),
    "another node": (
        right(2, node_id="shop-2"),
        "the registry replied to shop-1 with the topology of shop-2: ignored",
    ),
    "an older version": (
        right(4, parents=()),
        OLDER,
    ),
    "no HTTP": (Answer(b"", headers=(("X", "y\n\x00z"),)), "the reply of ASKED is incomplete: RemoteProtocolError"),
    "half an answer": (
        Answer(right(6).body, promised=10_000),
        "the reply of ASKED is incomplete: RemoteProtocolError",
    ),
}


async def answer_wrong(path: Path, wrong: Answer) -> str:
    with Answers(lambda _: right(5)) as answers:
        async with watching(answers.url, path) as broker:
            assert await broker.next() == topology(5)
            before = path.read_bytes()
            answers.answer = lambda _: wrong
            await asked_again(answers, 4)
            assert broker.followed.empty()
            assert path.read_bytes() == before
            # The same is right again, and no news; then there are some.
            answers.answer = lambda _: right(5)
            await asked_again(answers)
            assert broker.followed.empty()
            answers.answer = lambda _: right(6)
            assert await broker.next() == topology(6)
    return answers.url


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_changes_nothing_and_is_told_once(kind: str, path: Path, log: pytest.LogCaptureFixture) -> None:
    answer, reason = WRONG[kind]

    url = asyncio.run(answer_wrong(path, answer))

    asked = f"{url}/registry/topology"
    told = reason.replace("ASKED", asked).replace("FILE", str(path))
    assert warnings_in(log) == [f"no valid topology from the registry: {told}; keeping the last topology"]
    assert log.messages.count("the registry answers again") == 1


async def change_the_reason(path: Path) -> None:
    with Answers(lambda _: Answer(b"", 500)) as answers:
        async with watching(answers.url, path):
            await asked_again(answers)
            answers.answer = lambda _: Answer(b"", 503)
            await asked_again(answers)


def test_another_reason_is_told_again(path: Path, log: pytest.LogCaptureFixture) -> None:
    asyncio.run(change_the_reason(path))

    assert [message[-3:] for message in warnings_in(log)] == ["500", "503"]


async def ask_one_who_dawdles() -> None:
    """Each byte comes in time, and the whole never does."""

    async def dawdle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(dawdle, "127.0.0.1", 0) as server, http_client("http://127.0.0.1") as client:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TimedOut, match=r"did not answer within 0\.3 s"):
            await ask(client, f"http://127.0.0.1:{port}", answer_s=0.3)


def test_who_answers_too_slowly_has_not_answered() -> None:
    asyncio.run(ask_one_who_dawdles())


async def ask_in_vain() -> None:
    with Answers(lambda _: as_json({"code": "UNKNOWN_NODE", "text": "no"}, 404)) as answers:
        async with http_client("http://127.0.0.1") as client:
            with pytest.raises(UnknownNode, match="no"):
                await ask(client, answers.url)
            answers.answer = lambda _: as_json({"code": 5}, 404)
            with pytest.raises(BadTopology, match="replied with status 404"):
                await ask(client, answers.url)
            with pytest.raises(NoBroker, match="no answer from "):
                await ask(client, NOBODY)


def test_an_error_of_the_other_side_is_raised_as_it_was_there() -> None:
    asyncio.run(ask_in_vain())


# ---- without the registry


def keep(path: Path, topology: Topology, registry: str = NOBODY) -> None:
    path.write_text(json.dumps({"registry": registry} | topology.to_json()))


async def follow_one(url: str, path: Path) -> Topology:
    async with watching(url, path) as broker:
        return await broker.next()


def test_a_broker_starts_with_what_it_kept(path: Path, log: pytest.LogCaptureFixture) -> None:
    keep(path, topology(5))

    assert asyncio.run(follow_one(NOBODY, path)) == topology(5)
    asked = f"{NOBODY}/registry/topology"
    told = f"no answer from {asked}: All connection attempts failed"
    assert warnings_in(log) == [f"no valid topology from the registry: {told}; keeping the last topology"]


async def start_before_the_registry(path: Path, expected: list[Topology]) -> None:
    with Answers(lambda _: Answer(b"", 503)) as answers:
        keep(path, topology(5), answers.url)
        async with watching(answers.url, path) as broker:
            assert await broker.next() == expected[0]
            answers.answer = lambda _: right(5)
            await asked_again(answers)
            assert broker.followed.empty(), "it is the same"
            answers.answer = lambda _: right(6)
            assert await broker.next() == expected[1]


def test_what_was_kept_is_followed_once(path: Path) -> None:
    asyncio.run(start_before_the_registry(path, [topology(5), topology(6)]))


async def ask_before_anything(path: Path) -> None:
    with Answers(lambda _: right(6)) as answers:
        keep(path, topology(5), answers.url)
        async with watching(answers.url, path) as broker:
            assert await broker.next() == topology(6)
            await asked_again(answers)
            assert broker.followed.empty()


def test_a_registry_that_answers_is_believed_before_the_file(path: Path) -> None:
    asyncio.run(ask_before_anything(path))


async def wait_for_the_registry(path: Path) -> None:
    with Answers(lambda _: Answer(b"", 503)) as answers:
        async with watching(answers.url, path) as broker:
            await asked_again(answers)
            assert broker.followed.empty()
            answers.answer = lambda _: right(1)
            assert await broker.next() == topology(1)


def test_a_broker_that_knows_nothing_waits_for_the_registry(path: Path) -> None:
    asyncio.run(wait_for_the_registry(path))


async def answer_older_than_kept(path: Path, registry: Callable[[Answers], str]) -> Topology:
    with Answers(lambda _: right(4, parents=())) as answers:
        keep(path, topology(5), registry(answers))
        return await follow_one(answers.url, path)


def test_an_older_version_is_not_taken_after_a_restart_either(path: Path) -> None:
    assert asyncio.run(answer_older_than_kept(path, lambda answers: answers.url)) == topology(5)


def test_another_registry_counts_anew(path: Path) -> None:
    assert asyncio.run(answer_older_than_kept(path, lambda _: NOBODY)) == topology(4, parents=())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the stored topology is invalid: PATH: PATH is not a JSON object"),
        (b"[]", "the stored topology is invalid: PATH: PATH is not a JSON object"),
        (DEEP, "the stored topology is invalid: PATH: PATH is not a JSON object"),
        (
            json.dumps(topology(5).to_json() | {"role": "x"}).encode(),
            "the stored topology is invalid: PATH: role is 'x': it must be ROOT, L2, L3, POS or LOCAL",
        ),
        (
            json.dumps(topology(5, node_id="shop-2").to_json()).encode(),
            "ignoring the topology in PATH: it is of node shop-2",
        ),
    ],
    ids=["empty", "a list", "too deep", "an unknown role", "another node"],
)
def test_what_was_kept_is_checked_as_well(data: bytes, reason: str, path: Path, log: pytest.LogCaptureFixture) -> None:
    path.write_bytes(data)

    asyncio.run(wait_for_the_registry(path))

    assert warnings_in(log)[0] == reason.replace("PATH", str(path))
    assert kept_in(path) == topology(1)


def test_what_cannot_be_kept_is_followed_and_told(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "topology.json"

    async def follow() -> None:
        with Answers(lambda _: right(1)) as answers:
            assert await follow_one(answers.url, path) == topology(1)

    asyncio.run(follow())

    assert warnings_in(log) == [f"cannot store the topology in {path}: No such file or directory"]


async def fail_to_follow(path: Path) -> None:
    with Answers(lambda _: right(1)) as answers:
        broker = Broker()
        broker.fails = 2
        task = asyncio.create_task(watch(answers.url, NODE, POLL_MS, path, broker.follow))
        assert await broker.next() == topology(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_what_could_not_be_followed_is_tried_again(path: Path, log: pytest.LogCaptureFixture) -> None:
    asyncio.run(fail_to_follow(path))

    assert warnings_in(log) == ["no valid topology from the registry: not now; keeping the last topology"]


# ---- how often


def test_it_is_asked_at_its_interval_a_little_earlier_or_later() -> None:
    assert [delay_s(30, 0, chance) for chance in (0, 0.5, 1)] == [27, 30, 33]


def test_after_failures_it_is_asked_less_and_less_often() -> None:
    waits = [delay_s(30, failures, 0.5) for failures in range(1, 12)]

    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert delay_s(30, 10_000_000, 1) == pytest.approx(330)
    # Who asks often asks again as soon.
    assert delay_s(0.1, 1, 0.5) == 0.1


# ---- real ones


TREE: Final = """
[[nodes]]
id = "root"
role = "ROOT"
url = "http://127.0.0.1:1"

[[nodes]]
id = "shop-1"
role = "POS"
parent = "root"
"""


def test_a_broker_keeps_its_place_while_the_registry_is_killed_and_comes_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree.toml"
    tree.write_text(TREE)
    path = tmp_path / "broker" / "data" / "topology.json"
    with (
        Registry(tree) as registry,
        Serve(tmp_path / "broker", registry_url=registry.url, server_node_id=NODE, registry_poll_ms=100) as server,
    ):
        followed = f"topology, version {registry.version}: POS, follows http://127.0.0.1:1"
        until(lambda: followed in server.stderr)
        first = kept_in(path)
        registry.kill()
        until(lambda: "no valid topology from the registry: no answer" in server.stderr)

        # It starts without a registry, where it was.
        server.kill()
        server.restart()
        until(lambda: followed in server.stderr)
        assert kept_in(path) == first

        # The registry comes back with another tree.
        tree.write_text(TREE.replace('parent = "root"', ""))
        registry.start()
        until(lambda: "POS, follows no broker" in server.stderr)
        assert kept_in(path) == topology(registry.version, parents=())
        assert registry.version > first.version
        assert "the registry answers again" in server.stderr
        # What the HTTP client says of each request is not for this log.
        assert "HTTP Request" not in server.stderr


def test_a_broker_stops_cleanly_while_it_waits_for_an_answer(tmp_path: Path) -> None:
    asked: list[int] = []

    def wait(_: str) -> Answer:
        asked.append(1)
        os.read(reader, 1)
        return Answer(b"")

    reader, writer = os.pipe()
    try:
        with Answers(wait) as answers, Serve(tmp_path, registry_url=answers.url) as server:
            until(lambda: asked)
            assert server.stop().code == 0
            os.write(writer, b"x")
    finally:
        os.close(reader)
        os.close(writer)
