"""The marks of a log: offsets that only grow, and the outcomes that wait for them.

    first ≤ start ≤ committed ≤ written ≤ end
                      durable ≤ written

    start ............ committed ... written ... end
      │ may be read        │            │         └ the next message gets this offset
      │                    │            └ handed to the operating system
      │                    └ as durable as the commit rule asks: acknowledged, may be read
      └ older messages were dropped or purged

    durable     on the disk. The commit rule decides whether `committed` waits for it.
    reserved    offsets below are reserved durably: no message gets one of them after a power cut
    held_at     `committed` does not pass this offset before `release`

Only `take_back` and `restart` move a mark backwards: `end`, to the first offset whose message was rejected, or all of
them after a truncation.

Nothing here touches a disk. The code that writes, syncs or replicates moves `written`, `durable` and `reserved`, and
then calls `advance`. Only the commit rule decides what that means for `committed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.errors import PenstockError
from penstock.log.policy import Durability, Policy
from penstock.outcome import Outcome


class CommitRule(NamedTuple):
    """Decides what an acknowledgement is worth."""

    # Returns the offset up to which messages may be read and acknowledged.
    committed: Callable[[Marks], int]
    # Whether offsets are reserved durably before readers see them, because `committed` is ahead of `durable`.
    reserves: bool


class Marks:
    __slots__ = (
        "_await_commit",
        "_await_sync",
        "_on_fault",
        "committed",
        "durable",
        "end",
        "first",
        "held_at",
        "purged",
        "reserved",
        "reserved_written",
        "rule",
        "written",
    )

    def __init__(self, rule: CommitRule, on_fault: Callable[[Exception], None]) -> None:
        """`on_fault` is called with an exception that an outcome's callback raised."""
        self.rule = rule
        # Where the first segment begins, and below which offset a purge lets nobody read.
        self.first = self.purged = 0
        self.committed = self.durable = self.written = self.end = 0
        # Reserved durably, and reserved by what is written: durable with the next sync.
        self.reserved = self.reserved_written = 0
        self.held_at: int | None = None
        # Outcomes with the offset that the mark must reach, in ascending order.
        self._await_commit: deque[tuple[int, Outcome]] = deque()
        self._await_sync: deque[tuple[int, Outcome]] = deque()
        self._on_fault = on_fault

    @property
    def start(self) -> int:
        # A piped log can lose its end in a power cut. Messages below the purge that are fetched again stay unreadable.
        return max(self.first, min(self.purged, self.end))

    def restart(self, end: int) -> None:
        """Set all marks to `end`: everything below it is stored."""
        self.committed = self.durable = self.written = self.end = end

    def reserve(self, offset: int) -> None:
        """Note that the offsets below `offset` are reserved durably."""
        self.reserved = self.reserved_written = offset

    def when_committed(self, outcome: Outcome) -> None:
        """Settle `outcome` when everything appended so far is committed or rejected."""
        if self.end <= self.committed:
            outcome.settle()
        else:
            self._await_commit.append((self.end, outcome))

    def when_durable(self, outcome: Outcome) -> None:
        """Settle `outcome` when everything appended so far is on the disk or rejected."""
        if self.end <= self.durable:
            outcome.settle()
        else:
            self._await_sync.append((self.end, outcome))

    def advance(self) -> bool:
        """Settle the outcomes that wait for `durable`, and move `committed`; return whether it moved."""
        if self._await_sync:
            self._settle_until(self._await_sync, self.durable)
        committed = self.rule.committed(self)
        if self.held_at is not None and committed > self.held_at:
            committed = self.held_at
        if committed <= self.committed:
            return False
        self.committed = committed
        return True

    def confirm(self, offset: int) -> None:
        """Settle the outcomes of appends below `offset`, which must be committed."""
        self._settle_until(self._await_commit, offset)

    def take_back(self, offset: int) -> list[Outcome]:
        """Give the offsets from `offset` on to others; return the outcomes that waited for them, to be rejected."""
        self.end = offset
        if self.held_at is not None:
            self.held_at = min(self.held_at, offset)
        rejected = []
        for awaiting in (self._await_sync, self._await_commit):
            while awaiting and awaiting[-1][0] > offset:
                rejected.append(awaiting.pop()[1])
        rejected.reverse()
        return rejected

    def settle(self, outcome: Outcome, error: PenstockError | None) -> None:
        try:
            outcome.settle(error)
        except Exception as fault:  # noqa: BLE001 - a faulty callback must not keep the others waiting
            self._on_fault(fault)

    def _settle_until(self, awaiting: deque[tuple[int, Outcome]], mark: int) -> None:
        while awaiting and awaiting[0][0] <= mark:
            self.settle(awaiting.popleft()[1], None)


# Every message is on the disk first.
WHEN_SYNCED: Final = CommitRule(lambda marks: marks.durable, reserves=False)
# The operating system has it. A power cut can lose it, but its offset is reserved.
WHEN_WRITTEN: Final = CommitRule(
    lambda marks: marks.written if marks.written <= marks.reserved else marks.durable, reserves=True
)
# The same, for a copy of another log. The origin numbers the messages, and lost ones are fetched again.
WHEN_COPIED: Final = CommitRule(lambda marks: marks.written, reserves=False)


def commit_rule(policy: Policy, *, is_piped: bool) -> CommitRule:
    """Return the rule for a log of this broker."""
    if policy.durability is Durability.FSYNC:
        return WHEN_SYNCED
    return WHEN_COPIED if is_piped else WHEN_WRITTEN
