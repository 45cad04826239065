"""What Prometheus is told: the broker's own counters, read when it asks. Nothing is counted for it alone.

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
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from penstock.broker.group import Group, Position
from penstock.broker.topic import ServedTopic
from penstock.errors import PenstockError
from penstock.storage.histogram import Histogram
from penstock.storage.log import Log

if TYPE_CHECKING:
    from penstock.server.server import Server

# Consumer, topic, group.
Labels = tuple[str, str, str]

TOPICS_MAX: Final = 200
CONSUMERS_MAX: Final = 1000
# How old what a group has not acknowledged is may have to be read from the disk: so often for one answer.
READS_MAX: Final = 256
OTHER: Final = "other"
_CONSUMER: Final = ("consumer", "topic", "group")
_HEALTHS: Final = ("HEALTHY", "DEGRADED", "UNHEALTHY")


class Metrics:
    def __init__(self, server: Server, sources: Sequence[Callable[[], Iterable[Metric]]]) -> None:
        """`sources` are asked for more, each time and on the loop."""
        self._server = server
        self._sources = sources
        self._process = ProcessCollector(namespace="broker", registry=None)

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """All of it in a form that the asker accepts, and what that form is."""
        encode, media = choose_encoder(accept)
        # The counters belong to the loop. To write them down takes longer, and is done beside it.
        families, ages = list(self._collect()), _Ages(self._server)
        return await asyncio.to_thread(self._encode, encode, families, ages), media

    def _collect(self) -> Iterator[Metric]:
        server = self._server
        yield from _messages(server)
        yield from _logs(server)
        yield from _rounds(server)
        yield from _connections(server)
        yield from _consumers(server)
        yield from chain.from_iterable(source() for source in self._sources)

    def _encode(self, encode: Callable[[Any], bytes], families: list[Metric], ages: _Ages) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*families, ages.family(), *self._process.collect()]))
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


# Topics.


def _messages(server: Server) -> Iterator[Metric]:
    topics = _by_topic(server)
    received = _counter(
        "broker_messages_received", "Messages that publishers sent to a topic; _: live only, to inboxes.", "topic"
    )
    stored = _counter("broker_messages_stored", "Messages that were written to the topic's logs.", "topic")
    stored_bytes = _counter("broker_stored_bytes", "Bytes that were written to the topic's logs.", "topic")
    sent = _counter("broker_messages_sent", "Messages that were handed to connections.", "topic")
    checked = _counter("broker_dedup_checks", "Messages whose id or payload was looked for.", "topic")
    duplicates = _counter("broker_dedup_hits", "Messages that were stored before, and were not again.", "topic")
    for name, several in topics.items():
        partitions = [partition for topic in several for partition in topic.partitions]
        dedups = [topic.dedup for topic in several if topic.dedup is not None]
        found = sum(dedup.found for dedup in dedups)
        received.add_metric([name], sum(partition.received for partition in partitions) + found)
        stored.add_metric([name], sum(partition.log.stored_messages for partition in partitions))
        stored_bytes.add_metric([name], sum(partition.log.stored_bytes for partition in partitions))
        sent.add_metric([name], sum(partition.sent for partition in partitions))
        checked.add_metric([name], sum(dedup.checked for dedup in dedups))
        duplicates.add_metric([name], found)
    live = server.broker.live
    received.add_metric([live.name.decode()], live.received)
    sent.add_metric([live.name.decode()], live.sent)
    yield from (received, stored, stored_bytes, sent, checked, duplicates)


def _logs(server: Server) -> Iterator[Metric]:
    segments = _gauge("broker_segments", "Files of the topic's logs, one of each being written to.", "topic")
    size = _gauge("broker_log_bytes", "Bytes of the topic's logs.", "topic")
    held = _gauge("broker_log_messages", "Offsets from the start to the end of the topic's logs.", "topic")
    failed = _gauge(
        "broker_partitions_failed", "Partitions that cannot be opened, or take nothing more: see /healthz.", "topic"
    )
    partitions = _gauge("broker_partitions", "Partitions.", "topic")
    for name, several in _by_topic(server).items():
        logs = [partition.log for topic in several for partition in topic.partitions]
        segments.add_metric([name], sum(len(log.segments) for log in logs))
        size.add_metric([name], sum(segment.size for log in logs for segment in log.segments))
        held.add_metric([name], sum(log.committed - log.start for log in logs))
        refused = sum(topic.topic.partitions for topic in several if topic.refusal is not None)
        failed.add_metric([name], refused + sum(log.failure is not None for log in logs))
        partitions.add_metric([name], sum(topic.topic.partitions for topic in several))
    topics = _gauge("broker_topics", "Topics.")
    topics.add_metric([], sum(not topic.is_internal for topic in server.broker.topics))
    yield from (segments, size, held, failed, partitions, topics)


def _rounds(server: Server) -> Iterator[Metric]:
    store, figures = server.broker.store, server.broker.figures
    yield _histogram("broker_flush_seconds", "Writing what waited, one observation a round.", store.write_seconds)
    yield _histogram("broker_fsync_seconds", "Syncing what was written, one observation a round.", store.sync_seconds)
    yield _histogram("broker_flush_messages", "Messages that were written together.", store.round_messages)
    yield _histogram(
        "broker_delivery_seconds",
        "From when a message was appended, or published by a producer that says when, to when it was handed to a "
        "connection: one observation for each run of messages, of the first of them. Redeliveries, and what is "
        "older than its reader, do not count.",
        figures.delivery_seconds,
    )
    unflushed = _gauge("broker_unflushed_bytes", "Bytes that wait for a write.")
    unflushed.add_metric([], store.unflushed_bytes)
    yield unflushed


def _by_topic(server: Server) -> dict[str, list[ServedTopic]]:
    """The topics under the name that their series have: their own, or that of all others together."""
    named: dict[str, list[ServedTopic]] = {}
    for topic in server.broker.topics:
        if not topic.is_internal:
            named.setdefault(topic.topic.name if len(named) < TOPICS_MAX else OTHER, []).append(topic)
    return named


# Connections.

# Each of `Counters`, under the name that it has here.
_COUNTED: Final = {
    "connections": ("broker_connections_opened", "Connections that came."),
    "refused": ("broker_connections_refused", "Connections beyond server.connections_max."),
    "silent": ("broker_connections_silent", "Connections that were closed, because they said nothing in time."),
    "stale": ("broker_connections_stale", "Connections that were closed, because they did not answer."),
    "unauthorized": ("broker_unauthorized", "Requests without the right user or token."),
    "protocol_errors": ("broker_protocol_errors", "What could not be understood, or not be done."),
    "failed_publishes": ("broker_messages_refused", "Messages that were not stored, and whose publisher was told."),
    "unread": ("broker_connections_unread", "Times that one was not read from, as it did not read its answers."),
}


def _connections(server: Server) -> Iterator[Metric]:
    figures = server.statistics()
    for field, value in asdict(server.counters).items():
        name, about = _COUNTED[field]
        yield CounterMetricFamily(name, about, value)
    yield CounterMetricFamily("broker_received_bytes", "Bytes that connections sent.", figures["in_bytes"])
    yield CounterMetricFamily("broker_sent_bytes", "Bytes that were sent to connections.", figures["out_bytes"])
    yield CounterMetricFamily(
        "broker_messages_dropped", "Messages that slow readers were spared, as they asked.", figures["dropped"]
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


# Groups.


def _consumers(server: Server) -> Iterator[Metric]:
    offset = _gauge(
        "broker_consumer_offset", "How far a group has come: all below is done; summed over partitions.", *_CONSUMER
    )
    lag = _gauge("broker_consumer_lag", "Messages that are not acknowledged, and those to come.", *_CONSUMER)
    pending = _gauge("broker_consumer_pending", "Messages that are out with members, or wait to be again.", *_CONSUMER)
    sent = _counter("broker_consumer_messages_sent", "Deliveries.", *_CONSUMER)
    acks = _counter("broker_consumer_acks", "Messages that were acknowledged.", *_CONSUMER)
    failures = _counter("broker_consumer_failures", "Deliveries that were refused, or not acknowledged.", *_CONSUMER)
    retries = _counter("broker_consumer_retries", "Deliveries that were not the first of their message.", *_CONSUMER)
    for labels, positions in _by_consumer(server).items():
        offset.add_metric(labels, sum(position.inflight.floor for position in positions))
        lag.add_metric(labels, sum(position.lag() for position in positions))
        pending.add_metric(labels, sum(len(position.inflight) for position in positions))
        sent.add_metric(labels, sum(position.sent for position in positions))
        acks.add_metric(labels, sum(position.acked for position in positions))
        failures.add_metric(labels, sum(position.failed for position in positions))
        retries.add_metric(labels, sum(position.retried for position in positions))
    yield from (offset, lag, pending, sent, acks, failures, retries)
    members = _gauge("broker_consumer_members", "Members.", "consumer")
    letters = _counter("broker_dead_letters", "Messages that a group could not handle, and that are kept.", "consumer")
    lost = _counter(
        "broker_consumer_lost", "Messages that retention dropped before they were acknowledged.", "consumer"
    )
    for name, groups in _by_group(server).items():
        members.add_metric([name], sum(len(group.members) for group in groups))
        letters.add_metric([name], sum(group.dead_lettered for group in groups))
        lost.add_metric([name], sum(group.lost for group in groups))
    yield from (members, letters, lost)


def _by_group(server: Server) -> dict[str, list[Group]]:
    named: dict[str, list[Group]] = {}
    for name, group in server.broker.groups.items():
        named.setdefault(name.decode(errors="replace") if len(named) < CONSUMERS_MAX else OTHER, []).append(group)
    return named


def _by_consumer(server: Server) -> dict[Labels, list[Position]]:
    """The positions of each group in each topic, under the labels that they have here."""
    named: dict[Labels, list[Position]] = {}
    for name, group in server.broker.groups.items():
        consumer = name.decode(errors="replace")
        for position in group.positions.values():
            topic = position.partition.name.decode(errors="replace")
            labels = (consumer, topic, consumer.removeprefix(f"{topic}:") or consumer)
            if labels not in named and len(named) >= CONSUMERS_MAX:
                labels = (OTHER, OTHER, OTHER)
            named.setdefault(labels, []).append(position)
    return named


class _Ages:
    """Since when the oldest message of each group waits: from memory while the loop has it, else from the disk."""

    def __init__(self, server: Server) -> None:
        """On the loop."""
        self._now_us = server.broker.clock.now_us()
        self._oldest: dict[Labels, int] = {}
        self._unread: list[tuple[Labels, Log, int]] = []
        for labels, positions in _by_consumer(server).items():
            self._oldest[labels] = self._now_us
            for position in positions:
                if position.lag():
                    self._note(labels, position)

    def _note(self, labels: Labels, position: Position) -> None:
        log = position.partition.log
        offset = max(position.inflight.floor, log.start)
        batches = log.read_tail(offset, 1) if offset < log.committed else []
        if batches:
            self._oldest[labels] = min(self._oldest[labels], batches[0].append_time)
        elif batches is None and len(self._unread) < READS_MAX:
            self._unread.append((labels, log, offset))

    def family(self) -> Metric:
        """In any thread."""
        for labels, log, offset in self._unread:
            try:
                batches = log.read_disk(offset, 1)
            except PenstockError:
                continue  # whoever reads there is told
            if batches:
                self._oldest[labels] = min(self._oldest[labels], batches[0].append_time)
        family = _gauge(
            "broker_consumer_oldest_unacknowledged_seconds",
            "How long the oldest message that is not acknowledged is in the log; 0: there is none.",
            *_CONSUMER,
        )
        for labels, time_us in self._oldest.items():
            family.add_metric(labels, (self._now_us - time_us) / 1e6)
        return family


# Pipes.


def pipe_metrics(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """What `GET /pipe/status` tells, as metrics; None: there are no pipes."""
    health = _gauge("broker_pipe_health", "1 for the state that the pipe from the parent is in.", "health")
    lag = _gauge("broker_pipe_lag", "Messages that the other end has and this one has not.", "topic", "direction")
    gaps = _counter("broker_pipe_gaps", "Gaps that retention left at the other end.", "topic", "direction")
    children = _gauge("broker_pipe_children", "Brokers that follow this one.")
    if status is not None:
        for state in _HEALTHS:
            health.add_metric([state], int(status["health"] == state))
        children.add_metric([], len(status["children"]))
        summed: dict[tuple[str, str], tuple[int, int]] = {}
        for row in status["topics"]:
            labels = (row["topic"], row["direction"])
            if labels not in summed and len(summed) >= TOPICS_MAX:
                labels = (OTHER, row["direction"])
            behind, missing = summed.get(labels, (0, 0))
            summed[labels] = (behind + row["lag"], missing + row["gaps"])
        for labels, (behind, missing) in summed.items():
            lag.add_metric(labels, behind)
            gaps.add_metric(labels, missing)
    yield from (health, lag, gaps, children)


# Families.


def _counter(name: str, about: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, labels=labels)


def _gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=labels)


def _histogram(name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, histogram.cumulative(), strict=True))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)
