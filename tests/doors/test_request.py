"""Requests and replies: through both clients, and between them and NATS clients, against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

import nats
import nats.errors
import pytest
from nats.aio.msg import Msg

from penstock import AsyncClient, Client
from penstock.client.message import Message
from penstock.errors import BadRequest, Closed, NoResponders, TimedOut, UnknownTopic
from tests.support.process import PATIENCE_S
from tests.support.server import Serve
from tests.support.shells import SHELLS, Shell, shell_of

_NUMBERS: Final = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("data")) as serve:
        yield serve


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with shell_of(request.param) as made:
        yield made


@pytest.fixture
def client(shell: Shell, server: Serve) -> Client:
    return shell.client(address(server))


@pytest.fixture
def subject() -> str:
    return f"service{next(_NUMBERS)}.add"


def address(server: Serve) -> str:
    return f"127.0.0.1:{server.ports['text']}"


@contextmanager
def responder(
    server: Serve, pattern: str, answer: Callable[[Message], None], group: str | None = None
) -> Iterator[None]:
    """Another client that answers each message as it comes."""
    with Client(address(server)) as client, client.subscribe(pattern, group=group) as subscription:

        def serve() -> None:
            for message in subscription:
                answer(message)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            subscription.close()
            thread.join()


def test_a_request_returns_the_reply(client: Client, server: Serve, subject: str) -> None:
    def add(message: Message) -> None:
        message.respond(json=sum(message.json()), headers={"Unit": message.headers["Unit"]})

    with responder(server, subject, add):
        for numbers in ([1, 2], [3, 4]):
            reply = client.request(subject, json=numbers, headers={"Unit": "m"}, timeout=PATIENCE_S)

            assert (reply.json(), reply.headers) == (sum(numbers), {"Unit": "m"})
            assert reply.subject.startswith("_INBOX.")
    # A request is a message like any other; a reply is not stored.
    assert [message.json() for message in client.fetch(subject.partition(".")[0])] == [[1, 2], [3, 4]]


def test_a_request_and_a_reply_may_be_empty(client: Client, server: Serve, subject: str) -> None:
    with responder(server, subject, lambda message: message.respond()):
        reply = client.request(subject, key="k", timeout=PATIENCE_S)

    assert (reply.value, reply.deleted) == (b"", False)
    [message] = client.fetch(subject.partition(".")[0])
    assert (message.value, message.key, message.deleted) == (b"", b"k", False)


def test_a_member_of_a_group_responds(client: Client, server: Serve, subject: str) -> None:
    def answer(message: Message) -> None:
        message.respond(message.value.upper())
        message.ack()

    with responder(server, subject, answer, group=f"workers-{subject}"):
        assert client.request(subject, b"hello", timeout=PATIENCE_S).value == b"HELLO"


def test_nobody_to_answer_is_said_at_once_and_nothing_is_stored(client: Client, subject: str) -> None:
    with pytest.raises(NoResponders, match=f"nobody is subscribed to '{subject}': nothing was published"):
        client.request(subject, b"x", timeout=float("inf"))

    with pytest.raises(UnknownTopic):
        client.topic(subject.partition(".")[0])


def test_no_reply_in_time_is_told_and_the_next_request_has_its_own(client: Client, server: Serve, subject: str) -> None:
    held: list[Message] = []

    def answer(message: Message) -> None:
        held.append(message)
        if message.value == b"second":
            # The first answer comes to nobody.
            for each in held:
                each.respond(each.value)

    with responder(server, subject, answer):
        with pytest.raises(TimedOut, match=f"request to {subject} .*: not done within 0.2 s"):
            client.request(subject, b"first", timeout=0.2)
        assert client.request(subject, b"second", timeout=PATIENCE_S).value == b"second"


def test_requests_under_way_at_once_get_their_own_replies(server: Serve, subject: str) -> None:
    many = 200
    held: list[Message] = []

    def answer(message: Message) -> None:
        held.append(message)
        if len(held) == many:
            for each in reversed(held):
                each.respond(each.value)

    async def ask() -> list[bytes]:
        async with AsyncClient(address(server)) as client:
            requests = (client.request(subject, b"%d" % n, timeout=PATIENCE_S) for n in range(many))
            return [reply.value for reply in await asyncio.gather(*requests)]

    with responder(server, subject, answer):
        assert asyncio.run(ask()) == [b"%d" % n for n in range(many)]


def test_a_nats_client_answers_our_request(client: Client, server: Serve, subject: str) -> None:
    async def work() -> Message:
        peer = await nats.connect(server.url, connect_timeout=PATIENCE_S)
        try:

            async def answer(message: Msg) -> None:
                await peer.publish(message.reply, message.data + b"!", headers={"By": "nats"})

            await peer.subscribe(subject, cb=answer)
            await peer.flush()
            return await asyncio.to_thread(client.request, subject, b"hello", timeout=PATIENCE_S)
        finally:
            await peer.close()

    reply = asyncio.run(work())

    assert (reply.value, reply.headers) == (b"hello!", {"By": "nats"})


def test_we_answer_the_request_of_a_nats_client(server: Serve, subject: str) -> None:
    async def ask() -> Msg:
        peer = await nats.connect(server.url, connect_timeout=PATIENCE_S)
        try:
            return await peer.request(subject, b"hello", timeout=PATIENCE_S, headers={"A": "b"})
        finally:
            await peer.close()

    with responder(server, subject, lambda message: message.respond(message.value + b"!", headers=message.headers)):
        reply = asyncio.run(ask())

    assert (reply.data, reply.headers) == (b"hello!", {"A": "b"})


def test_what_is_no_request_cannot_be_responded_to(client: Client, subject: str) -> None:
    with client.subscribe(subject) as subscription:
        client.publish(subject, b"news")
        message = subscription.get(timeout=PATIENCE_S)
        assert message.reply is None
        with pytest.raises(BadRequest, match=f"the message of {subject} is not a request: it has no reply subject"):
            message.respond(b"x")


def test_a_request_that_was_fetched_later_cannot_be_responded_to(client: Client, server: Serve, subject: str) -> None:
    with responder(server, subject, lambda message: message.respond(b"x")):
        client.request(subject, b"x", timeout=PATIENCE_S)
    [message] = client.fetch(subject.partition(".")[0])

    assert message.reply is not None
    with pytest.raises(TypeError, match="only a message of a subscription can be responded to"):
        message.respond(b"x")


def test_closing_the_client_ends_a_request(server: Serve, subject: str) -> None:
    with Client(address(server)) as client:
        asked = threading.Event()
        failed: list[Exception] = []

        def ask() -> None:
            try:
                client.request(subject, b"x", timeout=PATIENCE_S)
            except Closed as error:
                failed.append(error)

        with responder(server, subject, lambda _: asked.set()):
            thread = threading.Thread(target=ask)
            thread.start()
            assert asked.wait(PATIENCE_S)
            client.close()
            thread.join()

    assert len(failed) == 1
