"""The figures that the documents of the five brokers promise, each measured here: figure, promised, ratio.

They were measured on other machines, so a line says how far this one is from them and no more. Where a document gives a
range, the better end of it is what is promised.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Final

from bench import peers
from bench.data import MESSAGES, ready
from bench.doors import OTHER_FILES, allow_open_files, connection_bytes, paced, run_pairs
from bench.load import Connection, Publisher, Worker, block_messages
from bench.measure import Bench, Line, RatioOf
from bench.peers import Peer
from penstock import ChannelBroker
from penstock.log.log import Log
from penstock.log.policy import Policy
from penstock.store.store import Store, StoreSettings

_RATE: Final = 1000
_SUBSCRIBERS: Final = 10
_CONNECTIONS: Final = 10_000
_CHUNK_BYTES: Final = 1 << 20


def measure(bench: Bench) -> Iterator[Line]:
    # Of fresh servers: memory that others have freed would be used again.
    with peers.penstock(bench.directory / "memory", "flush") as peer:
        each = connection_bytes(bench, "memory of connections", peer, bench.choose(1000, 100))
        yield _line("memory of a connection", "PulsyFlux", "kB", max(0, each) / 1e3, 8, "memory")
    with peers.penstock(bench.directory / "subscribers", "flush") as peer:
        yield _subscribers(bench, peer)
    with peers.penstock(bench.directory / "connections", "flush") as peer:
        yield _connections(bench, peer)
    with peers.penstock(bench.directory / "doors", "flush") as peer:
        yield from _latencies(bench, peer)
        yield from _rates(bench, peer)
    yield from _storage(bench, bench.directory / "storage")


def _line(what: str, document: str, unit: str, figure: float, promised: float, ratio_of: RatioOf) -> Line:
    return Line(
        section="promised",
        what=what,
        against=f"promised: {document}",
        unit=unit,
        penstock=figure,
        limit=promised,
        ratio_of=ratio_of,
        target=1,
    )


def _subscribers(bench: Bench, peer: Peer) -> Line:
    """PF-10: the memory of a channel's broker with a hundred subscribers."""
    bench.progress("subscribers")
    with ChannelBroker(f"127.0.0.1:{peer.port}", "bench", timeout=60) as broker:
        before = peer.memory_bytes()
        for _ in range(100):
            broker.subscribe("events")
        size = max(0, peer.memory_bytes() - before)
    return _line("memory of 100 subscribers of a channel", "PulsyFlux", "kB", size / 1e3, 1600, "memory")


def _connections(bench: Bench, peer: Peer) -> Line:
    """PF-08: connections at once, each of which is answered."""
    wanted = bench.choose(_CONNECTIONS, 200)
    possible = min(wanted, allow_open_files(wanted + OTHER_FILES) - OTHER_FILES)
    if possible < wanted:
        bench.note(f"Promised: {possible:,} connections and not {wanted:,}, `ulimit -Hn` allows no more open files.")
    with ExitStack() as stack:
        connections = []
        for number in range(possible):
            if number % 100 == 0:
                bench.progress("opening connections")
            connections.append(stack.enter_context(Connection(peer.port)))
        for connection in connections:
            connection.ping()
    return _line("connections at once", "Provider", "clients", len(connections), wanted, "count")


def _latencies(bench: Bench, peer: Peer) -> Iterator[Line]:
    """PF-01, PF-06 and PF-09: from a send to the receipt, at a rate that keeps no one busy."""
    times: list[float] = []
    with paced(peer, _RATE) as run:
        run(_RATE // 10)
        for _ in range(bench.choose(10, 1)):
            bench.progress("latency")
            times += run(bench.choose(_RATE, _RATE // 10))
    middle, slow = median(times) * 1e6, quantiles(times, n=100)[98] * 1e6
    yield _line("delivery to an active subscriber, p50", "Cursus", "µs", middle, 1000, "time")
    yield _line("push to a consumer, p50", "Provider", "µs", middle, 1000, "time")
    yield _line("push to a consumer, p99", "Provider", "µs", slow, 5000, "time")
    with ChannelBroker(f"127.0.0.1:{peer.port}", "latency", timeout=60) as broker:
        subscriber = broker.subscribe("events")
        times = []
        for _ in range(bench.choose(2000, 20)):
            begun = time.perf_counter()
            broker.publish("events", b"")
            subscriber.get()
            times.append(time.perf_counter() - begun)
    what = "publish and receive by a channel's broker, p50"
    yield _line(what, "PulsyFlux", "µs", median(times) * 1e6, 200, "time")


def _rates(bench: Bench, peer: Peer) -> Iterator[Line]:
    """PF-02, PF-07 and PF-09: a publisher alone, with one subscriber, and with ten."""
    blocks = bench.choose(40, 2)
    messages = blocks * block_messages(100)
    with Publisher(peer.port, "promised.write", 100) as publisher:
        seconds = min(_seconds(bench, "write", *publisher.run(blocks)) for _ in range(bench.choose(10, 1)))
    yield _line("write, 100 B, flush", "Provider", "msg/s", messages / seconds, 50_000, "speed")
    with run_pairs(peer, 1, 100, blocks) as run:
        seconds = min(run() for _ in range(bench.choose(10, 1)))
    yield _line("messages to one consumer, 100 B", "Provider", "msg/s", messages / seconds, 10_000, "speed")
    blocks = bench.choose(10, 1)
    messages = blocks * block_messages(100)
    with ExitStack() as stack:
        subscribers = [
            stack.enter_context(Worker("subscribe", peer.port, "promised.all", 100)) for _ in range(_SUBSCRIBERS)
        ]
        publisher_of_all = stack.enter_context(Worker("publish", peer.port, "promised.all", 100))
        workers = [*subscribers, publisher_of_all]
        for worker in workers:
            worker.wait_until_ready()
        seconds = min(_broadcast(bench, workers, blocks) for _ in range(bench.choose(5, 1)))
    what = f"broadcast to {_SUBSCRIBERS} subscribers, 100 B"
    yield _line(what, "PulsyFlux", "msg/s", messages / seconds, 8000, "speed")


def _seconds(bench: Bench, what: str, begun: float, ended: float) -> float:
    bench.progress(what)
    return ended - begun


def _broadcast(bench: Bench, workers: list[Worker], blocks: int) -> float:
    bench.progress("broadcast")
    for worker in workers:
        worker.begin(blocks)
    times = [worker.end() for worker in workers]
    return max(ended for _, ended in times) - times[-1][0]


def _storage(bench: Bench, directory: Path) -> Iterator[Line]:
    """PF-03 to PF-05: messages read from a segment that grows and from sealed ones, and one found by its offset."""
    batches = bench.choose(400, 20)
    with Store(directory, settings=StoreSettings(tail_bytes_max=0)) as store:
        active = store.log(store.create_topic("active", policy=Policy(segment_bytes=1 << 30)).id)
        sealed = store.log(store.create_topic("sealed", policy=Policy(segment_bytes=bench.choose(1 << 20, 1 << 18))).id)
        for log in (active, sealed):
            bench.progress("making logs to read")
            for batch in ready(batches):
                log.append(batch)
            store.flush()
        rounds = bench.choose(10, 1)
        speed = max(_read_speed(bench, active, active.committed) for _ in range(rounds))
        yield _line("read the active segment, as messages", "Provider", "msg/s", speed, 20_000, "speed")
        speed = max(_read_speed(bench, sealed, sealed.segments[-1].base) for _ in range(rounds))
        yield _line("read sealed segments, as messages", "Provider", "msg/s", speed, 100_000, "speed")
        offsets = Random(1).choices(range(sealed.segments[-1].base), k=bench.choose(2000, 20))
        begun = time.perf_counter()
        for offset in offsets:
            [batch] = islice(sealed.read_disk(offset, 1), 1)
            assert batch.base_offset <= offset < batch.end
        each = (time.perf_counter() - begun) / len(offsets)
        yield _line("find a message by its offset", "Provider", "µs", each * 1e6, 1000, "time")


def _read_speed(bench: Bench, log: Log, end: int) -> float:
    """Messages a second, from the disk's cache to a list of values."""
    bench.progress("reading")
    offset = log.start
    count = 0
    begun = time.perf_counter()
    while offset < end:
        found = log.read_disk(offset, _CHUNK_BYTES)
        count += sum(len(batch.columns().values()) for batch in found)
        offset = found[-1].end
    seconds = time.perf_counter() - begun
    assert count % MESSAGES == 0
    return count / seconds
