"""A group: a name, a pattern, and the members that share what matches it; it remembers how far they have come.

In a *shared* group each message goes to one member, which acknowledges it. What is not acknowledged in time, is given
back, or was with a member that left goes to another one; after the last try it becomes a dead letter. In a
*partitioned* group each partition belongs to one member (partition p to member p % members), which commits an offset.

A position counts when it is in the state topic; whoever acknowledges is told then. Many acknowledgements share a write.
So after a crash only that is delivered again which nobody was told about. A write contains what changed since the last
one. The whole position is written again when the changes have grown as large as it is.

A dead letter is stored once, whatever happens: first the position says which messages are about to become dead letters
and under which number, then they are appended under that number, which the log of the dead letters knows again, and
only then are they done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Final, Protocol

from penstock import headers
from penstock.batch import BATCH_BYTES_MAX
from penstock.broker import sources
from penstock.broker.flow import Backlog
from penstock.broker.inflight import Inflight, Record, weight
from penstock.broker.member import Deliveries, Member, share_out
from penstock.broker.partition import Partition
from penstock.broker.room import NAME_COPIES, PENDING_BYTES, PENDING_FEW, POSITION_BYTES, Room
from penstock.broker.sources import Completion, Source
from penstock.broker.subscription import Loop, select_matching
from penstock.broker.topic import ServedTopic
from penstock.errors import LogDamaged, OffsetOutOfRange, PenstockError, StaleCommit
from penstock.run import Run, batch_bytes, message_bytes
from penstock.storage.meta import Change
from penstock.storage.policy import OnDamage, Policy
from penstock.storage.state import Addition
from penstock.storage.store import Store
from penstock.subject import meets

logger = logging.getLogger(__name__)

# Where a position moves though nobody acknowledges (messages of other subjects), it is written this often.
_SAVE_US: Final = 1_000_000
# Until the next try, when dead letters cannot be stored.
_RETRY_US: Final = 1_000_000
_NEVER_US: Final = 1 << 62
_GRAVES_MAX: Final = 100
# What a record of changes costs besides its numbers: a batch, a key, and later the deletion of the key.
_RECORD_WEIGHT: Final = 32

Saved = Callable[[PenstockError | None], None]


class Mode(StrEnum):
    SHARED = "shared"
    PARTITIONED = "partitioned"


class Host(Loop, Protocol):
    """The broker, as far as a group needs it."""

    store: Store
    room: Room

    async def dead_letter_topic(self) -> ServedTopic:
        """Made when it is first needed."""
        ...

    def dead_letter_subject(self, subject: bytes) -> bytes: ...

    def is_dead_letters(self, topic: bytes) -> bool: ...


class Position:
    """How far a group has come in one partition."""

    __slots__ = (
        "acked",
        "backlog",
        "buried",
        "burying",
        "counted",
        "expired",
        "failed",
        "graves",
        "inflight",
        "lost",
        "partition",
        "damage",
        "retried",
        "sent",
        "since",
        "_unexpired",
        "_weight",
        "_written",
    )

    def __init__(self, partition: Partition, inflight: Inflight) -> None:
        self.partition = partition
        self.inflight = inflight
        self.backlog = Backlog()
        # Pending messages for which room is taken.
        self.counted = 0
        # The number under which dead letters were stored last, and what is being stored under the next one.
        self.buried = 0
        self.burying: list[tuple[int, int]] | None = None
        # The last ones that became dead letters: who acknowledges one of them is too late.
        self.graves: dict[int, None] = {}
        # Since the broker started: deliveries, those that were not the first, and what members said or failed to say.
        self.sent = self.retried = self.acked = self.failed = 0
        # Messages that were never acknowledged: retention dropped them before, or their TTL ended.
        self.lost = self.expired = 0
        # The group's generation when it was last moved by hand: what was delivered before comes again, or not at all.
        self.since = 0
        # What it met last that cannot be read, if it did. While the policy says stop, it does not go on there.
        self.damage: LogDamaged | None = None
        # Messages that were found not to have expired, and until when they do not: no need to read them again before.
        self._unexpired: dict[int, int] = {}
        # How much more may be written as changes before the whole position is written again.
        self._weight = 0
        # What was written last of the fields above.
        self._written: Record = {}

    def is_done(self, offset: int) -> bool:
        """Whether it was acknowledged, as far as is known."""
        return offset < self.inflight.next and not self.inflight.is_pending(offset) and offset not in self.graves

    def is_stopped_at(self, offset: int) -> bool:
        """Whether the message there is known to be damaged, and not to be skipped."""
        damage = self.damage
        return damage is not None and damage.holds(offset) and self.partition.policy.on_damage is OnDamage.STOP

    @property
    def stopped(self) -> LogDamaged | None:
        """The damage before which it waits for somebody to act, if it does."""
        return self.damage if self.is_stopped_at(self.inflight.next) else None

    def bury(self, offsets: Sequence[int]) -> None:
        """Their dead letters are stored."""
        self.inflight.bury(offsets)
        self.buried += 1
        self.burying = None
        self.graves |= dict.fromkeys(offsets)
        for offset in list(self.graves)[:-_GRAVES_MAX]:
            del self.graves[offset]

    def reset(self, offset: int, generation: int) -> None:
        self.inflight.reset(offset)
        self.graves.clear()
        self.since = generation

    def may_expire(self, offset: int, now_us: int) -> bool:
        """Whether the message there may have expired since it was last looked at."""
        return self._unexpired.get(offset, now_us) <= now_us

    def note_unexpired(self, run: Run) -> None:
        """The first of these messages has not expired."""
        ttl_us = run.ttls.get(0)
        until_us = _NEVER_US if ttl_us is None else run.append_time + ttl_us
        # The first that waits to be delivered again, and the first that was not delivered yet.
        self._unexpired = dict([*self._unexpired.items(), (run.offset(0), until_us)][-2:])

    def lag(self) -> int:
        return len(self.inflight) + max(0, self.partition.served - self.inflight.next)

    def to_json(self, now_us: int) -> Record:
        return {**self.inflight.snapshot(now_us), **self._beside()}

    @classmethod
    def from_json(cls, partition: Partition, records: Sequence[Record], now_us: int) -> Position:
        """Restore a position from what was written of it: the whole, then the changes."""
        position = cls(partition, Inflight.restore(records, now_us))
        data = {name: value for record in records for name, value in record.items()}
        position.buried = data["buried"]
        position.graves = dict.fromkeys(data.get("graves", ()))
        position.since = data.get("since", 0)
        position.lost = data.get("lost", 0)
        position.expired = data.get("expired", 0)
        if data["burying"] is not None:
            position.burying = [(offset, attempts) for offset, attempts in data["burying"]]
        return position

    def save(self, key: str, now_us: int) -> Change | Addition:
        """Return what to write now: the changes since the last call, or the whole position.

        If the write fails, call `unsave`.
        """
        beside = self._beside()
        changes = self.inflight.changes(now_us)
        if changes is not None and beside != self._written:
            changes |= beside
        self._weight -= 0 if changes is None else weight(changes) + _RECORD_WEIGHT
        self._written = beside
        self.inflight.mark()
        if changes is not None and self._weight > 0:
            return Addition("position", key, changes)
        whole = self.to_json(now_us)
        self._weight = weight(whole)
        return Change("position", key, whole)

    def unsave(self) -> None:
        """Write the whole position next time."""
        self.inflight.unmark()

    def _beside(self) -> Record:
        return {
            "buried": self.buried,
            "burying": self.burying and [list(pair) for pair in self.burying],
            "graves": list(self.graves),
            "since": self.since,
            "lost": self.lost,
            "expired": self.expired,
        }


class Group:
    def __init__(self, name: bytes | None, pattern: bytes, mode: Mode, host: Host, identity: str = "") -> None:
        """Without a name it is forgotten with its last member, and nothing of it is written.

        `identity` tells it from a group that had the same name before.
        """
        self.name = name
        self.identity = identity
        self.pattern = pattern
        self.mode = mode
        # It goes up with every change of the members or of a position by hand: commits made before do not count. It
        # begins with the time, so that those from before a restart do not either.
        self.generation = host.clock.now_us()
        self.members: list[Member] = []
        # Of the member that left last.
        self._deliveries = Deliveries()
        # When there were members again, after there was none.
        self._since_us = 0
        self.positions: dict[tuple[int, int], Position] = {}
        self.redelivered = 0
        self.dead_lettered = 0
        # Whether a member of it has ever understood what a refresh is: then one that is away is waited for.
        self.refreshes = False
        # Topics of which nothing is delivered for now.
        self.held: set[int] = set()
        # Who is told when it may have come further.
        self.watchers: dict[Callable[[], None], None] = {}
        self._host = host
        self._numbers = 0
        self._turn = 0
        self._woken = asyncio.Event()
        # One at a time hands out.
        self._serving = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsaved: dict[Position, None] = {}
        self._saved: list[Saved] = []
        self._is_saving = False
        self._is_stopped = False
        self._retry_us = 0
        # Whether to look for messages that expired, though no member has room.
        self._is_upkeep_due = False

    # Its members.

    def join(self, member: Member) -> None:
        self._numbers += 1
        member.number = self._numbers
        member.out = 0
        if not self.members:
            self._since_us = self._host.clock.now_us()
        self.members.append(member)
        self._rebalance()

    def leave(self, member: Member) -> None:
        """What it had goes to the others at once."""
        if member not in self.members:
            return
        self.members.remove(member)
        self._deliveries = member.deliveries
        now_us = self._host.clock.monotonic_us()
        for position in self.positions.values():
            if self.mode is Mode.SHARED:
                position.inflight.release(member.number, now_us)
        self._rebalance()

    def owner(self, position: Position) -> Sequence[Member]:
        """Who gets the messages of a partition."""
        if self.mode is Mode.SHARED or not self.members:
            return self.members
        return [self.members[position.partition.number % len(self.members)]]

    def _rebalance(self) -> None:
        self.generation += 1
        if self.mode is Mode.PARTITIONED:
            # A partition's new owner begins where the last one has committed.
            for position in self.positions.values():
                position.inflight.reset(position.inflight.floor)
        self.wake()

    def _deliveries_max(self, policy: Policy) -> int:
        """Return after how many deliveries a message becomes a dead letter; 0: never.

        The most patient member decides, and while there is none, the last one that was there: what it gave back by
        leaving is not dead for that.
        """
        limits = [member.deliveries.of(policy) for member in self.members] or [self._deliveries.of(policy)]
        return 0 if 0 in limits else max(limits)

    # Its positions.

    def attach(self, partition: Partition, start: int, records: Sequence[Record] = ()) -> Position:
        """Read this partition too, from `start`, or from where the stored records say."""
        place = (partition.topic_id, partition.number)
        if not records:
            position = Position(partition, Inflight(start))
        else:
            position = Position.from_json(partition, records, self._host.clock.monotonic_us())
            # Also if the clock was set back.
            self.generation = max(self.generation, position.since)
        assert place not in self.positions, "it reads a partition once"
        self.positions[place] = position
        self._host.room.take(self.position_bytes)
        partition.groups[self.wake] = None
        self.wake()
        return position

    def detach(self, partition: Partition) -> None:
        position = self.positions.pop((partition.topic_id, partition.number), None)
        if position is not None:
            self._unsaved.pop(position, None)
            self._release(position)

    def _release(self, position: Position) -> None:
        """Let go of the partition, and of the room."""
        position.partition.groups.pop(self.wake, None)
        self._host.room.give_back(self.position_bytes + position.counted * PENDING_BYTES)
        position.counted = 0

    def _has(self, position: Position) -> bool:
        place = (position.partition.topic_id, position.partition.number)
        return self.positions.get(place) is position and not self._is_stopped

    def positions_of(self, topic_id: int) -> list[Position]:
        return [position for place, position in self.positions.items() if place[0] == topic_id]

    @property
    def position_bytes(self) -> int:
        """How much room a position of it takes."""
        return POSITION_BYTES + NAME_COPIES * len(self.name or b"")

    def matches(self, topic: bytes) -> bool:
        return meets(self.pattern, topic)

    def lag(self) -> int:
        """How many offsets it has still to acknowledge; messages of other subjects among them."""
        return sum(position.lag() for position in self.positions.values())

    @property
    def lost(self) -> int:
        """Messages that retention or a purge dropped before they were acknowledged."""
        return sum(position.lost for position in self.positions.values())

    @property
    def expired(self) -> int:
        """Messages whose TTL ended before they were acknowledged."""
        return sum(position.expired for position in self.positions.values())

    # What members say.

    def is_stale(self, place: tuple[int, int], generation: int) -> bool:
        """Whether what was delivered under a generation is nothing to be spoken of, because the group was reset."""
        position = self.positions.get(place)
        return position is not None and generation < position.since

    def ack(self, place: tuple[int, int], offset: int, saved: Saved) -> bool:
        """It is done; `saved` is called when that is stored, also if it was done before.

        False if it cannot be: it is a dead letter, or was not delivered since the broker started.
        """
        return not self.ack_many(place, [offset], saved)

    def ack_many(self, place: tuple[int, int], offsets: Sequence[int], saved: Saved) -> Sequence[int]:
        """As `ack`, of several; those that cannot be. `saved` is not called if none can."""
        position = self.positions.get(place)
        if position is None:
            return offsets
        inflight = position.inflight
        owners = Counter(map(inflight.owner, offsets))
        count = inflight.ack_many(offsets)
        refused: Sequence[int] = ()
        if count < len(offsets):
            refused = [offset for offset in offsets if not position.is_done(offset)]
            if len(refused) == len(offsets):
                return refused
        if count:
            position.acked += count
            for owner, held in owners.items():
                self._gets_back(owner, held)
            self.wake()
        if count or self._is_saving or position in self._unsaved:
            # Or what says that they are done is on its way, or the disk refused it.
            self._save(position, saved)
        else:
            saved(None)
        return refused

    def nack(
        self,
        place: tuple[int, int],
        offset: int,
        delay_us: int,
        member: Member | None = None,
        saved: Saved | None = None,
        reason: str = "",
    ) -> bool:
        """Deliver it again, after a while; `saved` is called when that is stored. `reason`: why it failed.

        False if it cannot be: it is done, a dead letter, or with another than `member`, who says so.
        """
        position = self._holding(place, offset, member)
        if position is None:
            return False
        owner = position.inflight.owner(offset)
        back_us = self._host.clock.monotonic_us() + delay_us
        if not position.inflight.nack(offset, back_us, headers.reason(reason)):
            return False
        position.failed += 1
        self._gets_back(owner)
        self._save(position, saved)
        self.wake()
        return True

    def untake(self, place: tuple[int, int], offset: int, member: Member) -> bool:
        """`member` has it and did not look at it: it goes to another, and this delivery does not count."""
        position = self._holding(place, offset, member)
        if position is None or not position.inflight.untake(offset, self._host.clock.monotonic_us()):
            return False
        self._gets_back(member.number)
        self._save(position, None)
        self.wake()
        return True

    def give_back(self, member: Member) -> None:
        """`untake` for all that it has."""
        for place, position in self.positions.items():
            for offset in position.inflight.taken_by(member.number):
                self.untake(place, offset, member)

    def extend(self, place: tuple[int, int], offset: int, member: Member | None = None) -> bool:
        """Whoever has it needs more time. False as for `nack`."""
        position = self._holding(place, offset, member)
        return position is not None and position.inflight.extend(offset, self._due_us(position))

    def kill(
        self,
        place: tuple[int, int],
        offset: int,
        member: Member | None = None,
        saved: Saved | None = None,
        reason: str = "",
    ) -> bool:
        """It can never be handled: a dead letter, without further tries. The rest, and False, as for `nack`."""
        position = self._holding(place, offset, member)
        if position is None:
            return False
        owner = position.inflight.owner(offset)
        if not position.inflight.kill(offset, headers.reason(reason)):
            return False
        position.failed += 1
        self._gets_back(owner)
        self._save(position, saved)
        self.wake()
        return True

    def revive(self, position: Position, offsets: Sequence[int]) -> Change:
        """Deliver messages that became dead letters again, as if for the first time.

        Return the new position. Whoever calls this writes it in the same turn of the loop, or later changes are lost.
        """
        if not self._has(position):
            raise StaleCommit(f"the group does not read {position.partition.name.decode()} any more")
        now_us = self._host.clock.monotonic_us()
        position.inflight.revive(offsets, now_us)
        for offset in offsets:
            position.graves.pop(offset, None)
        self.wake()
        return Change("position", self.key(position.partition), position.to_json(now_us))

    def _holding(self, place: tuple[int, int], offset: int, member: Member | None) -> Position | None:
        """The position of a message, unless another one than `member` has it now."""
        position = self.positions.get(place)
        if position is None or member is None:
            return position
        return position if position.inflight.owner(offset) in (None, member.number) else None

    def commit(self, place: tuple[int, int], offset: int, generation: int, saved: Saved) -> None:
        """All below `offset` is done; for partitioned groups."""
        if generation != self.generation:
            raise StaleCommit(f"the group is at generation {self.generation}, not {generation}: join it again")
        position = self._position(place)
        if offset > position.partition.served:
            raise OffsetOutOfRange(offset, position.partition.start, position.partition.served)
        if offset > position.inflight.floor:
            position.acked += position.inflight.ack_upto(offset - 1)
            if offset > position.inflight.next:
                # Who keeps its position elsewhere was not delivered anything here.
                position.inflight.take([], offset, 0, 0)
        self._save(position, saved)
        self.wake()

    def reset(self, place: tuple[int, int], offset: int, saved: Saved) -> None:
        """Go on from `offset`, which may lie before what is done."""
        position = self._position(place)
        self._rebalance()
        position.reset(offset, self.generation)
        self._save(position, saved)

    def restart(self, topic_id: int) -> None:
        """Go back to the start of a topic. Whoever asks for it writes that: see `changes`."""
        self._rebalance()
        for position in self.positions_of(topic_id):
            position.reset(position.partition.start, self.generation)

    def changes(self, topic_id: int) -> list[Change]:
        """Where it is in a topic, to be written together with something else."""
        now_us = self._host.clock.monotonic_us()
        positions = self.positions_of(topic_id)
        return [Change("position", self.key(each.partition), each.to_json(now_us)) for each in positions]

    def _position(self, place: tuple[int, int]) -> Position:
        if place not in self.positions:
            raise StaleCommit(f"the group does not read partition {place[1]} of a topic with id {place[0]}")
        return self.positions[place]

    # Its life.

    def wake(self) -> None:
        self._woken.set()

    def keep_up(self) -> None:
        """Pass over messages that retention dropped or that have expired, also while no member has room."""
        if any(position.lag() for position in self.positions.values()):
            self._is_upkeep_due = True
            self.wake()

    def start(self) -> None:
        self._task = self._host.spawn(self._run())

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self._host.store.health.clear(self._problem)
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for position in self.positions.values():
            self._release(position)

    def save_all(self) -> None:
        """Write where it is, in passing; before a stop."""
        for position in self.positions.values():
            # Whole, so that delays are stored as they are now.
            position.unsave()
            self._save(position, None)

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self.drain()
            except Exception as fault:  # noqa: BLE001 - supervises one group
                self._host.health.fault("group", repr(self.name), fault)

    async def drain(self) -> None:
        """Hand out what can be handed out now."""
        async with self._serving:
            is_upkeep_due, self._is_upkeep_due = self._is_upkeep_due, False
            for position in list(self.positions.values()):
                try:
                    await self._serve(position)
                    if is_upkeep_due:
                        await self._pass_expired(position)
                except Exception as error:  # noqa: BLE001 - supervises one reader
                    if isinstance(error, LogDamaged):
                        position.damage = error
                    self._fail(position, error)
            # The partitions around damage are served; a member is told of it if there is nothing else for it.
            stopped = [position for position in self.positions.values() if position.stopped]
            if stopped and len(stopped) == len(self.positions) and stopped[0].damage is not None:
                self._fail(stopped[0], stopped[0].damage)
            self._set_timer()
        for watcher in list(self.watchers):
            watcher()

    def _fail(self, position: Position, error: Exception) -> None:
        """What comes next cannot be delivered: the members are told, and may join again."""
        place = f"group {self.name!r} in {position.partition.name.decode()} {position.partition.number}"
        if isinstance(error, PenstockError):
            logger.error("%s: %s", place, error)
        else:
            self._host.health.fault("deliver", place, error)
            error = PenstockError("internal error")
        for member in list(self.members):
            try:
                member.sink.fail(member, error)
            except Exception as fault:  # noqa: BLE001 - the other members are told all the same
                self._host.health.fault("deliver", place, fault)

    async def _serve(self, position: Position) -> None:
        inflight, partition = position.inflight, position.partition
        if self._is_held(position):
            return
        if partition.start > inflight.floor:
            self._lose(position)
        if expired := inflight.expire(self._host.clock.monotonic_us()):
            position.failed += expired
            self._save(position, None)
        is_shared = self.mode is Mode.SHARED
        limit = self._deliveries_max(partition.policy) if is_shared and self._numbers else 0
        if limit and partition.policy.dead_letters and not self._host.is_dead_letters(partition.name):
            # Once somebody has joined since the start: they may have more patience than the topic.
            inflight.doom(limit)
        dying = position.burying or inflight.dead()
        is_due = bool(dying) and self._retry_us <= self._host.clock.monotonic_us()
        if is_due and dying[-1][0] < partition.served:
            await self._bury(position)
        members = self.owner(position)
        for member in members:
            member.out = sum(other.inflight.held(member.number) for other in self.positions.values())
        while await self._redeliver(position):
            pass
        while await self._deliver(position):
            pass

    async def _redeliver(self, position: Position) -> bool:
        """What is back goes out once more; whether there may be more of it."""
        inflight, partition = position.inflight, position.partition
        now_us = self._host.clock.monotonic_us()
        first = inflight.back(now_us, 1)
        # What the power took from a piped log comes again from its origin: it is not here yet, and not gone.
        if not first or first[0] >= partition.served or not self._has_room(position, now_us):
            return False
        if position.is_stopped_at(first[0]):
            return False
        found = await partition.read(first[0])
        if self._is_held(position):
            return False
        # Others acted meanwhile: only what is still back counts.
        members = self.owner(position)
        room = max((member.flow.buffer for member in members if member.flow), default=0) * len(members)
        back = inflight.back(now_us, room)
        if not back:
            return False
        run, following, expired = found if found is not None else (Run([], []), back[0] + 1, Run([], []))
        index_of = {run.offset(index): index for index in range(len(run))}
        gone = [offset for offset in back if first[0] <= offset < following and offset not in index_of]
        if gone:
            self._pass_gone(position, gone, expired)
            return True
        again = [offset for offset in back if offset in index_of]
        if not again:
            return back[0] < first[0]
        chosen = run.select([index_of[offset] for offset in again])
        shares, shared = share_out(partition, chosen, members, self._turn, now_us)
        self._turn += shared
        for share in shares:
            part = share.of(chosen)
            offsets = part.all_offsets()
            inflight.retake(offsets, share.member.number, self._due_us(position))
            attempts = {index: inflight.attempts(offset) for index, offset in enumerate(offsets)}
            position.sent += len(part)
            partition.sent += len(part)
            share.member.gets(partition, part, attempts)
        position.retried += shared
        self.redelivered += shared
        if shared:
            self._save(position, None)
        return bool(shares) or shared == len(again)

    async def _deliver(self, position: Position) -> bool:
        """Messages that were not delivered before; whether there may be more, and room for them."""
        inflight, partition = position.inflight, position.partition
        now_us = self._host.clock.monotonic_us()
        begin = self._skip(position)
        if not self._pending_room(position) or not self._has_room(position, now_us) or position.is_stopped_at(begin):
            return False
        found = await partition.read(begin)
        if self._is_held(position):
            return False
        if found is None or inflight.next != begin:
            return inflight.next != begin
        run, following, expired = found
        if position.backlog.until is not None and following > position.backlog.until:
            following = position.backlog.until
            run = run.below(following)
        run = select_matching(run, self.pattern)
        if not run.values:
            inflight.take([], following, 0, 0)
            self._count_expired(position, expired.below(following))
            self._save_later(position)
            return True
        room = self._pending_room(position)
        if not room:
            return False  # others took it meanwhile
        offered = run if len(run) <= room else run.select(range(room))
        shares, shared = share_out(partition, offered, self.owner(position), self._turn, now_us)
        self._turn += shared
        if not shared:
            return False
        taken = [(share.member, share.of(offered)) for share in shares]
        upto = following if shared == len(run) else run.offset(shared)
        if taken:
            each = [(member.number, part.all_offsets()) for member, part in taken]
            inflight.share(each, upto, self._due_us(position))
        else:
            # All of it is from those who do not want to hear themselves.
            inflight.take([], upto, 0, 0)
        self._count_expired(position, expired.below(upto))
        for member, part in taken:
            position.sent += len(part)
            partition.sent += len(part)
            member.gets(partition, part)
        if taken:
            self._host.figures.delivered(run, self._since_us)
        return True

    async def _pass_expired(self, position: Position) -> None:
        """Pass over messages that have expired, up to the first that has not: of those that wait to be delivered again,
        and of those that were not delivered yet."""
        inflight, partition = position.inflight, position.partition
        while back := inflight.back(self._host.clock.monotonic_us(), 1):
            if position.is_stopped_at(back[0]) or not position.may_expire(back[0], self._host.clock.now_us()):
                break
            found = await partition.read(back[0])
            if found is None or self._is_held(position):
                return
            if found.run.values and found.run.offset(0) == back[0]:
                position.note_unexpired(found.run)
                break
            self._pass_gone(position, back, found.expired)
        while position.may_expire(begin := inflight.next, self._host.clock.now_us()):
            found = None if position.is_stopped_at(begin) else await partition.read(begin)
            if found is None or self._is_held(position) or inflight.next != begin:
                return
            run = select_matching(found.run, self.pattern)
            upto = run.offset(0) if run.values else found.following
            if upto > begin:
                inflight.take([], upto, 0, 0)
                self._count_expired(position, found.expired.below(upto))
                self._save_later(position)
            if run.values:
                position.note_unexpired(run)

    def _pass_gone(self, position: Position, offsets: Sequence[int], expired: Run) -> None:
        """Messages that wait to be delivered again are not there any more: compaction or retention dropped them, or
        they are among `expired`."""
        position.inflight.ack_many(offsets)
        if expired.values:
            self._count_expired(position, expired, set(offsets))
        self._save(position, None)

    def _count_expired(self, position: Position, expired: Run, among: Collection[int] | None = None) -> None:
        """Count messages that are passed over because they have expired: all of them, or those among these offsets."""
        expired = select_matching(expired, self.pattern)
        count = len(expired) if among is None else sum(offset in among for offset in expired.all_offsets())
        position.expired += count
        self._host.figures.expired += count

    def _pending_room(self, position: Position) -> int:
        """Return how many more messages may be pending."""
        room, pending = self._host.room, len(position.inflight)
        if self._has(position):
            room.take((pending - position.counted) * PENDING_BYTES)
            position.counted = pending
        if room.is_short and self.mode is Mode.SHARED:
            return max(0, PENDING_FEW - pending)
        # What is pending in a partitioned group goes with its member.
        return position.inflight.room()

    def _skip(self, position: Position) -> int:
        """Where to read on. One that is too far behind may not want to wait; a group with a name skips nothing."""
        inflight = position.inflight
        if self.name is None and self.members and self.members[0].flow is not None:
            begin = position.backlog.begin(self.members[0].flow, inflight.next, position.partition.served)
            if begin > inflight.next:
                self._host.figures.dropped += begin - inflight.next
                for member in self.members:
                    member.dropped += begin - inflight.next
                inflight.take([], begin, 0, 0)
        return inflight.next

    def _is_held(self, position: Position) -> bool:
        return position.partition.topic_id in self.held

    def _has_room(self, position: Position, now_us: int) -> bool:
        return not self._is_held(position) and any(member.has_room(now_us) for member in self.owner(position))

    def _due_us(self, position: Position) -> int:
        if self.mode is Mode.PARTITIONED:
            return _NEVER_US
        return self._host.clock.monotonic_us() + position.partition.policy.ack_deadline_ms * 1000

    def _gets_back(self, number: int | None, count: int = 1) -> None:
        for member in self.members:
            if member.number == number and member.out:
                member.out = max(0, member.out - count)

    def _lose(self, position: Position) -> None:
        start = position.partition.start
        lost = max(0, start - position.inflight.next)
        lost += position.inflight.forget_below(start)
        position.lost += lost
        if lost:
            logger.warning(
                "group %s: %d messages of %s were dropped by retention or a purge before they were acknowledged",
                self.name,
                lost,
                position.partition.name.decode(),
            )
        self._save(position, None)

    def _set_timer(self) -> None:
        """Wake when a deadline is over, a delay is, or a member's rate allows more."""
        now_us = self._host.clock.monotonic_us()
        served = [position for position in self.positions.values() if not self._is_held(position)]
        moments = [moment for position in served if (moment := position.inflight.next_us()) is not None]
        moments += [moment for member in self.members if (moment := member.ready_us(now_us)) is not None]
        if self._retry_us > now_us:
            moments.append(self._retry_us)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when_us = min(moments, default=_NEVER_US)
        if when_us < _NEVER_US:
            self._timer = self._host.call_at(when_us, self.wake)

    # Dead letters.

    async def _bury(self, position: Position) -> None:
        """Store dead letters: as many as one decision covers. The group is woken for the others."""
        health, name = self._host.store.health, self._problem
        try:
            if position.burying is None:
                position.burying = await self._choose_dead(position) or None
            burying = position.burying
            if burying is None:
                self._buried(position)  # all of them have expired
                return
            # Before the first letter is stored the position must say which ones these are.
            await self._saved_now(position)
            await self._store_letters(position, burying)
        except Exception as error:  # noqa: BLE001  a bug of ours must not end the group
            if not isinstance(error, PenstockError):
                health.fault("dead letters", f"group {self.name!r} of {position.partition.name!r}", error)
            health.report(name, f"they cannot be stored yet, and are tried again: {error!r}")
            self._retry_us = self._host.clock.monotonic_us() + _RETRY_US
            return
        position.bury([offset for offset, _ in burying])
        self.dead_lettered += len(burying)
        self._buried(position)

    def _buried(self, position: Position) -> None:
        """Some messages that were dead are done; go on with the others."""
        self._host.store.health.clear(self._problem)
        self._save(position, None)
        if position.inflight.dead():
            self.wake()

    @property
    def _problem(self) -> str:
        return f"dead letters of group {(self.name or b'without a name').decode()}"

    async def _choose_dead(self, position: Position) -> list[tuple[int, int]]:
        """Return the first messages that are dead, as many as one decision covers. Those that cannot be read stay dead:
        they must not hold up the others. Those that have expired are done."""
        chosen: list[tuple[int, int]] = []
        size = 0
        failed: PenstockError | None = None
        for offset, attempts in position.inflight.dead()[: sources.DECISION_MESSAGES_MAX]:
            try:
                run = await position.partition.message(offset)
            except PenstockError as error:
                failed = error
                continue
            if run is not None and not run.split_expired(self._host.clock.now_us())[0].values:
                position.inflight.bury([offset])
                self._count_expired(position, run)
                continue
            size += 0 if run is None else message_bytes(run, 0)
            if chosen and size > sources.DECISION_BYTES_MAX:
                break
            chosen.append((offset, attempts))
        if failed is not None and not chosen:
            raise failed
        return chosen

    async def _store_letters(self, position: Position, burying: list[tuple[int, int]]) -> None:
        topic = await self._host.dead_letter_topic()
        origin = position.partition
        completion = Completion(self._host, self._letters(origin) if self.name else None, position.buried + 1)
        for target in topic.partitions:
            await completion.begin(target)
        for index, (offset, attempts) in enumerate(burying):
            run = await origin.message(offset)
            if run is None:
                position.lost += 1
                logger.warning("offset %d of %s is gone, so it is no dead letter", offset, origin.name.decode())
                continue
            subject = self._host.dead_letter_subject(run.subjects[0])
            target = topic.choose(subject, run.keys.get(0))
            reason = _reason(attempts, position.inflight.reason(offset), self._deliveries_max(origin.policy))
            await completion.add(target, index, self._letter(origin, run, subject, attempts, reason))
        await completion.end()

    def _letters(self, origin: Partition) -> Source:
        return Source("dead letters", self.name, self.identity, origin.topic_id, origin.number)

    def forget_letters(self, origin: Partition, topic: ServedTopic) -> None:
        """The group stores no more dead letters of a partition in `topic`."""
        source = self._letters(origin)
        for target in topic.partitions:
            target.log.forget_source(source.whole)
            target.log.forget_source(source.parts)

    def _letter(self, origin: Partition, run: Run, subject: bytes, attempts: int, reason: str) -> Run:
        """Return the dead letter of a message."""
        letter = Run([subject], run.values)
        letter.keys, letter.tombstones = run.keys, run.tombstones
        fields = {
            "dead_letter_reason": reason,
            "dead_letter_attempts": attempts,
            "dead_letter_group": (self.name or b"").decode(),
            "dead_letter_subject": run.subjects[0].decode(),
            "dead_letter_topic": origin.name.decode(),
            "dead_letter_partition": origin.number,
            "dead_letter_offset": run.offset(0),
        }
        block = run.headers.get(0, b"")
        # It does not expire here: the TTL is for the message, and counts anew if it is redriven.
        if (ttl := headers.value_of(block, headers.TTL)) is not None:
            fields["dead_letter_ttl"] = ttl.decode(errors="replace")
        own = headers.without(block, b"dead-letter-", headers.TTL)
        letter.headers[0] = own + headers.lines(**fields)
        if batch_bytes(letter) > BATCH_BYTES_MAX:
            # It is as large as a message can be: only what tells where to find it has room.
            fields["dead_letter_reason"] = f"{reason}; its {len(run.values[0])} bytes have no room in a dead letter"
            letter = Run([subject], [b""])
            letter.headers[0] = headers.lines(**fields, dead_letter_is_empty="true")
        return letter

    # Saving.

    def _save(self, position: Position, saved: Saved | None) -> None:
        """Write the position, with all else that changes in this turn of the loop; `saved` is called when it counts."""
        if self.name is None:
            if saved is not None:
                saved(None)
            return
        if saved is not None:
            self._saved.append(saved)
        self._unsaved[position] = None
        if not self._is_saving:
            self._is_saving = True
            asyncio.get_running_loop().call_soon(self._write)

    def _save_later(self, position: Position) -> None:
        if self.name is not None and position not in self._unsaved:
            if not self._unsaved:
                self._host.call_at(self._host.clock.monotonic_us() + _SAVE_US, self._write_soon)
            self._unsaved[position] = None

    def _write_soon(self) -> None:
        if self._unsaved and not self._is_saving:
            self._is_saving = True
            self._write()

    async def _saved_now(self, position: Position) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def saved(error: PenstockError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._save(position, saved)
        await future

    def _write(self) -> None:
        now_us = self._host.clock.monotonic_us()
        # Skip positions of a topic or group that was deleted meanwhile.
        positions = {position: None for position in self._unsaved if self._has(position)}
        self._unsaved = {}
        callbacks, self._saved = self._saved, []
        changes = [position.save(self.key(position.partition), now_us) for position in positions]

        def done(_offset: int, error: PenstockError | None) -> None:
            for saved in callbacks:
                saved(error)
            if error is not None:
                logger.error("group %s: its position is not written, tried again: %s", self.name, error)
                self._unsaved = positions | self._unsaved
                for position in positions:
                    position.unsave()
            if self._saved or (self._unsaved and error is None):
                self._write()
                return
            self._is_saving = False
            if self._unsaved:
                self._host.call_at(self._host.clock.monotonic_us() + _SAVE_US, self._write_soon)

        if not changes:
            done(0, None)
            return
        try:
            self._host.store.state.write(changes, done)
        except PenstockError as error:
            done(0, error)

    def key(self, partition: Partition) -> str:
        """Under which its position in a partition is in the state topic."""
        assert self.name is not None
        return f"{self.name.decode()}/{partition.topic_id}/{partition.number}"


def _reason(attempts: int, failed: tuple[int, str] | None, deliveries_max: int) -> str:
    """Return why a message is a dead letter. `failed`: the last delivery that failed for a known reason, and that.
    `deliveries_max`: 0 for no limit."""
    if failed is not None and failed[0] == attempts:
        return failed[1]
    how = "not acknowledged" if 0 < deliveries_max <= attempts else "refused"
    return how if failed is None else f"{how}; delivery {failed[0]} failed: {failed[1]}"
