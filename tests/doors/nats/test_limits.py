"""What NATS clients can rely on, and where they are stopped: durability, credentials, refusals, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from tests.support.nats_clients import connected, run, settle, take_data
from tests.support.process import PATIENCE_S
from tests.support.server import Flux, Nats, Serve, pub
from tests.support.web import get

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
