"""`penstock demo`: the log at work, in a directory that is removed afterwards.

Run as a module, this is the process that the demo kills: it appends until it is gone, and writes to its output
up to which offset it was told that messages are safe.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from penstock.batch import Batch, encode
from penstock.cli import verify
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
        return sound & _verify(data, console)


def _append(store: Store, log: Log, messages: int, console: Console) -> None:
    console.print(
        f"\n[bold]1. Append[/] {messages:,} messages of {VALUE_BYTES} bytes, in batches of {BATCH_MESSAGES}.\n"
        "   A batch is acknowledged when it is on the disk (fsync)."
    )
    columns = ("  ", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
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
