"""The interface between a pipe and its transport.

A pipe needs three things of its parent: the list of topics, the stored batches of a partition from an offset on, and
to push its own batches. The setting `pipe.type` selects the connector. `http` is included; a package can add another
with an entry point in the group `penstock.pipes`, which names a function `connect(url, caller)`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from penstock.clock import Clock
from penstock.model.batch import Batch
from penstock.plugins import find
from penstock.tls.options import TlsOptions

GROUP: Final = "penstock.pipes"


@dataclass(frozen=True, slots=True)
class RemotePartition:
    start: int
    committed: int


@dataclass(frozen=True, slots=True)
class RemoteTopic:
    name: str
    # Identifies the original topic and broker in all copies.
    origin: str
    partitions: tuple[RemotePartition, ...]


@dataclass(frozen=True, slots=True)
class Remote:
    """A parent's description of itself."""

    # The IDs of the brokers above it, the root first, and its own last.
    ancestry: tuple[str, ...]
    topics: tuple[RemoteTopic, ...]


class Piece(NamedTuple):
    """Batches in order, and the committed end of the parent's log. No batches means that there are none below it."""

    batches: list[Batch]
    committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSource:
    """A partition whose batches are pushed."""

    topic: str
    origin: str
    partition: int
    # The number of partitions of the topic.
    partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The broker that connects, and its settings for a connector."""

    node: str
    # Topics by name, for parents that cannot list theirs.
    topics: tuple[str, ...]
    poll_ms: int
    batch_size: int
    clock: Clock
    # The Authorization header for this parent; None for no header.
    authorization: str | None = field(default=None, repr=False)
    # How it connects to https URLs.
    tls: TlsOptions = field(default_factory=TlsOptions)


class PipeConnector(Protocol):
    """Raises only PenstockError: ClientError if the parent cannot be reached or is not a parent."""

    async def topics(self) -> Remote: ...

    def stream(self, topic: RemoteTopic, partition: int, offset: int) -> AsyncGenerator[Piece, None]:
        """Yield the parent's batches from `offset` on, in order and without gaps; end when there are no more for a
        while. Raise OffsetOutOfRange if the parent has dropped the offset: `start` is its first one."""
        ...

    async def pushed(self, source: PushSource) -> int:
        """Return the offset up to which the parent has the pushed batches."""
        ...

    async def push(self, source: PushSource, after: int, batches: Sequence[Batch]) -> int:
        """Push batches that follow `after`; return the offset up to which the parent now has them durably. Raise
        OutOfSequence if the parent is not at `after`."""
        ...

    async def close(self) -> None: ...


Connect = Callable[[str, Caller], PipeConnector]


def find_connector(name: str) -> Connect:
    """Return the function that connects to a parent. Raise BadConfig if the name is not registered."""
    entry = find(GROUP, "pipe.type", name)

    def connect(url: str, caller: Caller) -> PipeConnector:
        # Load it on demand: a broker without a parent needs no HTTP client.
        connector: PipeConnector = entry.load()(url, caller)
        return connector

    return connect
