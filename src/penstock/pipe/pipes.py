"""This broker in the tree: its parent, its children, and the status of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.broker.broker import Broker
from penstock.broker.topic import ServedTopic
from penstock.errors import PipeLoop
from penstock.health import Usage
from penstock.pipe.connector import Caller, Connect
from penstock.pipe.down import Down, OnGap
from penstock.pipe.gaps import Gaps
from penstock.pipe.parent import Parent, ParentCredentials
from penstock.pipe.topology import Topology
from penstock.pipe.up import Up
from penstock.times import iso
from penstock.tls.options import TlsOptions

logger = logging.getLogger(__name__)

# The number of children to remember, and for how long after their last request.
CHILDREN_MAX: Final = 10_000
CHILD_US: Final = 10 * 60 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeSettings:
    poll_ms: int = 1000
    batch_size: int = 100
    on_gap: OnGap = OnGap.STOP
    credentials: ParentCredentials = field(default_factory=ParentCredentials)
    tls: TlsOptions = field(default_factory=TlsOptions)


@dataclass(frozen=True, slots=True)
class _Child:
    address: str
    seen_us: int


class Pipes:
    def __init__(self, broker: Broker, *, node_id: str, connect: Connect, settings: PipeSettings | None = None) -> None:
        """`connect` opens a connection to a parent; see `connector`."""
        self.broker = broker
        self.store = broker.store
        self.node = node_id
        self.connect = connect
        self.settings = settings or PipeSettings()
        self.on_gap = self.settings.on_gap
        self.poll_ms = self.settings.poll_ms
        self.credentials = self.settings.credentials
        self.gaps = Gaps(broker.store, broker.clock)
        # Known after `start`.
        self.identity = ""
        # Set when this broker stops: waiting children get their replies.
        self.is_stopping = False
        self.waiting: dict[Callable[[], None], None] = {}
        self._topology: Topology | None = None
        self._changed = asyncio.Event()
        self._parent: Parent | None = None
        self._children: dict[str, _Child] = {}
        self._health = "HEALTHY"
        self._since_us = broker.clock.now_us()

    async def run(self) -> None:
        """Follow the parents of the current topology until cancelled."""
        await self.start()
        while True:
            self._changed.clear()
            topology = self._topology
            if topology is None or not topology.parents:
                self._parent = None
                await self._changed.wait()
                continue
            self._parent = Parent(self, topology)
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(self._parent.run())
                watching = tasks.create_task(self._watch())
                await self._changed.wait()
                following.cancel()
                watching.cancel()

    async def start(self) -> None:
        """Load the identity of this broker, before it serves requests."""
        if not self.identity:
            self.identity = await self.store.identity()
            await self.gaps.forget_others({topic.id for topic in self.store.topics})

    def stop(self) -> None:
        """Answer waiting children, and serve no more."""
        self.is_stopping = True
        for wake in list(self.waiting):
            wake()

    async def follow(self, topology: Topology) -> None:
        """Follow a new topology, at any time. Copies stay, and continue from the new parent."""
        before, self._topology = self._topology, topology
        if before is None or replace(before, version=0, role=topology.role) != replace(topology, version=0):
            self._changed.set()

    def caller(self, url: str) -> Caller:
        """Return the description of this broker for the parent at this URL."""
        topics = self._topology.topics if self._topology is not None else ()
        settings = self.settings
        return Caller(
            node=self.node,
            topics=topics,
            poll_ms=settings.poll_ms,
            batch_size=settings.batch_size,
            clock=self.broker.clock,
            authorization=self.credentials.for_parent(url),
            tls=settings.tls,
        )

    # ---- children

    @property
    def ancestry(self) -> tuple[str, ...]:
        """The IDs of the brokers above, the root first, and this one's last."""
        return self._parent.ancestry if self._parent is not None else (self.node,)

    def admit(self, node: str, address: str) -> None:
        """Note a request of a child. Raise PipeLoop if this broker is below it, or has the same ID."""
        if node == self.node:
            raise PipeLoop(f"both brokers have the ID {node}: give each its own server.node_id")
        if node in self.ancestry:
            raise PipeLoop(f"{node} is above {self.node} and cannot follow it: a tree must not have loops")
        now_us = self.broker.clock.now_us()
        self._children.pop(node, None)
        self._children[node] = _Child(address, now_us)
        while len(self._children) > CHILDREN_MAX or next(iter(self._children.values())).seen_us < now_us - CHILD_US:
            del self._children[next(iter(self._children))]

    def origin(self, topic: ServedTopic) -> str:
        """Return the identifier of the original topic and broker, which all copies keep."""
        return topic.topic.origin or f"{self.identity}/{topic.topic.id}"

    def usage(self) -> dict[str, Usage]:
        """Return the usage of each limited table by name."""
        return {"pipe_children": Usage(len(self._children), CHILDREN_MAX)}

    # ---- parent

    def note_reply(self) -> None:
        if self._parent is not None:
            self._parent.replied_us = self.broker.clock.monotonic_us()

    async def _watch(self) -> None:
        """Update the health periodically, so that the time of each change is known."""
        while True:
            await asyncio.sleep(self.poll_ms / 1000)
            self._update_health()

    def _update_health(self) -> tuple[str, str]:
        health, reason = ("HEALTHY", "") if self._parent is None else self._parent.health()
        if health != self._health:
            level = logging.INFO if health == "HEALTHY" else logging.WARNING
            logger.log(level, "the pipe from the parent is %s%s", health, f": {reason}" if reason else "")
            self._health, self._since_us = health, self.broker.clock.now_us()
        return health, reason

    # ---- status

    def status(self) -> dict[str, Any]:
        health, reason = self._update_health()
        topology, parent = self._topology, self._parent
        return {
            "node": self.node,
            "role": None if topology is None else topology.role.value,
            "version": 0 if topology is None else topology.version,
            "parent": None if parent is None else parent.url,
            "credentials": None if parent is None else self.credentials.status(parent.url),
            "health": health,
            "reason": reason,
            "since": iso(self._since_us, "milliseconds"),
            "ancestry": list(self.ancestry),
            "topics": [*self._status_down(), *self._status_up()],
            "children": [
                {"node": node, "address": child.address, "seen": iso(child.seen_us, "milliseconds")}
                for node, child in self._children.items()
            ],
        }

    def _status_down(self) -> list[dict[str, Any]]:
        downs = self._parent.downs if self._parent is not None else {}
        found = []
        for topic in self.broker.topics:
            if topic.is_piped:
                followed = [downs[place] for place in _places(topic) if place in downs]
                positions = [partition.end for partition in topic.partitions]
                found.append(self._status_of(topic, "down", followed, positions))
        return found

    def _status_up(self) -> list[dict[str, Any]]:
        ups = self._parent.ups if self._parent is not None else {}
        found = []
        for topic in self.broker.topics:
            followed = [ups[place] for place in _places(topic) if place in ups]
            if followed:
                found.append(self._status_of(topic, "up", followed, [up.position for up in followed]))
        return found

    def _status_of(
        self, topic: ServedTopic, direction: str, followed: Sequence[Down | Up], positions: list[int]
    ) -> dict[str, Any]:
        return {
            "topic": topic.topic.name,
            "direction": direction,
            "lag": sum(each.lag() for each in followed),
            "position": positions,
            "gaps": self.gaps.count(topic.topic.id),
        }


def _places(topic: ServedTopic) -> list[tuple[int, int]]:
    return [(partition.topic_id, partition.number) for partition in topic.partitions]
