"""What Prometheus is told: the broker's own counters, read when it asks. Nothing is counted for it alone.

The counters belong to the loop, so they are read there, a slice at a time: a table of numbers. To make metrics of the
tables and to write those down takes ten times as long, and is done in another thread.

How many series there are is bounded. The first TOPICS_MAX topics and the first CONSUMERS_MAX pairs of a group and a
topic, in the order in which they were made, have series of their own; all others are summed under "other".

A *consumer* is a group as the broker knows it: `<topic>:<group>` for those of the Provider's clients and for Flux's
durables, whose `group` is then the name that the client gave. Subscriptions without a name have no such series.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from penstock.broker.group import Position
from penstock.broker.topic import ServedTopic
from penstock.errors import PenstockError
from penstock.storage.histogram import Histogram
from penstock.storage.log import Log

if TYPE_CHECKING:
    from penstock.server.server import Server

TOPICS_MAX: Final = 200
CONSUMERS_MAX: Final = 1000
OTHER: Final = "other"
# How old what a group has not acknowledged is may have to be read from the disk: so often for one answer.
READS_MAX: Final = 256
# Topics, or positions of groups, that are read before others may use the loop: about a millisecond.
SLICE: Final = 250
_HEALTHS: Final = ("HEALTHY", "DEGRADED", "UNHEALTHY")


class Metrics:
    def __init__(self, server: Server, sources: Sequence[Callable[[], Iterable[Metric]]]) -> None:
        """`sources` are asked for more, each time and on the loop."""
        self._server = server
        self._sources = sources
        self._process = ProcessCollector(namespace="broker", registry=None)

    def form(self, accept: str) -> tuple[Callable[[Any], bytes], str]:
        """How to write it so that the asker accepts it, and what that form is called."""
        return choose_encoder(accept)

    async def expose(self, encode: Callable[[Any], bytes]) -> bytes:
        """All of it."""
        server = self._server
        ages = _Ages(server.broker.clock.now_us())
        tables = [*await _topics(server), *await _groups(server, ages)]
        families = [*_rounds(server), *_connections(server), *chain.from_iterable(each() for each in self._sources)]
        return await asyncio.to_thread(self._encode, encode, tables, families, ages)

    def _encode(
        self, encode: Callable[[Any], bytes], tables: list[_Table], families: list[Metric], ages: _Ages
    ) -> bytes:
        told = chain.from_iterable(table.families() for table in (*tables, ages.table()))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*told, *families, *self._process.collect()]))
        return encode(registry)


class _Collected:
    """What prometheus-client encodes: something that it can collect from."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """It is registered for one answer: nothing can clash."""
        return ()


class _Figure(NamedTuple):
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    about: str


class _Table:
    """Figures with the same labels: a row for each of what they label, a column for each figure."""

    def __init__(self, labels: Sequence[str], rows_max: int, figures: Sequence[_Figure]) -> None:
        self._labels = labels
        self._rows_max = rows_max
        self._figures = figures
        self._rows: dict[tuple[str, ...], tuple[float, ...]] = {}

    def add(self, labels: tuple[str, ...], numbers: tuple[float, ...]) -> None:
        """Above what is there under these labels; or under `other`, when there are too many."""
        rows = self._rows
        if labels not in rows and len(rows) >= self._rows_max:
            labels = (OTHER,) * len(labels)
        before = rows.get(labels)
        rows[labels] = numbers if before is None else tuple(map(add, before, numbers))

    def families(self) -> Iterator[Metric]:
        for column, figure in enumerate(self._figures):
            family = figure.kind(figure.name, figure.about, labels=self._labels)
            for labels, numbers in self._rows.items():
                family.add_metric(labels, numbers[column])
            yield family


# Topics.

_TRAFFIC: Final = (
    _Figure(
        CounterMetricFamily,
        "broker_messages_received",
        "Messages that publishers sent to a topic; _: live only, to inboxes.",
    ),
    _Figure(CounterMetricFamily, "broker_messages_sent", "Messages that were handed to connections."),
)
_STORED: Final = (
    _Figure(CounterMetricFamily, "broker_messages_stored", "Messages that were written to the topic's logs."),
    _Figure(CounterMetricFamily, "broker_stored_bytes", "Bytes that were written to the topic's logs."),
    _Figure(CounterMetricFamily, "broker_dedup_checks", "Messages whose id or payload was looked for."),
    _Figure(CounterMetricFamily, "broker_dedup_hits", "Messages that were stored before, and were not again."),
    _Figure(GaugeMetricFamily, "broker_segments", "Files of the topic's logs, one of each being written to."),
    _Figure(GaugeMetricFamily, "broker_log_bytes", "Bytes of the topic's logs."),
    _Figure(GaugeMetricFamily, "broker_log_messages", "Offsets from the start to the end of the topic's logs."),
    _Figure(GaugeMetricFamily, "broker_partitions", "Partitions."),
    _Figure(
        GaugeMetricFamily,
        "broker_partitions_failed",
        "Partitions that cannot be opened, or take nothing more: see /healthz.",
    ),
    _Figure(GaugeMetricFamily, "broker_damaged_ranges", "Places in the topic's logs that are damaged: see /healthz."),
    _Figure(
        CounterMetricFamily, "broker_damaged_offsets_skipped", "Damaged offsets that readers of the topic skipped."
    ),
)


async def _topics(server: Server) -> tuple[_Table, ...]:
    # Inboxes are one more.
    traffic, stored = _Table(["topic"], TOPICS_MAX + 1, _TRAFFIC), _Table(["topic"], TOPICS_MAX, _STORED)
    live = server.broker.live
    traffic.add((live.name.decode(),), (live.received, live.sent))
    count = 0
    for index, topic in enumerate(list(server.broker.topics)):
        if not topic.is_internal:
            found = 0 if topic.dedup is None else topic.dedup.found
            received = sum(partition.received for partition in topic.partitions) + found
            traffic.add((topic.topic.name,), (received, sum(partition.sent for partition in topic.partitions)))
            stored.add((topic.topic.name,), _stored(topic))
            count += 1
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    total = _Table([], 1, [_Figure(GaugeMetricFamily, "broker_topics", "Topics.")])
    total.add((), (count,))
    return traffic, stored, total


def _stored(topic: ServedTopic) -> tuple[float, ...]:
    messages = size = segments = log_bytes = held = failed = damaged = skipped = 0
    for partition in topic.partitions:
        log = partition.log
        messages += log.stored_messages
        size += log.stored_bytes
        segments += len(log.segments)
        log_bytes += sum(segment.size for segment in log.segments)
        held += log.committed - log.start
        failed += log.failure is not None
        damaged += len(log.damage)
        skipped += log.skipped_offsets
    checked, found = (0, 0) if topic.dedup is None else (topic.dedup.checked, topic.dedup.found)
    partitions = topic.topic.partitions
    refused = partitions if topic.refusal is not None else 0
    return messages, size, checked, found, segments, log_bytes, held, partitions, failed + refused, damaged, skipped


def _rounds(server: Server) -> Iterator[Metric]:
    store, rounds, figures = server.broker.store, server.broker.store.rounds, server.broker.figures
    yield _histogram("broker_flush_seconds", "Writing what waited, one observation a round.", rounds.write_seconds)
    yield _histogram("broker_fsync_seconds", "Syncing what was written, one observation a round.", rounds.sync_seconds)
    yield _histogram("broker_flush_messages", "Messages that were written together.", rounds.round_messages)
    yield _histogram(
        "broker_delivery_seconds",
        "From when a message was appended, or published by a producer that says when, to when it was handed to a "
        "connection: one observation for each run of messages, of the first of them. Redeliveries, and what is "
        "older than its reader, do not count.",
        figures.delivery_seconds,
    )
    yield GaugeMetricFamily("broker_unflushed_bytes", "Bytes that wait for a write.", rounds.unflushed_bytes)
    stored = store.maintenance.store_bytes
    yield GaugeMetricFamily("broker_store_bytes", "Bytes of all segments, as of the last upkeep.", stored)
    if store.settings.retain_bytes is not None:
        about = "Bytes of all segments above which the oldest go."
        yield GaugeMetricFamily("broker_store_limit_bytes", about, store.settings.retain_bytes)
    yield GaugeMetricFamily("broker_disk_free_bytes", "Bytes that are free on the disk of the data.", store.space.free)
    yield GaugeMetricFamily("broker_disk_total_bytes", "Bytes of the disk of the data.", store.space.total)


def _histogram(name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, histogram.cumulative(), strict=True))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)


# Connections.

# Each of `Counters`, under the name that it has here.
_COUNTED: Final = {
    "connections": ("broker_connections_opened", "Connections that came."),
    "refused": ("broker_connections_refused", "Connections beyond server.connections_max."),
    "silent": ("broker_connections_silent", "Connections that were closed, because they said nothing in time."),
    "stale": ("broker_connections_stale", "Connections that were closed, because they did not answer."),
    "slow": (
        "broker_connections_slow",
        "Connections that were closed, because a large frame of theirs kept others waiting.",
    ),
    "unauthorized": ("broker_unauthorized", "Requests without the right user or token."),
    "protocol_errors": ("broker_protocol_errors", "What could not be understood, or not be done."),
    "failed_publishes": ("broker_messages_refused", "Messages that were not stored, and whose publisher was told."),
    "unstored": ("broker_messages_unstored", "Messages delivered but not stored: the subject or reply cannot be."),
    "unread": ("broker_connections_unread", "Times that one was not read from, as it did not read its answers."),
    "received_bytes": ("broker_received_bytes", "Bytes that connections sent."),
    "sent_bytes": ("broker_sent_bytes", "Bytes that were sent to connections."),
}


def _connections(server: Server) -> Iterator[Metric]:
    figures = server.statistics()
    for field, value in asdict(server.counters).items():
        name, about = _COUNTED[field]
        yield CounterMetricFamily(name, about, value)
    yield CounterMetricFamily(
        "broker_messages_dropped", "Messages that slow readers were spared, as they asked.", figures["dropped"]
    )
    yield CounterMetricFamily(
        "broker_messages_expired",
        "Messages that were not delivered because their TTL had ended, once for each reader.",
        figures["expired"],
    )
    yield GaugeMetricFamily("broker_connections", "Connections.", figures["connections"])
    yield GaugeMetricFamily("broker_subscriptions", "Subscriptions.", figures["subscriptions"])
    yield GaugeMetricFamily(
        "broker_slow_readers", "Subscriptions that are behind what was published.", figures["slow_consumers"]
    )
    yield GaugeMetricFamily("broker_groups", "Groups.", figures["groups"])
    yield GaugeMetricFamily("broker_delayed_messages", "Messages that are not due yet.", figures["delayed"])
    info = GaugeMetricFamily("broker_info", "Always 1: which broker this is.", labels=("version", "node"))
    info.add_metric([server.version, server.config.server.node_id], 1)
    yield info
    ill = server.ill()
    yield GaugeMetricFamily("broker_healthy", "Whether /healthz says that it is well.", int(ill is None))
    health = server.broker.store.health
    yield GaugeMetricFamily(
        "broker_problems", "Conditions that need attention: /healthz names them.", len(health.problems)
    )
    faults = CounterMetricFamily("broker_faults", "Unexpected exceptions: bugs, contained at a seam.", labels=["seam"])
    for seam, count in health.faults.items():
        faults.add_metric([seam], count)
    yield faults
    yield _histogram(
        "broker_loop_stall_seconds",
        "How late a timer of the event loop was: how long one client can keep all others waiting.",
        server.stalls.seconds,
    )


# Groups.

_CONSUMER: Final = ("consumer", "topic", "group")
_POSITION: Final = (
    _Figure(
        GaugeMetricFamily,
        "broker_consumer_offset",
        "How far a group has come: all below is done; summed over partitions.",
    ),
    _Figure(GaugeMetricFamily, "broker_consumer_lag", "Messages that are not acknowledged, and those to come."),
    _Figure(GaugeMetricFamily, "broker_consumer_pending", "Messages that are out with members, or wait to be again."),
    _Figure(CounterMetricFamily, "broker_consumer_messages_sent", "Deliveries."),
    _Figure(CounterMetricFamily, "broker_consumer_acks", "Messages that were acknowledged."),
    _Figure(CounterMetricFamily, "broker_consumer_failures", "Deliveries that were refused, or not acknowledged."),
    _Figure(CounterMetricFamily, "broker_consumer_retries", "Deliveries that were not the first of their message."),
)
_GROUP: Final = (
    _Figure(GaugeMetricFamily, "broker_consumer_members", "Members."),
    _Figure(CounterMetricFamily, "broker_dead_letters", "Messages that a group could not handle, and that are kept."),
    _Figure(
        CounterMetricFamily,
        "broker_consumer_lost",
        "Messages that retention dropped before they were acknowledged.",
    ),
    _Figure(CounterMetricFamily, "broker_consumer_expired", "Messages whose TTL ended before they were acknowledged."),
)
_AGE: Final = _Figure(
    GaugeMetricFamily,
    "broker_consumer_oldest_unacknowledged_seconds",
    "How long the oldest message that is not acknowledged is in the log; 0: there is none.",
)


async def _groups(server: Server, ages: _Ages) -> tuple[_Table, ...]:
    positions, groups = _Table(_CONSUMER, CONSUMERS_MAX, _POSITION), _Table(["consumer"], CONSUMERS_MAX, _GROUP)
    count = 0
    for name, group in list(server.broker.groups.items()):
        consumer = name.decode(errors="replace")
        groups.add((consumer,), (len(group.members), group.dead_lettered, group.lost, group.expired))
        for position in list(group.positions.values()):
            topic = position.partition.name.decode(errors="replace")
            labels = (consumer, topic, consumer.removeprefix(f"{topic}:") or consumer)
            lag = position.lag()
            positions.add(labels, _position(position, lag))
            ages.note(labels, position if lag else None)
            count += 1
            if count % SLICE == 0:
                await asyncio.sleep(0)
    return positions, groups


def _position(position: Position, lag: int) -> tuple[float, ...]:
    inflight = position.inflight
    return inflight.floor, lag, len(inflight), position.sent, position.acked, position.failed, position.retried


class _Ages:
    """Since when the oldest message of each group waits: from memory while the loop has it, else from the disk."""

    def __init__(self, now_us: int) -> None:
        self._now_us = now_us
        self._oldest: dict[tuple[str, ...], int] = {}
        self._unread: list[tuple[tuple[str, ...], Log, int]] = []

    def note(self, labels: tuple[str, ...], position: Position | None) -> None:
        """On the loop; None: there is nothing that waits."""
        if labels not in self._oldest and len(self._oldest) >= CONSUMERS_MAX:
            labels = (OTHER,) * len(labels)
        self._oldest.setdefault(labels, self._now_us)
        if position is None:
            return
        log = position.partition.log
        offset = max(position.inflight.floor, log.start)
        batches = log.read_tail(offset, 1) if offset < log.committed else []
        if batches:
            self._oldest[labels] = min(self._oldest[labels], batches[0].append_time)
        elif batches is None and len(self._unread) < READS_MAX:
            self._unread.append((labels, log, offset))

    def table(self) -> _Table:
        """In any thread."""
        for labels, log, offset in self._unread:
            try:
                batches = log.read_disk(offset, 1)
            except PenstockError:
                continue  # whoever reads there is told
            if batches:
                self._oldest[labels] = min(self._oldest[labels], batches[0].append_time)
        table = _Table(_CONSUMER, len(self._oldest), [_AGE])
        for labels, time_us in self._oldest.items():
            table.add(labels, ((self._now_us - time_us) / 1e6,))
        return table


# Pipes.

_HEALTH: Final = _Figure(
    GaugeMetricFamily, "broker_pipe_health", "1 for the state that the pipe from the parent is in."
)
_PIPE: Final = (
    _Figure(GaugeMetricFamily, "broker_pipe_lag", "Messages that the other end has and this one has not."),
    _Figure(CounterMetricFamily, "broker_pipe_gaps", "Gaps that retention left at the other end."),
)
_CHILDREN: Final = _Figure(GaugeMetricFamily, "broker_pipe_children", "Brokers that follow this one.")


def pipe_metrics(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """What `GET /pipe/status` tells, as metrics; None: there are no pipes."""
    health, children = _Table(["health"], len(_HEALTHS), [_HEALTH]), _Table([], 1, [_CHILDREN])
    topics = _Table(["topic", "direction"], TOPICS_MAX, _PIPE)
    if status is not None:
        for state in _HEALTHS:
            health.add((state,), (int(status["health"] == state),))
        children.add((), (len(status["children"]),))
        for row in status["topics"]:
            topics.add((row["topic"], row["direction"]), (row["lag"], row["gaps"]))
    return chain.from_iterable(table.families() for table in (health, topics, children))
