"""Stores on a simulated disk, and the ways in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import uvloop

from penstock.errors import (
    Closed,
)
from penstock.log.log import Log
from penstock.log.policy import Durability, Policy, Topic
from penstock.model.batch import Batch, encode
from penstock.store.meta import Meta
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta
from tests.support.watched import Call, WatchedFiles

DATA = Path("/data")
SMALL = Policy(segment_bytes=4096)
FLUSH = Policy(durability=Durability.FLUSH)

# Two of these do not fit into one small segment.
LARGE = Random(0).randbytes(3000)
T = TypeVar("T")


def open_store(files: Any, *, meta: Meta | None = None, clock: ManualClock | None = None, **settings: Any) -> Store:
    """A store in memory. Its `meta.db` is gone with it, and is built again from the state topic each time."""
    return Store(
        DATA,
        files=files,
        meta=meta or memory_meta(),
        clock=clock or ManualClock(),
        settings=StoreSettings(**settings),
    )


def append_flushed(store: Store, topic: Topic, *items: bytes, partition: int = 0) -> None:
    append(store.log(topic.id, partition), *items)
    store.flush()


def end_by_close(store: Store, disk: FaultyFiles) -> FaultyFiles:
    store.close()
    return disk


def end_by_kill(store: Store, disk: FaultyFiles) -> FaultyFiles:
    disk.kill()
    return disk


def end_by_power_cut(store: Store, disk: FaultyFiles) -> FaultyFiles:
    return disk.power_cut()


End = Callable[[Store, FaultyFiles], FaultyFiles]
ENDS: list[End] = [end_by_close, end_by_kill, end_by_power_cut]


class AtOnce:
    """Topics are changed by the calls that wait for the disk."""

    def create(self, store: Store, name: str, **options: Any) -> Topic:
        return store.create_topic(name, **options)

    def alter(self, store: Store, topic: Topic) -> None:
        store.alter_topic(topic)

    def delete(self, store: Store, topic_id: int) -> None:
        store.delete_topic(topic_id)


class Awaited:
    """Topics are changed by the calls that `run` serves."""

    def create(self, store: Store, name: str, **options: Any) -> Topic:
        return serve(store, lambda: store.create_topic_async(name, **options))

    def alter(self, store: Store, topic: Topic) -> None:
        serve(store, lambda: store.alter_topic_async(topic))

    def delete(self, store: Store, topic_id: int) -> None:
        serve(store, lambda: store.delete_topic_async(topic_id))


def serve(store: Store, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the store for one change. If the power goes that is raised, wherever it was noticed."""

    async def main() -> T:
        async with asyncio.timeout(10):
            rounds = asyncio.create_task(store.run())
            asked = asyncio.create_task(change())
            await asyncio.wait([asked])
            if not isinstance(asked.exception(), PowerCut | Closed):
                rounds.cancel()
            [ended] = await asyncio.gather(rounds, return_exceptions=True)
            if isinstance(ended, BaseExceptionGroup):
                raise ended.exceptions[0]
            return await asked

    return uvloop.run(main())


ways = pytest.mark.parametrize("way", [AtOnce(), Awaited()], ids=["at once", "awaited"])
Way = AtOnce | Awaited
STATE_FILE = "topics/0/0/" + "0" * 20 + ".log"


def fail() -> None:
    raise OSError(errno.EIO, "input/output error")


def drive(main: Callable[[], Awaitable[None]]) -> None:
    """Run in an event loop, which must not hang."""

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await main()

    uvloop.run(bounded())


@contextlib.asynccontextmanager
async def running(store: Store) -> AsyncIterator[asyncio.Task[None]]:
    """The store with its rounds; it is stopped as a server stops it, and is left open."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        yield task
        task.cancel()


def batch(*items: bytes, **columns: Any) -> Batch:
    return encode(items, timestamp=0, **columns)


class Gate:
    """Where a worker waits until it is let through; `reached` is when it is there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self.reached = asyncio.Event()

    def wait(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._open.wait(10)

    def open(self) -> None:
        self._open.set()


def hold(files: WatchedFiles, name: str, log: Log) -> Gate:
    """Hold the next call of that name on a segment of this log. Only that one."""
    gate = Gate()

    def before(call: Call) -> None:
        if call.name == name and call.path.parent == log.directory and call.path.suffix == ".log":
            files.before = None
            gate.wait()

    files.before = before
    return gate
