"""Which lane the messages of a subject go to."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapreplace
from typing import Final

from penstock.client.lane import PartitionLane
from penstock.client.outgoing import subject_bytes
from penstock.client.partitioner import PIECE_MESSAGES, Layout
from penstock.model.run import MESSAGE_BYTES

# Routes to remember; beyond that the table starts again.
_ROUTES_MAX: Final = 65_536


class TopicLanes:
    """The lanes of a topic, with its layout as the broker last described it."""

    __slots__ = ("_first", "_given", "is_asked", "is_stale", "lanes", "layout", "own")

    def __init__(self, layout: Layout, first: int) -> None:
        """`first`: any number; it selects the partition with which messages that may go anywhere begin."""
        self.layout = layout
        self.lanes: dict[int, PartitionLane] = {}
        # The route of the topic's own name, whose messages go to each partition in turn.
        self.own: Route | None = None
        # A heap of (messages given, partition), counted from `first`. The partition with the least has its turn.
        self._given = [(0, number) for number in range(layout.partitions)]
        self._first = first
        # The number of partitions has changed, and whether the new one was requested.
        self.is_stale = False
        self.is_asked = False

    def turn(self, given: int) -> int:
        """Count messages for the partition that has its turn, and return the next one."""
        least, number = self._given[0]
        heapreplace(self._given, (least + given, number))
        return (self._first + self._given[0][1]) % self.layout.partitions


class Route:
    """The lane for messages of a subject without a key."""

    __slots__ = ("lane", "left", "overhead", "subject")

    def __init__(self, subject: bytes, lane: PartitionLane, left: int = 0) -> None:
        """`left`: messages until another lane has its turn; 0: it never changes."""
        self.subject = subject
        self.lane = lane
        self.left = left
        self.overhead = MESSAGE_BYTES + len(subject)


class Routes:
    def __init__(self, draw: Callable[[], int]) -> None:
        """`draw` returns a random producer ID."""
        # By subject. The batcher looks here first, for every message.
        self.known: dict[str, Route] = {}
        self._topics: dict[bytes, TopicLanes] = {}
        self._draw = draw

    def learn(self, layout: Layout) -> None:
        """Add a topic. A known topic stays as it is: the broker reports when its layout is stale."""
        if layout.name not in self._topics:
            # Programs that publish little and end must not all begin with the same partition.
            first = self._draw() if layout.partitions > 1 else 0
            self._topics[layout.name] = TopicLanes(layout, first)

    def forget(self, topic: TopicLanes) -> None:
        """Remove a topic. Its layout is requested again with the next message."""
        if self._topics.get(topic.layout.name) is topic:
            del self._topics[topic.layout.name]
            self.known.clear()

    def owner(self, subject: bytes) -> TopicLanes | None:
        """Return the topic of a subject: the subject itself or a prefix. No topic lies below another one."""
        topics = self._topics
        end = len(subject)
        while end >= 0:
            topic = topics.get(subject[:end])
            if topic is not None:
                return topic
            end = subject.rfind(b".", 0, end)
        return None

    def find(self, subject: str) -> Route | None:
        """Return the route of a subject, and remember it; None if its topic is unknown."""
        data = subject_bytes(subject)
        topic = self.owner(data)
        if topic is None:
            return None
        if len(self.known) >= _ROUTES_MAX:
            self.known.clear()
        partition = topic.layout.choose(data, None)
        route = self._own_route(topic) if partition is None else Route(data, self._lane(topic, partition))
        self.known[subject] = route
        return route

    def choose(self, topic: TopicLanes, subject: bytes, key: bytes | None) -> PartitionLane:
        """Return the lane of a message, and count it."""
        partition = topic.layout.choose(subject, key)
        if partition is not None:
            return self._lane(topic, partition)
        route = self._own_route(topic)
        lane = route.lane
        self.count(route)
        return lane

    def count(self, route: Route) -> None:
        """Count a message of the topic's own name. After some messages the next lane has its turn."""
        route.left -= 1
        if not route.left:
            self._turn(route)

    def sealed(self, lane: PartitionLane) -> None:
        """A batch was sealed: messages that may go anywhere go to the next lane."""
        own = lane.topic.own
        if own is not None and own.lane is lane:
            self._turn(own)

    def _turn(self, route: Route) -> None:
        topic = route.lane.topic
        route.lane, route.left = self._lane(topic, topic.turn(PIECE_MESSAGES - route.left)), PIECE_MESSAGES

    def _lane(self, topic: TopicLanes, partition: int) -> PartitionLane:
        lane = topic.lanes.get(partition)
        if lane is None:
            lane = topic.lanes[partition] = PartitionLane(topic, partition, self._draw())
        return lane

    def _own_route(self, topic: TopicLanes) -> Route:
        if topic.own is None:
            topic.own = Route(topic.layout.name, self._lane(topic, topic.turn(0)), PIECE_MESSAGES)
        return topic.own
