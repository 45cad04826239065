"""What /varz and /connz count, on nats-server and on Penstock: the same scenario has the same figures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, Final

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.nats.python_client import PATIENCE_S, Receiver, connected, settle
from tests.nats.run import Peer, Wire

FIGURES: Final = ("in_msgs", "in_bytes", "out_msgs", "out_bytes")
_subjects: Final = (f"figures.f{number}" for number in count())

# A publisher, and three others; no-echo: the last one. A subject of the case's own.
Case = Callable[[Client, Client, Client, Client, str], Awaitable[None]]


async def plain(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await one.subscribe(subject)
    await settle(one)
    for size in (0, 1, 10, 1000, 100_000):
        await publisher.publish(subject, b"x" * size)


async def empty(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await one.subscribe(subject)
    await settle(one)
    await publisher.publish(subject)


async def nobody_listens(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await publisher.publish(subject, b"hello")


async def headers(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await one.subscribe(subject)
    await settle(one)
    await publisher.publish(subject, b"hello", headers={"A": "1", "Longer-Name": "two words"})
    await publisher.publish(subject, b"", headers={"A": "1"})
    await publisher.publish(subject, b"hello", reply="somewhere.else", headers={"A": "1"})


async def several_subscriptions(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    for pattern in (subject, subject, f"{subject}.>", f"{subject}.*"):
        await one.subscribe(pattern)
    await other.subscribe(subject)
    await settle(one)
    await settle(other)
    await publisher.publish(subject, b"hello")
    await publisher.publish(f"{subject}.x", b"world!")


async def to_oneself(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await publisher.subscribe(subject)
    await settle(publisher)
    await publisher.publish(subject, b"hello")


async def no_echo(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await quiet.subscribe(subject)
    await one.subscribe(subject)
    await settle(quiet)
    await settle(one)
    await quiet.publish(subject, b"hello")
    await publisher.publish(subject, b"world!")


async def queue_group(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    receive = Receiver()
    for client in (one, other, quiet):
        await client.subscribe(subject, queue="workers", cb=receive.take)
        await settle(client)
    for number in range(100):
        await publisher.publish(subject, b"%03d" % number)


async def requests(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"re: " + message.data)

    await one.subscribe(subject, cb=answer)
    await settle(one)
    for number in range(10):
        await publisher.request(subject, b"%d" % number, PATIENCE_S)


async def no_responders(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await publisher.request(subject, b"anyone?", PATIENCE_S)


async def invalid_subjects(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    await one.subscribe(f"{subject}.>")
    await settle(one)
    await publisher.publish(f"{subject}.*", b"hello")
    await publisher.publish(f"{subject}..x", b"world!", headers={"A": "1"})


async def unsubscribed(publisher: Client, one: Client, other: Client, quiet: Client, subject: str) -> None:
    subscription = await one.subscribe(subject)
    await subscription.unsubscribe(limit=2)
    await settle(one)
    for _ in range(5):
        await publisher.publish(subject, b"hello")


CASES: Final[tuple[Case, ...]] = (
    plain,
    empty,
    nobody_listens,
    headers,
    several_subscriptions,
    to_oneself,
    no_echo,
    queue_group,
    requests,
    no_responders,
    invalid_subjects,
    unsubscribed,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_figures_are_those_of_nats_server(peers: tuple[Peer, Peer], case: Case) -> None:
    real, ours = (asyncio.run(_figures(peer, case)) for peer in peers)
    assert ours == real


async def _figures(peer: Peer, case: Case) -> dict[str, Any]:
    """Return what the case adds to /varz, and each connection's row of /connz."""
    subject = next(_subjects)
    names = ("publisher", "one", "other", "quiet")
    before = peer.get("/varz")
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connected(peer.url, name=f"{subject} {name}", no_echo=name == "quiet"))
            for name in names
        ]
        publisher, one, other, quiet = clients
        await case(publisher, one, other, quiet, subject)
        # Twice: answers to what the others received are published meanwhile.
        for client in (*clients, *clients):
            await settle(client)
        after = peer.get("/varz")
        rows = {
            row["name"]: {name: row[name] for name in FIGURES}
            for row in peer.get("/connz")["connections"]
            if row["name"].startswith(f"{subject} ")
        }
    assert len(rows) == len(names)
    found = [rows[f"{subject} {name}"] for name in names]
    if case is queue_group:
        # Which member receives a message is the server's choice.
        found[1:] = [dict(sum((Counter(row) for row in found[1:]), Counter()))]
    return {"/varz": {name: after[name] - before[name] for name in FIGURES}, "/connz": found}


def test_headers_that_a_client_does_not_receive_are_not_counted(peers: tuple[Peer, Peer]) -> None:
    subject = next(_subjects)
    found = []
    for peer in peers:
        receiver, sender = Wire(peer, is_slow=False), Wire(peer, is_slow=False)
        try:
            receiver.send(b'CONNECT {"verbose":false,"name":"%b"}\r\n' % subject.encode())
            receiver.send(b"SUB %b 1\r\nPING\r\n" % subject.encode(), 1)
            receiver.take()
            sender.send(b'CONNECT {"verbose":false,"headers":true}\r\n')
            sender.send(b"HPUB %b 18 20\r\nNATS/1.0\r\nA: 1\r\n\r\nhi\r\nPING\r\n" % subject.encode(), 1)
            sender.take()
            receiver.send(b"PING\r\n", 1)
            received = receiver.take()
            [row] = [row for row in peer.get("/connz")["connections"] if row.get("name") == subject]
            found.append((received, {name: row[name] for name in FIGURES}))
        finally:
            receiver.close()
            sender.close()
    assert found[0] == found[1]


def test_subscriptions_have_the_fields_of_nats_server(peers: tuple[Peer, Peer]) -> None:
    real, ours = (_details(peer) for peer in peers)
    assert ours.keys() == real.keys()
    for sid, row in real.items():
        assert row.items() <= ours[sid].items()


def _details(peer: Peer) -> dict[str, dict[str, Any]]:
    """Return a connection's subscriptions in /connz by sid: plain, in a queue group, and with a max."""
    subject = next(_subjects)
    client = Wire(peer, is_slow=False)
    try:
        client.send(b'CONNECT {"verbose":false,"name":"%b"}\r\n' % subject.encode())
        client.send(b"SUB a.* 1\r\nSUB b workers 2\r\nSUB c 3\r\nUNSUB 3 5\r\n")
        client.send(b"PUB a.x 2\r\nhi\r\nPUB c 2\r\nhi\r\nPING\r\n", 1)
        client.take()
        [row] = [row for row in peer.get("/connz?subs=detail")["connections"] if row.get("name") == subject]
    finally:
        client.close()
    assert "subscriptions_list" not in row
    assert {each.pop("cid") for each in row["subscriptions_list_detail"]} == {row["cid"]}
    return {each["sid"]: each for each in row["subscriptions_list_detail"]}
