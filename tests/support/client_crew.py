"""The clients of a broker that is killed again and again: producers, readers and members of groups, in both shells."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from random import Random
from typing import Any, Final

from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.client.producer import AsyncProducer
from penstock.client.subscription import AsyncSubscription
from penstock.client.sync import Client, Producer, Subscription
from penstock.errors import Closed, ConnectionLost, NotOutstanding, StaleCommit, TimedOut
from tests.support.client_journal import (
    PATIENCE_S,
    At,
    Author,
    Journal,
    PartitionedGroup,
    Reader,
    SharedGroup,
    at_of,
)
from tests.support.proxy import LoopThread

# How long a member waits for messages before it looks whether it is wanted any more.
LOOK_S: Final = 0.1
# What `flush` raises if not all that was said counts: it will come again.
TOO_LATE: Final = (NotOutstanding, StaleCommit, Closed)


class Member:
    """One of a group: how long it stays, how much it takes, and what it said and is not confirmed yet."""

    def __init__(self, name: str, journal: Journal, group: SharedGroup | PartitionedGroup, seed: int) -> None:
        self.group = group
        self._name = name
        self._journal = journal
        self._random = Random(f"{seed} {name}")
        self._said: list[At] = []
        self._left = 0
        self._is_careless = True

    def options(self) -> dict[str, Any]:
        """What it subscribes with, each time that it joins the group."""
        self._said.clear()
        self._left = self._random.randint(20, 400)
        self._is_careless = not self._journal.is_quiet
        buffer = self._random.choice((1, 10, 100))
        return {"group": self.group.name, "mode": self.group.mode, "start": "earliest", "buffer": buffer}

    def stays(self) -> bool:
        """When it begins to be careful it leaves, so that what it was careless with comes again."""
        self._left -= 1
        return self._left >= 0 and not self._journal.is_over and self._is_careless is not self._journal.is_quiet

    def wants(self) -> int:
        """How many messages at once."""
        return self._random.choice((1, 10, 100))

    def take(self, messages: Sequence[Message]) -> None:
        self._said += [at_of(each) for each in messages if self.group.take(each, self._random, self._name)]

    def is_impatient(self) -> bool:
        """Whether it flushes."""
        return self._random.random() < 0.3

    def confirm(self, now_us: int, generation: int) -> None:
        """All that it said is stored. The group's generation was this one after that, or it is one of a later life of
        the server: then what it was before is below the time."""
        self.group.confirm(self._said, min(now_us, generation))
        self._said.clear()

    def forget(self) -> None:
        """Nobody knows what is stored of what it said."""
        self._said.clear()


class Crew:
    """Those at work, in threads and in one event loop. What one of them raises is the judge's."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.loop = LoopThread()

    def start(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        ended: Future[None] = Future()

        def run() -> None:
            with self._supervised():
                work(self.journal, *arguments)
            ended.set_result(None)

        threading.Thread(target=run, name=work.__name__, daemon=True).start()
        return ended

    def start_async(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> Future[None]:
        async def run() -> None:
            with self._supervised():
                await work(self.journal, *arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop.loop)

    def join(self, all_of: Iterable[Future[None]]) -> None:
        _, late = wait(all_of, PATIENCE_S)
        self.journal.check()
        assert not late, f"{len(late)} clients do not come to their end"

    @contextmanager
    def _supervised(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the journal's reader raises it
            self.journal.fail(error)


# What the clients do, each until nobody wants it any more.
def produce(journal: Journal, producer: Producer, author: Author) -> None:
    while not journal.is_quiet:
        for sent in author.burst():
            producer.publish(sent.subject, sent.value, **sent.options())
        if author.is_impatient():
            producer.flush()
            journal.stored(author.sent)
        time.sleep(author.pause_s())
    producer.flush()
    journal.stored(author.sent)


async def produce_async(journal: Journal, producer: AsyncProducer, author: Author) -> None:
    while not journal.is_quiet:
        for sent in author.burst():
            await producer.publish(sent.subject, sent.value, **sent.options())
        if author.is_impatient():
            await producer.flush()
            journal.stored(author.sent)
        await asyncio.sleep(author.pause_s())
    await producer.flush()
    journal.stored(author.sent)


def publish_each(journal: Journal, client: Client, author: Author) -> None:
    while not journal.is_quiet:
        sent = author.next()
        while sent.receipt is None:
            try:
                journal.receipt(sent, client.publish(sent.subject, sent.value, **sent.options()))
            except Closed:
                # A server that stops takes no more.
                pass
            except ConnectionLost:
                assert sent.message_id is None, f"{sent} could be sent again"
                break
        time.sleep(author.pause_s() / 10)


async def publish_each_async(journal: Journal, client: AsyncClient, author: Author) -> None:
    while not journal.is_quiet:
        sent = author.next()
        while sent.receipt is None:
            try:
                journal.receipt(sent, await client.publish(sent.subject, sent.value, **sent.options()))
            except Closed:
                pass
            except ConnectionLost:
                assert sent.message_id is None, f"{sent} could be sent again"
                break
        await asyncio.sleep(author.pause_s() / 10)


def read(journal: Journal, subscription: Subscription, reader: Reader) -> None:
    for messages in subscription.batches():
        reader.take(messages)
        time.sleep(reader.pause_s())


async def read_async(journal: Journal, subscription: AsyncSubscription, reader: Reader) -> None:
    async for message in subscription:
        reader.take([message])
        await asyncio.sleep(reader.pause_s())


def follow(journal: Journal, client: Client, topic: str, reader: Reader) -> None:
    try:
        for message in client.fetch(topic, follow=True):
            reader.take([message])
    except Closed:
        assert journal.is_over, "the client was not closed"


def attend(journal: Journal, client: Client, member: Member) -> None:
    while not journal.is_over:
        with client.subscribe(member.group.pattern, **member.options()) as subscription:
            while member.stays():
                try:
                    messages = subscription.get_many(member.wants(), LOOK_S)
                except TimedOut:
                    continue
                member.take(messages)
                if member.is_impatient():
                    try:
                        subscription.flush()
                    except TOO_LATE:
                        member.forget()
                    else:
                        member.confirm(now_us(), client.group(member.group.name).generation)


async def attend_async(journal: Journal, client: AsyncClient, member: Member) -> None:
    while not journal.is_over:
        async with await client.subscribe(member.group.pattern, **member.options()) as subscription:
            while member.stays():
                try:
                    messages = await subscription.get_many(member.wants(), LOOK_S)
                except TimedOut:
                    continue
                member.take(messages)
                if member.is_impatient():
                    try:
                        await subscription.flush()
                    except TOO_LATE:
                        member.forget()
                    else:
                        member.confirm(now_us(), (await client.group(member.group.name)).generation)


def watch(journal: Journal, client: Client, group: SharedGroup | PartitionedGroup) -> None:
    """Ask how far a group is: never less far than was confirmed."""
    while not journal.is_over:
        confirmed = group.committed()
        found = client.group(group.name)
        for position in found.positions:
            low = confirmed.get((position.topic, position.partition), 0)
            assert position.committed >= low, f"{group.name} is at {position}, though {low} was confirmed"
        with journal.changed:
            journal.lags[group.name] = found.lag
            journal.changed.notify_all()
        time.sleep(LOOK_S)


def now_us() -> int:
    return time.time_ns() // 1000
