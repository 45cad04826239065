"""Opens the logs of a store, with what they share: files, caches, and the rounds that write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from penstock.clock import Clock
from penstock.log.files import Files
from penstock.log.log import Log
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy
from penstock.log.segment import ReadMode
from penstock.log.tail import TailBudget
from penstock.log.witness import NOBODY, PartitionId, Witness
from penstock.store.rounds import Rounds
from penstock.store.space import DiskSpace
from penstock.store.state import STATE_TOPIC

_STATE_SEGMENTS_OPEN: Final = 8


class LogOpener:
    def __init__(
        self,
        directory: Path,
        files: Files,
        clock: Clock,
        rounds: Rounds,
        space: DiskSpace,
        open_segments: OpenSegments,
        tail_budget: TailBudget,
        read_mode: ReadMode,
    ) -> None:
        """`directory` has a directory for each topic."""
        self._directory = directory
        self._files = files
        self._clock = clock
        self._open_segments = open_segments
        self._tail_budget = tail_budget
        self._read_mode: ReadMode = read_mode
        # How far each log once reached.
        self.witnesses: Mapping[PartitionId, Witness] = {}
        # Called when the known damage of a log changes, in any thread.
        self.on_damage: Callable[[Log], None] = lambda log: None
        self._owner = _RoundsOwner(rounds, space.admit, self._damaged)
        # The state topic is written, and may use the reserve, when the disk has no room for others.
        self._state_owner = _RoundsOwner(rounds, lambda: None, self._damaged)
        self._open_state_segments = OpenSegments(_STATE_SEGMENTS_OPEN, space.release)

    def open(self, place: PartitionId, policy: Policy, *, piped: bool) -> Log:
        """Open the log of a partition. For any thread: logs share only `OpenSegments` while they are opened, and it has
        a lock."""
        topic_id, partition = place
        is_state = topic_id == STATE_TOPIC
        return Log(
            self._directory / str(topic_id) / str(partition),
            policy=policy,
            files=self._files,
            clock=self._clock,
            owner=self._state_owner if is_state else self._owner,
            open_segments=self._open_state_segments if is_state else self._open_segments,
            # Nobody reads the state topic while it grows.
            tail_budget=TailBudget(0) if is_state else self._tail_budget,
            read_mode=self._read_mode,
            piped=piped,
            witness=self.witnesses.get(place, NOBODY),
            # Lost records of the state topic would be missing, or come back in an older form: people must decide.
            strict=is_state,
        )

    def _damaged(self, log: Log) -> None:
        self.on_damage(log)


class _RoundsOwner:
    """The owner of logs that rounds write: see `appender.LogOwner`."""

    def __init__(self, rounds: Rounds, admit: Callable[[], None], damaged: Callable[[Log], None]) -> None:
        """`admit` raises if the disk has no room for more."""
        self._admit = admit
        self._append = rounds.append
        self.settled = rounds.unflushed.settled
        self.announce = rounds.announce
        self.fault = rounds.fault
        self.damaged = damaged

    def appended(self, log: Log, size: int) -> None:
        self._admit()
        self._append(log, size)
