"""The text door as NATS clients use it: real ones of nats-py, and a bare socket where they are too polite."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Serve, pub
from tests.support.web import get

# Nothing of `patient` is delivered again while a test runs, all of `quick` is at once.
TOPICS = """
[topics.patient]
ack_deadline_ms = "1h"
[topics.quick]
ack_deadline_ms = 700
deliveries_max = 3
"""
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("nats"), config=TOPICS) as server:
        yield server


@pytest.fixture
def subject() -> str:
    """One that no other test uses, of a topic that is new."""
    return f"t{next(_numbers)}.x"


@pytest.fixture
def patient() -> str:
    return f"patient.{next(_numbers)}"


@pytest.fixture
def quick() -> str:
    return f"quick.{next(_numbers)}"


@asynccontextmanager
async def connected(server: Serve, **options: Any) -> AsyncIterator[Client]:
    """A client; what it complains about fails the test, unless the test looks at it itself."""
    complaints: list[Exception] = []

    async def note(error: Exception) -> None:
        complaints.append(error)

    settings = {"allow_reconnect": False, "error_cb": note, "connect_timeout": PATIENCE_S} | options
    client = await nats.connect(server.url, **settings)
    try:
        yield client
    finally:
        await client.close()
    assert not complaints


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            await work()

    asyncio.run(bounded())


async def settle(client: Client) -> None:
    """Until the server has done all that the client sent.

    The client writes its PING ahead of what it has gathered, so only the second PONG speaks for that.
    """
    await client.flush()
    await client.flush()


async def take(subscription: Subscription, number: int) -> list[Msg]:
    return [await subscription.next_msg(PATIENCE_S) for _ in range(number)]


async def take_data(subscription: Subscription, number: int) -> list[bytes]:
    return [message.data for message in await take(subscription, number)]


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
        root = f"w{next(_numbers)}"
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


# ---- durability


def test_flush_means_durable(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:

        async def work() -> None:
            async with connected(server) as client:
                for number in range(1000):
                    await client.publish("orders.new", b"%d" % number)
                await settle(client)
                server.kill()

        run(work)
        assert [message["value"] for message in server.dump("orders")] == [str(number) for number in range(1000)]
        server.restart()
        with Flux(server) as flux:
            flux.send("REPLAY FIRST 2000\r\n")
            messages, number = flux.until_ok()
            assert number == "1000"
            assert [message.payload for message in messages] == [b"%d" % number for number in range(1000)]


@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
def test_subscriptions_go_on_after_a_restart(tmp_path: Path, clean: bool) -> None:
    with Serve(tmp_path) as server:

        async def work() -> None:
            back = asyncio.Event()

            async def reconnected() -> None:
                back.set()

            async def ignore(_: Exception) -> None:
                pass

            client = await nats.connect(
                server.url,
                reconnect_time_wait=0.05,
                max_reconnect_attempts=-1,
                reconnected_cb=reconnected,
                error_cb=ignore,
            )
            subscription = await client.subscribe("orders.>")
            await client.publish("orders.a", b"before")
            assert await take_data(subscription, 1) == [b"before"]
            if clean:
                assert await asyncio.to_thread(server.stop) == (0, "")
            else:
                server.kill()
            await asyncio.to_thread(server.restart)
            await back.wait()
            await settle(client)
            await client.publish("orders.a", b"after")
            assert await take_data(subscription, 1) == [b"after"]
            await client.close()

        run(work)


# ---- who may come in


async def turned_away(server: Serve, **options: Any) -> None:
    async def ignore(_: Exception) -> None:
        pass

    client = Client()
    with pytest.raises(nats.errors.Error, match="uthorization"):
        await client.connect(server.url, allow_reconnect=False, error_cb=ignore, **options)
    # It leaves that to the garbage collector.
    transport: Any = client._transport
    transport.close()
    # The server closes without reading what the client sent behind its CONNECT, which may reset the connection.
    with contextlib.suppress(ConnectionResetError):
        await transport.wait_closed()


def test_user_and_password(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="ann", auth_password="secret") as server:

        async def work() -> None:
            async with connected(server, user="ann", password="secret") as client:
                await settle(client)
            await turned_away(server, user="ann", password="Secret")
            await turned_away(server, user="bob", password="secret")
            await turned_away(server, token="secret")
            await turned_away(server)

        run(work)
        with Flux(server) as flux:
            assert flux.info["auth_required"] is True
            flux.send("PING\r\n")
            assert "Authorization Violation" in flux.rest()


def test_token(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="s3cret") as server:

        async def work() -> None:
            async with connected(server, token="s3cret") as client:
                await settle(client)
            await turned_away(server, token="other")
            await turned_away(server, user="s3cret", password="s3cret")
            await turned_away(server)

        run(work)


# ---- what is refused


@pytest.mark.parametrize("subject", ["a..b", ".a", "a.", "a.*", "a.>"])
def test_a_pedantic_client_is_told_of_an_invalid_subject(server: Serve, subject: str) -> None:
    with Nats(server, pedantic=True) as client:
        client.send(f"PUB {subject} 1\r\nx\r\n")
        assert client.line() == "-ERR 'Invalid Publish Subject'"
        assert client.ask("PING") == "PONG"


def test_an_invalid_pattern_is_refused_and_the_connection_goes_on(server: Serve) -> None:
    with Nats(server) as client:
        assert client.ask("SUB a..b 1") == "-ERR 'Invalid Subject'"
        assert client.ask("PING") == "PONG"


def test_errors_are_quoted(server: Serve) -> None:
    with Nats(server) as client:
        client.send("SHOUT\r\n")
        assert client.rest() == "-ERR 'Unknown Protocol Operation'\r\n"


def test_verbose_clients_hear_of_every_command(server: Serve, subject: str) -> None:
    async def work() -> None:
        async with connected(server, verbose=True) as client:
            subscription = await client.subscribe(subject)
            await client.publish(subject, b"x")
            assert await take_data(subscription, 1) == [b"x"]
            await subscription.unsubscribe()
            await settle(client)

    run(work)


def test_jetstream_is_refused_at_once(server: Serve) -> None:
    async def work() -> None:
        async with connected(server) as client:
            stream = client.jetstream(timeout=3 * PATIENCE_S)
            with pytest.raises((nats.js.errors.Error, nats.errors.NoRespondersError)):
                await stream.account_info()
            with pytest.raises((nats.js.errors.Error, nats.errors.NoRespondersError)):
                await stream.add_stream(name="orders", subjects=["orders.>"])
            with pytest.raises((nats.js.errors.Error, nats.errors.NoRespondersError)):
                await stream.subscribe("orders.>")
            with pytest.raises((nats.js.errors.Error, nats.errors.NoRespondersError)):
                await stream.pull_subscribe("orders.>", durable="billing")
            with pytest.raises((nats.js.errors.Error, nats.errors.NoRespondersError)):
                await stream.create_key_value(bucket="config")
            # The connection is none the worse for it.
            await settle(client)

    run(work)


# ---- durable subscriptions


def test_a_durable_acknowledges_with_the_methods_of_its_client(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(patient, queue="DURABLE:billing")
            await settle(one)
            for number in range(4):
                await other.publish(patient, b"%d" % number)
            first, second, third, fourth = await take(subscription, 4)
            assert all(message.reply.startswith("$ACK.") for message in (first, second, third, fourth))
            await first.ack()
            await second.ack_sync(timeout=PATIENCE_S)
            await third.nak()
            [again] = await take(subscription, 1)
            assert (again.data, again.headers) == (b"2", {"Delivery-Count": "2"})
            await again.nak(delay=0.1)
            [again] = await take(subscription, 1)
            assert (again.data, again.headers) == (b"2", {"Delivery-Count": "3"})
            await again.ack()
            await fourth.in_progress()
            await fourth.ack()
            await settle(one)
            await other.publish(patient, b"new")
            assert await take_data(subscription, 1) == [b"new"]

    run(work)


def test_in_progress_puts_off_the_deadline(server: Serve, quick: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(quick, queue="DURABLE:billing")
            await settle(one)
            await other.publish(quick, b"first")
            [first] = await take(subscription, 1)
            # Another message comes back meanwhile, so the deadline was over.
            await other.publish(quick, b"clock")
            ticks = 0
            while ticks < 2:
                await first.in_progress()
                try:
                    message = await subscription.next_msg(0.05)
                except nats.errors.TimeoutError:
                    continue
                assert message.data == b"clock", "in_progress came in time, and yet it was delivered again"
                ticks += 1
            await first.ack()

    run(work)


def test_what_a_durable_does_not_acknowledge_comes_again_and_ends_as_a_dead_letter(server: Serve, quick: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            letters = await other.subscribe(f"DLQ.{quick}")
            subscription = await one.subscribe(quick, queue="DURABLE:billing")
            await settle(one)
            await settle(other)
            await other.publish(quick, b"poison", headers={"Trace-ID": "7"})
            tries = await take(subscription, 3)
            assert [message.data for message in tries] == [b"poison"] * 3
            counts = [(message.headers or {}).get("Delivery-Count") for message in tries]
            assert counts == [None, "2", "3"]
            [letter] = await take(letters, 1)
            assert letter.data == b"poison"
            assert letter.subject == f"DLQ.{quick}"
            assert letter.headers is not None
            assert (
                letter.headers.items()
                >= {
                    "Trace-ID": "7",
                    "Dead-Letter-Reason": "not acknowledged",
                    "Dead-Letter-Attempts": "3",
                    "Dead-Letter-Group": f"{quick}:billing",
                    "Dead-Letter-Subject": quick,
                    "Dead-Letter-Topic": "quick",
                }.items()
            )

    run(work)


def test_what_a_durable_terminates_is_a_dead_letter_at_once(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            letters = await other.subscribe(f"DLQ.{patient}")
            subscription = await one.subscribe(patient, queue="DURABLE:billing")
            await settle(one)
            await settle(other)
            await other.publish(patient, b"poison")
            [message] = await take(subscription, 1)
            await message.term()
            [letter] = await take(letters, 1)
            assert letter.data == b"poison"
            assert letter.headers is not None
            assert letter.headers["Dead-Letter-Reason"] == "refused"
            assert letter.headers["Dead-Letter-Attempts"] == "1"

    run(work)


@pytest.mark.parametrize("word", [b"+TERM", b"-NAK"])
def test_a_dead_letter_says_what_a_client_wrote_behind_term_or_nak(tmp_path: Path, word: bytes) -> None:
    with Serve(tmp_path, topic_deliveries_max=1) as once:

        async def work() -> None:
            async with connected(once) as client:
                letters = await client.subscribe("DLQ.>")
                subscription = await client.subscribe("orders", queue="DURABLE:billing")
                await settle(client)
                await client.publish("orders", b"poison")
                [message] = await take(subscription, 1)
                await client.publish(message.reply, word + b" no such account")
                [letter] = await take(letters, 1)
                assert letter.headers is not None
                assert letter.headers["Dead-Letter-Reason"] == "no such account"

        run(work)


def test_a_durable_gets_what_came_while_it_was_away(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=3_600_000) as server:

        async def publish(*data: bytes) -> None:
            async with connected(server) as client:
                for each in data:
                    await client.publish("orders.a", each)
                await settle(client)

        @asynccontextmanager
        async def durable() -> AsyncIterator[tuple[Client, Subscription]]:
            async with connected(server) as client:
                subscription = await client.subscribe("orders.>", queue="DURABLE:billing")
                await settle(client)
                yield client, subscription

        async def before() -> None:
            async with durable() as (client, subscription):
                await publish(b"1", b"2", b"3")
                first, second, third = await take(subscription, 3)
                await second.ack()
                await settle(client)
                assert (first.data, third.data) == (b"1", b"3")
            await publish(b"4")
            async with durable() as (client, subscription):
                found = await take(subscription, 3)
                assert [message.data for message in found] == [b"1", b"3", b"4"]
                await found[1].ack()
                await settle(client)
            await publish(b"5")

        async def after() -> None:
            await publish(b"6")
            async with durable() as (client, subscription):
                found = await take(subscription, 4)
                assert [message.data for message in found] == [b"1", b"4", b"5", b"6"]
                for message in found:
                    await message.ack()
                await settle(client)

        async def last() -> None:
            async with durable() as (_, subscription):
                await publish(b"7")
                assert await take_data(subscription, 1) == [b"7"]

        run(before)
        server.kill()
        server.restart()
        run(after)
        server.kill()
        server.restart()
        run(last)


def test_members_of_a_durable_share_its_messages(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as two, connected(server) as publisher:
            subscriptions = [await client.subscribe(patient, queue="DURABLE:billing") for client in (one, two)]
            await settle(one)
            await settle(two)
            for number in range(100):
                await publisher.publish(patient, b"%d" % number)
            got = [await take(subscription, 50) for subscription in subscriptions]
            numbers = sorted(int(message.data) for messages in got for message in messages)
            assert numbers == list(range(100))
            # What one has and does not acknowledge is the other's when it goes.
            for message in got[1]:
                await message.ack()
            await settle(two)
            await one.close()
            again = await take_data(subscriptions[1], 50)
            assert again == [message.data for message in got[0]]

    run(work)


# ---- a subscriber that is slow, or does not read


def test_a_high_rate_does_not_stall(server: Serve, subject: str) -> None:
    with Nats(server) as client, Flux(server) as publisher:
        client.send(f"SUB {subject} 1\r\nFLOWCTL 1 PUSH 8000 1\r\n")
        assert client.ask("PING") == "PONG"
        publisher.send(b"".join(pub(subject, b"%d" % number) for number in range(500)))
        assert [client.message().payload for _ in range(500)] == [b"%d" % number for number in range(500)]


def test_unstored_messages_wait_for_a_client_that_does_not_read_within_a_limit(tmp_path: Path) -> None:
    count, filler = 512, b"x" * (16 << 10)  # 8 MiB, more than the system's buffers take
    with Serve(tmp_path) as server, Nats(server, receive_bytes=4096) as slow, Nats(server) as other:
        slow.send("SUB _INBOX.slow.* 1\r\n")
        assert slow.ask("PING") == "PONG"

        def reply(first: int) -> None:
            for number in range(first, first + count):
                other.send(pub(f"_INBOX.slow.{number}", b"%08d" % number + filler))
            assert other.ask("PING") == "PONG"

        reply(0)
        for number in range(count):
            assert slow.message().payload[:8] == b"%08d" % number
        assert get(server, "/varz").json["dropped"] == 0

        # Beyond the limit they are dropped, and counted.
        for step in range(1, 5):
            reply(step * count)
        dropped = get(server, "/varz").json["dropped"]
        assert 0 < dropped < 4 * count
        numbers = [int(slow.message().payload[:8]) for _ in range(4 * count - dropped)]
        assert numbers == sorted(numbers)
        assert slow.ask("PING") == "PONG"


def test_a_subscriber_that_does_not_read_stops_nobody_and_gets_everything_later(tmp_path: Path) -> None:
    payload_bytes, per_flush, flushes = 16 << 10, 256, 50  # 200 MiB
    with (
        Serve(
            tmp_path,
            topic_durability="flush",
            topic_segment_bytes=16 << 20,
            storage_tail_bytes_max=4 << 20,
            storage_unflushed_bytes_max=16 << 20,
        ) as server,
        Nats(server, receive_bytes=4096) as stuck,
        Nats(server) as reader,
        Nats(server) as publisher,
    ):
        for client in (stuck, reader):
            client.send("SUB flood.> 1\r\n")
            assert client.ask("PING") == "PONG"
        filler = b"x" * (payload_bytes - 8)

        def publish(first: int) -> None:
            numbers = range(first, first + per_flush)
            publisher.send(b"".join(pub("flood.x", b"%08d" % number + filler) for number in numbers))

        def receive(client: Nats, first: int) -> None:
            for number in range(first, first + per_flush):
                message = client.message()
                assert (message.subject, message.payload[:8]) == ("flood.x", b"%08d" % number)

        publish(0)
        receive(reader, 0)
        before = server.rss()
        for flush in range(1, flushes):
            publish(flush * per_flush)
            receive(reader, flush * per_flush)
            assert server.rss() - before < 50 << 20
        assert publisher.ask("PING") == "PONG"
        # At last it reads: from the disk, in order, and then what is new.
        for flush in range(flushes):
            receive(stuck, flush * per_flush)
        publish(flushes * per_flush)
        receive(stuck, flushes * per_flush)
        assert server.rss() - before < 50 << 20


@pytest.mark.parametrize("options", [b'{"delay": Infinity}', b'{"delay": 1e300}', b"[" * 100_000, b'{"delay": []}'])
def test_a_delay_that_is_none_does_no_harm(server: Serve, options: bytes) -> None:
    with Nats(server) as client:
        client.send("SUB patient.nak DURABLE:nak 7\r\nPUB patient.nak 1\r\nx\r\n")
        reply = client.message().reply
        assert reply is not None
        client.send(b"PUB %b %d\r\n-NAK %b\r\n" % (reply.encode(), len(options) + 5, options))
        client.send(b"PUB %b 4\r\n+ACK\r\nPING\r\n" % reply.encode())
        # Given back at once, it may have come once more before it was acknowledged.
        while (line := client.line()) != "PONG":
            assert line.startswith("HMSG patient.nak 7 "), line
            client.read(int(line.split(" ")[-1]) + 2)
