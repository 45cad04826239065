"""The files and directories of `FaultyFiles`: what calls see, what is durable, and the changes in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

# The smaller ones are not real sector sizes: they tear the records of a small log more often. A cut draws from the
# sizes that split a file into no more pieces than the limit; otherwise it would take longer than the workload.
_SECTOR_BYTES: Final = (1, 8, 64, 512, 4096)
_SECTORS_MAX: Final = 256


class PendingWrite(NamedTuple):
    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        _grow(content, self.position)
        content[self.position : self.position + len(self.data)] = self.data

    def garbled(self, content: bytearray, kept: int, random: Random) -> PendingWrite:
        """Return this write up to byte `kept`, then garbage. Bytes that the write would not change stay intact."""
        before = content[self.position + kept : self.position + len(self.data)]
        after = self.data[kept:]
        rest = random.randbytes(len(after))
        safe = [new if new == old else other for old, new, other in zip(before, after, rest, strict=False)]
        return PendingWrite(self.position, self.data[:kept] + bytes(safe) + rest[len(safe) :])

    def sectors(self, sector_bytes: int) -> Iterator[PendingWrite]:
        """Yield this write in pieces that end at the sector boundaries of the file."""
        end = self.position + len(self.data)
        start = self.position
        while start < end:
            stop = min(end, start - start % sector_bytes + sector_bytes)
            yield PendingWrite(start, self.data[start - self.position : stop - self.position])
            start = stop


class PendingTruncate(NamedTuple):
    length: int

    def apply(self, content: bytearray) -> None:
        del content[self.length :]
        _grow(content, self.length)


@dataclass(slots=True, eq=False)
class Inode:
    content: bytearray = field(default_factory=bytearray)  # what reads see
    durable: bytearray = field(default_factory=bytearray)
    pending: list[PendingWrite | PendingTruncate] = field(default_factory=list)  # not yet durable, in order
    links: int = 0  # the number of names

    def keep(self) -> None:
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def after_cut(self, random: Random) -> bytearray:
        content = bytearray(self.durable)
        if self.pending:
            outcome = random.choice((_keep_none, _keep_all, _tear, _scatter))
            outcome(content, self.pending, random)
        return content


@dataclass(slots=True, eq=False)
class Directory:
    entries: dict[str, Node] = field(default_factory=dict)  # what calls see
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[NameChange] = field(default_factory=list)  # not yet durable, in order

    def keep(self, count: int) -> None:
        """Make the first `count` pending changes durable."""
        for _ in range(count):
            change = self.pending.pop(0)
            if (needs := change.needs) and needs in needs.directory.pending:
                needs.directory.keep(needs.directory.pending.index(needs) + 1)
            change.apply(self.durable)


Node = Inode | Directory


@dataclass(slots=True, eq=False)
class NameChange:
    directory: Directory
    names: dict[str, Node | None]  # None: the name is removed
    needs: NameChange | None  # a change that becomes durable before this one

    def apply(self, entries: dict[str, Node]) -> None:
        for name, node in self.names.items():
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


# What a power cut leaves of the pending changes of a file: one of these four, applied to its durable bytes.


def _keep_none(content: bytearray, pending: list[PendingWrite | PendingTruncate], random: Random) -> None:
    pass


def _keep_all(content: bytearray, pending: list[PendingWrite | PendingTruncate], random: Random) -> None:
    for change in pending:
        change.apply(content)


def _tear(content: bytearray, pending: list[PendingWrite | PendingTruncate], random: Random) -> None:
    whole = random.randrange(len(pending))
    _keep_all(content, pending[:whole], random)
    last = pending[whole]
    if isinstance(last, PendingWrite):
        kept = random.randint(0, len(last.data))
        torn = PendingWrite(last.position, last.data[:kept])
        if random.random() < 0.25:
            sector_rest = 512 - (last.position + kept) % 512
            torn = PendingWrite(last.position, last.data[: kept + sector_rest]).garbled(content, kept, random)
        torn.apply(content)


def _scatter(content: bytearray, pending: list[PendingWrite | PendingTruncate], random: Random) -> None:
    """Often the first changes arrive, because the kernel writes back by age; the disk reorders the rest."""
    whole = random.choice((0, random.randrange(len(pending))))
    _keep_all(content, pending[:whole], random)
    pending_bytes = sum(len(change.data) for change in pending[whole:] if isinstance(change, PendingWrite))
    fitting = [size for size in _SECTOR_BYTES if pending_bytes <= size * _SECTORS_MAX]
    sector_bytes = random.choice(fitting or _SECTOR_BYTES[-1:])
    arrives = random.choice((0.1, 0.5, 0.9))
    grows_first = random.random() < 0.5
    garbage = random.choice((0.0, 0.0, 0.0, 0.1))
    for change in pending[whole:]:
        if isinstance(change, PendingTruncate):
            if random.random() < arrives:
                change.apply(content)
            continue
        if grows_first:
            _grow(content, change.position + len(change.data))
        for piece in change.sectors(sector_bytes):
            if random.random() < arrives:
                if garbage and random.random() < garbage:
                    piece = piece.garbled(content, random.randrange(len(piece.data)), random)
                piece.apply(content)


def _grow(content: bytearray, length: int) -> None:
    if length > len(content):
        content.extend(bytes(length - len(content)))
