"""The files of a log as bytes: to be cut, damaged, and opened again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import (
    CorruptBatch,
    LogDamaged,
)
from penstock.log.log import Log
from penstock.log.policy import Durability, Policy
from penstock.log.segment import ReadMode
from penstock.model.batch import Batch, parse
from penstock.testing import FaultyFiles, PowerCut
from tests.support.logs import append, open_log
from tests.support.sampling import examples

DIRECTORY: Final = Path("/log")
FSYNC: Final = Policy(segment_bytes=4096)
FLUSH: Final = Policy(segment_bytes=4096, durability=Durability.FLUSH)
SEEDS: Final = 4
MASKS: Final = (0xFF, 0x01)

# A log is made of flush rounds, each of batches, each of values.
Rounds = Sequence[Sequence[Sequence[bytes]]]
SMALL: Final[Rounds] = [[[b"a"], [b"b", b"", b"c"]], [[b"d" * 9]], [[b"e"], [b"f"], [b"g", b"h"]]]
LARGE: Final = bytes(range(256)) * 16  # no other batch fits into its segment
ONE_SEGMENT: Final[Rounds] = SMALL
TWO_SEGMENTS: Final[Rounds] = [[[LARGE]], *SMALL]
FOUR_SEGMENTS: Final[Rounds] = [[[LARGE]], *SMALL, [[LARGE]], [[b"i"]]]

# All files of a log, by their names.
Image = dict[str, bytes]


class Place(NamedTuple):
    """A batch in a file, as found by its length alone."""

    name: str
    start: int
    stop: int
    batch: Batch


def make(rounds: Rounds, *, policy: Policy = FSYNC, closed: bool) -> Image:
    """The files of a log of these rounds, whose process stopped cleanly or was killed."""
    return extend({}, rounds, policy=policy, closed=closed)


def extend(image: Image, rounds: Rounds, *, policy: Policy = FSYNC, closed: bool) -> Image:
    disk = disk_with(image)
    log = reopen(disk, policy)
    for batches in rounds:
        for values in batches:
            append(log, *values)
        log.flush()
    if closed:
        log.close()
    return image_of(disk)


def disk_with(image: Image, seed: int = 0) -> FaultyFiles:
    disk = FaultyFiles(seed=seed)
    disk.make_directory(DIRECTORY)
    for name, content in image.items():
        disk.set_content(DIRECTORY / name, content)
    return disk


def image_of(disk: FaultyFiles) -> Image:
    return {name: disk.content(DIRECTORY / name) for name in sorted(disk.sizes(DIRECTORY))}


def reopen(disk: FaultyFiles, policy: Policy = FSYNC, reader: ReadMode = "pread") -> Log:
    return open_log(DIRECTORY, files=disk, policy=policy, reader=reader)


def places(image: Image) -> list[Place]:
    """Every batch of a log that is whole, in order."""
    found = []
    for name, content in sorted(image.items()):
        if name.endswith(".log"):
            at = 0
            while at < len(content):
                batch = parse(content, at)
                found.append(Place(name, at, at + len(batch.data), batch))
                at += len(batch.data)
    return found


def messages_of(batches: Sequence[Batch]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for batch in batches:
        if batch.span:  # not a control batch
            columns = batch.columns()
            found.update(zip(columns.offsets(), columns.values(), strict=True))
    return found


def flipped(content: bytes, at: int, mask: int = 0xFF) -> bytes:
    return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


class Around(NamedTuple):
    """What a reader gets who goes on behind damage."""

    found: dict[int, bytes]
    # Offset ranges that `read` refused, and those of batches that cannot be opened.
    refused: list[tuple[int, int | None]]
    corrupt: list[tuple[int, int]]


def read_around(log: Log, bytes_max: int) -> Around:
    around = Around({}, [], [])
    offset = log.start
    while True:
        try:
            batches = log.read(offset, bytes_max)
        except LogDamaged as damage:
            around.refused.append((damage.first, damage.last))
            if damage.last is None:
                return around
            if not damage.first <= offset < damage.last:
                raise AssertionError(f"offset {offset} cannot be read, and others are named") from damage
            offset = damage.last
            continue
        if not batches:
            return around
        for batch in batches:
            try:
                around.found.update(messages_of([batch]))
            except CorruptBatch:
                around.corrupt.append((batch.base_offset, batch.end))
            offset = batch.end


def cut_at_every_call(
    image: Image, prepare: Callable[[FaultyFiles], Callable[[], object]]
) -> Iterator[tuple[str, FaultyFiles]]:
    """Do what `prepare` returns, with the power going in its first call, its second, …, and after the last.

    Each time on a new disk with `image`, several times over. The disk after the reboot, and what to call it.
    """
    seeds = range(examples(SEEDS))
    for calls in itertools.count():
        finished = 0
        for seed in seeds:
            disk = disk_with(image, seed)
            deed = prepare(disk)
            disk.cut_after = disk.calls + calls
            try:
                deed()
                finished += 1
            except PowerCut:
                pass
            yield f"cut in call {calls}, seed {seed}", disk.power_cut()
        if finished == len(seeds):
            return
