"""The server at its text door, against the servers that people have: the same load, in the same run, on one machine.

Both sides run all the time, and only one at a time has anything to do. What a peer stores, and when it says so, is set
to be like what Penstock is asked for; where it stores nothing, its line says so.
"""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from bench import peers
from bench.load import (
    Connection,
    Publisher,
    Role,
    Worker,
    block_messages,
    connect,
    make_payload,
    make_pub,
    make_xadd,
    run_paced,
    run_single,
    run_window,
)
from bench.measure import Bench, Line
from bench.peers import Peer

_SIZES: Final = (100, 1024)
_WINDOW: Final = 1024
_TOUCHED_MIB: Final = 5000
_JETSTREAM: Final = "JetStream, sync always"
_REDIS: Final = "Redis, appendfsync always"
# Beside its connections a server has files open, and so has this process.
OTHER_FILES: Final = 500


def measure_live(bench: Bench) -> Iterator[Line]:
    """From publishers to subscribers as fast as it goes; Penstock stores what it passes on, some gigabytes in all."""
    if not _has(bench, "nats-server"):
        return
    directory = bench.directory
    _touch_memory(bench)
    with peers.penstock(directory / "penstock", "flush") as ours, peers.nats(directory / "nats") as theirs:
        for pairs in (1, 4):
            for size in _SIZES:
                yield _live(bench, ours, theirs, pairs, size)


def _touch_memory(bench: Bench) -> None:
    """Fill as much of the page cache as this will store, and free it again.

    A virtual machine gets memory from its host when it first writes to it, ten times more slowly than to memory that it
    has (300 MB/s against 3 GB/s here). A server that has run for a while does not meet that; a benchmark that stores
    gigabytes, beside one that stores nothing, would measure little else.
    """
    path = bench.directory / "touched"
    block = bytes(1 << 20)
    bench.progress("touching memory")
    with path.open("wb") as file:
        for _ in range(bench.choose(_TOUCHED_MIB, 1)):
            file.write(block)
    path.unlink()


def _live(bench: Bench, ours: Peer, theirs: Peer, pairs: int, size: int) -> Line:
    # Tens of megabytes in a round: nats-server cuts off a subscriber for whom 64 MiB wait.
    messages = bench.choose({100: 240_000, 1024: 48_000}[size], 4 * block_messages(size))
    blocks = max(1, messages // block_messages(size) // pairs)
    messages = blocks * block_messages(size) * pairs
    what = f"live, {pairs} → {pairs}, {_say(size)}, flush"
    with run_pairs(ours, pairs, size, blocks) as penstock, run_pairs(theirs, pairs, size, blocks) as nats:
        our_seconds, their_seconds = bench.processor(what, penstock, nats, bench.choose(20, 1))
    return Line(
        section="live",
        what=what,
        against="nats-server core, not stored",
        unit="msg/s",
        penstock=messages / our_seconds,
        limit=messages / their_seconds,
        ratio_of="speed",
        target=0.7,
    )


@contextmanager
def run_pairs(peer: Peer, pairs: int, size: int, blocks: int) -> Iterator[Callable[[], float]]:
    """Publishers, each with a subject and a subscriber of its own. A round is so many blocks from each.

    It lasts from the first send until the last subscriber has its last byte and every publisher was told that the
    server has all of it.
    """
    with ExitStack() as stack:

        def start(role: Role) -> list[Worker]:
            subjects = [f"live-{size}-{pairs}-{number}" for number in range(pairs)]
            return [stack.enter_context(Worker(role, peer.port, subject, size)) for subject in subjects]

        subscribers, publishers = start("subscribe"), start("publish")
        for worker in subscribers + publishers:
            worker.wait_until_ready()

        def run() -> float:
            for worker in subscribers + publishers:
                worker.begin(blocks)
            sent = [worker.end() for worker in publishers]
            received = [worker.end() for worker in subscribers]
            return max(ended for _, ended in sent + received) - min(begun for begun, _ in sent)

        yield run


@dataclass(frozen=True, slots=True)
class _Side:
    """A server that acknowledges what is on its disk."""

    socket: socket.socket
    make: Callable[[bytes], bytes]  # from a payload to what publishes it
    mark: bytes  # once in every acknowledgement
    settle: Callable[[int], None]  # after a round of so many messages: look whether they are there, make room

    def run(self, size: int, count: int) -> float:
        """Seconds for each message, with a full window."""
        frames = [self.make(make_payload(size, place)) for place in range(_WINDOW)]
        seconds = run_window(self.socket, frames, count, self.mark)
        self.settle(count)
        return seconds / count

    def run_single(self, count: int) -> list[float]:
        times = run_single(self.socket, self.make(make_payload(100)), count, self.mark)
        self.settle(count)
        return times


def measure_acked(bench: Bench) -> Iterator[Line]:
    """One connection, and a message counts when the server has said that it is on the disk."""
    with _penstock(bench) as ours:
        if _has(bench, "nats-server"):
            with _jetstream(bench) as theirs:
                for size in _SIZES:
                    # So many that a round takes some tenths of a second.
                    yield _acked(bench, ours, theirs, size, messages=2 * _WINDOW, against=_JETSTREAM, target=50)
        if _has(bench, "redis-server"):
            with _redis(bench) as theirs:
                for size in _SIZES:
                    messages = {100: 40_000, 1024: 12_000}[size]
                    yield _acked(bench, ours, theirs, size, messages=messages, against=_REDIS, target=2)


def _acked(bench: Bench, ours: _Side, theirs: _Side, size: int, *, messages: int, against: str, target: float) -> Line:
    our_messages = bench.choose({100: 80_000, 1024: 40_000}[size], 2 * _WINDOW)
    their_messages = bench.choose(messages, _WINDOW)
    what = f"acknowledged, {_say(size)}, fsync, window {_WINDOW}"
    our_seconds, their_seconds = bench.disk(
        what, lambda: ours.run(size, our_messages), lambda: theirs.run(size, their_messages), bench.choose(20, 1)
    )
    return Line(
        section="acked",
        what=what,
        against=against,
        unit="msg/s",
        penstock=1 / our_seconds,
        limit=1 / their_seconds,
        ratio_of="speed",
        target=target,
    )


def measure_one_in_flight(bench: Bench) -> Iterator[Line]:
    """A publish, its acknowledgement, the next publish: the faster of the peers that are here is the one to meet."""
    with ExitStack() as stack:
        ours = stack.enter_context(_penstock(bench))
        theirs = {}
        if _has(bench, "nats-server"):
            theirs[_JETSTREAM] = stack.enter_context(_jetstream(bench))
        if _has(bench, "redis-server"):
            theirs[_REDIS] = stack.enter_context(_redis(bench))
        if not theirs:
            return
        what = f"one in flight, {_say(100)}, fsync, p50"
        our_times: list[float] = []
        their_times: dict[str, list[float]] = {name: [] for name in theirs}
        for _ in range(bench.choose(200, 2)):
            bench.progress(what)
            our_times += ours.run_single(10)
            for name, side in theirs.items():
                their_times[name] += side.run_single(10)
        best = min(theirs, key=lambda name: median(their_times[name]))
        yield Line(
            section="one in flight",
            what=what,
            against=f"{best}, p50",
            unit="µs",
            penstock=median(our_times) * 1e6,
            limit=median(their_times[best]) * 1e6,
            ratio_of="time",
            target=1.2,
        )


@contextmanager
def _penstock(bench: Bench) -> Iterator[_Side]:
    """A verbose connection: +OK for each publish, after its sync."""
    with (
        peers.penstock(bench.directory / "penstock", "fsync") as peer,
        Connection(peer.port, verbose=True) as connection,
    ):
        # Each +OK is its promise, and the number of them is all that is looked at.
        yield _Side(connection.socket, lambda payload: make_pub("bench", payload), b"+", lambda count: None)


@contextmanager
def _jetstream(bench: Bench) -> Iterator[_Side]:
    """A stream in files. The answer to each publish is a JSON object, with its number in the stream."""
    with peers.jetstream(bench.directory / "jetstream") as peer, Connection(peer.port) as connection:
        stream = {"name": "bench", "subjects": ["bench"], "storage": "file"}
        connection.request("$JS.API.STREAM.CREATE.bench", json.dumps(stream).encode())
        connection.subscribe("_INBOX.acks")
        stored = 0

        def settle(count: int) -> None:
            nonlocal stored
            stored += count
            state = connection.request("$JS.API.STREAM.INFO.bench", b"")["state"]
            assert state["messages"] == stored, state

        yield _Side(connection.socket, lambda payload: make_pub("bench", payload, "_INBOX.acks"), b"}", settle)


@contextmanager
def _redis(bench: Bench) -> Iterator[_Side]:
    """A stream. The answer to each XADD is a string, the number of the entry."""
    with peers.redis(bench.directory / "redis") as peer, connect(peer.port) as connection:

        def settle(count: int) -> None:
            # It is all in memory, so it may not grow.
            connection.sendall(b"XLEN bench\r\nDEL bench\r\n")
            received = b""
            while received.count(b"\r\n") < 2:
                received += connection.recv(1024)
            assert received == b":%d\r\n:1\r\n" % count, received

        yield _Side(connection, lambda payload: make_xadd("bench", payload), b"$", settle)


def measure_latency(bench: Bench) -> Iterator[Line]:
    """From a send to the receipt by a subscriber, at a rate that keeps no one busy."""
    if not _has(bench, "nats-server"):
        return
    rate = 1000
    what = f"latency, live, {rate:,} msg/s, flush"
    directory = bench.directory
    with (
        peers.penstock(directory / "penstock", "flush") as ours,
        peers.nats(directory / "nats") as theirs,
        paced(ours, rate) as penstock,
        paced(theirs, rate) as nats,
    ):
        our_times, their_times = [], []
        penstock(rate // 10)  # the first of each finds cold caches
        nats(rate // 10)
        for _ in range(bench.choose(20, 1)):
            bench.progress(what)
            our_times += penstock(bench.choose(rate // 2, rate // 10))
            their_times += nats(bench.choose(rate // 2, rate // 10))
    for percent, target in ((50, 1.5), (99, 2)):
        yield Line(
            section="latency",
            what=f"{what}, p{percent}",
            against=f"nats-server core, not stored, p{percent}",
            unit="µs",
            penstock=quantiles(our_times, n=100)[percent - 1] * 1e6,
            limit=quantiles(their_times, n=100)[percent - 1] * 1e6,
            ratio_of="time",
            target=target,
        )


@contextmanager
def paced(peer: Peer, rate: int) -> Iterator[Callable[[int], list[float]]]:
    with Connection(peer.port) as publisher, Connection(peer.port) as subscriber:
        subscriber.subscribe("latency")
        yield lambda count: run_paced(publisher, subscriber, "latency", count, rate=rate)


def measure_request(bench: Bench) -> Iterator[Line]:
    """One request at a time, and its reply: by a subject that is not stored, and by one that is, with `fsync`."""
    if not _has(bench, "nats-server"):
        return
    directory = bench.directory
    count = bench.choose(200, 2)
    with peers.penstock(directory / "penstock", "fsync") as ours, peers.nats(directory / "nats") as theirs:
        for subject, kind, target in (("_bench.service", "not stored", 2.0), ("bench.service", "stored, fsync", None)):
            what = f"request and reply, {kind}"
            with _asking(ours, subject, count) as penstock, _asking(theirs, subject, count) as nats:
                our_seconds, their_seconds = bench.processor(what, penstock, nats, bench.choose(30, 1))
            yield Line(
                section="request",
                what=what,
                against="nats-server core, not stored",
                unit="µs",
                penstock=our_seconds / count * 1e6,
                limit=their_seconds / count * 1e6,
                ratio_of="time",
                target=target,
            )


@contextmanager
def _asking(peer: Peer, subject: str, count: int) -> Iterator[Callable[[], float]]:
    """A connection that asks and one that responds, by turns: nothing here waits for another thread."""
    with Connection(peer.port) as asking, Connection(peer.port) as responding:
        asking.subscribe("_INBOX.bench")
        responding.subscribe(subject)
        question, answer = make_pub(subject, b"question", "_INBOX.bench"), make_pub("_INBOX.bench", b"answer")

        def run() -> float:
            begun = time.perf_counter()
            for _ in range(count):
                asking.socket.sendall(question)
                responding.receive_until(b"question\r\n")
                responding.socket.sendall(answer)
                asking.receive_until(b"answer\r\n")
            return time.perf_counter() - begun

        yield run


def measure_idle(bench: Bench) -> Iterator[Line]:
    """Memory for a connection that has been greeted and says no more. Of one run: memory is not noisy."""
    if not _has(bench, "nats-server"):
        return
    wanted = bench.choose(10_000, 200)
    connections = min(wanted, allow_open_files(wanted + OTHER_FILES) - OTHER_FILES)
    if connections < wanted:
        bench.note(f"Idle: {connections:,} connections and not {wanted:,}, `ulimit -Hn` allows no more open files.")
    what = f"idle, {connections:,} connections, each"
    with peers.penstock(bench.directory / "penstock", "flush") as peer:
        ours = connection_bytes(bench, what, peer, connections)
    with peers.nats(bench.directory / "nats") as peer:
        theirs = connection_bytes(bench, what, peer, connections)
    yield Line(
        section="idle",
        what=what,
        against="nats-server",
        unit="kB",
        penstock=ours / 1e3,
        limit=theirs / 1e3,
        ratio_of="memory",
        target=20,
        target_of="figure",
    )


def connection_bytes(bench: Bench, what: str, peer: Peer, connections: int) -> float:
    with ExitStack() as stack:
        # What a server loads for the first of them is not what one costs.
        stack.enter_context(Connection(peer.port))
        before = peer.memory_bytes()
        for number in range(connections):
            if number % 100 == 0:
                bench.progress(what)
            stack.enter_context(Connection(peer.port))
        return (peer.memory_bytes() - before) / connections


def allow_open_files(wanted: int) -> int:
    """Raise the limit of this process, which servers started later inherit, as far as it may; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        allowed = wanted
    else:
        allowed = max(soft, min(wanted, hard))
    if soft not in (resource.RLIM_INFINITY, allowed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def measure_many(bench: Bench) -> Iterator[Line]:
    """What a publish costs when the server has much else to know: both sides are Penstock."""
    directory = bench.directory
    with peers.penstock(directory / "none", "flush") as none:
        with peers.penstock(directory / "topics", "flush") as peer, Connection(peer.port) as connection:
            topics = bench.choose(1000, 20)
            bench.progress("making topics")
            connection.socket.sendall(b"".join(make_pub(f"topic-{number}", b"") for number in range(topics)))
            connection.ping()
            yield _many(bench, f"publish, {topics:,} topics, flush", peer, none)
        with peers.penstock(directory / "subscriptions", "flush") as peer, ExitStack() as stack:
            subscriptions = bench.choose(1000, 10)
            for number in range(100):
                bench.progress("making subscriptions")
                connection = stack.enter_context(Connection(peer.port))
                # In the topic that is published to, and to none of its messages.
                lines = (b"SUB bench.other.%d.%d %d\r\n" % (number, place, place) for place in range(subscriptions))
                connection.socket.sendall(b"".join(lines))
                connection.ping()
            yield _many(bench, f"publish, {100 * subscriptions:,} subscriptions, flush", peer, none)


def _many(bench: Bench, what: str, many: Peer, none: Peer) -> Line:
    """One publisher sends blocks, and then waits until all is stored."""
    blocks = bench.choose(40, 2)
    messages = blocks * block_messages(100)
    with Publisher(many.port, "bench.one", 100) as ours, Publisher(none.port, "bench.one", 100) as theirs:

        def timed(publisher: Publisher) -> float:
            begun, ended = publisher.run(blocks)
            return ended - begun

        with_many, with_none = bench.processor(what, lambda: timed(ours), lambda: timed(theirs), bench.choose(15, 1))
    return Line(
        section="many",
        what=what,
        against="Penstock with none",
        unit="msg/s",
        penstock=messages / with_many,
        limit=messages / with_none,
        ratio_of="time",
        target=1.5,
    )


def _has(bench: Bench, program: str) -> bool:
    lack = peers.lack(program)
    if lack:
        bench.note(lack)
    return not lack


def _say(size: int) -> str:
    return "1 KiB" if size == 1024 else f"{size} B"
