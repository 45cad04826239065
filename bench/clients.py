"""The Python client, against those of NATS and Redis: the same work through each, in the same run, on one machine."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import nats
import redis
import uvloop
from nats.aio.msg import Msg

from bench import peers
from bench.load import Publisher, block_messages, make_payload
from bench.measure import Bench, Line
from bench.peers import Peer
from penstock.client.aio import AsyncClient
from penstock.client.subscription import AsyncSubscription
from penstock.client.sync import Client

_SIZE: Final = 100
# What is asked of Redis and JetStream at once: more makes neither faster.
_WINDOW: Final = 1000
# Read ahead of who takes one message after the other.
_BUFFER: Final = 10_000
_CHUNK_BYTES: Final = 1 << 20


def measure_producer(bench: Bench) -> Iterator[Line]:
    """Messages that are on the disk when the client says so."""
    what, messages = "producer, 100 B, fsync", bench.choose(200_000, 2_000)
    with ExitStack() as stack:
        server = stack.enter_context(peers.penstock(bench.directory / "penstock", "fsync"))
        ours = stack.enter_context(_producer(server, messages))
        # What of each peer is measured, and how many messages a round of it is.
        theirs: dict[str, tuple[Callable[[], float], int]] = {}
        server = stack.enter_context(peers.jetstream(bench.directory / "jetstream"))
        theirs["nats-py, JetStream publish_async, sync always"] = stack.enter_context(_publish_async(server)), _WINDOW
        if lack := peers.lack("redis-server"):
            bench.note(lack)
        else:
            count = bench.choose(20_000, _WINDOW)
            server = stack.enter_context(peers.redis(bench.directory / "redis"))
            theirs["redis-py, pipelined XADD, appendfsync always"] = stack.enter_context(_xadd(server, count)), count
        for against, (run, count) in theirs.items():
            our_seconds, their_seconds = bench.disk(what, ours, run, bench.choose(10, 1))
            yield Line(
                section="producer",
                what=what,
                against=against,
                unit="msg/s",
                penstock=messages / our_seconds,
                limit=count / their_seconds,
                ratio_of="speed",
                target=5,
            )


@contextmanager
def _producer(server: Peer, messages: int) -> Iterator[Callable[[], float]]:
    payload = make_payload(_SIZE)
    with Client(_address(server)) as client, client.producer() as producer:

        def run() -> float:
            begun = time.perf_counter()
            for _ in range(messages):
                producer.publish("produced", payload)
            producer.flush()
            return time.perf_counter() - begun

        yield run


@contextmanager
def _xadd(server: Peer, messages: int) -> Iterator[Callable[[], float]]:
    payload = make_payload(_SIZE)
    with redis.Redis(port=server.port) as client:

        def run() -> float:
            begun = time.perf_counter()
            for _ in range(0, messages, _WINDOW):
                pipeline = client.pipeline(transaction=False)
                for _ in range(_WINDOW):
                    pipeline.xadd("produced", {"v": payload})
                pipeline.execute()
            seconds = time.perf_counter() - begun
            client.delete("produced")
            return seconds

        yield run


@contextmanager
def _publish_async(server: Peer) -> Iterator[Callable[[], float]]:
    payload = make_payload(_SIZE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = runner.run(nats.connect(f"nats://127.0.0.1:{server.port}"))
        stream = client.jetstream()
        runner.run(stream.add_stream(name="produced", subjects=["produced"]))

        async def publish() -> None:
            for _ in range(_WINDOW):
                await stream.publish_async("produced", payload)
            await stream.publish_async_completed()

        yield lambda: _timed(runner, publish)
        runner.run(client.close())


def measure_consumer(bench: Bench) -> Iterator[Line]:
    """Messages that wait at the server, taken by a client."""
    blocks = bench.choose(40, 1)
    messages = blocks * block_messages(_SIZE)
    with (
        peers.nats(bench.directory / "nats") as their_server,
        peers.penstock(bench.directory / "penstock", "flush") as our_server,
        _nats_consumer(their_server, blocks) as theirs,
    ):
        for what, consume, target in (("one at a time", _take_each, 3), ("in batches", _take_batches, 10)):
            with _consumer(our_server, blocks, consume) as ours:
                what = f"consume, 100 B, {what}"
                our_seconds, their_seconds = bench.processor(what, ours, theirs, bench.choose(10, 1))
            yield Line(
                section="consumer",
                what=what,
                against="nats-py, core, by callback",
                unit="msg/s",
                penstock=messages / our_seconds,
                limit=messages / their_seconds,
                ratio_of="speed",
                target=target,
            )


async def _take_each(subscription: AsyncSubscription, messages: int) -> None:
    async for message in subscription:
        assert len(message.value) == _SIZE
        messages -= 1
        if not messages:
            return


async def _take_batches(subscription: AsyncSubscription, messages: int) -> None:
    async for batch in subscription.batches():
        for message in batch:
            assert len(message.value) == _SIZE
        messages -= len(batch)
        if messages <= 0:
            return


@contextmanager
def _consumer(
    server: Peer, blocks: int, consume: Callable[[AsyncSubscription, int], object]
) -> Iterator[Callable[[], float]]:
    messages = blocks * block_messages(_SIZE)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        Publisher(server.port, "taken", _SIZE) as publisher,
    ):
        client = AsyncClient(_address(server))
        subscription = runner.run(_subscribe(client))

        def run() -> float:
            publisher.run(blocks)
            return _timed(runner, lambda: consume(subscription, messages))

        yield run
        runner.run(client.close())


async def _subscribe(client: AsyncClient) -> AsyncSubscription:
    return await client.subscribe("taken", buffer=_BUFFER)


@contextmanager
def _nats_consumer(server: Peer, blocks: int) -> Iterator[Callable[[], float]]:
    messages = blocks * block_messages(_SIZE)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        Publisher(server.port, "taken", _SIZE) as publisher,
    ):
        client = runner.run(nats.connect(f"nats://127.0.0.1:{server.port}"))
        taken, is_done = 0, asyncio.Event()

        # Of its three ways this is the fastest: an iterator takes three times as long.
        async def take(message: Msg) -> None:
            nonlocal taken
            assert len(message.data) == _SIZE
            taken += 1
            if taken % messages == 0:
                is_done.set()

        runner.run(client.subscribe("taken", cb=take, pending_msgs_limit=0, pending_bytes_limit=0))
        runner.run(client.flush())

        def run() -> float:
            is_done.clear()
            publisher.run(blocks)
            return _timed(runner, is_done.wait)

        yield run
        runner.run(client.close())


def measure_fetch(bench: Bench) -> Iterator[Line]:
    """A topic as Arrow record batches, against the same bytes through a socket and nothing else."""
    messages = bench.choose(2_000_000, 10_000)
    payload = make_payload(_SIZE)
    with peers.penstock(bench.directory / "penstock", "flush") as server, Client(_address(server)) as client:
        with client.producer() as producer:
            for _ in range(messages):
                producer.publish("fetched", payload)
        stored = sum(position.bytes for position in client.topic("fetched").positions)

        with _fetcher(server, messages) as fetch, _loopback(stored) as receive:
            what = "fetch, 100 B, Arrow"
            our_seconds, their_seconds = bench.processor(what, fetch, receive, bench.choose(20, 1))
    yield Line(
        section="fetch",
        what=what,
        against="loopback TCP, nothing done with it",
        unit="MB/s",
        penstock=stored / our_seconds / 1e6,
        limit=stored / their_seconds / 1e6,
        ratio_of="speed",
        target=0.5,
    )


@contextmanager
def _fetcher(server: Peer, messages: int) -> Iterator[Callable[[], float]]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = AsyncClient(_address(server))

        async def fetch() -> None:
            rows = 0
            async for batch in client.fetch("fetched", arrow=True):
                rows += batch.num_rows
            assert rows == messages

        yield lambda: _timed(runner, fetch)
        runner.run(client.close())


@contextmanager
def _loopback(size: int) -> Iterator[Callable[[], float]]:
    """So many bytes from another process, as fast as they come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = subprocess.Popen([sys.executable, "-m", "bench.clients", str(port), str(size)])
        connection, _ = listener.accept()
        with connection:
            buffer = bytearray(_CHUNK_BYTES)

            def receive() -> float:
                begun = time.perf_counter()
                connection.sendall(b"!")
                left = size
                while left:
                    left -= connection.recv_into(buffer, min(left, _CHUNK_BYTES))
                return time.perf_counter() - begun

            yield receive
        sender.wait()


def _send(port: int, size: int) -> None:
    """Whenever it is asked, until nobody asks any more."""
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while connection.recv(1):
            for begin in range(0, size, _CHUNK_BYTES):
                connection.sendall(chunk[: size - begin])


def _timed(runner: asyncio.Runner, work: Callable[[], object]) -> float:
    async def timed() -> float:
        begun = time.perf_counter()
        await work()  # type: ignore[misc]
        return time.perf_counter() - begun

    return runner.run(timed())


def _address(server: Peer) -> str:
    return f"127.0.0.1:{server.port}"


if __name__ == "__main__":
    _send(*map(int, sys.argv[1:]))
