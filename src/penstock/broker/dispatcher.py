"""Reads what a group reads, and hands it to the members: one task for each group.

`delivery.py` decides what to read, and what becomes of it; here it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter
from typing import Final

from penstock.broker import delivery
from penstock.broker.cursor import Cursor
from penstock.broker.dead_letter_writer import DeadLetterWriter
from penstock.broker.delivery import Dispatch, Found, Save
from penstock.broker.group_state import GroupState
from penstock.broker.partition import Partition
from penstock.broker.position import Position
from penstock.broker.position_writer import PositionWriter
from penstock.broker.subscription import Loop
from penstock.errors import LogDamaged, PenstockError

logger = logging.getLogger(__name__)

# A group may read thousands of partitions: others use the loop after this long.
_SLICE_S: Final = 0.002


class Dispatcher:
    def __init__(
        self,
        group: bytes | None,
        pattern: bytes,
        state: GroupState[Partition],
        positions: PositionWriter,
        dead_letters: DeadLetterWriter,
        may_dead_letter: Callable[[bytes], bool],
        loop: Loop,
    ) -> None:
        """`may_dead_letter`: whether messages of a topic may become dead letters."""
        # Called when the group may have come further.
        self.watchers: dict[Callable[[], None], None] = {}
        self._group = group
        self._pattern = pattern
        self._state = state
        self._positions = positions
        self._dead_letters = dead_letters
        self._may_dead_letter = may_dead_letter
        self._loop = loop
        self._cursors: dict[Partition, Cursor] = {}
        self._woken = asyncio.Event()
        # Held while messages are handed out.
        self._dispatching = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        # Whether to look for messages that expired, though no member has room.
        self._is_upkeep_due = False

    def wake(self) -> None:
        """Look soon whether there is something to deliver."""
        self._woken.set()

    def keep_up(self) -> None:
        """Pass over messages that retention dropped or that have expired, also while no member has room."""
        if any(position.lag() for position in self._state.positions.values()):
            self._is_upkeep_due = True
            self.wake()

    def forget(self, partition: Partition) -> None:
        """A partition is not read any more."""
        self._cursors.pop(partition, None)

    def start(self) -> None:
        self._task = self._loop.spawn(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self.drain()
            except Exception as fault:  # noqa: BLE001 - supervises one group
                self._loop.health.fault("group", repr(self._group), fault)

    async def drain(self) -> None:
        """Hand out what can be handed out now."""
        async with self._dispatching:
            is_upkeep_due, self._is_upkeep_due = self._is_upkeep_due, False
            self._state.recount()
            until = perf_counter() + _SLICE_S
            for position in list(self._state.positions.values()):
                if not position.is_attached:
                    continue  # its topic was deleted meanwhile
                try:
                    await self._serve(position)
                    if is_upkeep_due:
                        await self._skip_expired(position)
                except Exception as error:  # noqa: BLE001 - supervises one reader
                    if isinstance(error, LogDamaged):
                        position.damage = error
                    self._fail(position, error)
                if perf_counter() > until:
                    await asyncio.sleep(0)
                    until = perf_counter() + _SLICE_S
            # The partitions without damage are served; members get the error if there is nothing else for them.
            stopped = [position for position in self._state.positions.values() if position.stopped]
            if stopped and len(stopped) == len(self._state.positions) and stopped[0].damage is not None:
                self._fail(stopped[0], stopped[0].damage)
            self._set_timer()
        for watcher in list(self.watchers):
            watcher()

    async def _serve(self, position: Position[Partition]) -> None:
        """Hand out what can be handed out of one partition."""
        if self._state.is_held(position):
            return
        now_us, partition = self._loop.clock.monotonic_us(), position.partition
        may_dead_letter = self._may_dead_letter(partition.name)
        lost, is_changed = delivery.review(self._state, position, now_us, dead_letters=may_dead_letter)
        if lost:
            logger.warning(
                "group %s: %d messages of %s were dropped by retention or a purge before they were acknowledged",
                self._group,
                lost,
                partition.name.decode(),
            )
        if is_changed:
            self._positions.save(position)
        if position.has_dead() and self._dead_letters.retry_us <= now_us:
            limit = self._state.deliveries_max(partition.policy)
            self._state.dead_lettered += await self._dead_letters.store(position, limit)
            if position.has_dead() and self._dead_letters.retry_us <= now_us:
                self.wake()  # one decision does not cover all of them
        while await self._redeliver(position):
            pass
        while await self._deliver(position):
            pass

    # The reads.

    async def _redeliver(self, position: Position[Partition]) -> bool:
        """Redeliver messages. Return whether there may be more of them."""
        offset = delivery.next_redelivery(self._state, position, self._loop.clock.monotonic_us())
        if offset is None:
            return False
        found = await self._read(position, offset)
        now_us = self._loop.clock.monotonic_us()
        return self._do(position, delivery.redeliver(self._state, position, offset, found, now_us))

    async def _deliver(self, position: Position[Partition]) -> bool:
        """Deliver messages for the first time. Return whether there may be more of them."""
        if self._group is None:
            self._loop.figures.dropped += delivery.drop_overflow(self._state, position)
        offset = delivery.next_delivery(self._state, position, self._loop.clock.monotonic_us())
        found = None if offset is None else await self._read(position, offset)
        if offset is None or found is None:
            return False
        dispatch = delivery.deliver(self._state, position, offset, found, self._loop.clock.monotonic_us())
        is_more = self._do(position, dispatch)
        if dispatch.deliveries:
            self._loop.figures.delivered(found[0], self._state.since_wall_us)
        return is_more

    async def _skip_expired(self, position: Position[Partition]) -> None:
        """Pass over messages that have expired, up to the first that has not."""
        clock = self._loop.clock
        is_more = True
        while is_more and (offset := delivery.next_check(position, clock.monotonic_us(), clock.now_us())) is not None:
            found = await self._read(position, offset)
            is_more = found is not None and self._do(
                position, delivery.skip_expired(self._state, position, offset, found)
            )

    async def _read(self, position: Position[Partition], offset: int) -> Found | None:
        """Return the next messages from `offset` on that the group wants; None at the end."""
        cursor = self._cursors.get(position.partition)
        if cursor is None:
            cursor = self._cursors[position.partition] = position.partition.cursor(offset, pattern=self._pattern)
        cursor.offset = offset
        return await cursor.read()

    def _do(self, position: Position[Partition], dispatch: Dispatch) -> bool:
        """Do what was decided. Return whether there may be more."""
        partition = position.partition
        self._loop.figures.expired += dispatch.expired
        if dispatch.save is Save.NOW:
            self._positions.save(position)
        elif dispatch.save is Save.LATER:
            self._positions.save_later(position)
        for member, run, attempts in dispatch.deliveries:
            partition.sent += len(run)
            member.gets(partition, run, attempts)
        return dispatch.is_more

    def _fail(self, position: Position[Partition], error: Exception) -> None:
        """Tell the members that the next messages cannot be delivered; they may join again."""
        place = f"group {self._group!r} in {position.partition.name.decode()} {position.partition.number}"
        if isinstance(error, PenstockError):
            logger.error("%s: %s", place, error)
        else:
            self._loop.health.fault("deliver", place, error)
            error = PenstockError("internal error")
        for member in list(self._state.members):
            try:
                member.sink.fail(member, error)
            except Exception as fault:  # noqa: BLE001 - the other members must get the error too
                self._loop.health.fault("deliver", place, fault)

    def _set_timer(self) -> None:
        """Wake when there may be more to deliver, or dead letters may be stored again."""
        now_us = self._loop.clock.monotonic_us()
        moments = [moment for moment in (delivery.next_us(self._state, now_us),) if moment is not None]
        if self._dead_letters.retry_us > now_us:
            moments.append(self._dead_letters.retry_us)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if moments:
            self._timer = self._loop.call_at(min(moments), self.wake)
