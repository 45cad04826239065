"""What a log serves after its sealed segments or its indexes were damaged."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Final

import pytest
from crc32c import crc32c

from penstock.log.policy import Cleanup, Policy
from penstock.log.segment import ReadMode, log_name
from penstock.model.batch import HEADER_BYTES, encode
from penstock.testing import FaultyFiles
from tests.support.log_images import (
    DIRECTORY,
    FOUR_SEGMENTS,
    LARGE,
    MASKS,
    Image,
    disk_with,
    flipped,
    image_of,
    make,
    messages_of,
    places,
    read_around,
    reopen,
)
from tests.support.logs import TIMESTAMP, append, messages
from tests.support.sampling import sampled

COMPACT: Final = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT)

# ---- every byte flipped.


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, -1), slice(-1, None)], ids=["head", "batches", "foot"])
@pytest.mark.parametrize("bytes_max", [1, 1 << 20])
@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_any_flipped_byte_of_a_sealed_segment_costs_one_batch_and_is_reported(
    reader: ReadMode, bytes_max: int, which: slice
) -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    sealed = [place for place in everything if place.name == log_name(1)]
    for place, mask in itertools.product(sealed[which], MASKS):
        others = messages_of([other.batch for other in everything if other is not place])
        lost = (place.batch.base_offset, place.batch.end)
        for at in sampled(range(place.start, place.stop)):
            disk = disk_with({**image, place.name: flipped(image[place.name], at, mask)})
            log = reopen(disk, reader=reader)

            around = read_around(log, bytes_max)
            report = log.verify()

            assert around.found == others, f"byte {at} was flipped"
            if place.batch.count:
                assert around.refused == [lost], f"byte {at} was flipped"
            [damage] = report.damage
            assert (damage.path, damage.position) == (DIRECTORY / place.name, place.start), f"byte {at} was flipped"
            assert (damage.first, damage.last) == lost, f"byte {at} was flipped"
            assert report.torn_bytes == 0


def test_damage_in_two_places_of_a_segment_costs_two_batches() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    name = log_name(1)
    sealed = [place for place in everything if place.name == name and place.batch.count]
    for one, two in itertools.combinations(sealed[:-1], 2):
        disk = disk_with({**image, name: flipped(flipped(image[name], one.start), two.start)})

        around = read_around(reopen(disk), bytes_max=1 << 20)

        others = [place.batch for place in everything if place not in (one, two)]
        assert around.found == messages_of(others)
        # Two that are side by side are one damage.
        assert {around.refused[0][0], around.refused[-1][1]} == {one.batch.base_offset, two.batch.end}


def test_a_damaged_batch_keeps_its_segment_from_being_compacted_and_nothing_else() -> None:
    disk = FaultyFiles()
    log = reopen(disk, COMPACT)
    for round_ in range(4):
        append(log, b"old %d" % round_, b"new %d" % round_, keys=[b"x", b"k%d" % round_])
        log.flush()
        append(log, LARGE)
        log.flush()
    log.close()
    image = image_of(disk)
    place = next(place for place in places(image) if place.batch.count == 2)
    for at in (place.start, place.stop - 1):
        damaged = {**image, place.name: flipped(image[place.name], at)}
        log = reopen(disk_with(damaged), COMPACT)
        before = read_around(log, bytes_max=1)

        log.upkeep.compact()

        after = read_around(log, bytes_max=1)
        assert (after.refused, after.corrupt) == (before.refused, before.corrupt)
        stale = {offset for offset, value in before.found.items() if value.startswith(b"old") and value != b"old 3"}
        assert after.found == {offset: value for offset, value in before.found.items() if offset not in stale}


# ---- batches inside of messages.


def smuggled(base_offset: int, value: bytes) -> bytes:
    """A batch as it would stand in a log, of someone who knows how: a message may well be made of it."""
    batch = encode([value], timestamp=TIMESTAMP)
    batch.stamp(base_offset, append_time=1 << 60, durable_bytes=base_offset)
    return bytes(batch.data)


def test_bytes_of_a_message_are_never_served_as_a_batch() -> None:
    # A message of 8 bytes before it, so that the batch begins where a batch can begin.
    image = make([[[b"a"]], [[b"", smuggled(2, b"wrong")]], [[LARGE]], [[b"i"]]], closed=True)
    victim = places(image)[2]
    assert victim.batch.count == 2
    for at in range(victim.start, victim.start + HEADER_BYTES):
        disk = disk_with({**image, victim.name: flipped(image[victim.name], at)})
        around = read_around(reopen(disk), bytes_max=1)
        assert b"wrong" not in around.found.values(), f"byte {at} was flipped"


def test_bytes_of_a_message_do_not_make_a_torn_tail_look_like_damage() -> None:
    image = make([[[b"a"]], [[b"", smuggled(1000, b"wrong")]]], closed=False)
    victim = places(image)[2]
    # The disk wrote the second half of the last batch first, and then the power went.
    torn = image[victim.name][: victim.start] + bytes(HEADER_BYTES) + image[victim.name][victim.start + HEADER_BYTES :]
    log = reopen(disk_with({**image, victim.name: torn}))
    assert messages(log) == {0: b"a"}


# ---- the index.


def indexed() -> Image:
    """A log with two sealed segments of one size, whose indexes have several entries."""
    image = make([[[b"%02d" % number * 500]] for number in range(60)], policy=Policy(segment_bytes=20_000), closed=True)
    sizes = [len(content) for name, content in image.items() if name.endswith(".log")]
    assert sizes[1] == sizes[2] > sizes[3]
    return image


def with_wrong_index(image: Image, name: str) -> Iterator[tuple[str, Image]]:
    """The files with another content of that index, or without it, and what is wrong with it."""
    good = image[name]
    yield "missing", {other: content for other, content in image.items() if other != name}
    wrong = {f"{length} bytes long": good[:length] for length in sampled(range(len(good)))}
    wrong |= {f"flipped at byte {at}": flipped(good, at, mask) for at in sampled(range(len(good))) for mask in MASKS}
    wrong |= {f"that of {other}": image[other] for other in image if other.endswith(".index") and other != name}
    wrong["too long"] = good + bytes(24)
    wrong["garbage"] = bytes(range(256)) * 4
    wrong["zeros"] = bytes(len(good))
    for what, content in wrong.items():
        yield what, {**image, name: content}


@pytest.mark.parametrize("reader", ["pread", "mmap"])
def test_with_any_wrong_index_every_read_is_right(reader: ReadMode) -> None:
    image = indexed()
    batches = [place.batch for place in places(image) if place.batch.count]
    expected = messages_of(batches)
    name = sorted(name for name in image if name.endswith(".index"))[2]
    for wrong, changed in with_wrong_index(image, name):
        log = reopen(disk_with(changed), reader=reader)
        for batch in batches[36:54]:
            assert log.segments[2].base <= batch.base_offset < log.segments[3].base
            [found] = log.read(batch.base_offset, 1)
            assert messages_of([found]) == messages_of([batch]), f"the index is {wrong}"
        assert messages(log) == expected, f"the index is {wrong}"


def test_any_wrong_index_is_built_again() -> None:
    image = indexed()
    name = sorted(name for name in image if name.endswith(".index"))[2]
    for wrong, changed in with_wrong_index(image, name):
        log = reopen(disk_with(changed))
        segment = log.segments[2]
        log.read(segment.base + 10, 1)
        assert segment.index.encode(segment.size) == image[name], f"the index is {wrong}"


@pytest.mark.parametrize(
    ("column", "change"),
    [(0, -3), (0, 3), (1, 1 << 20), (1, -(1 << 40)), (1, 64)],
    ids=["offsets too low", "offsets too high", "behind the end", "before the beginning", "amid a batch"],
)
def test_an_index_that_is_whole_and_lies_is_found_out(column: int, change: int) -> None:
    image = indexed()
    name = next(name for name in image if name.endswith(".index"))
    batches = [place.batch for place in places(image) if place.batch.count]
    log = reopen(disk_with({**image, name: lying(image[name], column, change)}))
    for batch in batches:
        [found] = log.read(batch.base_offset, 1)
        assert messages_of([found]) == messages_of([batch]), f"the index leads from {batch} to {found}"


def lying(index: bytes, column: int, change: int) -> bytes:
    """The index with other numbers in one column, but for its first entry, and the right checksum."""
    entries = struct.unpack_from("<I", index, 12)[0]
    data = bytearray(index)
    for entry in range(1, entries):
        at = 24 + 8 * (entries * column + entry)
        struct.pack_into("<q", data, at, struct.unpack_from("<q", data, at)[0] + change)
    struct.pack_into("<I", data, 8, crc32c(memoryview(data)[12:]))
    return bytes(data)
