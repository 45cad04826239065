"""Transactions: messages of several partitions that become readable together, or not at all.

The batches of a transaction are *staged* first: each is stored as the value of a message in an internal topic. A commit
is a *decision*: one record in the state topic names the staged batches. From then on a crash cannot stop it.
The batches are appended to their partitions under the number of the decision, by which each log recognises them if this
is repeated; the logs are held meanwhile, and released in one turn of the loop when all of it is on the disk. What was
interrupted is completed at the next start, before anybody reads.

A transaction has a name and a number. The numbers of a name ascend: one that is not above the last was committed
before. So a client that does not know whether it has committed (a Spark job that is restarted) repeats the transaction,
and nothing is stored twice.

In the state topic:

    transaction/<name>    {"number", "time_us", "once"}   the last decision; `once`: its name is not used again
    decided/<decision>    {"name", "number", "parts": [[topic id, partition, [offset, …]], …]}   until it is done
    transactions/last     the last decision
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from penstock.awaiting import settled
from penstock.broker.partition import Partition
from penstock.broker.position import PartitionId
from penstock.broker.sources import expected, sleep, source_number
from penstock.broker.subscription import Loop
from penstock.broker.topic import Topics
from penstock.errors import (
    BadRequest,
    BatchTooLarge,
    Closed,
    Overloaded,
    PenstockError,
    StageLost,
    UnknownTopic,
)
from penstock.health import Usage
from penstock.log.appender import LogState
from penstock.log.log import Log
from penstock.model.batch import Batch
from penstock.model.run import Run
from penstock.model.subject import is_text
from penstock.outcome import Outcome
from penstock.store.meta import Change
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.broker.dedup_windows import DedupWindows

logger = logging.getLogger(__name__)

STAGED_TOPIC: Final = b"$staged"
# A staged batch is a message itself, and shares a batch with others.
STAGED_BYTES_MAX: Final = 16 << 20
NAME_BYTES_MAX: Final = 256
# Staged batches that are not committed are dropped after this time, longer than any job takes.
STAGED_US_MAX: Final = 7 * 24 * 3600 * 1_000_000
# How long a transaction without a name of its own is known to be committed: its client may ask again.
ONCE_US: Final = 600 * 1_000_000
# Batches of one transaction: a limit on its decision, about 3 MiB. The position of a batch is the decision's number and
# its index in the decision.
PARTS_MAX: Final = 1 << 18
PARTS_BITS: Final = 20
# Batches that are staged and not committed, over all transactions: each takes some memory.
STAGED_MAX: Final = 1 << 20
# Names that are used again, and names of one transaction each; the oldest of the latter are forgotten first.
NAMES_MAX: Final = 100_000
ONCE_MAX: Final = 100_000
# Under which problems are reported.
_PROBLEM: Final = "transactions"

SOURCE: Final = source_number("transactions")
# The pause after a log could not take a decision.
RETRY_US: Final = 1_000_000

# In front of a staged batch: topic id and partition. In front of the name in its key: the number of the transaction.
_PLACE: Final = struct.Struct("<QII")
_NUMBER: Final = struct.Struct("<Q")

TransactionKey = tuple[bytes, int]  # the name and the number of a transaction


class TransactionsHost(Loop, Protocol):
    """The broker, as far as transactions need it."""

    store: Store
    topics: Topics
    dedup_windows: DedupWindows


@dataclass(slots=True)
class _Open:
    """A transaction that is not decided: the partition of each staged batch by its offset, in order."""

    since_us: int
    places: dict[int, PartitionId] = field(default_factory=dict)


@dataclass(slots=True)
class _Decision:
    number: int
    key: TransactionKey
    parts: dict[PartitionId, list[int]]
    # Logs that are held until all have their batches, and batches to note then.
    held: dict[Log, None] = field(default_factory=dict)
    noted: list[tuple[Partition, Batch]] = field(default_factory=list)
    is_stored: bool = False


class Transactions:
    def __init__(self, partition: Partition, host: TransactionsHost) -> None:
        """`partition`: where batches are staged."""
        self._staged = partition
        self._host = host
        self._open: dict[TransactionKey, _Open] = {}
        self._staged_count = 0
        # Decisions that are not known to be done, in order.
        self._undone: dict[int, _Decision] = {}
        self._committing: dict[TransactionKey, asyncio.Future[bool]] = {}
        # Held while one decision is carried out: they reach a partition in their order.
        self._lock = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        state = host.store.state
        self._last_decision: int = state.get("transactions", "last") or 0
        known = state.items("transaction")
        self._last: dict[bytes, int] = {name.encode(): value["number"] for name, value in known}
        # The names that are not used again, with the time of their decision, oldest first.
        self._once = deque(sorted((value["time_us"], name) for name, value in known if value["once"]))

    async def start(self) -> None:
        """Complete what was decided, and read what is staged."""
        for number, value in sorted((int(key), value) for key, value in self._host.store.state.items("decided")):
            key = (value["name"].encode(), value["number"])
            parts = {(topic_id, partition): offsets for topic_id, partition, offsets in value["parts"]}
            self._undone[number] = _Decision(number, key, parts)
        async with self._lock:
            await self._store_undone()
        try:
            await self._look()
        except PenstockError as error:
            logger.error("staged batches cannot be read, and must be staged again: %s", error)
        self._trim()

    async def _look(self) -> None:
        """Read what is staged."""
        cursor = self._staged.cursor(self._staged.start)
        while (found := await cursor.read_stored()) is not None:
            run, cursor.offset = found
            for index in range(len(run)):
                key = _read_key(run.keys[index])
                if not self.is_decided(*key):
                    topic_id, partition, _ = _PLACE.unpack_from(run.values[index])
                    since_us = run.time_us(index)
                    self._add(key, self._open.get(key, _Open(since_us)), run.offset(index), (topic_id, partition))

    def last(self, name: bytes) -> int | None:
        """Return the number of the last committed transaction of this name."""
        return self._last.get(name)

    def is_decided(self, name: bytes, number: int) -> bool:
        return self._last.get(name, -1) >= number

    # Staging.

    def stage(self, to: tuple[int, int, int], name: bytes, number: int, batch: Batch, outcome: Outcome) -> int:
        """Store a batch that is appended to a partition when its transaction is committed. Return its offset among the
        staged batches, or -1 if the transaction was committed before: then nothing is stored.

        `to`: the topic, the partition, and the number of partitions among which the producer chose it.
        """
        topic_id, partition, partitions = to
        _check_name(name)
        if batch.size > STAGED_BYTES_MAX:
            raise BatchTooLarge(f"a batch of {batch.size} bytes is too large: a transaction allows {STAGED_BYTES_MAX}")
        topic = self._host.topics.public(topic_id)
        topic.check_writable()
        topic.check_layout(partition, partitions)
        if self.is_decided(name, number):
            outcome.settle()
            return -1
        self._forget_old()
        self._check_room(name, number)
        key = (name, number)
        staged = self._open.get(key) or _Open(self._host.clock.now_us())

        def stored(error: PenstockError | None) -> None:
            if error is not None and self._open.get(key) is staged:
                del staged.places[offset]
                self._staged_count -= 1
                if not staged.places:
                    del self._open[key]
            outcome.settle(error)

        run = Run([STAGED_TOPIC], [_PLACE.pack(topic_id, partition, 0) + batch.data])
        run.keys[0] = _NUMBER.pack(number) + name
        offset = self._staged.append(run, Outcome(stored))
        self._add(key, staged, offset, (topic_id, partition))
        return offset

    def _add(self, key: TransactionKey, staged: _Open, offset: int, place: PartitionId) -> None:
        self._open[key] = staged
        staged.places[offset] = place
        self._staged_count += 1

    def _drop(self, key: TransactionKey) -> None:
        """Forget what a transaction staged."""
        if key in self._open:
            self._staged_count -= len(self._open.pop(key).places)

    def _check_room(self, name: bytes, number: int) -> None:
        """Raise if no more batches can be staged for a transaction."""
        staged = self._open.get((name, number))
        if staged is not None and len(staged.places) >= PARTS_MAX:
            raise BadRequest(
                f"the transaction has {PARTS_MAX} batches, the limit: stage larger batches, or commit earlier"
            )
        if self._staged_count >= STAGED_MAX:
            raise Overloaded(f"{STAGED_MAX} batches are staged and not committed: commit or abort some transactions")

    def usage(self) -> dict[str, Usage]:
        """Return how full each limited table is, by name."""
        return {
            "staged_batches": Usage(self._staged_count, STAGED_MAX),
            "transaction_names": Usage(self._names_count, NAMES_MAX),
        }

    @property
    def _names_count(self) -> int:
        """The number of names that are used again."""
        return len(self._last) - len(self._once)

    def abort(self, name: bytes, number: int) -> None:
        """Drop what was staged."""
        if (name, number) not in self._committing:
            self._drop((name, number))
            self._trim()

    # Committing.

    async def commit(self, name: bytes, number: int, offsets: Sequence[int], *, once: bool = False) -> bool:
        """Make the batches readable that were staged at these offsets, in this order in each partition. Return False if
        the transaction was committed before.

        Raises StageLost if some of them are not stored any more: then nothing is done. `once`: the name is not used
        again.
        """
        _check_name(name)
        key = (name, number)
        under_way = self._committing.get(key)
        if under_way is None:
            under_way = self._committing[key] = asyncio.get_running_loop().create_future()
            # It continues if the caller is cancelled.
            self._host.spawn(self._commit(key, offsets, under_way, once=once))
        return await asyncio.shield(under_way)

    async def _commit(
        self, key: TransactionKey, offsets: Sequence[int], ended: asyncio.Future[bool], *, once: bool
    ) -> None:
        try:
            async with self._lock:
                is_new = not self.is_decided(*key)
                if is_new and not once and key[0] not in self._last and self._names_count >= NAMES_MAX:
                    raise Overloaded(
                        f"there are {NAMES_MAX} transaction names, the limit: reuse one of them, with a higher number"
                    )
                parts = self._parts(key, offsets) if is_new else {}
                await self._store_undone(parts, key)
                if is_new:
                    await self._decide(key, parts, once=once)
                    await self._store_undone(parts, key)
            ended.set_result(is_new)
        except Exception as error:  # noqa: BLE001 - a bug of ours ends this transaction only
            ended.set_exception(expected(error, self._host.store.health, "transactions", _describe(key)))
            ended.exception()  # nobody may be waiting any more
        finally:
            del self._committing[key]

    def _parts(self, key: TransactionKey, offsets: Sequence[int]) -> dict[PartitionId, list[int]]:
        """Return the batches of each partition. Raises before anything is decided, if an error can be foreseen."""
        staged = self._open.get(key, _Open(0))
        parts: dict[PartitionId, list[int]] = {}
        if len(offsets) > PARTS_MAX:
            raise BadRequest(
                f"the transaction has {len(offsets)} batches, the limit is {PARTS_MAX}: stage larger batches"
            )
        if len(set(offsets)) < len(offsets):
            raise BadRequest("a staged batch is named twice: name each once")
        for offset in offsets:
            place = staged.places.get(offset)
            # A batch that is not on the disk yet could be lost in a crash after the decision.
            if place is None or offset >= self._staged.served:
                raise StageLost(
                    f"the batch staged at {offset} is not stored any more: stage all of the transaction again"
                )
            parts.setdefault(place, []).append(offset)
        for topic_id, partition in parts:
            topic = self._host.topics.public(topic_id)
            topic.check_writable()
            topic.partitions[partition].log.check_open()
        return parts

    async def _decide(self, key: TransactionKey, parts: dict[PartitionId, list[int]], *, once: bool) -> None:
        name, number = key
        decision = _Decision(self._last_decision + 1, key, parts)
        decided = {"name": name.decode(), "number": number, "parts": [[*place, parts[place]] for place in parts]}
        last = {"number": number, "time_us": self._host.clock.now_us(), "once": once}
        changes = [
            Change("transaction", name.decode(), last),
            Change("transactions", "last", decision.number),
            Change("decided", str(decision.number), decided),
        ]
        await self._host.store.write_state(changes)
        self._last_decision = decision.number
        self._last[name] = number
        if once:
            self._once.append((last["time_us"], name.decode()))
        self._undone[decision.number] = decision
        for other in [other for other in self._open if other[0] == name and other[1] <= number]:
            self._drop(other)

    # Carrying out decisions.

    async def _store_undone(self, places: Container[PartitionId] = (), key: TransactionKey | None = None) -> None:
        """Store the decisions that are not stored yet, and retry until that is possible. Raises if it is not possible
        now in one of these partitions, or for this transaction."""
        # Later decisions wait for earlier ones in the same partition.
        blocked: dict[PartitionId, PenstockError] = {}
        failed: PenstockError | None = None
        for decision in [decision for decision in self._undone.values() if not decision.is_stored]:
            error = next((blocked[place] for place in decision.parts if place in blocked), None)
            if error is None:
                try:
                    await self._store(decision)
                    continue
                except Exception as raised:  # noqa: BLE001 - a bug of ours delays this transaction only
                    error = expected(raised, self._host.store.health, "transactions", _describe(decision.key))
            blocked |= dict.fromkeys(decision.parts, error)
            if decision.key == key or any(place in places for place in decision.parts):
                failed = failed or error
        health = self._host.store.health
        if not blocked:
            health.clear(_PROBLEM)
        else:
            waiting = sum(not decision.is_stored for decision in self._undone.values())
            reason = next(iter(blocked.values()))
            health.report(_PROBLEM, f"{waiting} committed ones cannot be stored yet, and are retried: {reason}")
            if self._retrying is None:
                self._retrying = self._host.spawn(self._retry())
        if failed is not None:
            raise failed

    async def _retry(self) -> None:
        while any(not decision.is_stored for decision in self._undone.values()):
            await sleep(self._host, RETRY_US)
            async with self._lock:
                await self._store_undone()
        self._retrying = None

    async def _store(self, decision: _Decision) -> None:
        """Append the batches of a decision, and make all of them readable at once. If this raises, the logs remain held
        until it is repeated."""
        targets = {place: target for place in decision.parts if (target := self._target(place)) is not None}
        for target in targets.values():
            if target.log not in decision.held:
                target.log.hold()
                decision.held[target.log] = None
        for place, target in targets.items():
            await self._append(decision, place, target)
        await _all_durable(decision.held)
        known = [
            (target, await self._host.dedup_windows.identities(target, batch), batch.append_time)
            for target, batch in decision.noted
        ]
        # No await from here on: nobody may read one of them without the others.
        for log in decision.held:
            log.release()
        for target, identities, append_time in known:
            self._host.dedup_windows.note(target, identities, append_time)
        decision.is_stored = True
        self._host.spawn(self._settle(decision))

    def _target(self, place: PartitionId) -> Partition | None:
        """Return a partition; None if its topic was deleted."""
        topic_id, number = place
        try:
            return self._host.topics.public(topic_id).partitions[number]
        except UnknownTopic:
            return None

    async def _append(self, decision: _Decision, place: PartitionId, target: Partition) -> None:
        for index, offset in enumerate(decision.parts[place]):
            batch = await self._read(offset)
            await self._host.store.rounds.unflushed.room()
            if target.log.state is LogState.CLOSED:
                return  # deleted meanwhile
            end = target.end
            target.append_batch(batch, SOURCE, decision.number << PARTS_BITS | index, None)
            # Only these: all of them may not fit into memory.
            if target.end > end and self._host.dedup_windows.is_noted(target, batch):
                decision.noted.append((target, batch))

    async def _read(self, offset: int) -> Batch:
        run = await self._staged.cursor(offset).read_message()
        if run is None:
            raise StageLost(f"the batch staged at {offset} was committed, and is not stored any more")
        return Batch(bytearray(memoryview(run.values[0])[_PLACE.size :]))

    async def _settle(self, decision: _Decision) -> None:
        """Forget a decision that is stored, and old names."""
        horizon_us = self._host.clock.now_us() - ONCE_US
        changes = [Change("decided", str(decision.number), None)]
        while self._once and (self._once[0][0] < horizon_us or len(self._once) > ONCE_MAX):
            name = self._once.popleft()[1]
            self._last.pop(name.encode(), None)
            changes.append(Change("transaction", name, None))
        try:
            await self._host.store.write_state(changes)
        except PenstockError as error:
            logger.warning("a stored transaction is carried out again at the next start: %s", error)
            return
        del self._undone[decision.number]
        self._trim()

    def _forget_old(self) -> None:
        horizon_us = self._host.clock.now_us() - STAGED_US_MAX
        # The oldest are the first.
        while self._open and (oldest := next(iter(self._open.items())))[1].since_us < horizon_us:
            (name, number), _ = oldest
            logger.warning(
                "transaction %d of %r was not committed in time: its staged batches are dropped", number, name
            )
            self._drop((name, number))
            self._trim()

    def _trim(self) -> None:
        """Let upkeep remove staged batches that are not needed any more."""
        needed = [next(iter(staged.places)) for staged in self._open.values() if staged.places]
        for decision in self._undone.values():
            needed += [min(offsets) for offsets in decision.parts.values()]
        self._staged.log.upkeep.unneeded = min(needed, default=self._staged.log.committed)


def _check_name(name: bytes) -> None:
    if not 0 < len(name) <= NAME_BYTES_MAX or not is_text(name):
        raise BadRequest(f"invalid transaction name {name!r}: 1 to {NAME_BYTES_MAX} bytes of text are allowed")


def _describe(key: TransactionKey) -> str:
    name, number = key
    return f"number {number} of {name.decode()}"


def _read_key(key: bytes) -> TransactionKey:
    return key[_NUMBER.size :], _NUMBER.unpack_from(key)[0]


async def _all_durable(logs: Iterable[Log]) -> None:
    waits = []
    for log in logs:
        outcome = Outcome()
        log.when_durable(outcome)
        waits.append(settled(outcome))
    for result in await asyncio.gather(*waits, return_exceptions=True):
        # A log is closed when its topic is deleted.
        if isinstance(result, BaseException) and not isinstance(result, Closed):
            raise result
