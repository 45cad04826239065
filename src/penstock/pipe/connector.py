"""The seam between a pipe and what carries it.

A pipe needs of its parent: which topics there are, the stored batches of a partition from an offset on, and to push
batches of its own. Which connector does that is a setting, `pipe.type`. One ships, `http`; a package adds another by an
entry point in the group `penstock.pipes`, which names a function `connect(url, caller)`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.batch import Batch
from penstock.clock import Clock
from penstock.plugins import find

GROUP: Final = "penstock.pipes"


@dataclass(frozen=True, slots=True)
class RemotePartition:
    start: int
    committed: int


@dataclass(frozen=True, slots=True)
class RemoteTopic:
    name: str
    # Which topic of which broker it is, wherever it was copied to.
    origin: str
    partitions: tuple[RemotePartition, ...]


@dataclass(frozen=True, slots=True)
class Remote:
    """What a parent says of itself."""

    # The ids of the brokers above it, the root first; its own is the last.
    ancestry: tuple[str, ...]
    topics: tuple[RemoteTopic, ...]


class Piece(NamedTuple):
    """Batches in their order, and how far the parent's log is. Without batches: there are no more below that."""

    batches: list[Batch]
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A partition whose batches are pushed."""

    topic: str
    origin: str
    partition: int
    # How many its topic has.
    partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who connects, and what a connector may need to know of it."""

    node: str
    # Topics by name: for parents that cannot be asked which ones they have.
    topics: tuple[str, ...]
    poll_ms: int
    batch_size: int
    clock: Clock
    # The Authorization header for this parent; None: it gets none.
    authorization: str | None = field(default=None, repr=False)


class PipeConnector(Protocol):
    """Raises PenstockError only: ClientError where the parent cannot be reached or is none."""

    async def topics(self) -> Remote: ...

    def stream(self, topic: RemoteTopic, partition: int, offset: int) -> AsyncGenerator[Piece, None]:
        """What the parent has from `offset` on, in order and with nothing left out; it ends when there is nothing more
        for a while. Raises OffsetOutOfRange if the parent has it no more: `start` is where it goes on."""
        ...

    async def pushed(self, source: Source) -> int:
        """Up to which offset the parent has what was pushed."""
        ...

    async def push(self, source: Source, after: int, batches: Sequence[Batch]) -> int:
        """Push batches to a parent that has all up to `after`; up to which offset it has them now, durably. Raises
        OutOfSequence if it has more or less than that."""
        ...

    async def close(self) -> None: ...


Connect = Callable[[str, Caller], PipeConnector]


def find_connector(name: str) -> Connect:
    """The function that connects to a parent. BadConfig if nobody has registered that name."""
    entry = find(GROUP, "pipe.type", name)

    def connect(url: str, caller: Caller) -> PipeConnector:
        # Loaded by whoever has a parent: a broker without one starts without an HTTP client.
        connector: PipeConnector = entry.load()(url, caller)
        return connector

    return connect
