"""Rounds: the writes and syncs that make all logs of a store durable together.

Logs belong to one thread, which appends to memory. A round takes what is pending in all dirty logs, and a worker writes
and syncs it. Without an event loop, `flush` does that in the calling thread. In one, there are two lanes, each with one
round at a time:

    synced    topics with `fsync`: writes and syncs everything dirty; also the syncs of `flush` topics that are due
    written   topics with `flush`: writes only, so that their readers never wait for an fsync; small rounds on the
              loop itself

Messages that arrive while a round runs go into the next one: the busier the store, the more of them share a sync.
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
from penstock.errors import LogFailed
from penstock.health import Health
from penstock.log.appender import LogState
from penstock.log.files import Files
from penstock.log.flush import Sync, Write
from penstock.log.log import Log
from penstock.log.policy import Durability
from penstock.store.histogram import MESSAGES, SECONDS, Histogram
from penstock.store.unflushed import UnflushedBytes

# Rounds of `flush` topics up to this size are written on the loop itself: the page cache takes them in some µs, while
# the way to a worker and back costs 100 µs and more, up to Python's switch interval when the loop is busy.
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
    ) -> None:
        """`unsynced_max` limits the logs with unsynced bytes in each lane, because their files stay open."""
        self._files = files
        self._clock = clock
        self._health = health
        self._unsynced_max = unsynced_max
        self._flush_messages = flush_messages
        self._flush_us = flush_ms * 1000
        # Called with each round when its logs are finished with it.
        self.on_finish: Callable[[Round], None] = lambda round_: None
        # Logs with batches that no round has taken yet, and logs with batches that are written and not yet synced.
        self._dirty: dict[Log, None] = {}
        self._unsynced: dict[Log, None] = {}
        self.unflushed = UnflushedBytes(unflushed_bytes_max)
        # Logs that take no more appends, because a sync failed.
        self.failed: dict[Log, None] = {}
        # Of each round: the time to write and to sync, and the number of messages.
        self.write_seconds, self.sync_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.round_messages = Histogram(MESSAGES)
        # Called after logs have called their `on_commit`: once for a round, when all of its logs are finished.
        self.on_commit: Callable[[], None] | None = None
        self._is_finishing = False
        self._lanes: Lanes | None = None

    # Dirty logs.

    def append(self, log: Log, size: int) -> None:
        """Count bytes of a log that wait for a write, and wake its lane. Raises Overloaded if too many wait."""
        self.unflushed.charge(size)
        self.wake(log)

    def wake(self, log: Log) -> None:
        """Let the next round look at a log: it has something to write, or belongs to another lane now."""
        self._dirty[log] = None
        if self._lanes is not None:
            self._lanes.wake(log)

    def is_dirty(self, log: Log) -> bool:
        return log in self._dirty

    def forget(self, log: Log) -> None:
        """Forget a deleted log. A worker may still write to it."""
        for logs in (self._dirty, self._unsynced, self.failed):
            logs.pop(log, None)

    # In the calling thread.

    def flush(self) -> None:
        """Write and sync everything pending, in the calling thread."""
        while writes := self._take_writes(None):
            self.drive(writes, [])
        self.drive([], self._take_syncs(None))

    def flush_log(self, log: Log) -> None:
        """Write and sync what is pending in one log, in the calling thread."""
        self._dirty.pop(log, None)
        log.flush()

    def roll(self, logs: Sequence[Log]) -> None:
        """Let these logs begin new segments: in the next rounds, or now if there are no lanes."""
        for log in logs:
            log.flusher.roll()
            self.wake(log)
        if self._lanes is None:
            self.drive([write for log in logs if (write := log.flusher.begin_write())], [])

    def drive(self, writes: list[Write], syncs: list[Sync]) -> None:
        round_ = Round(self._files, self._clock, writes, syncs, sync=True)
        round_.run()
        self.finish(round_)

    # In an event loop.

    @property
    def is_running(self) -> bool:
        return self._lanes is not None

    def start(self) -> Lanes:
        """Run rounds in two lanes from now on."""
        self._lanes = Lanes(self, asyncio.get_running_loop(), self._clock, self._health)
        for log in self._dirty:
            self._lanes.wake(log)
        return self._lanes

    async def stop(self) -> None:
        """Wait for the running rounds, and begin no more."""
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
        """Return when the next sync of a `flush` topic is due, on the monotonic clock."""
        due = [self._sync_due_us(log) for log in self._unsynced]
        return min((due_us for due_us in due if due_us is not None), default=None)

    def finish(self, round_: Round) -> None:
        """Let the logs finish their writes and syncs, then serve what they committed together."""
        self._is_finishing = True
        try:
            self._finish_logs(round_)
            self.on_finish(round_)
        finally:
            self._is_finishing = False
            self.announce()

    def announce(self) -> None:
        """Serve what is committed, unless a round is being finished: it does that for all of its logs together."""
        if self.on_commit is not None and not self._is_finishing:
            self.on_commit()

    def fault(self, seam: str, log: Log, error: Exception) -> None:
        self._health.fault(seam, str(log.directory), error)

    def _take_writes(self, durability: Durability | None) -> list[Write]:
        """Return what is pending, of as many logs as may have unsynced bytes, in the order in which they became
        dirty."""
        writes: list[Write] = []
        room = self._unsynced_max
        if durability is Durability.FLUSH:
            room -= len(self._unsynced)
        for log in list(self._dirty):
            if durability not in (None, log.policy.durability):
                continue
            if not log.has_pending:
                del self._dirty[log]  # everything pending was rejected
                continue
            is_open = durability is Durability.FLUSH and log in self._unsynced
            if room <= 0 and not is_open:
                continue
            with self._limited_to(log):
                if (write := log.flusher.begin_write()) is not None:
                    del self._dirty[log]
                    writes.append(write)
                    room -= not is_open
        return writes

    def _take_syncs(self, now_us: int | None) -> list[Sync]:
        """Return the syncs that are due at `now_us`; None: all."""
        syncs = []
        for log in list(self._unsynced):
            due_us = self._sync_due_us(log)
            if due_us is None:
                del self._unsynced[log]
            elif (now_us is None or due_us <= now_us) and (sync := log.flusher.begin_sync()):
                syncs.append(sync)
        return syncs

    def _finish_logs(self, round_: Round) -> None:
        for write in round_.writes:
            with self._limited_to(write.log):
                write.log.flusher.finish_write(write)
            if self._sync_due_us(write.log) is not None:
                self._unsynced[write.log] = None
            self._note_failure(write.log)
        for sync, error in zip(round_.syncs, round_.errors, strict=True):
            with self._limited_to(sync.log):
                sync.log.flusher.finish_sync(sync, error)
            self._note_failure(sync.log)
            if self._sync_due_us(sync.log) is None:
                self._unsynced.pop(sync.log, None)
        if round_.fault is not None:
            self._health.fault("sync", "everything in the round failed", round_.fault)
        if round_.writes:
            self.write_seconds.observe(round_.write_us / 1e6)
            self.round_messages.observe(sum(batch.count for write in round_.writes for batch in write.done))
        if round_.syncs:
            self.sync_seconds.observe(round_.sync_us / 1e6)

    @contextlib.contextmanager
    def _limited_to(self, log: Log) -> Iterator[None]:
        """Let an unexpected exception fail this log, and report it, and harm nothing else."""
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
        due_us = log.flusher.sync_due_us(self._flush_messages, self._flush_us)
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
        # An unexpected exception in the sync. Nobody knows what was synced, so all of it failed.
        self.fault: Exception | None = None
        # How long it took to write and to sync.
        self.write_us = self.sync_us = 0

    @property
    def is_quick(self) -> bool:
        """Whether running it takes no longer than handing it to a worker: little to write, and nothing to sync."""
        return (
            not self._sync
            and sum(write.size for write in self.writes) <= _QUICK_BYTES
            and not any(write.syncs or write.log.flusher.is_syncing for write in self.writes)
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


class _RoundLane:
    """Runs one round at a time, in a thread of its own.

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
        # Set when the lane must stop; done when no round runs any more.
        self._stopped: asyncio.Future[None] | None = None
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Begin a round at the end of this turn of the loop, with everything that is appended until then."""
        if not self._awake and not self._running:
            self._awake = True
            self._loop.call_soon(self._start)

    async def stop(self) -> None:
        """Wait for the running round, and begin no more."""
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
        """Run one round; return False at the end. A call of its own, so that a waiting lane keeps no round alive."""
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
        except BaseException as end:  # noqa: BLE001 - a round lets pass only what ends the process
            return end
        return None

    def _done(self, round_: Round, end: BaseException | None) -> None:
        self._running = False
        try:
            if end is not None:
                raise end
            self._finish(round_)
            self.wake()
        except Exception as fault:  # noqa: BLE001 - the lane continues with the next round
            self._health.fault("round", self._thread.name, fault)
            self.wake()
        except BaseException as raised:  # noqa: BLE001 - `run` ends with it
            if not self._end.done():
                self._end.set_exception(raised)
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)


class Lanes:
    """The two lanes, and the timer for the syncs of `flush` topics."""

    def __init__(self, rounds: Rounds, loop: asyncio.AbstractEventLoop, clock: Clock, health: Health) -> None:
        self._rounds = rounds
        self._loop = loop
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        # Set when a round was finished.
        self.finished = asyncio.Event()
        # Done when a round raised what ends the process, such as KeyboardInterrupt.
        self.end: asyncio.Future[None] = loop.create_future()
        self._synced = _RoundLane("synced", loop, rounds.take_synced_round, self._finish, health, self.end)
        self._written = _RoundLane("written", loop, rounds.take_written_round, self._finish, health, self.end)

    def wake(self, log: Log) -> None:
        lane = self._written if log.policy.durability is Durability.FLUSH else self._synced
        lane.wake()

    def _finish(self, round_: Round) -> None:
        self._rounds.finish(round_)
        self.finished.set()
        # A lane takes nothing of a log while the other one has it.
        for log in self._rounds.dirty_logs():
            self.wake(log)
        self._await_sync()

    def _await_sync(self) -> None:
        """Wake the lane when the next sync is due. A timer may be early by a millisecond: then it waits again."""
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
