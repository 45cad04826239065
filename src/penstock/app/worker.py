"""One running consumer: it takes messages, calls its function, and settles each message.

*Shared*: each message goes to a free handler, of which there are `concurrency`. Success acknowledges the message;
failure gives it back to the broker with a delay: only the broker counts attempts and dead-letters. The broker
redelivers a message whose ack deadline passes, so the deadlines of all messages here are extended, also of those that
wait for a handler.

*Partitioned*: the messages of a partition are handled one after the other, those of different partitions at the same
time. A failed message is retried here while its partition waits, and attempts are counted here. Waiting messages stay
in the buffer; if one partition fills it, the others wait too.

A *batch* that fails is halved, and each half is tried at once, until the failing message is alone. So only that message
is given back, retried or skipped, and the others are acknowledged with the part that succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from penstock.app.calls import FunctionCalls
from penstock.app.consumer import Consumer
from penstock.app.deadlines import DeadlineExtender
from penstock.app.queues import HandlerQueue, HandlerQueues
from penstock.app.retry import FailureAction, halves
from penstock.app.threads import call_in
from penstock.client import tracing
from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.client.subscription import AsyncSubscription
from penstock.errors import PenstockError, StaleCommit

logger = logging.getLogger(__name__)

# How often refused acknowledgements are noticed.
_CONFIRM_S: Final = 1.0


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
        self._is_shared = consumer.mode == "shared"
        self._tasks = asyncio.TaskGroup()
        self._calls = FunctionCalls(consumer)
        self._queues = HandlerQueues(consumer)
        self._deadlines = DeadlineExtender(consumer.name, client, subscription, self._tasks)
        self._handling: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(consumer.concurrency)
        # Cleared while the consumer is paused, unless it stops.
        self._going = asyncio.Event()
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop` is set. Then take no more messages, let running handlers finish within the stop timeout,
        release the messages that wait for one, and store the acknowledgements. Closing the subscription gives
        everything else back to the broker.

        If the subscription ends by itself, raise its error after all this, and set `stop` for the other consumers.
        """
        self._consumer.changed = partial(call_in, self._loop, self._update_going)
        self._update_going()
        try:
            async with self._tasks as tasks:
                taking = tasks.create_task(self._take())
                confirming = tasks.create_task(self._confirm())
                await self._stop.wait()
                taking.cancel()
                self._update_going()
                await self._finish()
                self._release()
                confirming.cancel()
                self._deadlines.cancel()
            await self._flush()
        finally:
            self._stop.set()
            self._consumer.changed = None
            self._calls.close()
            await self._subscription.close()
        if self._failure is not None:
            raise self._failure

    async def _finish(self) -> None:
        if not self._handling:
            return
        logger.info("consumer %s: waiting for %d handlers", self._consumer.name, len(self._handling))
        _, late = await asyncio.wait(self._handling, timeout=self._stop_timeout_s)
        for task in late:
            task.cancel()
        if late:
            logger.error(
                "consumer %s: %d handlers did not finish within %g s; their messages will be redelivered",
                self._consumer.name,
                len(late),
                self._stop_timeout_s,
            )

    def _release(self) -> None:
        if self._is_shared:
            for message in self._queues.drain():
                self._settle(message, message.release)

    def _update_going(self) -> None:
        if self._consumer.is_paused and not self._stop.is_set():
            self._going.clear()
        else:
            self._going.set()

    # Taking messages.

    async def _take(self) -> None:
        try:
            while True:
                while not (room := self._queues.room()):
                    self._has_room.clear()
                    await self._has_room.wait()
                for message in await self._subscription.get_many(room):
                    self._put(message)
        except PenstockError as error:
            logger.error("consumer %s: the subscription ended: %s", self._consumer.name, error)
            self._failure = error
            self._stop.set()

    def _put(self, message: Message) -> None:
        if self._is_shared:
            self._deadlines.add(message)
        else:
            self._forget_before(message.generation)
        queue = self._queues.put(message)
        if queue.is_idle:
            queue.busy += 1
            self._start(self._drain(queue))

    async def _drain(self, queue: HandlerQueue) -> None:
        while queue.waiting and not self._stop.is_set():
            messages = self._queues.take(queue)
            self._has_room.set()
            await self._handle(messages)
        queue.busy -= 1
        self._has_room.set()

    def _start(self, handling: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(handling)
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    # Handling them.

    async def _handle(self, messages: Sequence[Message]) -> None:
        parts, attempt = [messages], 1
        while parts:
            await self._going.wait()
            async with self._free:
                if not self._going.is_set():
                    continue  # it was paused in the meantime
                if self._stop.is_set() or self._queues.is_stale(parts[-1]):
                    break
                part = parts.pop()
                error = await self._attempt(part)
            if error is None:
                self._consumer.handled += len(part)
                self._ack(part)
                attempt = 1
            elif len(part) > 1:
                parts += reversed(halves(part))
            elif await self._retries(part[0], attempt, error):
                parts.append(part)
                attempt += 1
            else:
                attempt = 1
        for part in parts:
            self._deadlines.discard(part)

    async def _attempt(self, messages: Sequence[Message]) -> Exception | None:
        """Call the function, and return the exception that it raised."""
        try:
            with tracing.processing(messages, self._consumer.group):
                given = messages[0] if self._consumer.batch is None else list(messages)
                await self._calls.call(self._consumer.function, given)
        except Exception as error:
            self._consumer.failed += 1
            logger.error("consumer %s: failed for %s", self._consumer.name, _describe(messages), exc_info=error)
            await self._report(messages[0], error)
            return error
        return None

    async def _report(self, message: Message, error: Exception) -> None:
        if self._consumer.on_error is None:
            return
        try:
            await self._calls.call(self._consumer.on_error, message, error)
        except Exception:
            logger.exception("consumer %s: on_error failed too", self._consumer.name)

    async def _retries(self, message: Message, attempt: int, error: Exception) -> bool:
        """Handle the failure of a single message. Return whether to call the handler again now."""
        match self._consumer.retry.action:
            case FailureAction.SKIP:
                self._skip(message)
                return False
            case FailureAction.PAUSE:
                self._pause(message)
                return True
            case FailureAction.RETRY if self._is_shared:
                self._give_back(message, error)
                return False
            case FailureAction.RETRY:
                return await self._wait_retry(message, attempt)

    def _skip(self, message: Message) -> None:
        self._consumer.skipped += 1
        self._ack([message])

    def _pause(self, message: Message) -> None:
        logger.warning("consumer %s: paused at %s, until it is resumed", self._consumer.name, _describe([message]))
        self._consumer.pause()
        self._update_going()

    def _give_back(self, message: Message, error: Exception) -> None:
        delay_s = self._consumer.retry.delay_s(message.attempts)
        if delay_s is None:
            self._consumer.rejected += 1
            self._settle(message, lambda: message.reject(reason=error))
        else:
            self._consumer.retried += 1
            self._settle(message, lambda: message.nack(delay_s, reason=error))

    async def _wait_retry(self, message: Message, attempt: int) -> bool:
        delay_s = self._consumer.retry.delay_s(attempt)
        if delay_s is None:
            name = self._consumer.name
            logger.error("consumer %s: skipping %s after %d failed attempts", name, _describe([message]), attempt)
            self._skip(message)
            return False
        self._consumer.retried += 1
        try:
            async with asyncio.timeout(delay_s):
                await self._stop.wait()
        except TimeoutError:
            # Another member may own the partition by now.
            await self._learn_generation()
        return True

    def _ack(self, messages: Sequence[Message]) -> None:
        # In a partition, the last message acknowledges those before it.
        for message in messages if self._is_shared else messages[-1:]:
            self._settle(message, message.ack)

    def _settle(self, message: Message, verdict: Callable[[], None]) -> None:
        self._deadlines.discard([message])
        try:
            verdict()
        except PenstockError as error:
            name = self._consumer.name
            logger.warning("consumer %s: %s will be redelivered: %s", name, _describe([message]), error)

    # Confirming what was settled.

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            await self._flush()

    async def _flush(self) -> None:
        try:
            await self._subscription.flush()
        except StaleCommit as error:
            logger.warning("consumer %s: some messages will be redelivered: %s", self._consumer.name, error)
            await self._learn_generation()
        except PenstockError as error:
            logger.warning("consumer %s: %s", self._consumer.name, error)

    async def _learn_generation(self) -> None:
        try:
            group = await self._client.group(self._consumer.group)
        except PenstockError as error:
            logger.warning("consumer %s: the generation of its group is unknown: %s", self._consumer.name, error)
        else:
            self._forget_before(group.generation)

    def _forget_before(self, generation: int) -> None:
        self._queues.forget_before(generation)
        self._has_room.set()


def _describe(messages: Sequence[Message]) -> str:
    first = messages[0]
    place = f"{first.subject} (offset {first.offset} of {first.topic}/{first.partition})"
    return place if len(messages) == 1 else f"a batch of {len(messages)}, the first {place}"
