"""Store messages in the copy: retry, skip or pause as configured if the disk fails."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from penstock.client.message import Message
from penstock.errors import DiskError
from penstock.model.run import Run
from penstock.replica.config import OnError
from penstock.replica.copies import Copies, OriginTopic

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Errors of the disk.
_DISK_ERRORS: Final = (OSError, sqlite3.Error, DiskError)


class CopyWriter:
    def __init__(
        self, copies: Copies, *, on_error: OnError, delay_s: Callable[[int], float | None], stop: asyncio.Event
    ) -> None:
        """`delay_s` returns the seconds to wait after the n-th failure to store a message."""
        # Messages that were acknowledged without being stored, by SKIP_ON_ERROR.
        self.skipped = 0
        # Why messages cannot be stored now, if so.
        self.failure: str | None = None
        self.is_paused = False
        self._copies = copies
        self._on_error = on_error
        self._delay_s = delay_s
        self._stop = stop
        self._resumed = asyncio.Event()
        self._given_up = asyncio.Event()
        # The only thread that may change the copies.
        self._thread = ThreadPoolExecutor(1, "penstock-replica")

    def close(self) -> None:
        self._thread.shutdown()

    def resume(self) -> bool:
        """Resume after a pause; return False if there was none."""
        self._resumed.set()
        return self.is_paused

    def give_up(self) -> None:
        """End a `store` that fails and would be retried."""
        self._given_up.set()

    async def store(self, topic: OriginTopic, messages: Sequence[Message]) -> bool:
        """Store messages; halve a failing batch until the message that cannot be stored is alone.

        Return False if not all are stored or skipped, because of `give_up` or the stop.
        """
        parts, attempt = [messages], 1
        self._given_up.clear()
        while parts:
            part = parts.pop()
            try:
                await self.in_thread(partial(self._append, topic, part))
            except _DISK_ERRORS as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    parts += (part[middle:], part[:middle])
                    continue
                self._note_failure(f"cannot store offset {part[0].offset} of {topic.name}/{part[0].partition}", error)
                if self._on_error is OnError.SKIP_ON_ERROR:
                    self._skip(topic, part[0])
                elif await self._waits(attempt):
                    parts.append(part)
                    attempt += 1
                    continue
                else:
                    return False
            else:
                self.failure = None
            attempt = 1
            _acknowledge(part)
        return True

    def _append(self, topic: OriginTopic, messages: Sequence[Message]) -> None:
        partitions: dict[int, list[Message]] = {}
        for message in messages:
            partitions.setdefault(message.partition, []).append(message)
        self._copies.append(topic, {partition: _run(several) for partition, several in partitions.items()})

    def _skip(self, topic: OriginTopic, message: Message) -> None:
        self.skipped += 1
        logger.error("skipping offset %d of %s/%d", message.offset, topic.name, message.partition)

    async def _waits(self, attempt: int) -> bool:
        """Wait for the next attempt; return False after `give_up` and at the stop."""
        if self._on_error is OnError.PAUSE_ON_ERROR:
            logger.error("paused: resume with POST /api/consumer/resume")
            await self._wait_resumed()
        else:
            await self._first_of(self._stop, self._given_up, within_s=self._delay_s(attempt) or 0.0)
        return not (self._stop.is_set() or self._given_up.is_set())

    async def _wait_resumed(self) -> None:
        self._resumed.clear()
        self.is_paused = True
        try:
            await self._first_of(self._resumed, self._stop, self._given_up)
        finally:
            self.is_paused = False

    async def _first_of(self, *events: asyncio.Event, within_s: float | None = None) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def insist(self, change: Callable[[], T], problem: str) -> T:
        """Retry a change until it succeeds, because the broker waits for it."""
        attempt = 1
        while True:
            try:
                done = await self.in_thread(change)
            except _DISK_ERRORS as error:
                self._note_failure(problem, error)
                await self.pause(self._delay_s(attempt) or 0.0)
                if self._stop.is_set():
                    raise
                attempt += 1
            else:
                self.failure = None
                return done

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the stop."""
        await self._first_of(self._stop, within_s=seconds)

    def _note_failure(self, problem: str, error: Exception) -> None:
        self.failure = f"{problem}: {error}"
        logger.error("%s", self.failure)


def _run(messages: Sequence[Message]) -> Run:
    run = Run([message.subject.encode() for message in messages], [message.value for message in messages])
    run.keys = {index: key for index, message in enumerate(messages) if (key := message.key) is not None}
    run.headers = {index: block for index, message in enumerate(messages) if (block := message.header_block)}
    run.tombstones = {index for index, message in enumerate(messages) if message.deleted}
    run.timestamps = [message.timestamp_us for message in messages]
    run.offsets = [message.offset for message in messages]
    run.base_offset = messages[0].offset
    return run


def _acknowledge(messages: Sequence[Message]) -> None:
    """Acknowledge the last message of each partition, which covers those before it."""
    last: dict[int, Message] = {message.partition: message for message in messages}
    for message in last.values():
        message.ack()
