"""The parent of this broker: keep a connection to it, and run a task for each partition that is piped down or up.

Of several parents, the first is followed; when one fails, the next. The list of topics is polled, so that topics which
the parent creates later are followed too. The same poll shows whether the parent is alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final, Protocol

from penstock.broker.broker import Broker
from penstock.broker.topic import ServedTopic, selects
from penstock.errors import (
    BadParent,
    Closed,
    ConnectionLost,
    NoBroker,
    Overloaded,
    PenstockError,
    PipeLoop,
    TimedOut,
    Unauthorized,
)
from penstock.model.subject import covers, is_literal, meets
from penstock.pipe.backoff import LONGEST_S, Backoff
from penstock.pipe.connector import Caller, Connect, PipeConnector, PushSource, Remote, RemoteTopic
from penstock.pipe.down import Down, PipeHost
from penstock.pipe.topology import Topology, origin_of
from penstock.pipe.up import Up

logger = logging.getLogger(__name__)

# The pipe is DEGRADED if the parent has not replied for this long.
SILENCE_US: Final = 60_000_000

Place = tuple[int, int]  # the id of a topic, and a partition


@dataclass(frozen=True, slots=True)
class ParentCredentials:
    """The credentials for a parent, sent only to allowed parents: a registry can name any server as the parent."""

    authorization: str | None = field(default=None, repr=False)
    # Origins, as returned by `origin_of`.
    allowed: frozenset[str] = frozenset()

    def for_parent(self, url: str) -> str | None:
        """Return the Authorization header for a parent; None if it must not have it."""
        return self.authorization if origin_of(url) in self.allowed else None

    def status(self, url: str) -> str:
        if self.authorization is None:
            return "none: pipe.token, or pipe.user and pipe.password, are not set"
        if self.for_parent(url) is None:
            return f"withheld: {origin_of(url)} is not in pipe.parents"
        return "sent"


class LocalNode(PipeHost, Protocol):
    """This broker, as its pipes to the parent see it."""

    broker: Broker
    node: str
    identity: str
    connect: Connect

    poll_ms: int
    credentials: ParentCredentials

    def caller(self, url: str) -> Caller: ...


class Parent:
    def __init__(self, local: LocalNode, topology: Topology) -> None:
        self._local = local
        self._broker = local.broker
        self._topology = topology
        self.url = topology.parents[0]
        # The IDs of the brokers above, the root first, and this one last.
        self.ancestry: tuple[str, ...] = (local.node,)
        # Why it is not connected, None if it is; and the time of its last reply, None if there was none.
        self.error: PenstockError | None = None
        self.replied_us: int | None = None
        # Topics that should be piped but are not, and stopped partitions, with their reasons.
        self.refused: dict[str, str] = {}
        self.stopped: dict[tuple[str, Place], str] = {}
        self.downs: dict[Place, Down] = {}
        self.ups: dict[Place, Up] = {}
        self._running: dict[tuple[str, Place], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the parents until cancelled."""
        backoff = Backoff()
        for url in cycle(self._topology.parents):
            self.url = url
            try:
                self.error = await self._connect(url, backoff)
            except Exception:  # a bug here or in a connector must not end the broker
                logger.exception("parent %s", url)
                self.error = BadParent(f"following {url} failed: internal error")
            if isinstance(self.error, PipeLoop):
                self.ancestry = (self._local.node,)
            await asyncio.sleep(backoff.failed())

    async def _connect(self, url: str, backoff: Backoff) -> PenstockError:
        connector = self._local.connect(url, self._local.caller(url))
        try:
            return await self._follow(connector, backoff)
        finally:
            await connector.close()

    async def _follow(self, connector: PipeConnector, backoff: Backoff) -> PenstockError:
        """Follow one parent until it fails; return the reason."""
        for up in self.ups.values():
            up.begin()
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    remote = await connector.topics()
                    self._check_loop(remote)
                    backoff.reset()
                    await self._follow_topics(remote, connector, tasks)
                    await asyncio.sleep(self._local.poll_ms / 1000)
            except Unauthorized as error:
                return Unauthorized(f"{error}; credentials {self._local.credentials.status(self.url)}")
            except PenstockError as error:
                return error
            finally:
                for task in self._running.values():
                    task.cancel()
                self._running.clear()
                self.stopped.clear()

    def _check_loop(self, remote: Remote) -> None:
        node = self._local.node
        if node in remote.ancestry:
            raise PipeLoop(f"{self.url} is below this broker, {node}: a tree must not have loops, correct the parents")
        self.ancestry = (*remote.ancestry, node)
        self.error = None
        self._local.note_reply()

    # ---- the topics

    async def _follow_topics(self, remote: Remote, connector: PipeConnector, tasks: asyncio.TaskGroup) -> None:
        """Start pipes for new partitions, and stop those that are no longer wanted."""
        self.refused = {}
        wanted: dict[tuple[str, Place], Callable[[], Awaitable[None]]] = {}
        url = self.url
        for topic in self._wanted_down(remote):
            for down in await self._downs_of(topic):

                def step_down(down: Down = down, topic: RemoteTopic = topic) -> Awaitable[None]:
                    return down.step(connector, topic, url)

                wanted["down", down.place] = step_down
        for served in self._wanted_up():
            for up in self._ups_of(served):

                def step_up(up: Up = up) -> Awaitable[None]:
                    return up.step(connector, url)

                wanted["up", up.place] = step_up
        for key in self._running.keys() - wanted.keys():
            self._running.pop(key).cancel()
            self.stopped.pop(key, None)
        self.downs = {place: down for place, down in self.downs.items() if ("down", place) in wanted}
        self.ups = {place: up for place, up in self.ups.items() if ("up", place) in wanted}
        for key, step in wanted.items():
            if key not in self._running:
                self._running[key] = tasks.create_task(self._keep_going(key, step))

    async def _keep_going(self, key: tuple[str, Place], step: Callable[[], Awaitable[None]]) -> None:
        """Run steps forever, with a backoff after a failure."""
        backoff = Backoff()
        while True:
            try:
                await step()
                backoff.reset()
                self.stopped.pop(key, None)
            except (NoBroker, ConnectionLost, TimedOut, Overloaded, Closed):
                # The parent is down or busy, or the partition is gone: handled elsewhere.
                await asyncio.sleep(backoff.failed())
            except PenstockError as error:
                if self.stopped.get(key) != str(error):
                    logger.error("a pipe is stopped: %s", error)
                self.stopped[key] = str(error)
                await asyncio.sleep(LONGEST_S)
            except Exception:  # a bug in one partition must not stop the others
                logger.exception("pipe of partition %d of topic %d", key[1][1], key[1][0])
                self.stopped[key] = "internal error"
                await asyncio.sleep(LONGEST_S)

    def _wanted_down(self, remote: Remote) -> Iterable[RemoteTopic]:
        names = [topic.name for topic in remote.topics]
        for pattern in self._topology.topics:
            if not any(_covers(pattern, name) for name in names):
                wanted = pattern if is_literal(pattern.encode()) else f"that {pattern} matches"
                self.refused[pattern] = _part_of(pattern, names) or f"the parent has no topic {wanted}"
        for topic in remote.topics:
            if not _is_among(topic.name, self._topology.topics or (">",)):
                continue
            if _is_among(topic.name, self._topology.up):
                if topic.name in self._topology.topics:
                    self.refused[topic.name] = f"{topic.name} cannot be piped down and up: choose one"
            elif topic.origin.startswith(f"{self._local.identity}/"):
                self.refused[topic.name] = f"{topic.name} is this broker's own topic: the parent follows it"
            elif self._broker.is_dead_letters(topic.name.encode()):
                if topic.name in self._topology.topics:
                    self.refused[topic.name] = f"{topic.name} holds the dead letters of this broker"
            else:
                yield topic

    async def _downs_of(self, topic: RemoteTopic) -> list[Down]:
        try:
            served = await self._broker.changes.pipe(topic.name.encode(), topic.origin, len(topic.partitions))
        except PenstockError as error:
            self.refused[topic.name] = str(error)
            return []
        found = []
        for partition, remote in zip(served.partitions, topic.partitions, strict=False):
            place = (partition.topic_id, partition.number)
            if place not in self.downs:
                self.downs[place] = Down(partition, self._local)
            self.downs[place].known = max(self.downs[place].known, remote.committed)
            found.append(self.downs[place])
        return found

    def _wanted_up(self) -> Iterable[ServedTopic]:
        names = [topic.topic.name for topic in self._broker.topics if not topic.is_internal]
        for pattern in self._topology.up:
            # A topic that does not exist yet is not an error: it is pushed once it exists.
            if not any(_covers(pattern, name) for name in names) and (reason := _part_of(pattern, names)):
                self.refused[pattern] = reason
        for topic in self._broker.topics:
            name = topic.topic.name
            if topic.is_internal or topic.refusal is not None or not _is_among(name, self._topology.up):
                continue
            if name in self._topology.topics:
                self.refused[name] = f"{name} cannot be piped down and up: choose one"
            elif topic.is_piped:
                self.refused[name] = f"{name} is piped down to this broker, so it cannot be pushed up"
            elif name in self._topology.up or not self._broker.is_dead_letters(topic.name):
                yield topic

    def _ups_of(self, served: ServedTopic) -> list[Up]:
        origin = f"{self._local.identity}/{served.topic.id}"
        found = []
        for partition in served.partitions:
            place = (partition.topic_id, partition.number)
            if place not in self.ups:
                source = PushSource(
                    topic=served.topic.name,
                    origin=origin,
                    partition=partition.number,
                    partitions=len(served.partitions),
                )
                self.ups[place] = Up(partition, source, self._local)
            found.append(self.ups[place])
        return found

    # ---- status

    def health(self) -> tuple[str, str]:
        """Return HEALTHY, DEGRADED or UNHEALTHY, and the reason."""
        if self.error is not None and (self.replied_us is None or not isinstance(self.error, TimedOut)):
            return "UNHEALTHY", str(self.error)
        if self.replied_us is None:
            return "UNHEALTHY", f"connecting to {self.url}"
        if self._broker.clock.monotonic_us() - self.replied_us > SILENCE_US:
            return "DEGRADED", f"{self.url} has not answered for {SILENCE_US // 1_000_000} s"
        reasons = [*self.refused.values(), *self.stopped.values()]
        return ("DEGRADED", "; ".join(dict.fromkeys(reasons))) if reasons else ("HEALTHY", "")


def _covers(pattern: str, name: str) -> bool:
    return covers(pattern.encode(), name.encode()) and selects(pattern.encode(), name.encode())


def _is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(_covers(pattern, name) for pattern in patterns)


def _part_of(pattern: str, names: Iterable[str]) -> str | None:
    """Return why a pattern without a topic is refused, if it matches some of the subjects of a topic."""
    for name in names:
        if meets(pattern.encode(), name.encode()):
            return f"{pattern} is a part of topic {name}, and only whole topics are piped: list {name} instead"
    return None
