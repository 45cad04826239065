"""`penstock demo`: the log at work, in a directory that is removed afterwards.

Run as a module, this is the process that the demo kills: it appends until it is gone, and writes to its output
up to which offset it was told that messages are safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn

from penstock.batch import Batch, encode
from penstock.cli import output, verify
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.storage import inspect
from penstock.storage.log import Log
from penstock.storage.store import Store

VALUE_BYTES: Final = 100
BATCH_MESSAGES: Final = 500
# Batches that wait for their acknowledgement at once: what a few busy producers would have on the way.
IN_FLIGHT: Final = 8
READ_BYTES: Final = 1 << 20
# The process is killed once it was told of so many messages.
KILL_AFTER_MESSAGES: Final = 20_000
# Through the door each message is a command, and is replayed as one.
SERVED_MESSAGES_MAX: Final = 100_000
# A server that says nothing for so long does not work.
SILENCE_SECONDS_MAX: Final = 30


def run(messages: int) -> bool:
    """Whether everything that was acknowledged was there."""
    logging.basicConfig(format="   (%(message)s)")
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as directory:
        console.print(f"In {directory}, which is removed afterwards.", soft_wrap=True)
        data = Path(directory)
        with Store(data) as store:
            orders = store.create_topic("orders")
            survivors = store.create_topic("survivors")
            _append(store, store.log(orders.id), messages, console)
        sound = _read(data, orders.id, messages, console)
        sound &= _kill(data, survivors.id, min(messages, KILL_AFTER_MESSAGES), console)
        sound &= _verify(data, console)
        return sound & _serve(data / "served", min(messages, SERVED_MESSAGES_MAX), console)


def _append(store: Store, log: Log, messages: int, console: Console) -> None:
    console.print(
        f"\n[bold]1. Append[/] {messages:,} messages of {VALUE_BYTES} bytes, in batches of {BATCH_MESSAGES}.\n"
        "   A batch is acknowledged when it is on the disk (fsync)."
    )
    with output.progress("  ", BarColumn(), MofNCompleteColumn()) as progress:
        bar = progress.add_task("", total=messages)
        started = time.perf_counter()
        _drive(store, log, _batches(messages), lambda batch: progress.advance(bar, batch.count))
        seconds = time.perf_counter() - started
    console.print(f"   {_rate(messages, seconds)}, {messages * VALUE_BYTES / seconds / 1e6:,.0f} MB/s")


def _read(data: Path, topic_id: int, messages: int, console: Console) -> bool:
    console.print("\n[bold]2. Read[/] them back, after closing and opening the directory.")
    with Store(data) as store:
        log = store.log(topic_id)
        found, seconds = _read_lists(log)
        console.print(f"   as lists of bytes  {_rate(found, seconds)}")
        if importlib.util.find_spec("pyarrow"):
            rows, seconds = _read_arrow(log)
            console.print(f"   as Arrow           {_rate(rows, seconds)}")
        else:
            console.print("   as Arrow           skipped: pip install 'penstock[arrow]'")
    if found != messages:
        console.print(f"   [red]{found:,} of {messages:,} are as they were written.[/]")
    return found == messages


def _kill(data: Path, topic_id: int, messages: int, console: Console) -> bool:
    console.print("\n[bold]3. kill -9[/] a process while it appends, and look what is left.")
    command = [sys.executable, "-m", "penstock.cli.demo", str(data), str(topic_id)]
    acknowledged = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                acknowledged = int(line)
                if acknowledged >= messages:
                    break
            else:
                console.print("   [red]The process ended before it could be killed.[/]")
                return False
        finally:
            child.kill()
        # What it was told between our decision and its end counts as well.
        for line in child.stdout:
            acknowledged = int(line)
    with Store(data) as store:
        found, _ = _read_lists(store.log(topic_id))
    console.print(f"   Process {child.pid} was told that {acknowledged:,} messages are safe. Then it was killed.")
    if found < acknowledged:
        console.print(f"   [red]Only the first {found:,} are there.[/]")
        return False
    console.print(f"   [green]All {acknowledged:,} are there[/], each once and in order.", end="")
    more = found - acknowledged
    console.print(f" So are {more:,} more that had just been written." if more else "")
    return True


def _verify(data: Path, console: Console) -> bool:
    console.print("\n[bold]4. Verify[/] every byte, as [bold]penstock log verify[/] does.\n")
    with inspect.inspect(data) as inspection:
        verdicts = [inspect.verify(log) for log in inspection.logs]
    verify.show(inspection, verdicts, console)
    return verify.is_sound(inspection, verdicts)


def _serve(data: Path, messages: int, console: Console) -> bool:
    console.print(
        f"\n[bold]5. Serve[/] it: {messages:,} messages from a publisher to a subscriber, as NATS clients speak.\n"
        "   Then kill -9 the server, start it again, and ask for them."
    )
    with _server(data) as (server, port), _connect(port) as subscriber, _connect(port) as publisher:
        _ask(subscriber, b"CONNECT {}\r\nSUB orders.> 1\r\nPING\r\n", b"PONG\r\n")
        commands = [b"PUB orders.eu %d\r\n%b\r\n" % (VALUE_BYTES, value) for value in _values(0, messages)]
        last = re.escape(commands[-1].split(b"\r\n")[1])
        started = time.perf_counter()
        sending = threading.Thread(target=publisher.sendall, args=(b"CONNECT {}\r\n" + b"".join(commands),))
        sending.start()
        received = _ask(subscriber, b"", last)
        seconds = time.perf_counter() - started
        sending.join()
        _ask(publisher, b"PING\r\n", b"PONG\r\n")
        arrived = received.count(b"MSG orders.eu 1 ")
        console.print(f"   stored and received  {_rate(arrived, seconds)}")
        server.kill()
    with _server(data) as (server, port), _connect(port) as client:
        replayed = _ask(client, b"REPLAY FIRST %d\r\n" % messages, rb"\r\n\+OK \d+\r\n")
        server.terminate()
    if arrived != messages or not replayed.endswith(b"+OK %d\r\n" % messages):
        console.print(f"   [red]{arrived:,} of {messages:,} arrived, and not all are there afterwards.[/]")
        return False
    console.print(f"   [green]All {messages:,} are there[/], after the kill as before it.")
    return True


@contextlib.contextmanager
def _server(data: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ports = [argument for name in ("port", "quiet-port", "http-port") for argument in (f"--{name}", "0")]
    command = [sys.executable, "-m", "penstock", "serve", "--data", str(data), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            ready = re.search(rb"text on [^:]+:(\d+)", server.stdout.readline())
            if ready is None:
                raise OSError("the server did not start")
            yield server, int(ready[1])
        finally:
            if server.poll() is None:
                server.terminate()


def _connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_SECONDS_MAX)
    _ask(client, b"", b"\r\n")
    return client


def _ask(client: socket.socket, command: bytes, until: bytes) -> bytes:
    """What comes back, up to what ends it: a pattern."""
    client.sendall(command)
    received = bytearray()
    while True:
        part = client.recv(1 << 18)
        if not part:
            raise OSError("the server closed the connection")
        received += part
        if re.search(until, received[-len(part) - VALUE_BYTES :]):
            return bytes(received)


def _batches(messages: int | None = None) -> Iterator[Batch]:
    """Messages that tell their own number; without end if no number of them is given."""
    clock = SystemClock()
    for first in itertools.count(0, BATCH_MESSAGES):
        last = first + BATCH_MESSAGES if messages is None else min(first + BATCH_MESSAGES, messages)
        if first >= last:
            return
        yield encode(_values(first, last), timestamp=clock.now_us())


def _values(first: int, last: int) -> list[bytes]:
    return [(b"message %d " % number).ljust(VALUE_BYTES, b".") for number in range(first, last)]


def _drive(store: Store, log: Log, batches: Iterator[Batch], acknowledged: Callable[[Batch], object]) -> None:
    """Append all batches, some of them at once, in the order in which they come."""

    async def produce() -> None:
        for batch in batches:
            await store.append(log, batch)
            acknowledged(batch)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            rounds = group.create_task(store.run())
            async with asyncio.TaskGroup() as producers:
                for _ in range(IN_FLIGHT):
                    producers.create_task(produce())
            rounds.cancel()

    try:
        uvloop.run(run())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _read_lists(log: Log) -> tuple[int, float]:
    """How many messages from the first on are as they were written, and how long it took to read them."""
    seconds = 0.0
    end = log.start
    while True:
        started = time.perf_counter()
        decoded = [(batch.base_offset, batch.columns().values()) for batch in log.read(end, READ_BYTES)]
        seconds += time.perf_counter() - started
        if not decoded:
            return end, seconds
        for offset, values in decoded:
            if offset != end or values != _values(offset, offset + len(values)):
                return end, seconds
            end += len(values)


def _read_arrow(log: Log) -> tuple[int, float]:
    from penstock import arrow

    rows = 0
    offset = log.start
    started = time.perf_counter()
    while batches := log.read(offset, READ_BYTES):
        rows += sum(arrow.decode(batch).num_rows for batch in batches)
        offset = batches[-1].end
    return rows, time.perf_counter() - started


def _rate(messages: int, seconds: float) -> str:
    return f"{seconds:.2f} s: {messages / seconds:,.0f} messages/s"


def _append_until_killed(data: Path, topic_id: int) -> None:
    with Store(data) as store:
        _drive(store, store.log(topic_id), _batches(), lambda batch: os.write(1, b"%d\n" % batch.end))


if __name__ == "__main__":
    try:
        _append_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
    except (PenstockError, OSError) as error:
        sys.exit(f"error: {inspect.explain(error)}")
