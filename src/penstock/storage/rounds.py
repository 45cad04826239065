"""Rounds: the writes and syncs that make all logs of a store durable together.

Logs belong to one thread, which appends to memory. A round takes what waits in all dirty logs, and a worker writes and
syncs it. Without an event loop, `flush` does that in the calling thread. In one, there are two lanes, each with one
round at a time:

    synced    topics with `fsync`: writes and syncs all that is dirty; also the syncs that `flush` topics are due
    written   topics with `flush`: writes only, so that their readers never wait for an fsync; small rounds on the
              loop itself

What arrives while a round runs goes into the next one: the busier the store, the more messages share a sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Final

from penstock.clock import Clock
from penstock.errors import LogFailed, Overloaded
from penstock.health import Health
from penstock.storage.files import Files
from penstock.storage.flush import Sync, Write
from penstock.storage.histogram import MESSAGES, SECONDS, Histogram
from penstock.storage.log import Log
from penstock.storage.log import State as LogState
from penstock.storage.policy import Durability

# A round of `flush` topics that is no larger is written on the loop itself: the page cache takes it in some µs, and
# the way to a worker and back costs 100 and more, up to Python's switch interval when the loop is busy.
_QUICK_BYTES: Final = 64 << 10


class Rounds:
    def __init__(
        self,
        files: Files,
        clock: Clock,
        health: Health,
        *,
        unflushed_bytes_max: int,
        unsynced_max: int,
        flush_messages: int,
        flush_ms: int,
        finished: Callable[[Round], None],
    ) -> None:
        """`unsynced_max` limits the logs with unsynced bytes in each lane, because their files stay open. `finished` is
        called with each round when its logs have taken note of it."""
        self._files = files
        self._clock = clock
        self._health = health
        self._unflushed_bytes_max = unflushed_bytes_max
        self._unsynced_max = unsynced_max
        self._flush_messages = flush_messages
        self._flush_us = flush_ms * 1000
        self._finished = finished
        # Logs with batches that no round has taken yet, and logs with batches that are written and not yet synced.
        self._dirty: dict[Log, None] = {}
        self._unsynced: dict[Log, None] = {}
        # Bytes that wait for the disk.
        self.unflushed_bytes = 0
        # Logs that take nothing more, because a sync of theirs failed.
        self.failed: dict[Log, None] = {}
        # Of each round: how long it took to write and to sync, and how many messages were in it.
        self.write_seconds, self.sync_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.round_messages = Histogram(MESSAGES)
        # Done when there is room for more again, if anyone waits for that.
        self._room: asyncio.Future[None] | None = None
        # Called when logs have given what was committed to their `on_commit`; not while a round is being finished.
        self.on_commit: Callable[[], None] | None = None
        self._is_finishing = False
        self._lanes: Lanes | None = None

    # What waits.

    def append(self, log: Log, size: int) -> None:
        """Count bytes of a log that wait for a write. Raises Overloaded if they are too many."""
        self.charge(size)
        self.wake(log)

    def charge(self, size: int) -> None:
        """Count bytes that wait for the disk until they are `settled`. Raises Overloaded if they are too many."""
        # After `room` any batch is taken: one as large as the limit would never fit beside anything else.
        if self.unflushed_bytes + size > self._unflushed_bytes_max and self.is_crowded:
            raise Overloaded(f"{self.unflushed_bytes} bytes wait for the disk: try again later")
        self.unflushed_bytes += size

    def settled(self, size: int) -> None:
        self.unflushed_bytes -= size
        if self._room is not None and not self.is_crowded:
            self._room.set_result(None)
            self._room = None

    @property
    def is_crowded(self) -> bool:
        """Whether half of what may wait for the disk does: whoever can wait with more should."""
        return self.unflushed_bytes > self._unflushed_bytes_max // 2

    async def room(self) -> None:
        """Wait until it is not crowded."""
        while self.is_crowded:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    def wake(self, log: Log) -> None:
        """Have the next round look at a log: it has something to write, or belongs to another lane now."""
        self._dirty[log] = None
        if self._lanes is not None:
            self._lanes.wake(log)

    def is_dirty(self, log: Log) -> bool:
        return log in self._dirty

    def forget(self, log: Log) -> None:
        """The log is deleted. A worker may still have something of it."""
        for logs in (self._dirty, self._unsynced, self.failed):
            logs.pop(log, None)

    # In this thread.

    def flush(self) -> None:
        """Write and sync all that was appended, here and now."""
        while writes := self._take_writes(None):
            self.drive(writes, [])
        self.drive([], self._take_syncs(None))

    def flush_log(self, log: Log) -> None:
        """Write and sync what waits in one log, here and now."""
        self._dirty.pop(log, None)
        log.flush()

    def roll(self, logs: Sequence[Log]) -> None:
        """Have these logs begin new segments: in the next rounds, or now if there are no lanes."""
        for log in logs:
            log.roll()
            self.wake(log)
        if self._lanes is None:
            self.drive([write for log in logs if (write := log.begin_write())], [])

    def drive(self, writes: list[Write], syncs: list[Sync]) -> None:
        round_ = Round(self._files, self._clock, writes, syncs, sync=True)
        round_.run()
        self.finish(round_)

    # In an event loop.

    @property
    def is_running(self) -> bool:
        return self._lanes is not None

    def start(self) -> Lanes:
        """Begin to run rounds in two lanes."""
        self._lanes = Lanes(self, asyncio.get_running_loop(), self._clock, self._health)
        for log in self._dirty:
            self._lanes.wake(log)
        return self._lanes

    async def stop(self) -> None:
        """Wait for the rounds that run, and begin none."""
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            await lanes.stop()

    def dirty_logs(self) -> Iterator[Log]:
        return iter(self._dirty)

    def take_synced_round(self) -> Round | None:
        writes = self._take_writes(Durability.FSYNC)
        syncs = self._take_syncs(self._clock.monotonic_us())
        return Round(self._files, self._clock, writes, syncs, sync=True) if writes or syncs else None

    def take_written_round(self) -> Round | None:
        writes = self._take_writes(Durability.FLUSH)
        return Round(self._files, self._clock, writes, [], sync=False) if writes else None

    def next_sync_us(self) -> int | None:
        """When the next sync of a `flush` topic is due, on the monotonic clock."""
        due = [self._sync_due_us(log) for log in self._unsynced]
        return min((due_us for due_us in due if due_us is not None), default=None)

    def finish(self, round_: Round) -> None:
        """Let the logs take note of a round; then have what was committed served, for all of them together."""
        self._is_finishing = True
        try:
            self._finish_logs(round_)
            self._finished(round_)
        finally:
            self._is_finishing = False
            self.announce()

    def announce(self) -> None:
        """Have what is committed served: after a round, that of all its logs together."""
        if self.on_commit is not None and not self._is_finishing:
            self.on_commit()

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        self._health.fault(seam, str(log.directory), error)

    def _take_writes(self, durability: Durability | None) -> list[Write]:
        """What waits, of as many logs as may have unsynced bytes. The first that waited are the first to be taken."""
        writes: list[Write] = []
        room = self._unsynced_max
        if durability is Durability.FLUSH:
            room -= len(self._unsynced)
        for log in list(self._dirty):
            if durability not in (None, log.policy.durability):
                continue
            if not log.has_pending:
                del self._dirty[log]  # what waited was taken back
                continue
            is_open = durability is Durability.FLUSH and log in self._unsynced
            if room <= 0 and not is_open:
                continue
            with self._limited_to(log):
                if (write := log.begin_write()) is not None:
                    del self._dirty[log]
                    writes.append(write)
                    room -= not is_open
        return writes

    def _take_syncs(self, now_us: int | None) -> list[Sync]:
        """The syncs that are due by now; None: all."""
        syncs = []
        for log in list(self._unsynced):
            due_us = self._sync_due_us(log)
            if due_us is None:
                del self._unsynced[log]
            elif (now_us is None or due_us <= now_us) and (sync := log.begin_sync()):
                syncs.append(sync)
        return syncs

    def _finish_logs(self, round_: Round) -> None:
        for write in round_.writes:
            with self._limited_to(write.log):
                write.log.finish_write(write)
            if self._sync_due_us(write.log) is not None:
                self._unsynced[write.log] = None
            self._note_failure(write.log)
        for sync, error in zip(round_.syncs, round_.errors, strict=True):
            with self._limited_to(sync.log):
                sync.log.finish_sync(sync, error)
            self._note_failure(sync.log)
            if self._sync_due_us(sync.log) is None:
                self._unsynced.pop(sync.log, None)
        if round_.fault is not None:
            self._health.fault("sync", "all that was in the round has failed", round_.fault)
        if round_.writes:
            self.write_seconds.observe(round_.write_us / 1e6)
            self.round_messages.observe(sum(batch.count for write in round_.writes for batch in write.done))
        if round_.syncs:
            self.sync_seconds.observe(round_.sync_us / 1e6)

    @contextlib.contextmanager
    def _limited_to(self, log: Log) -> Iterator[None]:
        """Let an unexpected exception fail this log, visibly, and nothing else."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - supervises one log of a round
            self.fault("commit", log, fault)
            self._dirty.pop(log, None)
            log.fail(LogFailed(f"{log.directory}: unexpected error: {fault!r}"))
            self._note_failure(log)

    def _note_failure(self, log: Log) -> None:
        if log.failure is not None and log.state is LogState.FAILED:
            self.failed[log] = None

    def _sync_due_us(self, log: Log) -> int | None:
        due_us = log.sync_due_us(self._flush_messages, self._flush_us)
        is_crowded = due_us is not None and len(self._unsynced) >= self._unsynced_max
        return 0 if is_crowded else due_us


class Round:
    """Writes and syncs of several logs, for a worker."""

    def __init__(self, files: Files, clock: Clock, writes: list[Write], syncs: list[Sync], *, sync: bool) -> None:
        self._files = files
        self._clock = clock
        self._sync = sync
        self.writes = writes
        self.syncs = syncs
        self.errors: list[OSError | None] = []
        # An unexpected exception in the sync, which may have done anything: all that was to be synced has failed.
        self.fault: Exception | None = None
        # How long it took.
        self.write_us = self.sync_us = 0

    @property
    def is_quick(self) -> bool:
        """Whether it takes no longer than handing it to a worker: a little for the page cache, and no disk in sight."""
        return (
            not self._sync
            and sum(write.size for write in self.writes) <= _QUICK_BYTES
            and not any(write.syncs or write.log.is_syncing for write in self.writes)
        )

    def run(self) -> None:
        begun_us = self._clock.monotonic_us()
        for write in self.writes:
            write.run()
        written_us = self._clock.monotonic_us()
        self.write_us = written_us - begun_us
        if self._sync:
            self.syncs += [
                write.sync() for write in self.writes if write.done and not isinstance(write.error, LogFailed)
            ]
        if self.syncs:
            try:
                self.errors = self._files.sync([sync.file for sync in self.syncs])
            except Exception as fault:  # noqa: BLE001 - it fails the logs of the round
                self.fault = fault
                self.errors = [OSError(errno.EIO, f"unexpected error: {fault!r}") for _ in self.syncs]
            self.sync_us = self._clock.monotonic_us() - written_us


class _Lane:
    """One round at a time, in a thread of its own.

    Callbacks and a queue, where a task and an executor would do: a round trip takes 55 µs instead of 140.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[], Round | None],
        finish: Callable[[Round], None],
        health: Health,
        end: asyncio.Future[None],
    ) -> None:
        self._loop = loop
        self._take = take
        self._finish = finish
        self._health = health
        self._end = end
        self._awake = False
        self._running = False
        # Set once the lane is to stop: when no round runs any more.
        self._stopped: asyncio.Future[None] | None = None
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to take. All that is appended in this turn of the loop goes with it."""
        if not self._awake and not self._running:
            self._awake = True
            self._loop.call_soon(self._start)

    async def stop(self) -> None:
        """Wait for the round that runs, and begin none."""
        self._stopped = self._loop.create_future()
        if self._running:
            await self._stopped
        self._rounds.put(None)
        self._thread.join()

    def _start(self) -> None:
        self._awake = False
        if self._running or self._stopped is not None:
            return
        round_ = self._take()
        if round_ is None:
            return
        self._running = True
        if round_.is_quick:
            self._done(round_, self._run(round_))
        else:
            self._rounds.put(round_)

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one round; return False at the end. Its own call: a waiting lane does not keep its last round."""
        round_ = self._rounds.get()
        if round_ is None:
            return False
        end = self._run(round_)
        self._loop.call_soon_threadsafe(self._done, round_, end)
        return True

    @staticmethod
    def _run(round_: Round) -> BaseException | None:
        try:
            round_.run()
        except BaseException as end:  # noqa: BLE001 - a round lets only that pass which ends the process
            return end
        return None

    def _done(self, round_: Round, end: BaseException | None) -> None:
        self._running = False
        try:
            if end is not None:
                raise end
            self._finish(round_)
            self.wake()
        except Exception as fault:  # noqa: BLE001 - the lane goes on with the next round
            self._health.fault("round", self._thread.name, fault)
            self.wake()
        except BaseException as raised:  # noqa: BLE001 - `run` ends with it
            if not self._end.done():
                self._end.set_exception(raised)
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)


class Lanes:
    """The two lanes, and the timer for the syncs that `flush` topics are due."""

    def __init__(self, rounds: Rounds, loop: asyncio.AbstractEventLoop, clock: Clock, health: Health) -> None:
        self._rounds = rounds
        self._loop = loop
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        # A round was finished.
        self.finished = asyncio.Event()
        # Done when a round raised what ends the process: no error, and no bug.
        self.end: asyncio.Future[None] = loop.create_future()
        self._synced = _Lane("synced", loop, rounds.take_synced_round, self._finish, health, self.end)
        self._written = _Lane("written", loop, rounds.take_written_round, self._finish, health, self.end)

    def wake(self, log: Log) -> None:
        lane = self._written if log.policy.durability is Durability.FLUSH else self._synced
        lane.wake()

    def _finish(self, round_: Round) -> None:
        self._rounds.finish(round_)
        self.finished.set()
        # What one lane could not take while the other had the same log.
        for log in self._rounds.dirty_logs():
            self.wake(log)
        self._await_sync()

    def _await_sync(self) -> None:
        """Sync when the next sync is due. A timer may be early by a millisecond: then it waits again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_us = self._rounds.next_sync_us()
        if due_us is None:
            return
        wait_us = due_us - self._clock.monotonic_us()
        if wait_us > 0:
            self._timer = self._loop.call_later(wait_us / 1e6, self._await_sync)
        else:
            self._synced.wake()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._written.stop(), self._synced.stop())
