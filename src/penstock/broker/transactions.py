"""Transactions: messages of several partitions that become readable together, or not at all.

What belongs to a transaction is *staged* first: its batches are stored, each as the value of a message in a topic of
the broker's own. To commit is to *decide*: one record in the state topic names what was staged. From then on it will be
done whatever happens. The batches are appended to their partitions under the number of the decision, which each log
knows again; their logs are held meanwhile, and released in one turn of the loop when all of it is on the disk. What was
interrupted is done at the next start, before anybody reads.

A transaction has a name and a number: those of a name ascend, and one that is not above the last was committed before.
So whoever does not know whether it was (a Spark job that is started again) does the same once more, and nothing is
stored twice.

In the state topic:

    transaction/<name>    {"number", "time_us", "once"}   the last that was decided; `once`: nobody comes back to it
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
from typing import Final, Protocol

from penstock.batch import Batch
from penstock.broker.intake import Identity
from penstock.broker.partition import Partition
from penstock.broker.sources import source_number
from penstock.broker.subscription import Loop
from penstock.broker.topic import ServedTopic
from penstock.errors import (
    BadRequest,
    BatchTooLarge,
    BrokerError,
    Closed,
    Overloaded,
    PenstockError,
    StageLost,
    UnknownTopic,
)
from penstock.health import Usage
from penstock.run import Run
from penstock.storage.log import Done, Log
from penstock.storage.log import State as LogState
from penstock.storage.meta import Change
from penstock.storage.store import Store, outcome
from penstock.subject import is_text

logger = logging.getLogger(__name__)

STAGED_TOPIC: Final = b"$staged"
# A staged batch is a message itself, and shares a batch with others.
STAGED_BYTES_MAX: Final = 16 << 20
NAME_BYTES_MAX: Final = 256
# What nobody commits is forgotten after so long: longer than any job takes that will still come to its end.
STAGED_US_MAX: Final = 7 * 24 * 3600 * 1_000_000
# How long it is known that a transaction without a name of its own was committed: its client may ask again.
ONCE_US: Final = 600 * 1_000_000
# Batches of one transaction: a limit on its decision, about 3 MiB. The position of a batch is the decision and its
# place in it.
PARTS_MAX: Final = 1 << 18
PARTS_BITS: Final = 20
# Batches that are staged and not committed, over all transactions: each takes some memory.
STAGED_MAX: Final = 1 << 20
# Names that somebody may come back to, and those of one transaction each; of the latter the oldest are forgotten first.
NAMES_MAX: Final = 100_000
ONCE_MAX: Final = 100_000
# Under which problems are reported.
_PROBLEM: Final = "transactions"

SOURCE: Final = source_number("transactions")
# When what a log could not take is tried again.
RETRY_US: Final = 1_000_000

# Topic id and partition of a staged batch, in front of it; and the number of its transaction, in front of the name.
_PLACE: Final = struct.Struct("<QII")
_NUMBER: Final = struct.Struct("<Q")

Place = tuple[int, int]
Key = tuple[bytes, int]  # the name and the number of a transaction


class Host(Loop, Protocol):
    store: Store

    def public_topic(self, topic_id: int) -> ServedTopic: ...

    def is_noted(self, partition: Partition, batch: Batch) -> bool:
        """Whether `note` wants to know of it."""
        ...

    async def identities(self, partition: Partition, batch: Batch) -> Sequence[Identity]:
        """Return what `note` is told of a stored batch."""
        ...

    def note(self, partition: Partition, identities: Sequence[Identity], append_time: int) -> None:
        """Messages came into a partition, and not the way of those that are published."""
        ...


@dataclass(slots=True)
class _Open:
    """What is staged of a transaction that is not decided: where each batch lies, in order, and belongs."""

    since_us: int
    places: dict[int, Place] = field(default_factory=dict)


@dataclass(slots=True)
class _Decision:
    number: int
    key: Key
    parts: dict[Place, list[int]]
    # Logs that wait for the others, and what is known of their messages once they are there.
    held: dict[Log, None] = field(default_factory=dict)
    noted: list[tuple[Partition, Batch]] = field(default_factory=list)
    is_stored: bool = False


class Transactions:
    def __init__(self, partition: Partition, host: Host) -> None:
        """`partition` is that of the staged batches."""
        self._staged = partition
        self._host = host
        self._open: dict[Key, _Open] = {}
        self._staged_count = 0
        # What was decided, in that order, and is not known to be done.
        self._undone: dict[int, _Decision] = {}
        self._committing: dict[Key, asyncio.Future[bool]] = {}
        # One at a time: what is decided arrives in a partition in the order of the decisions.
        self._lock = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        state = host.store.state
        self._last_decision: int = state.get("transactions", "last") or 0
        known = state.items("transaction")
        self._last: dict[bytes, int] = {name.encode(): value["number"] for name, value in known}
        # When those were decided that nobody comes back to, oldest first.
        self._once = deque(sorted((value["time_us"], name) for name, value in known if value["once"]))

    async def start(self) -> None:
        """Do what was decided, and take note of what is staged."""
        for number, value in sorted((int(key), value) for key, value in self._host.store.state.items("decided")):
            key = (value["name"].encode(), value["number"])
            parts = {(topic_id, partition): offsets for topic_id, partition, offsets in value["parts"]}
            self._undone[number] = _Decision(number, key, parts)
        async with self._lock:
            await self._store_undone()
        try:
            await self._look()
        except PenstockError as error:
            logger.error("what was staged cannot be read to its end, and must be staged again: %s", error)
        self._trim()

    async def _look(self) -> None:
        """Take note of what is staged."""
        offset = self._staged.start
        while (found := await self._staged.read_stored(offset)) is not None:
            run, offset = found
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

    def stage(self, name: bytes, number: int, topic_id: int, partition: int, batch: Batch, done: Done) -> None:
        """Store a batch that belongs to a partition when its transaction is committed. `done` gets where it is staged,
        -1 if the transaction was committed before: then nothing is stored."""
        _check_name(name)
        if batch.size > STAGED_BYTES_MAX:
            raise BatchTooLarge(f"a batch of {batch.size} bytes, {STAGED_BYTES_MAX} are allowed in a transaction")
        topic = self._host.public_topic(topic_id)
        count = len(topic.partitions)
        if partition >= count:
            raise UnknownTopic(f"{topic.topic.name} has {count} partitions, none with number {partition}")
        if self.is_decided(name, number):
            done(-1, None)
            return
        self._forget_old()
        self._check_room(name, number)
        key = (name, number)
        staged = self._open.get(key) or _Open(self._host.clock.now_us())

        def stored(offset: int, error: PenstockError | None) -> None:
            if error is not None and self._open.get(key) is staged:
                del staged.places[offset]
                self._staged_count -= 1
                if not staged.places:
                    del self._open[key]
            done(offset, error)

        run = Run([STAGED_TOPIC], [_PLACE.pack(topic_id, partition, 0) + batch.data])
        run.keys[0] = _NUMBER.pack(number) + name
        self._add(key, staged, self._staged.append(run, stored), (topic_id, partition))

    def _add(self, key: Key, staged: _Open, offset: int, place: Place) -> None:
        self._open[key] = staged
        staged.places[offset] = place
        self._staged_count += 1

    def _drop(self, key: Key) -> None:
        """Forget what a transaction staged."""
        if key in self._open:
            self._staged_count -= len(self._open.pop(key).places)

    def _check_room(self, name: bytes, number: int) -> None:
        """Raise if a transaction cannot have one batch more."""
        staged = self._open.get((name, number))
        if staged is not None and len(staged.places) >= PARTS_MAX:
            raise BadRequest(f"a transaction of more than {PARTS_MAX} batches: stage larger batches, or commit earlier")
        if self._staged_count >= STAGED_MAX:
            raise Overloaded(f"{STAGED_MAX} batches are staged and not committed: commit or abort some transactions")

    def usage(self) -> dict[str, Usage]:
        """How full each limited table is, by name."""
        return {
            "staged_batches": Usage(self._staged_count, STAGED_MAX),
            "transaction_names": Usage(self._names_count, NAMES_MAX),
        }

    @property
    def _names_count(self) -> int:
        """Without those of one transaction each."""
        return len(self._last) - len(self._once)

    def abort(self, name: bytes, number: int) -> None:
        """Forget what was staged."""
        if (name, number) not in self._committing:
            self._drop((name, number))
            self._trim()

    # Committing.

    async def commit(self, name: bytes, number: int, offsets: Sequence[int], *, once: bool = False) -> bool:
        """Let readers have what was staged at these offsets, in this order in each partition; False if the transaction
        was committed before.

        Raises StageLost if some of it is not there any more: then nothing is done. `once`: the name is of this
        transaction alone.
        """
        _check_name(name)
        key = (name, number)
        under_way = self._committing.get(key)
        if under_way is None:
            under_way = self._committing[key] = asyncio.get_running_loop().create_future()
            # It goes on though whoever asks for it is gone.
            self._host.spawn(self._commit(key, offsets, under_way, once=once))
        return await asyncio.shield(under_way)

    async def _commit(self, key: Key, offsets: Sequence[int], ended: asyncio.Future[bool], *, once: bool) -> None:
        try:
            async with self._lock:
                is_new = not self.is_decided(*key)
                if is_new and not once and key[0] not in self._last and self._names_count >= NAMES_MAX:
                    raise Overloaded(
                        f"there are {NAMES_MAX} names of transactions: use one of them again, with a higher number"
                    )
                parts = self._parts(key, offsets) if is_new else {}
                await self._store_undone(parts, key)
                if is_new:
                    await self._decide(key, parts, once=once)
                    await self._store_undone(parts, key)
            ended.set_result(is_new)
        except Exception as error:  # noqa: BLE001 - a bug of ours ends this transaction only
            ended.set_exception(self._expected(error, key))
            ended.exception()  # it may be that nobody waits for it any more
        finally:
            del self._committing[key]

    def _expected(self, error: Exception, key: Key) -> PenstockError:
        """Return an error as one that a client can be told. An unexpected one is a fault of ours."""
        if isinstance(error, PenstockError):
            return error
        self._host.store.health.fault("transactions", f"number {key[1]} of {key[0]!r}", error)
        return BrokerError(f"internal error in transaction {key[1]} of {key[0].decode()}: {error!r}")

    def _parts(self, key: Key, offsets: Sequence[int]) -> dict[Place, list[int]]:
        """What goes where. Everything that can be known to go wrong does so here, before it is decided."""
        staged = self._open.get(key, _Open(0))
        parts: dict[Place, list[int]] = {}
        if len(offsets) > PARTS_MAX:
            raise BadRequest(f"a transaction of {len(offsets)} batches, the limit is {PARTS_MAX}: stage larger batches")
        if len(set(offsets)) < len(offsets):
            raise BadRequest("what was staged is named twice: name it once")
        for offset in offsets:
            place = staged.places.get(offset)
            # What is not on the disk yet cannot be decided upon: a crash could take it.
            if place is None or offset >= self._staged.served:
                raise StageLost(
                    f"what was staged at {offset} is not there any more: stage all of the transaction again"
                )
            parts.setdefault(place, []).append(offset)
        for topic_id, partition in parts:
            topic = self._host.public_topic(topic_id)
            topic.check_writable()
            topic.partitions[partition].log.check_open()
        return parts

    async def _decide(self, key: Key, parts: dict[Place, list[int]], *, once: bool) -> None:
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

    # Doing what is decided.

    async def _store_undone(self, places: Container[Place] = (), key: Key | None = None) -> None:
        """Store what was decided and is not stored yet. Raises if that is not possible now in one of these places, or
        for this transaction; it is tried again until it is."""
        # What comes later waits for what is earlier in the same place.
        blocked: dict[Place, PenstockError] = {}
        failed: PenstockError | None = None
        for decision in [decision for decision in self._undone.values() if not decision.is_stored]:
            error = next((blocked[place] for place in decision.parts if place in blocked), None)
            if error is None:
                try:
                    await self._store(decision)
                    continue
                except Exception as raised:  # noqa: BLE001 - a bug of ours delays this transaction only
                    error = self._expected(raised, decision.key)
            blocked |= dict.fromkeys(decision.parts, error)
            if decision.key == key or any(place in places for place in decision.parts):
                failed = failed or error
        health = self._host.store.health
        if not blocked:
            health.clear(_PROBLEM)
        else:
            waiting = sum(not decision.is_stored for decision in self._undone.values())
            reason = next(iter(blocked.values()))
            health.report(_PROBLEM, f"{waiting} committed ones cannot be stored yet, and are tried again: {reason}")
            if self._retrying is None:
                self._retrying = self._host.spawn(self._retry())
        if failed is not None:
            raise failed

    async def _retry(self) -> None:
        while any(not decision.is_stored for decision in self._undone.values()):
            due = asyncio.Event()
            self._host.call_at(self._host.clock.monotonic_us() + RETRY_US, due.set)
            await due.wait()
            async with self._lock:
                await self._store_undone()
        self._retrying = None

    async def _store(self, decision: _Decision) -> None:
        """Append what is decided to where it belongs, and let all of it be read at once. If it raises, the logs that
        are held are held until it is done after all."""
        targets = {place: target for place in decision.parts if (target := self._target(place)) is not None}
        for target in targets.values():
            if target.log not in decision.held:
                target.log.hold()
                decision.held[target.log] = None
        for place, target in targets.items():
            await self._append(decision, place, target)
        await _all_durable(decision.held)
        known = [
            (target, await self._host.identities(target, batch), batch.append_time) for target, batch in decision.noted
        ]
        # No await from here on: nobody sees one of them without the others.
        for log in decision.held:
            log.release()
        for target, identities, append_time in known:
            self._host.note(target, identities, append_time)
        decision.is_stored = True
        self._host.spawn(self._settle(decision))

    def _target(self, place: Place) -> Partition | None:
        """None if its topic was deleted."""
        topic_id, number = place
        try:
            return self._host.public_topic(topic_id).partitions[number]
        except UnknownTopic:
            return None

    async def _append(self, decision: _Decision, place: Place, target: Partition) -> None:
        for index, offset in enumerate(decision.parts[place]):
            batch = await self._read(offset)
            await self._host.store.rounds.room()
            if target.log.state is LogState.CLOSED:
                return  # deleted meanwhile
            end = target.end
            target.append_batch(batch, SOURCE, decision.number << PARTS_BITS | index, None)
            # Of the others nobody must know; there may be more of them than fit into memory.
            if target.end > end and self._host.is_noted(target, batch):
                decision.noted.append((target, batch))

    async def _read(self, offset: int) -> Batch:
        found = await self._staged.read_stored(offset)
        if found is None or not found[0].values or found[0].offset(0) != offset:
            raise StageLost(f"what was staged at {offset} and decided upon is gone")
        return Batch(bytearray(memoryview(found[0].values[0])[_PLACE.size :]))

    async def _settle(self, decision: _Decision) -> None:
        """Forget what was staged."""
        horizon_us = self._host.clock.now_us() - ONCE_US
        changes = [Change("decided", str(decision.number), None)]
        while self._once and (self._once[0][0] < horizon_us or len(self._once) > ONCE_MAX):
            name = self._once.popleft()[1]
            self._last.pop(name.encode(), None)
            changes.append(Change("transaction", name, None))
        try:
            await self._host.store.write_state(changes)
        except PenstockError as error:
            logger.warning("a transaction that is done is done again at the next start: %s", error)
            return
        del self._undone[decision.number]
        self._trim()

    def _forget_old(self) -> None:
        horizon_us = self._host.clock.now_us() - STAGED_US_MAX
        # The oldest are the first.
        while self._open and (oldest := next(iter(self._open.items())))[1].since_us < horizon_us:
            (name, number), _ = oldest
            logger.warning("transaction %d of %r was never committed: what it staged is dropped", number, name)
            self._drop((name, number))
            self._trim()

    def _trim(self) -> None:
        """Let the log of staged batches drop what nobody needs."""
        needed = [next(iter(staged.places)) for staged in self._open.values() if staged.places]
        for decision in self._undone.values():
            needed += [min(offsets) for offsets in decision.parts.values()]
        self._staged.log.unneeded = min(needed, default=self._staged.log.committed)


def _check_name(name: bytes) -> None:
    if not 0 < len(name) <= NAME_BYTES_MAX or not is_text(name):
        raise BadRequest(f"{name!r} is no name of a transaction: 1 to {NAME_BYTES_MAX} bytes of text")


def _read_key(key: bytes) -> Key:
    return key[_NUMBER.size :], _NUMBER.unpack_from(key)[0]


async def _all_durable(logs: Iterable[Log]) -> None:
    waits = []
    for log in logs:
        settled, done = outcome()
        log.when_durable(done)
        waits.append(settled)
    for result in await asyncio.gather(*waits, return_exceptions=True):
        # A log is closed when its topic is deleted.
        if isinstance(result, BaseException) and not isinstance(result, Closed):
            raise result
