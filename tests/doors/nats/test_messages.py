"""Messages and requests of NATS clients: nats-py, and a bare socket where it is too polite."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.msg import Msg

from tests.support.nats_clients import connected, numbers, run, settle, take, take_data
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Serve, pub

# ---- publish and subscribe


def test_publish_and_subscribe(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(subject)
            await settle(one)
            await other.publish(subject, b"hello")
            await other.publish(subject, b"")
            assert await take_data(subscription, 2) == [b"hello", b""]

    run(work)


def test_wildcards(server: Serve) -> None:
    async def work() -> None:
        root = f"w{next(numbers)}"
        async with connected(server) as one, connected(server) as other:
            star = await one.subscribe(f"{root}.*.created")
            rest = await one.subscribe(f"{root}.us.>")
            everything = await one.subscribe(">")
            await settle(one)
            names = ["us.created", "eu.created", "us", "us.created.now", "us.deleted", "created", "eu.x.created"]
            for name in names:
                await other.publish(f"{root}.{name}", name.encode())
            await other.publish(f"{root}.us.end")
            await other.publish(f"{root}.end.created")
            assert await take_data(star, 3) == [b"us.created", b"eu.created", b""]
            assert await take_data(rest, 4) == [b"us.created", b"us.created.now", b"us.deleted", b""]
            assert await take_data(everything, 9) == [*map(str.encode, names), b"", b""]

    run(work)


def test_every_subscriber_gets_every_message(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as two, connected(server) as publisher:
            subscriptions = [await client.subscribe(subject) for client in (one, one, two)]
            await settle(one)
            await settle(two)
            wanted = [b"%d" % number for number in range(100)]
            for data in wanted:
                await publisher.publish(subject, data)
            for subscription in subscriptions:
                assert await take_data(subscription, 100) == wanted

    run(work)


def test_each_message_goes_to_one_member_of_a_queue_group(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as two, connected(server) as publisher:
            got: Counter[bytes] = Counter()
            shares: Counter[int] = Counter()
            done = asyncio.Event()

            def member(number: int) -> Callable[[Msg], Awaitable[None]]:
                async def receive(message: Msg) -> None:
                    got[message.data] += 1
                    shares[number] += 1
                    if sum(shares.values()) == 300:
                        done.set()

                return receive

            for number, client in enumerate((one, one, two)):
                await client.subscribe(subject, queue="workers", cb=member(number))
            plain = await two.subscribe(subject)
            another = await two.subscribe(subject, queue="others")
            await settle(one)
            await settle(two)
            wanted = [b"%d" % number for number in range(300)]
            for data in wanted:
                await publisher.publish(subject, data)
            await done.wait()
            # Each other subscriber is served by itself.
            assert await take_data(plain, 300) == wanted
            assert await take_data(another, 300) == wanted
            assert got == Counter(wanted)
            assert min(shares[number] for number in range(3)) >= 50

    run(work)


def test_a_queue_group_goes_on_without_a_member_that_left(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as stays, connected(server) as publisher:
            async with connected(server) as leaves:
                left = await leaves.subscribe(subject, queue="workers")
                stayed = await stays.subscribe(subject, queue="workers")
                await settle(leaves)
                await settle(stays)
                for number in range(10):
                    await publisher.publish(subject, b"%d" % number)
                got = await take_data(left, 5) + await take_data(stayed, 5)
                assert sorted(got) == [b"%d" % number for number in range(10)]
            for number in range(10):
                await publisher.publish(subject, b"%d" % number)
            await settle(publisher)
            data = [await stayed.next_msg(PATIENCE_S)]
            assert data[0].subject == subject

    run(work)


def test_headers_arrive(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one:
            subscription = await one.subscribe(subject)
            sent = {"Trace-ID": "7", "Empty": "", "Long": "x" * 10_000}
            await one.publish(subject, b"body", headers=sent)
            await one.publish(subject, b"", headers={"Only": "headers"})
            await one.publish(subject, b"plain")
            first, second, third = await take(subscription, 3)
            assert (first.headers, first.data) == (sent, b"body")
            assert (second.headers, second.data) == ({"Only": "headers"}, b"")
            assert (third.headers, third.data) == (None, b"plain")

    run(work)


def test_the_order_of_a_subject_is_kept(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(subject, pending_msgs_limit=20_000)
            await settle(one)
            wanted = [b"%d" % number for number in range(10_000)]
            for data in wanted:
                await other.publish(subject, data)
            await settle(other)
            assert await take_data(subscription, 10_000) == wanted

    run(work)


def test_a_mebibyte_fits_and_a_byte_more_does_not(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one:
            subscription = await one.subscribe(subject)
            largest = bytes(range(256)) * 4096
            assert one.max_payload == len(largest)
            for _ in range(3):
                await one.publish(subject, largest)
            assert await take_data(subscription, 3) == [largest] * 3
            with pytest.raises(nats.errors.MaxPayloadError):
                await one.publish(subject, largest + b"x")

    run(work)
    with Nats(server) as client:
        client.send(f"PUB {subject} {(1 << 20) + 1}\r\n")
        assert client.rest() == "-ERR 'Maximum Payload Violation'\r\n"


def test_a_client_can_ask_not_to_hear_itself(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server, no_echo=True) as deaf, connected(server) as other:
            own = await deaf.subscribe(subject)
            theirs = await other.subscribe(subject)
            await settle(deaf)
            await settle(other)
            await deaf.publish(subject, b"mine")
            await settle(deaf)
            await other.publish(subject, b"yours")
            assert await take_data(theirs, 2) == [b"mine", b"yours"]
            assert await take_data(own, 1) == [b"yours"]

    run(work)


def test_a_client_that_does_not_want_to_hear_itself_does_not_in_inboxes_either(server: Serve) -> None:
    with Nats(server, echo=False) as deaf, Nats(server) as other:
        deaf.send("SUB _INBOX.echo 1\r\n")
        assert deaf.ask("PING") == "PONG"
        deaf.send("PUB _INBOX.echo 4\r\nmine\r\n")
        assert deaf.ask("PING") == "PONG"
        other.send("PUB _INBOX.echo 5\r\nyours\r\n")
        assert deaf.message().payload == b"yours"


def test_a_durable_that_does_not_want_to_hear_itself_does_not(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server, echo=False) as deaf, Nats(server) as other:
        deaf.send("SUB orders.> DURABLE:billing 1\r\n")
        assert deaf.ask("PING") == "PONG"
        deaf.send("PUB orders.a 4\r\nmine\r\n")
        assert deaf.ask("PING") == "PONG"
        other.send("PUB orders.a 5\r\nyours\r\n")
        assert deaf.message().payload == b"yours"


def test_unsubscribe(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one:
            ends = await one.subscribe(subject)
            stays = await one.subscribe(subject)
            await one.publish(subject, b"1")
            assert await take_data(ends, 1) == [b"1"]
            await ends.unsubscribe()
            await one.publish(subject, b"2")
            assert await take_data(stays, 2) == [b"1", b"2"]
            assert ends.delivered == 1

    run(work)


@pytest.mark.parametrize("before", [0, 2, 5, 9])
def test_unsubscribe_after_so_many_delivers_exactly_so_many(server: Serve, subject: str, before: int) -> None:
    """`UNSUB` with a maximum counts what came before it, too."""
    with Nats(server) as client:
        client.send(f"SUB {subject} 1\r\nSUB {subject} 2\r\n")
        for number in range(before):
            client.send(pub(subject, b"%d" % number))
            assert {client.message().sid for _ in range(2)} == {"1", "2"}
        client.send("UNSUB 1 5\r\n" + "".join(f"PUB {subject} 1\r\n{number}\r\n" for number in range(before, 10)))
        got: list[str] = []
        while got.count("2") < 10 - before:
            got.append(client.message().sid)
        assert got.count("1") == max(0, 5 - before)
        client.send(pub(subject, b"end"))
        assert client.message().sid == "2"


def test_drain_delivers_what_is_there_and_ends(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as publisher:
            client = await nats.connect(server.url, allow_reconnect=False)
            got = []

            async def receive(message: Msg) -> None:
                got.append(message.data)

            await client.subscribe(subject, cb=receive)
            await settle(client)
            for number in range(100):
                await publisher.publish(subject, b"%d" % number)
            await settle(publisher)
            await client.publish(f"{subject}.own", b"last")
            await client.drain()
            assert client.is_closed
            assert got == [b"%d" % number for number in range(100)]

    run(work)


# ---- requests


def test_request_and_reply(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as service, connected(server) as client:

            async def answer(message: Msg) -> None:
                await message.respond(message.data.upper())

            await service.subscribe(subject, cb=answer)
            await settle(service)
            replies = await asyncio.gather(
                *(client.request(subject, b"hello %d" % number, timeout=PATIENCE_S) for number in range(50))
            )
            assert [reply.data for reply in replies] == [b"HELLO %d" % number for number in range(50)]
            old = await client.request(subject, b"x", timeout=PATIENCE_S, old_style=True)
            assert old.data == b"X"
            with_headers = await client.request(subject, b"y", timeout=PATIENCE_S, headers={"A": "b"})
            assert with_headers.data == b"Y"

    run(work)


def test_requests_are_shared_among_responders(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as two, connected(server) as client:
            for name, service in ((b"one", one), (b"two", two)):

                async def answer(message: Msg, name: bytes = name) -> None:
                    await message.respond(name)

                await service.subscribe(subject, queue="services", cb=answer)
                await settle(service)
            replies = [await client.request(subject, timeout=PATIENCE_S) for _ in range(20)]
            assert {reply.data for reply in replies} == {b"one", b"two"}

    run(work)


def test_a_request_that_nobody_serves_fails_at_once(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server) as client:
            for _ in range(3):
                with pytest.raises(nats.errors.NoRespondersError):
                    await client.request(subject, b"anyone?", timeout=PATIENCE_S)
            with pytest.raises(nats.errors.NoRespondersError):
                await client.request(subject, b"anyone?", timeout=PATIENCE_S, headers={"A": "b"})

    run(work)


def test_the_words_of_no_responders(server: Serve) -> None:
    with Nats(server) as client:
        client.send("SUB _IN.* 9\r\nPUB nobody.x _IN.1 2\r\nhi\r\n")
        assert client.line() == "HMSG _IN.1 9 40 40"
        assert client.read(42) == b"NATS/1.0 503\r\nNats-Subject: nobody.x\r\n\r\n\r\n"
        assert client.ask("PING") == "PONG"


def test_what_is_published_to_an_inbox_is_not_stored(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Nats(server) as client:
            client.send("SUB _INBOX.> 1\r\nPUB _INBOX.a 2\r\nhi\r\n")
            assert client.message().payload == b"hi"
        with Flux(server) as flux:
            assert flux.ask("REPLAY FIRST") == "+OK 0"
