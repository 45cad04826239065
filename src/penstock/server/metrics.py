"""Metrics for Prometheus: the broker's own counters, read at each scrape. Nothing is counted for Prometheus alone.

The counters belong to the loop, so they are read there, a slice at a time, into tables of numbers. Making metrics of
the tables and encoding them takes ten times as long, and is done in another thread.

The number of series is bounded. The first TOPICS_MAX topics and the first CONSUMERS_MAX pairs of a group and a topic,
in the order of their creation, have their own series; all others are summed under "other".

A *consumer* is a group as the broker knows it: `<topic>:<group>` for groups of the Provider's clients and for Flux's
durables, whose `group` is then the name that the client gave. Subscriptions without a name have no series.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from penstock.broker.broker import Broker
from penstock.broker.partition import Partition
from penstock.broker.pipeline_reports import PIPELINES_MAX, PipelineReports
from penstock.broker.position import Position
from penstock.broker.topic import ServedTopic
from penstock.errors import PenstockError
from penstock.log.log import Log
from penstock.security.quotas import NAMES
from penstock.security.security import Security
from penstock.server.settings import Config
from penstock.server.stalls import Stalls
from penstock.store.histogram import Histogram
from penstock.tls.port import ServerTls

if TYPE_CHECKING:
    from penstock.doors.counters import Counters

TOPICS_MAX: Final = 200
CONSUMERS_MAX: Final = 1000
USERS_MAX: Final = 1000
OTHER: Final = "other"
# The age of the oldest unacknowledged message may have to be read from the disk: at most this often in one scrape.
READS_MAX: Final = 256
# Topics, or positions of groups, that are read before other tasks run: about a millisecond.
SLICE: Final = 250
_HEALTHS: Final = ("HEALTHY", "DEGRADED", "UNHEALTHY")


class Measured(Protocol):
    """The server, as far as its metrics need it."""

    broker: Broker
    config: Config
    counters: Counters
    stalls: Stalls
    tls: ServerTls | None
    version: str

    def unhealthy_reason(self) -> str | None: ...

    def statistics(self) -> dict[str, Any]: ...


class Metrics:
    def __init__(self, server: Measured, sources: Sequence[Callable[[], Iterable[Metric]]]) -> None:
        """`sources` are called for more metrics, at each scrape and on the loop."""
        self._server = server
        self._sources = sources
        self._process = ProcessCollector(namespace="broker", registry=None)

    def form(self, accept: str) -> tuple[Callable[[Any], bytes], str]:
        """Return an encoder that the client accepts, and its content type."""
        return choose_encoder(accept)

    async def expose(self, encode: Callable[[Any], bytes]) -> bytes:
        """Return all metrics, encoded."""
        server = self._server
        ages = _Ages(server.broker.clock.now_us())
        broker = server.broker
        tables = [*await _topics(broker), *await _groups(broker, ages), _pipelines(broker.pipeline_reports)]
        tables.append(_users(broker.security))
        families = [
            *_rounds(server.broker),
            *_health(server),
            *_connections(server),
            *chain.from_iterable(each() for each in self._sources),
        ]
        return await asyncio.to_thread(self._encode, encode, tables, families, ages)

    def _encode(
        self, encode: Callable[[Any], bytes], tables: list[_Table], families: list[Metric], ages: _Ages
    ) -> bytes:
        found = chain.from_iterable(table.families() for table in (*tables, ages.table()))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*found, *families, *self._process.collect()]))
        return encode(registry)


class _Collected:
    """A collector, which is what prometheus-client encodes."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """It is registered for one scrape only, so no names can clash."""
        return ()


class _Figure(NamedTuple):
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    about: str


class _Table:
    """Figures with the same labels: a row for each set of labels, a column for each figure."""

    def __init__(self, labels: Sequence[str], rows_max: int, figures: Sequence[_Figure]) -> None:
        self._labels = labels
        self._rows_max = rows_max
        self._figures = figures
        self._rows: dict[tuple[str, ...], tuple[float, ...]] = {}

    def add(self, labels: tuple[str, ...], numbers: tuple[float, ...]) -> None:
        """Add to the row of these labels, or to `other` if there are too many rows."""
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
        "Messages that producers sent to a topic; _: to inboxes, not stored.",
    ),
    _Figure(CounterMetricFamily, "broker_messages_sent", "Messages sent to connections."),
)
_STORED: Final = (
    _Figure(CounterMetricFamily, "broker_messages_stored", "Messages written to the topic's logs."),
    _Figure(CounterMetricFamily, "broker_stored_bytes", "Bytes written to the topic's logs."),
    _Figure(CounterMetricFamily, "broker_dedup_checks", "Messages that were checked for duplicates."),
    _Figure(CounterMetricFamily, "broker_dedup_hits", "Duplicates, which were not stored again."),
    _Figure(GaugeMetricFamily, "broker_segments", "Segment files of the topic's logs."),
    _Figure(GaugeMetricFamily, "broker_log_bytes", "Size of the topic's logs."),
    _Figure(
        GaugeMetricFamily,
        "broker_log_held_bytes",
        "Size of what retention would drop, and keeps for the group in retain_for, at the last upkeep.",
    ),
    _Figure(GaugeMetricFamily, "broker_log_messages", "Offsets from the start to the end of the topic's logs."),
    _Figure(GaugeMetricFamily, "broker_partitions", "Partitions."),
    _Figure(
        GaugeMetricFamily,
        "broker_partitions_failed",
        "Partitions that cannot be opened or written: see /healthz.",
    ),
    _Figure(GaugeMetricFamily, "broker_damaged_ranges", "Damaged ranges in the topic's logs: see /healthz."),
    _Figure(
        CounterMetricFamily, "broker_damaged_offsets_skipped", "Damaged offsets that readers of the topic skipped."
    ),
)


async def _topics(broker: Broker) -> tuple[_Table, ...]:
    # Inboxes have one more row.
    traffic, stored = _Table(["topic"], TOPICS_MAX + 1, _TRAFFIC), _Table(["topic"], TOPICS_MAX, _STORED)
    live = broker.live
    traffic.add((live.name.decode(),), (live.received, live.sent))
    count = 0
    for index, topic in enumerate(list(broker.topics)):
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
    messages = size = segments = log_bytes = held_bytes = held = failed = damaged = skipped = 0
    for partition in topic.partitions:
        log = partition.log
        messages += log.flusher.stored_messages
        size += log.flusher.stored_bytes
        segments += len(log.segments)
        log_bytes += sum(segment.size for segment in log.segments)
        held_bytes += log.upkeep.held_bytes
        held += log.committed - log.start
        failed += log.failure is not None
        damaged += len(log.damage)
        skipped += log.reader.skipped_offsets
    checked, found = (0, 0) if topic.dedup is None else (topic.dedup.checked, topic.dedup.found)
    partitions = topic.topic.partitions
    refused = partitions if topic.refusal is not None else 0
    kept = (segments, log_bytes, held_bytes, held, partitions, failed + refused, damaged, skipped)
    return messages, size, checked, found, *kept


def _rounds(broker: Broker) -> Iterator[Metric]:
    store, rounds, figures = broker.store, broker.store.rounds, broker.figures
    yield _histogram("broker_flush_seconds", "Duration of the write of each flush round.", rounds.write_seconds)
    yield _histogram("broker_fsync_seconds", "Duration of the sync of each flush round.", rounds.sync_seconds)
    yield _histogram("broker_flush_messages", "Messages in each flush round.", rounds.round_messages)
    yield _histogram(
        "broker_delivery_seconds",
        "Time from the append of a message, or from its publish time if the producer sends one, to its delivery: one "
        "observation for the first message of each run. Redeliveries, and messages older than their subscription, do "
        "not count.",
        figures.delivery_seconds,
    )
    yield GaugeMetricFamily("broker_unflushed_bytes", "Bytes that wait for a write.", rounds.unflushed.used)
    stored = store.maintenance.store_bytes
    yield GaugeMetricFamily("broker_store_bytes", "Size of all segments, at the last upkeep.", stored)
    if store.settings.retain_bytes is not None:
        about = "Size of all segments above which the oldest are dropped."
        yield GaugeMetricFamily("broker_store_limit_bytes", about, store.settings.retain_bytes)
    yield GaugeMetricFamily("broker_disk_free_bytes", "Free bytes on the disk of the data directory.", store.space.free)
    yield GaugeMetricFamily("broker_disk_total_bytes", "Size of the disk of the data directory.", store.space.total)


def _tls_metrics(tls: ServerTls) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "broker_tls_certificate_expiry_seconds", "Seconds until the TLS certificate expires.", tls.expires_in_s
    )
    yield CounterMetricFamily("broker_tls_handshakes", "TLS handshakes.", tls.handshakes.done)
    yield CounterMetricFamily(
        "broker_tls_handshakes_failed", "TLS handshakes that failed, and clients without TLS.", tls.handshakes.failed
    )


def _histogram(name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, histogram.cumulative(), strict=True))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=histogram.total)


# Connections.

# The metric of each field of `Counters`.
_COUNTED: Final = {
    "connections": ("broker_connections_opened", "Connections opened."),
    "refused": ("broker_connections_refused", "Connections refused by server.connections_max."),
    "silent": ("broker_connections_silent", "Connections closed because the handshake timed out."),
    "stale": ("broker_connections_stale", "Connections closed because they did not answer PINGs."),
    "slow": (
        "broker_connections_slow",
        "Connections closed because a large frame did not arrive while others waited.",
    ),
    "unauthorized": ("broker_unauthorized", "Requests with invalid credentials."),
    "protocol_errors": ("broker_protocol_errors", "Invalid or failed requests."),
    "failed_publishes": ("broker_messages_refused", "Messages refused, with an error to the producer."),
    "unstored": ("broker_messages_unstored", "Messages delivered but not stored, because of their subject or reply."),
    "unread": (
        "broker_connections_unread",
        "Times that reading from a connection was paused because it did not read its answers.",
    ),
    "received_bytes": ("broker_received_bytes", "Bytes received from connections."),
    "sent_bytes": ("broker_sent_bytes", "Bytes sent to connections."),
}


def _connections(server: Measured) -> Iterator[Metric]:
    figures = server.statistics()
    for field, value in asdict(server.counters).items():
        name, about = _COUNTED[field]
        yield CounterMetricFamily(name, about, value)
    yield CounterMetricFamily("broker_messages_dropped", "Messages dropped for slow consumers.", figures["dropped"])
    yield CounterMetricFamily(
        "broker_messages_expired",
        "Messages not delivered because their TTL had ended, counted for each subscription.",
        figures["expired"],
    )
    yield GaugeMetricFamily("broker_connections", "Connections.", figures["connections"])
    yield GaugeMetricFamily("broker_subscriptions", "Subscriptions.", figures["subscriptions"])
    yield GaugeMetricFamily("broker_slow_readers", "Subscriptions that are behind.", figures["slow_consumers"])
    yield GaugeMetricFamily("broker_groups", "Groups.", figures["groups"])
    yield GaugeMetricFamily("broker_delayed_messages", "Messages that are not due yet.", figures["delayed"])


def _health(server: Measured) -> Iterator[Metric]:
    info = GaugeMetricFamily("broker_info", "Always 1: which broker this is.", labels=("version", "node"))
    info.add_metric([server.version, server.config.server.node_id], 1)
    yield info
    yield GaugeMetricFamily("broker_healthy", "1 if /healthz reports no error.", int(server.unhealthy_reason() is None))
    health = server.broker.store.health
    problems = len(health.problems) + (server.tls is not None and server.tls.problem is not None)
    yield GaugeMetricFamily("broker_problems", "Conditions that need attention: see /healthz.", problems)
    if server.tls is not None:
        yield from _tls_metrics(server.tls)
    faults = CounterMetricFamily(
        "broker_faults", "Unexpected exceptions, which are bugs, by where they were caught.", labels=["seam"]
    )
    for seam, count in health.faults.items():
        faults.add_metric([seam], count)
    yield faults
    yield _histogram(
        "broker_loop_stall_seconds",
        "How late timers of the event loop are: how long one client can delay all others.",
        server.stalls.seconds,
    )


# Groups.

_CONSUMER: Final = ("consumer", "topic", "group")
_POSITION: Final = (
    _Figure(
        GaugeMetricFamily,
        "broker_consumer_offset",
        "Committed offset of a group, summed over partitions.",
    ),
    _Figure(GaugeMetricFamily, "broker_consumer_lag", "Messages that are not acknowledged yet."),
    _Figure(
        GaugeMetricFamily,
        "broker_consumer_pending",
        "Messages that are delivered and not acknowledged, or wait for redelivery.",
    ),
    _Figure(CounterMetricFamily, "broker_consumer_messages_sent", "Deliveries."),
    _Figure(CounterMetricFamily, "broker_consumer_acks", "Messages acknowledged."),
    _Figure(
        CounterMetricFamily, "broker_consumer_failures", "Deliveries that were rejected or not acknowledged in time."
    ),
    _Figure(CounterMetricFamily, "broker_consumer_retries", "Redeliveries."),
)
_GROUP: Final = (
    _Figure(GaugeMetricFamily, "broker_consumer_members", "Members."),
    _Figure(CounterMetricFamily, "broker_dead_letters", "Messages that became dead letters."),
    _Figure(
        CounterMetricFamily,
        "broker_consumer_lost",
        "Messages dropped by retention before they were acknowledged.",
    ),
    _Figure(CounterMetricFamily, "broker_consumer_expired", "Messages whose TTL ended before they were acknowledged."),
)
_AGE: Final = _Figure(
    GaugeMetricFamily,
    "broker_consumer_oldest_unacknowledged_seconds",
    "Age of the oldest unacknowledged message; 0: there is none.",
)


async def _groups(broker: Broker, ages: _Ages) -> tuple[_Table, ...]:
    positions, groups = _Table(_CONSUMER, CONSUMERS_MAX, _POSITION), _Table(["consumer"], CONSUMERS_MAX, _GROUP)
    count = 0
    for group in list(broker.groups):
        consumer = (group.name or b"").decode(errors="replace")
        groups.add((consumer,), (len(group.members), group.state.dead_lettered, group.lost, group.expired))
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


def _position(position: Position[Partition], lag: int) -> tuple[float, ...]:
    inflight = position.inflight
    return inflight.floor, lag, len(inflight), position.sent, position.acked, position.failed, position.retried


class _Ages:
    """The age of each group's oldest unacknowledged message: from memory if the loop has it, else from the disk."""

    def __init__(self, now_us: int) -> None:
        self._now_us = now_us
        self._oldest: dict[tuple[str, ...], int] = {}
        self._unread: list[tuple[tuple[str, ...], Log, int]] = []

    def note(self, labels: tuple[str, ...], position: Position[Partition] | None) -> None:
        """Call it on the loop; None: no message waits."""
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
        """Call it in any thread."""
        for labels, log, offset in self._unread:
            try:
                batches = log.read_disk(offset, 1)
            except PenstockError:
                continue  # readers get the error
            if batches:
                self._oldest[labels] = min(self._oldest[labels], batches[0].append_time)
        table = _Table(_CONSUMER, len(self._oldest), [_AGE])
        for labels, time_us in self._oldest.items():
            table.add(labels, ((self._now_us - time_us) / 1e6,))
        return table


# Pipelines.

_PIPELINE: Final = (
    _Figure(GaugeMetricFamily, "broker_pipeline_running", "1 if the pipeline is running, else 0."),
    _Figure(CounterMetricFamily, "broker_pipeline_rows", "Rows read since the pipeline was started."),
    _Figure(CounterMetricFamily, "broker_pipeline_late_rows", "Rows dropped because they came after the watermark."),
    _Figure(GaugeMetricFamily, "broker_pipeline_rows_per_second", "Rows read per second in the last batch."),
    _Figure(GaugeMetricFamily, "broker_pipeline_lag", "Messages that are not processed yet; -1 if unknown."),
    _Figure(GaugeMetricFamily, "broker_pipeline_failures", "Failures in a row."),
)


def _pipelines(reports: PipelineReports) -> _Table:
    table = _Table(["pipeline", "kind"], PIPELINES_MAX, _PIPELINE)
    for heard in reports:
        report = heard.report
        lag = -1 if report.lag is None else report.lag
        numbers = (reports.state(heard) == "running", report.rows, report.late_rows, report.rows_per_second)
        table.add((report.name, report.kind), (*map(float, numbers), lag, report.failures))
    return table


# Users.

_QUOTA: Final = (
    _Figure(GaugeMetricFamily, "broker_user_usage", "What a user uses of its quota; rates over the last second."),
    _Figure(GaugeMetricFamily, "broker_user_quota", "The limit of it."),
)


def _users(security: Security) -> _Table:
    """Users without quotas are left out."""
    table = _Table(["user", "quota"], USERS_MAX, _QUOTA)
    for user in security.users:
        used = security.usage_of(user)
        for name in NAMES:
            if (limit := user.quotas.get(name)) is not None:
                table.add((user.name, name), (used.get(name, 0), limit))
    return table


# Pipes.

_HEALTH: Final = _Figure(
    GaugeMetricFamily, "broker_pipe_health", "1 for the current state of the pipe from the parent."
)
_PIPE: Final = (
    _Figure(GaugeMetricFamily, "broker_pipe_lag", "Messages that the source has and the target has not."),
    _Figure(CounterMetricFamily, "broker_pipe_gaps", "Gaps that retention left at the source."),
)
_CHILDREN: Final = _Figure(GaugeMetricFamily, "broker_pipe_children", "Brokers that follow this one.")


def pipe_metrics(status: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Return the answer of `GET /pipe/status` as metrics; None: there are no pipes."""
    health, children = _Table(["health"], len(_HEALTHS), [_HEALTH]), _Table([], 1, [_CHILDREN])
    topics = _Table(["topic", "direction"], TOPICS_MAX, _PIPE)
    if status is not None:
        for state in _HEALTHS:
            health.add((state,), (int(status["health"] == state),))
        children.add((), (len(status["children"]),))
        for row in status["topics"]:
            topics.add((row["topic"], row["direction"]), (row["lag"], row["gaps"]))
    return chain.from_iterable(table.families() for table in (health, topics, children))
