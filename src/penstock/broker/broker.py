"""The broker: every door opens to it, and finds its parts here.

    topics          which topic stores a subject          changes   creating, altering and deleting topics
    intake          from a published run to partitions    delays    messages for later
    subscriptions   live readers                          groups    readers that are remembered
    transactions    messages that become readable together
    dedup_windows   IDs of recent messages
    schemas         what the values of topics look like

It belongs to the event loop. Publishing and delivery are callbacks, because they happen for every run of messages.
Changes that wait for the disk are awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from penstock import awaiting
from penstock.broker.audit_log import AuditLog
from penstock.broker.changes import TopicChanges
from penstock.broker.cursor import ReadAhead
from penstock.broker.deadletters import DeadLetters
from penstock.broker.dedup import ENTRIES_MAX
from penstock.broker.dedup_windows import DedupWindows
from penstock.broker.delay import DELAYED_TOPIC, Delays
from penstock.broker.epochs import Epochs
from penstock.broker.figures import Figures
from penstock.broker.group import Group
from penstock.broker.groups import Groups
from penstock.broker.intake import Intake
from penstock.broker.member import Sink
from penstock.broker.opened import Opened
from penstock.broker.partition import LivePartition, Partition
from penstock.broker.pipeline_reports import PipelineReports
from penstock.broker.position_budget import PositionBudget
from penstock.broker.refresh import Refreshes, TopicRefresh
from penstock.broker.schemas import TopicSchemas
from penstock.broker.subscriptions import Members, Subscriptions
from penstock.broker.topic import LIVE, RESERVED, ServedTopic, Topics
from penstock.broker.trail import CatchUpTurns, Trail
from penstock.broker.transactions import STAGED_TOPIC, Transactions
from penstock.broker.waiting import Waiting
from penstock.clock import Clock
from penstock.errors import (
    LogDamaged,
    PenstockError,
)
from penstock.health import Usage
from penstock.log.policy import Policy, Topic
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.security.security import Security
from penstock.store.store import Store

logger = logging.getLogger(__name__)


T = TypeVar("T")

_SLEEP_US_MAX: Final = 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    # Whether publishing creates a missing topic, named by the first token of the subject; how many are created so.
    auto_create: bool = True
    topics_max: int = 10_000
    # Message ids that each topic remembers.
    dedup_ids_max: int = ENTRIES_MAX
    # Groups with a name, and subscriptions: those of a group's members, and all others.
    groups_max: int = 10_000
    subscriptions_max: int = 100_000
    # Memory for the positions of all groups.
    position_bytes_max: int = 512 << 20
    partitions: int = 1
    policy: Policy = field(default_factory=Policy)
    dead_letter_prefix: str = "DLQ"


class Broker:
    def __init__(
        self, store: Store, *, clock: Clock, settings: Settings | None = None, security: Security | None = None
    ) -> None:
        """`security`: of the server; None: no credentials are required."""
        self.store = store
        self.security = security or Security(clock)
        self._audit_log = AuditLog(self.security.audit, self)
        self.clock = clock
        self.settings = settings or Settings()
        self.health = store.health
        self.figures = Figures(clock)
        self.topics = Topics()
        self.schemas = TopicSchemas(self)
        # Partitions with messages that are appended and not served yet.
        self._unserved: dict[Partition, None] = {}
        self._opened = Opened()
        self._read_ahead = ReadAhead()
        self.trail = Trail()
        self.catch_up_turns = CatchUpTurns(clock)
        self.members = Members(self.settings.subscriptions_max)
        self.position_budget = PositionBudget(self.settings.position_bytes_max)
        self.subscriptions = Subscriptions(self, self.members, self._unserved)
        self.live = LivePartition(LIVE[0], self.subscriptions.deliver)
        self.dedup_windows = DedupWindows(self, self.settings.dedup_ids_max)
        self.intake = Intake(self, self.live, self.subscriptions.order)
        self.groups = Groups(self, self.members, self.settings.groups_max)
        self.changes = TopicChanges(self, self._serve_partition)
        # None until the broker runs, and if its log cannot be opened.
        self.delays: Delays | None = None
        # None until the first batch is staged.
        self.transactions: Transactions | None = None
        self._dead_letters: DeadLetters | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None
        store.rounds.on_commit = self.subscriptions.order.serve
        store.maintenance.before_upkeep = self._mark_needed
        store.maintenance.on_upkeep = self._keep_up
        for topic in store.topics:
            self.changes.serve(topic)
        for name, value in store.state.items("group"):
            self.groups.restore(name, value)
        self.refreshes = Refreshes(self)
        self.pipeline_reports = PipelineReports(clock)
        self.waiting = Waiting()
        self.epochs = Epochs(store)

    # Its life.

    async def run(self, started: asyncio.Event) -> None:
        """Serve until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self.store.run(), name="store")
            if self.topics.get(STAGED_TOPIC) is not None:
                await self._start_transactions()
            delayed = await self.changes.own(DELAYED_TOPIC)
            if delayed.refusal is None:
                self.delays = Delays(delayed.partitions[0], self)
                tasks.create_task(self.delays.run(), name="delays")
            for group in self.groups:
                group.dispatcher.start()
            self.refreshes.start()
            self._audit_log.start()
            started.set()

    def _mark_needed(self) -> None:
        """Tell the logs of topics with `retain_for` how far that group is. A group that does not exist needs all."""
        for served in self.topics:
            if (name := served.topic.policy.retain_for) is not None:
                group = self.groups.get(name.encode())
                for partition in served.partitions:
                    position = None if group is None else group.positions.get(partition.place)
                    partition.log.upkeep.needed_from = 0 if position is None else position.inflight.floor

    def _keep_up(self) -> None:
        """Let groups pass over what retention dropped, or what has expired."""
        for group in self.groups.all:
            group.dispatcher.keep_up()

    def save(self) -> None:
        """Before a stop: let the groups write where they are."""
        for group in self.groups:
            group.save_all()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task. An unexpected exception ends this task only."""
        assert self._tasks is not None, "it runs"
        return awaiting.spawn(self._tasks, self.health, coroutine)

    def call_at(self, when_us: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        assert self._loop is not None, "it runs"
        # uvloop counts in milliseconds, and rounds: never early, or the callback finds nothing to do.
        # And not for longer than a day: the callback looks again, and a client may ask for a time beyond any clock.
        delay_us = min(max(0, when_us - self.clock.monotonic_us()), _SLEEP_US_MAX) + 1000
        return self._loop.call_later(delay_us / 1e6, self._on_time, callback)

    def _on_time(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as fault:  # noqa: BLE001 - supervises one timer
            self.health.fault("timer", repr(callback), fault)

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Wait for a change, which is finished even if the caller is cancelled."""
        return await asyncio.shield(self.begin(change))

    def begin(self, change: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Begin a change, and return what it will return or raise."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                ended.set_result(await change)
            except (PenstockError, ValueError) as error:
                ended.set_exception(error)
                ended.exception()  # the caller may be gone

        self.spawn(run())
        return ended

    def usage(self) -> dict[str, Usage]:
        """How full each limited table is, by name."""
        found = {
            "opened_batches": self._opened.usage,
            "read_ahead_bytes": self._read_ahead.usage,
            "trail_steps": self.trail.usage,
            "interest_bytes": self.subscriptions.interest.usage,
            "owners_bytes": self.topics.usage,
            **self.dedup_windows.usage(),
            **self.epochs.usage(),
            **self.schemas.usage(),
            "groups": self.groups.usage,
            "pipelines": self.pipeline_reports.usage,
            "waiting_positions": self.waiting.usage,
            "position_bytes": self.position_budget.usage,
            **self.members.usage(),
        }
        for part in (self.delays, self.transactions):
            if part is not None:
                found |= part.usage()
        return found

    # Its parts.

    def _serve_partition(self, topic: Topic, number: int) -> Partition:
        name = topic.name.encode()
        # Messages in a topic of the broker's own have the subject of where they go, and are not there yet.
        deliver: Callable[[Partition, Batch | Run], None] = self.subscriptions.deliver
        if name.startswith(RESERVED):
            deliver = self.subscriptions.deliver_audit if topic.is_audit else _deliver_to_nobody
        return Partition(
            topic.id,
            number,
            name,
            self.store.log(topic.id, number),
            self.store,
            deliver,
            self.subscriptions.pass_over,
            self._unserved,
            self._opened,
            self._read_ahead,
            self.subscriptions.order,
            self.clock,
        )

    async def refresh_topic(self, name: bytes) -> TopicRefresh:
        """Restart all consumers of a topic that take part in refreshes. Return the refresh, which may already run."""
        return await self.to_its_end(self.refreshes.begin(self.topics.named(name)))

    def is_served(self, subject: bytes, besides: Sink | None = None) -> bool:
        """Return whether anyone gets what is published there now, other than the connection `besides`."""
        if self.subscriptions.is_served(subject, besides):
            return True
        return any(member.sink is not besides for group in self.groups.served(subject) for member in group.members)

    async def open_transactions(self) -> Transactions:
        """Return the transactions; their topic is created at the first use. Raises if it cannot be opened."""
        if self.transactions is None:
            topic = await self.changes.own(STAGED_TOPIC)
            if topic.refusal is not None:
                raise topic.refusal
            if self.transactions is None:
                self.transactions = Transactions(topic.partitions[0], self)
        return self.transactions

    async def _start_transactions(self) -> None:
        """Finish those of the life before."""
        try:
            transactions = await self.open_transactions()
        except PenstockError as error:
            logger.error("the staged batches of transactions cannot be opened: %s", error)
        else:
            await transactions.start()

    async def dead_letter_topic(self) -> ServedTopic:
        name = self.settings.dead_letter_prefix.encode()
        # A failed dead letter does not become one again, and need not match a schema.
        policy = replace(self.settings.policy, dead_letters=False, schema_enforced=False)
        topic = self.topics.get(name) or await self.changes.make(name, 1, policy)
        topic.check_writable()
        return topic

    async def dead_letters(self) -> DeadLetters | None:
        """None as long as there was none."""
        topic = self.topics.get(self.settings.dead_letter_prefix.encode())
        if topic is None:
            return None
        if topic.refusal is not None:
            raise topic.refusal
        if self._dead_letters is None or self._dead_letters.topic.topic.id != topic.topic.id:
            self._dead_letters = DeadLetters(topic, self)
        self._dead_letters.serve(topic)
        return self._dead_letters

    def dead_letters_of(self, group: Group) -> ServedTopic | None:
        """Return the topic that may hold dead letters of a group."""
        return self.topics.get(self.settings.dead_letter_prefix.encode())

    def is_dead_letters(self, topic: bytes) -> bool:
        return topic == self.settings.dead_letter_prefix.encode()

    def dead_letter_subject(self, subject: bytes) -> bytes:
        return self.settings.dead_letter_prefix.encode() + b"." + subject

    @property
    def refused(self) -> list[str]:
        """Topics that are not served, because a partition of theirs cannot be opened."""
        return [topic.topic.name for topic in self.topics if topic.refusal is not None]

    def damage(self) -> list[tuple[str, int, LogDamaged]]:
        """Return the known damage: topic, partition, and place. All other messages are served."""
        damaged = dict.fromkeys(self.store.catalogue.damage)
        if not damaged:
            return []
        return [
            (topic.topic.name, partition.number, damage)
            for topic in self.topics
            for partition in topic.partitions
            if partition.log in damaged
            for damage in partition.log.damage
        ]

    @property
    def failed(self) -> list[str]:
        """Topics that are read, and take nothing more until a restart: an fsync failed, or we have a bug."""
        failed = self.store.rounds.failed
        if not failed:
            return []
        names = [
            f"{topic.topic.name} ({partition.log.failure})"
            for topic in self.topics
            for partition in topic.partitions
            if partition.log in failed
        ]
        # The state of groups and topics is in a log that does not belong to a topic.
        is_state = failed.keys() - {p.log for topic in self.topics for p in topic.partitions}
        return [*names, "the broker's own state"] if is_state else names


def _deliver_to_nobody(_partition: Partition, _fresh: Batch | Run) -> None:
    pass
