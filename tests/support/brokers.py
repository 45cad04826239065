"""A broker in this process, on a store: one life of it after another, on one disk.

No time passes but what a test lets pass: `Life.advance` turns the clock and rings the timers that are due then. And
`Life.settle` lets the loop and the disk go on until neither has anything to do.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from penstock.broker.broker import Broker, Settings
from penstock.broker.deadletters import DeadLetter, DeadLetterFilter, Redriven
from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.intake import Receipt, Refusals
from penstock.broker.member import Deliveries, Member, Place
from penstock.broker.partition import Partition
from penstock.broker.subscription import Subscription
from penstock.broker.value_check import Check
from penstock.errors import PenstockError
from penstock.log.log import Log
from penstock.log.policy import OnDamage
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.store import store as stores
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support import logs, sampling

DATA: Final = Path("/data")
SECOND: Final = 1_000_000

P = ParamSpec("P")
T = TypeVar("T")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is awaited; one that hangs fails."""

    async def bounded(*args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(60):
            await test(*args, **kwargs)

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(bounded(*args, **kwargs))

    return run


class Got(NamedTuple):
    """A message as a member got it."""

    sid: bytes
    subject: bytes
    value: bytes
    headers: bytes
    key: bytes | None
    place: tuple[int, int]
    offset: int
    attempts: int


class Recorder:
    """A connection that keeps what it is sent."""

    def __init__(self, *, echo: bool = True) -> None:
        self.is_open = True
        self.echo = echo
        self.name = self.address = ""
        self.meter = None
        self.got: list[Got] = []
        self.errors: list[PenstockError] = []
        # What it has published, for one without echo; and how often it may be asked before that is a loop without end.
        self.published: set[tuple[int, int, int]] = set()
        self.asked_max = 1000

    @property
    def takes_unstored(self) -> bool:
        return self.is_open

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        assert self.is_open, "nothing is sent to a connection that takes nothing"
        for index in range(len(run)):
            self.got.append(
                Got(
                    member.sid,
                    run.subjects[index],
                    run.values[index],
                    run.headers.get(index, b""),
                    run.keys.get(index),
                    (place.topic_id, place.number),
                    run.offset(index),
                    (attempts or {}).get(index, 1),
                )
            )

    def has_published(self, place: Place, offset: int) -> bool:
        self.asked_max -= 1
        assert self.asked_max, "it is asked for ever"
        return (place.topic_id, place.number, offset) in self.published

    def fail(self, _member: Member, error: PenstockError) -> None:
        self.errors.append(error)

    @property
    def values(self) -> list[bytes]:
        return [message.value for message in self.got]

    def take(self) -> list[Got]:
        """What it got since the last time."""
        got, self.got = self.got, []
        return got


class Life:
    """From a start to a stop, a kill or a power cut: `async with Life(disk) as life`. Left as it is, it is stopped."""

    def __init__(
        self,
        disk: FaultyFiles | Path,
        *,
        clock: ManualClock | None = None,
        settings: Settings | None = None,
        **store: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.disk = disk
        with_disk: dict[str, Any] = {} if isinstance(disk, Path) else {"files": disk, "meta": logs.memory_meta()}
        self.store = _WatchedStore(
            disk if isinstance(disk, Path) else DATA,
            clock=self.clock,
            settings=stores.StoreSettings(**store),
            **with_disk,
        )
        self.timers: list[asyncio.TimerHandle] = []
        self.broker = _TimedBroker(self.store, self.clock, settings, self.timers)
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Life:
        started = asyncio.Event()
        self._running = asyncio.create_task(self.broker.run(started))
        try:
            await self.do(started.wait())
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            await self._abandon()
        elif self._running is not None:
            await self.stop()

    # How it ends.

    async def stop(self) -> None:
        """As a server does it."""
        self.broker.save()
        await self._end()
        self.store.close()

    async def kill(self) -> None:
        """The process ends; what was written is there."""
        assert isinstance(self.disk, FaultyFiles)
        await self._abandon()
        self.disk.kill()

    async def power_cut(self) -> FaultyFiles:
        """The disk as it is after the reboot."""
        assert isinstance(self.disk, FaultyFiles)
        disk = self.disk.power_cut()
        await self._abandon()
        return disk

    async def _end(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            pass

    async def _abandon(self) -> None:
        """Nothing more is written, but for what a worker has already."""
        if self._running is not None:
            running, self._running = self._running, None
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self.store._worker.shutdown()
            if self.store._readers is not None:
                self.store._readers.shutdown()
            self.store._meta.close()

    # What goes on in it.

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that the broker does. If the broker ends meanwhile, that is raised: a power cut as such."""
        assert self._running is not None
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self._running], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._raise_end()
        if task.exception() is not None and self._is_dark():
            raise PowerCut("the power went") from task.exception()
        return task.result()

    def _raise_end(self) -> None:
        assert self._running is not None
        if self._is_dark():
            raise PowerCut("the power went")
        error = self._running.exception()
        raise AssertionError(f"the broker ended: {error!r}") from error

    def _is_dark(self) -> bool:
        if isinstance(self.disk, FaultyFiles):
            try:
                self.disk.sizes(DATA)
            except PowerCut:
                return True
        return False

    async def settle(self) -> None:
        """Until nothing happens any more."""
        quiet = 0
        while quiet < 20:
            assert self._running is not None
            if self._running.done():
                self._raise_end()
            if self.store.is_idle and not self.broker._opened.lock.locked():
                quiet += 1
                await asyncio.sleep(0)
            else:
                quiet = 0
                await asyncio.sleep(0.0002)

    async def advance(self, us: int) -> None:
        """Let time pass, and what is due happen."""
        self.clock.advance(us)
        await self.settle()
        while due := [timer for timer in self.timers if timer.when() <= self.clock.monotonic_us()]:
            self.timers[:] = [timer for timer in self.timers if timer not in due]
            for timer in due:
                if not timer.cancelled():
                    timer._run()
            await self.settle()

    # Short forms.

    def offer(self, run: Run, refusals: Refusals | None = None) -> asyncio.Future[Receipt]:
        """Publish a run that the broker is ready for; the receipt comes when it is decided."""
        decided: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        receipt = self.broker.intake.publish(run, refusals)
        receipt.outcome.then(lambda _: None if decided.done() else decided.set_result(receipt))
        return decided

    async def publish_run(self, run: Run) -> Receipt:
        async def publish() -> Receipt:
            checked: set[Check] = set()
            for _ in range(10):
                if self.broker.intake.is_ready(run, checked=checked):
                    return await self.offer(run)
                refusals = await self.broker.intake.prepare(run, checked)
                if refusals:
                    return await self.offer(run, refusals)
            raise AssertionError("the broker is never ready for it")

        receipt = await self.do(publish())
        if receipt.error is not None and self._is_dark():
            raise PowerCut("the power went") from receipt.error
        return receipt

    async def publish(self, subject: bytes, *values: bytes, headers: bytes = b"", key: bytes | None = None) -> Receipt:
        """All values in one run, with the same headers."""
        run = run_of(subject, *values, headers=headers)
        if key is not None:
            run.keys = dict.fromkeys(range(len(values)), key)
        return await self.publish_run(run)

    async def stored(self, subject: bytes, *values: bytes, headers: bytes = b"") -> Receipt:
        """As `publish`, and it must succeed; with all that follows from it."""
        receipt = await self.publish(subject, *values, headers=headers)
        assert receipt.error is None, receipt.error
        await self.settle()
        return receipt

    def subscribe(
        self, pattern: bytes, sink: Recorder, *, queue: bytes | None = None, flow: Flow | None = None, sid: bytes = b"1"
    ) -> tuple[Subscription, Member]:
        member = Member(sid, sink, flow)
        return self.broker.subscriptions.subscribe(pattern, member, queue), member

    async def join(
        self,
        name: bytes | None,
        pattern: bytes,
        sink: Recorder,
        *,
        mode: Mode = Mode.SHARED,
        buffer: int = 1000,
        sid: bytes = b"1",
        deliveries: Deliveries | None = None,
    ) -> tuple[Group, Member]:
        member = Member(sid, sink, Flow(buffer=buffer))
        member.deliveries = deliveries or member.deliveries
        group = await self.do(self.broker.groups.join(name, pattern, member, mode))
        await self.settle()
        return group, member

    async def ack(self, group: Group, *messages: Got) -> None:
        """Acknowledge, and wait until that counts."""

        async def saved() -> None:
            outcomes = []
            for message in messages:
                outcome: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
                assert group.ack(message.place, message.offset, Outcome(outcome.set_result))
                outcomes.append(outcome)
            for outcome in outcomes:
                error = await outcome
                if error is not None:
                    raise error

        await self.do(saved())
        await self.settle()

    async def letters(self, pattern: bytes = b">", *, redriven: bool = False) -> list[DeadLetter]:
        async def read() -> list[DeadLetter]:
            letters = await self.broker.dead_letters()
            if letters is None:
                return []
            return [letter async for letter in letters.list(DeadLetterFilter(pattern), redriven=redriven)]

        return await self.do(read())

    async def redrive(self, pattern: bytes = b">", count: int | None = None, *, to_group: bool = False) -> int:
        """Return how many were redriven; none may be skipped."""
        done = await self.redrive_some(pattern, count, to_group=to_group)
        assert not done.skipped, done.reason
        return done.count

    async def redrive_some(
        self, pattern: bytes = b">", count: int | None = None, *, to_group: bool = False
    ) -> Redriven:
        async def redrive() -> Redriven:
            letters = await self.broker.dead_letters()
            return (
                Redriven(0)
                if letters is None
                else await letters.redrive(DeadLetterFilter(pattern), count, to_group=to_group)
            )

        return await self.do(redrive())

    def partition(self, topic: bytes, number: int = 0) -> Partition:
        served = self.broker.topics.get(topic)
        assert served is not None, f"there is no topic {topic.decode()}"
        return served.partitions[number]

    def log(self, topic: bytes, number: int = 0) -> Log:
        return self.partition(topic, number).log

    def in_log(self, topic: bytes, number: int = 0) -> list[bytes]:
        """What is stored in a partition; nothing if there is no such topic."""
        return logs.values(self.log(topic, number)) if self.broker.topics.get(topic) else []


def run_of(subject: bytes, *values: bytes, headers: bytes = b"") -> Run:
    run = Run([subject] * len(values), list(values))
    if headers:
        run.headers = dict.fromkeys(range(len(values)), headers)
    return run


async def each_cut(
    prepare: Callable[[FaultyFiles, ManualClock], Coroutine[Any, Any, None]],
    work: Callable[[Life], Coroutine[Any, Any, None]],
    **life: Any,
) -> AsyncIterator[tuple[FaultyFiles, ManualClock, int]]:
    """The disk after `work`, for a power cut at every call to the disk in it, the start of its life among them."""
    cuts = 0
    while True:
        clock = ManualClock()
        disk = FaultyFiles(seed=cuts)
        await prepare(disk, clock)
        disk.cut_after = disk.calls + cuts
        try:
            async with Life(disk, clock=clock, **life) as running:
                await work(running)
                await running.settle()
        except PowerCut:
            yield disk.power_cut(), clock, cuts
            cuts += sampling.stride
            continue
        assert cuts > 3, "there is something to interrupt"
        return


def refuse(disk: FaultyFiles, segment: Path) -> Path:
    """Let the log of a segment be refused at the next start, until what is returned is removed."""
    stray = segment.with_name("notes.txt")
    disk.set_content(stray, b"")
    return stray


class _WatchedStore(Store):
    """It knows whether anything of it is under way."""

    reads = 0

    async def read(self, log: Log, offset: int, bytes_max: int, on_damage: OnDamage | None = None) -> list[Batch]:
        self.reads += 1
        try:
            return await super().read(log, offset, bytes_max, on_damage)
        finally:
            self.reads -= 1

    @property
    def is_idle(self) -> bool:
        changes, logs = self._changes, self.catalogue.logs.values()
        return not (
            self.reads
            or self.rounds._dirty
            or changes._is_changing
            or changes._turns
            or any(log.flusher.is_busy for log in logs)
        )


class _TimedBroker(Broker):
    """Its timers are those of the test."""

    def __init__(
        self, store: Store, clock: ManualClock, settings: Settings | None, timers: list[asyncio.TimerHandle]
    ) -> None:
        self._timers = timers
        super().__init__(store, clock=clock, settings=settings)

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when_us, callback, (), asyncio.get_running_loop())
        self._timers.append(timer)
        return timer
