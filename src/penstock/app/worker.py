"""One consumer at work: messages in, calls of its function, and what is said of each message then.

*Shared*: each message goes to whichever of the `concurrency` handlers is free. One that went well is acknowledged. One
that failed is given back to the broker with a delay: only the broker counts attempts, and makes dead letters. It gives
a message to somebody else when its deadline is over, so the deadlines of all messages that are here are extended as
long as they are: of those that are being handled, and of those that wait for a handler.

*Partitioned*: the messages of a partition are handled one after the other, those of different partitions at the same
time. One that failed is tried again here, and its partition waits for it. Nobody else counts, so attempts are counted
here. What waits of a partition stays in the buffer; if that is full of one partition, the others wait too.

A *batch* that fails is halved, and each half is tried at once, until the message that fails is alone. So it alone is
given back, tried again or skipped, and each of the others is acknowledged with the part that it went well in.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from penstock.app.consumer import Consumer
from penstock.app.retry import Failed, halves
from penstock.app.threads import Threads, call_in
from penstock.client import tracing
from penstock.client.aio import AsyncClient, AsyncSubscription
from penstock.client.message import Message
from penstock.errors import PenstockError, StaleCommit

logger = logging.getLogger(__name__)

# So many messages of a shared group are taken at once: what is said of them goes to the broker together. Not more, for
# other members of the group may be idle.
_TAKE: Final = 32
# So often the broker is asked whether it took what was said of messages. It always answers; this is when we listen.
_CONFIRM_S: Final = 1.0
# Until the next try, when the broker does not tell the deadline of a topic.
_ASK_AGAIN_S: Final = 1.0


class Worker:
    def __init__(
        self,
        consumer: Consumer,
        client: AsyncClient,
        subscription: AsyncSubscription,
        stop: asyncio.Event,
        stop_timeout_s: float,
    ) -> None:
        self._consumer = consumer
        self._client = client
        self._subscription = subscription
        self._stop = stop
        self._stop_timeout_s = stop_timeout_s
        self._loop = asyncio.get_running_loop()
        self._failure: PenstockError | None = None
        self._threads = Threads(consumer.concurrency, f"penstock {consumer.name}") if _blocks(consumer) else None
        self._tasks = asyncio.TaskGroup()
        self._handling: set[asyncio.Task[None]] = set()
        self._calls = asyncio.Semaphore(consumer.concurrency)
        # Set unless it is paused, and when it stops.
        self._going = asyncio.Event()
        self._lanes: dict[tuple[str, int] | None, _Lane] = {}
        self._waiting = 0
        self._has_room = asyncio.Event()
        # Shared: what was taken and nothing is said of yet, and the topics whose deadlines are kept.
        self._is_shared = consumer.mode == "shared"
        self._held: set[Message] = set()
        self._kept: dict[str, asyncio.Task[None]] = {}
        # Partitioned: what came by an earlier sharing out does not count any more.
        self._generation = 0

    async def run(self) -> None:
        """Until `stop`. Then no more messages are taken, and the handlers that run may finish, for so long. What waited
        for one is released, and what they said is stored. And with the subscription all else goes back to the broker,
        which gives it to others.

        If the subscription ends by itself, that is raised when all this is done; `stop` is set, for the others.
        """
        self._consumer.changed = partial(call_in, self._loop, self._look)
        self._look()
        try:
            async with self._tasks as tasks:
                taking = tasks.create_task(self._take())
                confirming = tasks.create_task(self._confirm())
                await self._stop.wait()
                taking.cancel()
                self._look()
                await self._finish()
                self._release()
                for task in (confirming, *self._kept.values()):
                    task.cancel()
            await self._flush()
        finally:
            self._stop.set()
            self._consumer.changed = None
            if self._threads is not None:
                self._threads.close()
            await self._subscription.close()
        if self._failure is not None:
            raise self._failure

    async def _finish(self) -> None:
        if not self._handling:
            return
        logger.info("consumer %s: waits for %d handlers", self._consumer.name, len(self._handling))
        _, late = await asyncio.wait(self._handling, timeout=self._stop_timeout_s)
        for task in late:
            task.cancel()
        if late:
            logger.error(
                "consumer %s: %d handlers did not end within %g s; their messages will be delivered again",
                self._consumer.name,
                len(late),
                self._stop_timeout_s,
            )

    def _release(self) -> None:
        """What waits for a handler was not looked at."""
        for lane in self._lanes.values() if self._is_shared else ():
            while lane.waiting:
                message = lane.waiting.popleft()
                self._say(message, message.release)

    def _look(self) -> None:
        """Whether it is paused."""
        if self._consumer.is_paused and not self._stop.is_set():
            self._going.clear()
        else:
            self._going.set()

    # What comes in.

    async def _take(self) -> None:
        try:
            while True:
                while not (room := self._room()):
                    self._has_room.clear()
                    await self._has_room.wait()
                for message in await self._subscription.get_many(room):
                    self._put(message)
        except PenstockError as error:
            logger.error("consumer %s: its subscription ended: %s", self._consumer.name, error)
            self._failure = error
            self._stop.set()

    def _room(self) -> int:
        """How many messages may be taken."""
        consumer = self._consumer
        if not self._is_shared:
            return consumer.buffer - self._waiting
        is_idle = None not in self._lanes or self._lanes[None].is_idle
        return max(min(consumer.buffer, _TAKE), consumer.batch or 1) if is_idle else 0

    def _put(self, message: Message) -> None:
        if self._is_shared:
            self._held.add(message)
            self._keep_deadline(message.topic)
        elif message.generation > self._generation:
            self._forget_before(message.generation)
        lane = self._lane(message)
        lane.waiting.append(message)
        self._waiting += 1
        if lane.is_idle:
            lane.busy += 1
            self._start(self._drain(lane))

    def _lane(self, message: Message) -> _Lane:
        place = None if self._is_shared else (message.topic, message.partition)
        if place not in self._lanes:
            self._lanes[place] = _Lane(self._consumer.concurrency if self._is_shared else 1)
        return self._lanes[place]

    async def _drain(self, lane: _Lane) -> None:
        while lane.waiting and not self._stop.is_set():
            messages = lane.take(self._consumer.batch or 1)
            self._waiting -= len(messages)
            self._has_room.set()
            await self._handle(messages)
        lane.busy -= 1
        self._has_room.set()

    def _start(self, handling: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(handling)
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    # Handling.

    async def _handle(self, messages: Sequence[Message]) -> None:
        parts, attempt = [messages], 1
        while parts:
            await self._going.wait()
            async with self._calls:
                if not self._going.is_set():
                    continue  # it was paused meanwhile
                if self._stop.is_set() or self._is_stale(parts[-1]):
                    break
                part = parts.pop()
                error = await self._attempt(part)
            if error is None:
                self._consumer.handled += len(part)
                self._ack(part)
                attempt = 1
            elif len(part) > 1:
                parts += reversed(halves(part))
            elif await self._comes_again(part[0], attempt, error):
                parts.append(part)
                attempt += 1
            else:
                attempt = 1
        for part in parts:
            self._held.difference_update(part)

    async def _attempt(self, messages: Sequence[Message]) -> Exception | None:
        """Call the function, and return what it raised."""
        try:
            with tracing.processing(messages, self._consumer.group):
                given = messages[0] if self._consumer.batch is None else list(messages)
                await self._call(self._consumer.function, given)
        except Exception as error:
            self._consumer.failed += 1
            logger.error("consumer %s: failed at %s", self._consumer.name, _told(messages), exc_info=error)
            await self._tell(messages[0], error)
            return error
        return None

    async def _tell(self, message: Message, error: Exception) -> None:
        if self._consumer.on_error is None:
            return
        try:
            await self._call(self._consumer.on_error, message, error)
        except Exception:
            logger.exception("consumer %s: its on_error failed too", self._consumer.name)

    async def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        if _is_async(function):
            result = function(*arguments)
        else:
            assert self._threads is not None, "one of its functions blocks"
            # The function finds there what is current here: a span of OpenTelemetry, say.
            result = await self._threads.call(copy_context().run, function, *arguments)
        if inspect.isawaitable(result):
            await _uncancelled(result)

    async def _comes_again(self, message: Message, attempt: int, error: Exception) -> bool:
        """A message failed alone: whether its handler is to be called again, now that the time for it has come."""
        match self._consumer.retry.failed:
            case Failed.SKIP:
                self._skip(message)
                return False
            case Failed.PAUSE:
                self._pause(message)
                return True
            case Failed.RETRY if self._is_shared:
                self._give_back(message, error)
                return False
            case Failed.RETRY:
                return await self._wait_retry(message, attempt)

    def _skip(self, message: Message) -> None:
        self._consumer.skipped += 1
        self._ack([message])

    def _pause(self, message: Message) -> None:
        logger.warning("consumer %s: paused at %s, until it is resumed", self._consumer.name, _told([message]))
        self._consumer.pause()
        self._look()

    def _give_back(self, message: Message, error: Exception) -> None:
        delay_s = self._consumer.retry.delay_s(message.attempts)
        if delay_s is None:
            self._consumer.rejected += 1
            self._say(message, lambda: message.reject(reason=error))
        else:
            self._consumer.retried += 1
            self._say(message, lambda: message.nack(delay_s, reason=error))

    async def _wait_retry(self, message: Message, attempt: int) -> bool:
        delay_s = self._consumer.retry.delay_s(attempt)
        if delay_s is None:
            logger.error("consumer %s: gives up %s after %d attempts", self._consumer.name, _told([message]), attempt)
            self._skip(message)
            return False
        self._consumer.retried += 1
        try:
            async with asyncio.timeout(delay_s):
                await self._stop.wait()
        except TimeoutError:
            # Another member may have the partition by now.
            await self._learn_generation()
        return True

    def _ack(self, messages: Sequence[Message]) -> None:
        # In a partition the last one speaks for all.
        for message in messages if self._is_shared else messages[-1:]:
            self._say(message, message.ack)

    def _say(self, message: Message, verdict: Callable[[], None]) -> None:
        self._held.discard(message)
        try:
            verdict()
        except PenstockError as error:
            logger.warning("consumer %s: %s will come again: %s", self._consumer.name, _told([message]), error)

    # What the broker must hear, and what it says.

    def _keep_deadline(self, topic: str) -> None:
        if topic not in self._kept:
            self._kept[topic] = self._tasks.create_task(self._keep(topic))

    async def _keep(self, topic: str) -> None:
        """Each message of the topic that is here gets more time, whenever a third of it is over."""
        third_s = await self._deadline_s(topic) / 3
        while True:
            await asyncio.sleep(third_s)
            try:
                for message in (*self._held, *self._subscription.unread()):
                    if message.topic == topic:
                        message.extend()
                    else:
                        self._keep_deadline(message.topic)
            except PenstockError as error:
                logger.warning("consumer %s: deadlines are not extended any more: %s", self._consumer.name, error)
                return

    async def _deadline_s(self, topic: str) -> float:
        while True:
            try:
                deadline_ms: int = (await self._client.topic(topic)).policy["ack_deadline_ms"]
            except PenstockError as error:
                logger.warning("consumer %s: the deadline of %s is not known: %s", self._consumer.name, topic, error)
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return deadline_ms / 1000

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            await self._flush()

    async def _flush(self) -> None:
        try:
            await self._subscription.flush()
        except StaleCommit as error:
            logger.warning("consumer %s: some messages will come again: %s", self._consumer.name, error)
            await self._learn_generation()
        except PenstockError as error:
            logger.warning("consumer %s: %s", self._consumer.name, error)

    async def _learn_generation(self) -> None:
        try:
            group = await self._client.group(self._consumer.group)
        except PenstockError as error:
            logger.warning("consumer %s: its group is not known: %s", self._consumer.name, error)
        else:
            self._forget_before(group.generation)

    def _forget_before(self, generation: int) -> None:
        """The partitions were shared out anew: what came before comes again, to whoever has them now."""
        self._generation = max(self._generation, generation)
        for lane in self._lanes.values():
            self._waiting -= len(lane.waiting)
            lane.waiting = deque(message for message in lane.waiting if not self._is_stale([message]))
            self._waiting += len(lane.waiting)
        self._has_room.set()

    def _is_stale(self, messages: Sequence[Message]) -> bool:
        return messages[0].generation < self._generation


class _Lane:
    """Messages that are begun in their order, `width` at a time: all of a shared group, or those of one partition."""

    __slots__ = ("busy", "waiting", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.busy = 0
        self.waiting: deque[Message] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether another one could begin: then none waits."""
        return self.busy < self.width

    def take(self, count_max: int) -> list[Message]:
        return [self.waiting.popleft() for _ in range(min(count_max, len(self.waiting)))]


def _blocks(consumer: Consumer) -> bool:
    functions = (consumer.function, consumer.on_error)
    return any(function is not None and not _is_async(function) for function in functions)


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _uncancelled(result: Awaitable[object]) -> None:
    """A handler that awaits something which is cancelled is not cancelled itself: it failed."""
    try:
        await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("what the handler waited for was cancelled") from error


def _told(messages: Sequence[Message]) -> str:
    first = messages[0]
    place = f"{first.subject} (offset {first.offset} of {first.topic}/{first.partition})"
    return place if len(messages) == 1 else f"a batch of {len(messages)}, the first {place}"
