"""What a log serves after its files were cut short, rotted, mixed up, or lost the power at any call.

Most tests make a small log once, and then open a changed copy of its files for every byte of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from crc32c import crc32c

from penstock.errors import (
    BadDirectory,
    CorruptBatch,
    DirectoryInUse,
    DiskError,
    LogDamaged,
    LogFailed,
    PenstockError,
    UnsupportedBatch,
)
from penstock.log.appender import LogState
from penstock.log.flusher import RESERVE_AHEAD
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Durability, OnDamage, Policy
from penstock.log.segment import ReadMode, log_name
from penstock.model.batch import HEADER_BYTES, Batch, encode, parse
from penstock.outcome import Outcome
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import TIMESTAMP, append, messages, open_log
from tests.support.sampling import sampled

DIRECTORY: Final = Path("/log")
FSYNC: Final = Policy(segment_bytes=4096)
FLUSH: Final = Policy(segment_bytes=4096, durability=Durability.FLUSH)
COMPACT: Final = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT)
SEEDS: Final = 4
MASKS: Final = (0xFF, 0x01)
# The checksum of a batch's header covers the bytes before this one; the rest is under the producer's.
HEADER_CRC_ENDS: Final = 96

# A log is made of flush rounds, each of batches, each of values.
Rounds = Sequence[Sequence[Sequence[bytes]]]
SMALL: Final[Rounds] = [[[b"a"], [b"b", b"", b"c"]], [[b"d" * 9]], [[b"e"], [b"f"], [b"g", b"h"]]]
LARGE: Final = bytes(range(256)) * 16  # no other batch fits into its segment
ONE_SEGMENT: Final[Rounds] = SMALL
TWO_SEGMENTS: Final[Rounds] = [[[LARGE]], *SMALL]
FOUR_SEGMENTS: Final[Rounds] = [[[LARGE]], *SMALL, [[LARGE]], [[b"i"]]]

# All files of a log, by their names.
Image = dict[str, bytes]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of recoveries would fill the report, and half the time."""
    caplog.set_level(logging.CRITICAL, "penstock")


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


def resigned(batch: Batch, *, version: int) -> bytes:
    """The batch as a newer Penstock would have made it."""
    data = bytearray(batch.data)
    struct.pack_into("<H", data, 64, version)
    struct.pack_into("<I", data, 56, crc32c(memoryview(data)[60:]))
    struct.pack_into("<I", data, 0, crc32c(memoryview(data)[4:96]))
    return bytes(data)


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
    for calls in itertools.count():
        finished = 0
        for seed in range(SEEDS):
            disk = disk_with(image, seed)
            deed = prepare(disk)
            disk.cut_after = disk.calls + calls
            try:
                deed()
                finished += 1
            except PowerCut:
                pass
            yield f"cut in call {calls}, seed {seed}", disk.power_cut()
        if finished == SEEDS:
            return


# Cut short at every byte.


@pytest.mark.parametrize("rounds", [ONE_SEGMENT, TWO_SEGMENTS], ids=["one segment", "two segments"])
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_a_log_cut_short_at_any_byte_serves_the_batches_that_are_whole_and_goes_on(
    rounds: Rounds, policy: Policy, closed: bool
) -> None:
    image = make(rounds, policy=policy, closed=closed)
    everything = places(image)
    active = everything[-1].name
    for length in sampled(range(len(image[active]) + 1)):
        whole = [place.batch for place in everything if place.name != active or place.stop <= length]
        expected = messages_of(whole)
        disk = disk_with({**image, active: image[active][:length]})

        log = reopen(disk, policy)
        assert messages(log) == expected, f"cut short at byte {length}"

        offset = append(log, b"new")
        log.flush()
        assert offset >= max(expected, default=-1) + 1, f"cut short at byte {length}"
        disk = disk.power_cut()
        assert messages(reopen(disk, policy)) == {**expected, offset: b"new"}, f"cut short at byte {length}"


def test_whatever_was_torn_off_its_producer_sends_again_and_each_message_is_there_once() -> None:
    def send(log: Log) -> None:
        for sequence, values in enumerate(itertools.chain(*SMALL)):
            append(log, *values, producer=7, sequence=sequence)
            log.flush()

    disk = FaultyFiles()
    send(reopen(disk))
    [(name, content)] = [(name, content) for name, content in image_of(disk).items() if name.endswith(".log")]
    expected = messages_of([place.batch for place in places({name: content})])
    for length in sampled(range(len(content) + 1)):
        log = reopen(disk_with({name: content[:length]}))
        send(log)
        assert messages(log) == expected, f"cut short at byte {length}"


@pytest.mark.parametrize("between", [False, True], ids=["amid a batch", "between two batches"])
def test_a_sealed_segment_that_is_cut_short_at_any_byte_is_noticed(between: bool) -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    name = log_name(1)
    sealed = [place for place in everything if place.name == name and place.batch.span]
    end = sealed[-1].batch.end
    for length in range(1, sealed[-1].stop):
        if between is not any(length == place.stop for place in everything if place.name == name):
            continue
        gone = [place.batch for place in sealed if place.stop > length]
        first = gone[0].base_offset
        log = reopen(disk_with({**image, name: image[name][:length]}))

        around = read_around(log, bytes_max=1)

        assert around.refused == [(first, end)], f"cut short at byte {length}"
        assert around.found == messages_of([place.batch for place in everything if place.batch not in gone])
        [damage] = log.verify().damage
        assert (damage.path.name, damage.first, damage.last) == (name, first, end), f"cut short at byte {length}"


def test_an_only_segment_without_a_head_is_left_behind_if_others_were_before_it() -> None:
    image = make(TWO_SEGMENTS, closed=False)
    name = log_name(1)
    head = next(place for place in places(image) if place.name == name)
    for length in range(head.stop):
        disk = disk_with({name: image[name][:length]})
        log = reopen(disk)
        offset = append(log, b"new")
        log.flush()
        assert disk.content(DIRECTORY / name) == image[name][:length]
        for opened in (log, reopen(disk)):
            [damage] = opened.damage
            assert (damage.path.name, damage.first) == (name, 1)
            assert read_around(opened, bytes_max=1).found == {offset: b"new"}


# Every byte flipped.


def check_damage_is_left_behind(image: Image, place: Place, mask: int, policy: Policy) -> None:
    """Flip each byte of a batch: it alone is lost, and the log goes on, also once it is opened again."""
    everything = places(image)
    others = messages_of([other.batch for other in everything if other[:2] != place[:2]])
    lost = (place.batch.base_offset, place.batch.end)
    acknowledged = max(other.batch.end for other in everything)
    skipping = replace(policy, on_damage=OnDamage.SKIP)
    for at in sampled(range(place.start, place.stop)):
        damaged = flipped(image[place.name], at, mask)
        disk = disk_with({**image, place.name: damaged})
        message = f"byte {at} was flipped"

        log = reopen(disk, policy)
        offset = append(log, b"new")
        log.flush()

        assert offset >= acknowledged, message
        expected = {**others, offset: b"new"}
        for restarted in (False, True):
            if restarted:
                disk.kill()
                log = reopen(disk, policy)
            around = read_around(log, bytes_max=1 << 20)
            assert around.found == expected, message
            if place.batch.count:
                assert around.refused == [lost], message
            [known] = log.damage
            assert (known.path, known.position) == (DIRECTORY / place.name, place.start), message
            assert (known.first, known.last) == lost, message
            assert disk.content(DIRECTORY / place.name).startswith(damaged[: place.stop]), "what is damaged was changed"
            report = log.verify()
            assert not report.torn_bytes, message
            [found] = report.damage
            assert (found.position, found.first, found.last) == (known.position, known.first, known.last), message
            log.policy = skipping
            assert messages(log) == expected, message
            assert log.reader.skipped_offsets == place.batch.span, message


@pytest.mark.parametrize("mask", MASKS, ids=hex)
@pytest.mark.parametrize("rounds", [ONE_SEGMENT, TWO_SEGMENTS], ids=["one segment", "two segments"])
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
def test_any_flipped_byte_of_a_log_that_was_closed_costs_one_batch_and_the_log_goes_on(
    rounds: Rounds, policy: Policy, mask: int
) -> None:
    image = make(rounds, policy=policy, closed=True)
    everything = places(image)
    *before, mark = [place for place in everything if place.name == everything[-1].name]
    for place in before:
        check_damage_is_left_behind(image, place, mask, policy)
    for at in range(mark.start, mark.stop):
        # The note that all is well is the last thing in the log; nothing knows of it, and nothing is lost with it.
        disk = disk_with({**image, mark.name: flipped(image[mark.name], at, mask)})
        assert messages(reopen(disk, policy)) == messages_of([place.batch for place in everything])


def test_a_strict_log_is_refused_if_its_last_segment_is_damaged_and_left_as_it_is() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    *before, _ = [place for place in places(image) if place.name == log_name(1)]
    for place in before:
        damaged = {**image, place.name: flipped(image[place.name], place.start)}
        disk = disk_with(damaged)
        with pytest.raises(LogDamaged) as caught:
            open_log(DIRECTORY, files=disk, policy=FSYNC, strict=True)
        damage = caught.value
        assert (damage.path, damage.position) == (DIRECTORY / place.name, place.start)
        assert (damage.first, damage.last) == (place.batch.base_offset, place.batch.end)
        assert str(damage).startswith(
            f"{damage.path}: damaged at byte {damage.position}, offsets {damage.first} to {damage.last}: "
        )
        assert image_of(disk) == damaged


def test_offsets_are_not_given_out_again_though_what_reserves_them_is_damaged() -> None:
    disk = FaultyFiles()
    log = reopen(disk, FLUSH)
    for value in (b"a", b"b"):  # the second knows that all before it was durable
        append(log, value)
        log.flush()
    image = image_of(disk)
    _, reservation, *_ = places(image)
    # Readers see these, and the power takes them.
    append(log, *[b"c"] * 1000)
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)
    seen = log.committed
    assert seen == 1002
    damaged = flipped(image[reservation.name], reservation.start)

    log = reopen(disk_with({reservation.name: damaged}), FLUSH)

    assert [damage.position for damage in log.damage] == [reservation.start]
    assert append(log, b"new") >= seen


def test_a_power_cut_while_damage_is_left_behind_loses_nothing_else() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    name = log_name(1)
    active = [place for place in places(image) if place.name == name]
    for place in (active[0], active[2]):
        damaged = {**image, name: flipped(image[name], place.start)}
        others = messages_of([other.batch for other in places(image) if other[:2] != place[:2]])

        def prepare(disk: FaultyFiles) -> Callable[[], object]:
            return lambda: reopen(disk)

        for message, disk in cut_at_every_call(damaged, prepare):
            log = reopen(disk)
            assert read_around(log, 1 << 20).found == others, message
            assert [each.position for each in log.damage] == [place.start], message
            assert len(log.segments) == 3, message
            offset = append(log, b"new")
            log.flush()
            assert offset >= 10, message
            disk.kill()
            assert read_around(reopen(disk), 1 << 20).found == {**others, offset: b"new"}, message


def test_producers_are_known_again_though_the_head_that_told_of_them_is_damaged() -> None:
    disk = FaultyFiles()
    log = reopen(disk)
    append(log, LARGE, producer=7, sequence=0)
    log.flush()
    append(log, b"b")
    log.flush()
    log.close()
    image = image_of(disk)
    name = log_name(1)
    log = reopen(disk_with({**image, name: flipped(image[name], 0)}))
    assert append(log, LARGE, producer=7, sequence=0) == 0
    assert append(log, b"c", producer=7, sequence=1) > 1


def test_what_is_known_to_be_damaged_is_forgotten_with_its_segment() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    *_, place, _ = places(image)
    disk = disk_with({**image, place.name: flipped(image[place.name], place.start)})
    log = reopen(disk, Policy(segment_bytes=4096, retain_bytes=1))
    assert [(damage.first, damage.last) for damage in log.damage] == [(place.batch.base_offset, place.batch.end)]

    log.upkeep.retain()

    assert log.damage == []
    assert not [name for name in image_of(disk) if name.endswith(".damaged")]
    assert reopen(disk).damage == []


@pytest.mark.parametrize("mask", MASKS, ids=hex)
@pytest.mark.parametrize(
    "rounds", [SMALL[:1], ONE_SEGMENT, TWO_SEGMENTS], ids=["one round", "one segment", "two segments"]
)
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
def test_of_a_log_that_was_killed_only_the_last_round_can_look_torn(rounds: Rounds, policy: Policy, mask: int) -> None:
    image = make(rounds, policy=policy, closed=False)
    last = len(rounds[-1])
    if policy is FLUSH and len(rounds) == 1:
        last += 1  # the reservation before it
    _check_only_the_last_round_can_look_torn(image, policy, last, mask)


@pytest.mark.parametrize("mask", MASKS, ids=hex)
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
def test_a_note_of_an_earlier_stop_is_not_taken_for_a_torn_tail(policy: Policy, mask: int) -> None:
    image = extend(make(SMALL, policy=policy, closed=True), [[[b"i"]]], policy=policy, closed=False)
    last = 1 if policy is FSYNC else 2  # the batch, and before it the reservation
    _check_only_the_last_round_can_look_torn(image, policy, last, mask)


def _check_only_the_last_round_can_look_torn(image: Image, policy: Policy, last: int, mask: int) -> None:
    everything = places(image)
    active = [place for place in everything if place.name == everything[-1].name]
    for place in active[:-last]:
        check_damage_is_left_behind(image, place, mask, policy)
    for place in active[-last:]:
        before = [other.batch for other in everything if other.batch.base_offset < place.batch.base_offset]
        expected = messages_of(before)
        for at in sampled(range(place.start, place.stop)):
            log = reopen(disk_with({**image, place.name: flipped(image[place.name], at, mask)}), policy)
            assert messages(log) == expected, f"byte {at} was flipped"


def test_what_was_cut_off_does_not_come_back_behind_what_is_written_in_its_place() -> None:
    image = make([[[b"a"]], [[b"b"], [b"c"], [b"d"]]], closed=False)
    torn = next(place for place in places(image) if place.batch.span and place.batch.base_offset == 1)
    disk = disk_with({torn.name: flipped(image[torn.name], torn.start)})
    log = reopen(disk)
    assert messages(log) == {0: b"a"}
    append(log, b"x")  # its batch is as long as that of "b", so that of "c" would follow
    log.flush()
    disk.kill()
    assert messages(reopen(disk)) == {0: b"a", 1: b"x"}


def test_nothing_of_a_segment_can_look_torn_once_the_next_one_was_begun() -> None:
    image = make(TWO_SEGMENTS, closed=False)
    name, unborn = log_name(1), log_name(10)
    torn_head = image[name][:50]
    everything = places(image)
    for place in [place for place in everything if place.name == name]:
        others = messages_of([other.batch for other in everything if other is not place])
        for at in sampled(range(place.start, place.stop)):
            damaged = flipped(image[name], at)
            disk = disk_with({**image, name: damaged, unborn: torn_head})
            log = reopen(disk)
            assert read_around(log, 1 << 20).found == others, f"byte {at} was flipped"
            assert [(each.first, each.last) for each in log.damage] == [(place.batch.base_offset, place.batch.end)]
            assert append(log, b"new") >= 10
            assert disk.content(DIRECTORY / name).startswith(damaged), f"byte {at} was flipped"


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


# Batches inside of messages.


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


# The index.


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


# Files that do not belong there, or do not fit together.


def test_a_sealed_segment_of_another_log_is_not_served() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    other = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    ours = messages_of([place.batch for place in everything if place.name != log_name(1)])
    log = reopen(disk_with({**image, log_name(1): other[log_name(1)]}))
    for bytes_max in (1, 1 << 20):
        around = read_around(log, bytes_max)
        assert (around.found, around.refused) == (ours, [(1, 10)])
    assert [(damage.path.name, damage.first, damage.last) for damage in log.verify().damage] == [(log_name(1), 1, 10)]


def test_a_last_segment_of_another_log_is_left_behind() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    foreign = make(TWO_SEGMENTS, closed=True)[log_name(1)]
    ours = messages_of([place.batch for place in places(image) if place.name != log_name(1)])
    disk = disk_with({**image, log_name(1): foreign})
    log = reopen(disk)
    offset = append(log, b"new")
    log.flush()
    for opened in (log, reopen(disk)):
        assert read_around(opened, bytes_max=1).found == {**ours, offset: b"new"}
        [damage] = opened.damage
        assert (damage.path.name, damage.position, damage.first) == (log_name(1), 0, 1)
    assert disk.content(DIRECTORY / log_name(1)) == foreign


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "0.log",
        "00000000000000000000.LOG",
        "00000000000000000000.log.bak",
        "00000000000000000000.log~",
        "-0000000000000000001.log",
        "000000000000000000000.log",
        "0000000000000000000a.log",
        "00000000000000000000.aside",
        "99999999999999999999.log",
        "\N{ARABIC-INDIC DIGIT ZERO}" * 20 + ".log",
    ],
)
def test_a_file_that_is_not_of_a_log_is_refused_by_name_and_left_there(name: str) -> None:
    image = {**make(SMALL, closed=True), name: b"whatever"}
    disk = disk_with(image)
    with pytest.raises(BadDirectory) as caught:
        reopen(disk)
    assert str(DIRECTORY / name) in str(caught.value)
    assert image_of(disk) == image


def test_an_empty_segment_that_is_not_the_last_is_named_and_served_around() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    names = [name for name in image if name.endswith(".log")]
    for name, following in itertools.pairwise(names):
        disk = disk_with({**image, name: b""})
        log = reopen(disk)
        offset = append(log, b"new")
        log.flush()
        there = messages_of([place.batch for place in everything if place.name != name])
        hit = (int(name[:20]), int(following[:20]))
        for opened in (log, reopen(disk)):
            assert [(each.path.name, each.first, each.last) for each in opened.damage] == [(name, *hit)]
            around = read_around(opened, bytes_max=1)
            assert (around.found, around.refused) == ({**there, offset: b"new"}, [hit])
            assert [(each.first, each.last) for each in opened.verify().damage][:1] == [hit]


def test_an_empty_last_segment_was_being_created_and_goes() -> None:
    image = make(TWO_SEGMENTS, closed=False)
    log = reopen(disk_with({**image, log_name(99): b""}))
    assert messages(log) == messages_of([place.batch for place in places(image)])
    assert append(log, b"new") == log.marks.written


def test_a_missing_segment_is_named_by_whoever_reads_across_and_by_verify() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    missing = log_name(1)
    there = [place.batch for place in everything if place.name != missing]
    log = reopen(disk_with({name: content for name, content in image.items() if name != missing}))

    with pytest.raises(LogDamaged, match=rf"{missing}\b.* is missing"):
        messages(log)
    assert read_around(log, bytes_max=1 << 20).found == messages_of(there)
    [damage] = log.verify().damage
    assert re.search(rf"{missing}\b.* is missing", str(damage))


def test_of_missing_segments_exactly_their_offsets_are_reported() -> None:
    image = make([[[bytes([number]) * 4000]] for number in range(6)], closed=True)
    missing = (log_name(2), log_name(3))
    log = reopen(disk_with({name: content for name, content in image.items() if name not in missing}))

    around = read_around(log, bytes_max=1 << 20)

    assert around.refused == [(2, 4)]
    assert sorted(around.found) == [0, 1, 4, 5]
    [damage] = log.verify().damage
    assert (damage.first, damage.last) == (2, 4)


def test_a_log_whose_last_but_one_segment_is_missing_is_served_around_it() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    *_, missing, last = [name for name in image if name.endswith(".log")]
    log = reopen(disk_with({name: content for name, content in image.items() if name != missing}))
    [damage] = log.damage
    assert (damage.path.name, damage.first, damage.last) == (missing, int(missing[:20]), int(last[:20]))
    there = messages_of([place.batch for place in places(image) if place.name != missing])
    around = read_around(log, bytes_max=1)
    assert (around.found, around.refused) == (there, [(damage.first, damage.last)])
    assert append(log, b"new") == max(there) + 1


def test_a_copy_of_a_segment_under_another_offset_is_reported() -> None:
    image = make([[[b"%d" % (3 * number + place)] for place in range(3)] for number in range(120)], closed=True)
    names = [name for name in image if name.endswith(".log")]
    assert len(names) > 4
    for original in names[:2]:
        copy = log_name(int(original.removesuffix(".log")) + 1)
        copied = {**image, copy: image[original]}
        disk = disk_with(copied)
        log = reopen(disk)

        with pytest.raises(LogDamaged, match=f"{copy}.* overlaps {original}"):
            messages(log)
        with pytest.raises(LogDamaged, match=f"{copy}.* is another segment"):
            messages(log, bytes_max=1)
        assert [str(damage) for damage in log.verify().damage if f"overlaps {original}" in str(damage)]
        assert {name: image_of(disk)[name] for name in copied} == copied


@pytest.mark.parametrize("shift", [-1, 1, 1000])
def test_a_segment_under_a_wrong_name_is_refused_and_its_messages_are_not_lost(shift: int) -> None:
    image = make([[[b"%d" % number]] for number in range(200)], closed=True)
    expected = messages_of([place.batch for place in places(image)])
    names = [name for name in image if name.endswith(".log")]
    for name in names[1:]:
        wrong = log_name(int(name.removesuffix(".log")) + shift)
        renamed = {wrong if other == name else other: content for other, content in image.items()}
        disk = disk_with(renamed)
        with pytest.raises(DiskError, match=DIRECTORY.name):
            # If it is not the last it may be opened, but not be read.
            messages(reopen(disk))
        left = [content for other, content in image_of(disk).items() if other.endswith(".log")]
        assert image[name] in left, f"{name} was called {wrong}, and is gone"
        disk.rename(DIRECTORY / wrong, DIRECTORY / name)
        disk.kill()
        # If it is the last then the log went on behind it.
        assert read_around(reopen(disk), bytes_max=1).found == expected


def test_a_segment_of_a_newer_version_is_refused_with_its_name_and_left_as_it_is() -> None:
    image = make(TWO_SEGMENTS, closed=True)
    for place in [place for place in places(image) if place.name == log_name(1)]:
        content = image[place.name]
        newer = content[: place.start] + resigned(place.batch, version=2) + content[place.stop :]
        for end in (len(newer), len(newer) - 1):  # the last batch torn, too
            changed = {**image, place.name: newer[:end]}
            disk = disk_with(changed)
            if end < place.stop:
                continue
            with pytest.raises(UnsupportedBatch, match=rf"{place.name}.*version 2.*upgrade"):
                reopen(disk)
            assert image_of(disk) == changed


def test_damage_before_a_batch_of_a_newer_version_is_refused_with_the_name_of_the_file() -> None:
    image = make(ONE_SEGMENT, closed=True)
    name = log_name(0)
    _, damaged, newer, *_ = places(image)
    content = image[name][: newer.start] + resigned(newer.batch, version=2) + image[name][newer.stop :]
    changed = {**image, name: flipped(content, damaged.start)}
    disk = disk_with(changed)
    with pytest.raises((UnsupportedBatch, LogDamaged), match=name):
        reopen(disk)
    assert image_of(disk) == changed


def test_of_a_sealed_segment_batches_of_a_newer_version_are_refused_where_they_are_opened() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    everything = places(image)
    newer = next(place for place in everything if place.name == log_name(1) and place.batch.count)
    content = image[newer.name]
    content = content[: newer.start] + resigned(newer.batch, version=2) + content[newer.stop :]
    log = reopen(disk_with({**image, newer.name: content}))
    [batch] = log.read(newer.batch.base_offset, 1)
    with pytest.raises(UnsupportedBatch, match="upgrade"):
        batch.columns()
    assert messages(log, newer.batch.end) == messages_of(
        [place.batch for place in everything if place.batch.base_offset > newer.batch.base_offset]
    )
    report = log.verify()
    [unsupported] = report.unsupported
    assert f"{newer.name}: at byte {newer.start}: " in str(unsupported)
    assert not report.damage


def test_an_index_without_a_log_and_an_unfinished_rewrite_are_cleared_away() -> None:
    image = make(FOUR_SEGMENTS, closed=True)
    index = next(name for name in image if name.endswith(".index"))
    orphan, aside = log_name(77).replace(".log", ".index"), log_name(1) + ".aside"
    disk = disk_with({**image, orphan: image[index], aside: b"half a segment"})
    log = reopen(disk)
    assert messages(log) == messages_of([place.batch for place in places(image)])
    assert image_of(disk) == image


HOLD: Final = """
import sys
from pathlib import Path
from penstock.store.store import Store
with Store(Path(sys.argv[1])) as store:
    store.create_topic("held")
    print("open", flush=True)
    sys.stdin.read()
"""


def holding(directory: Path) -> subprocess.Popen[bytes]:
    """Another process that has a store open, until its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    return process


def test_a_directory_that_another_process_has_open_is_refused_with_its_pid(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(DirectoryInUse, match=rf"{tmp_path} is in use by process {process.pid}: "):
                Store(tmp_path)
    assert process.returncode == 0
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["held"]


def test_a_directory_that_this_process_has_open_is_refused_with_its_own_pid(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("mine")
        with pytest.raises(DirectoryInUse, match=rf"process {os.getpid()}: "):
            Store(tmp_path)
        append(store.log(topic.id), b"a")
    with Store(tmp_path) as store:
        assert messages(store.log(topic.id)) == {0: b"a"}


def test_the_lock_of_a_killed_process_hinders_nobody(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "LOCK").read_text() == f"{process.pid}\n"
        with Store(tmp_path) as store:
            assert [topic.name for topic in store.topics] == ["held"]


# Power cuts while a log is put in order.


def torn_tail() -> Image:
    image = make(TWO_SEGMENTS, closed=False)
    return {**image, log_name(1): image[log_name(1)][:-20]}


def torn_head() -> Image:
    image = make(TWO_SEGMENTS, closed=False)
    return {**image, log_name(10): image[log_name(1)][:50]}


def torn_reservation() -> Image:
    image = make(ONE_SEGMENT, policy=FLUSH, closed=False)
    return {**image, log_name(0): image[log_name(0)][:-1]}


def nothing_but_half_a_head() -> Image:
    return {log_name(0): make([], closed=False)[log_name(0)][:-8]}


def leftovers() -> Image:
    image = torn_tail()
    return {**image, log_name(1) + ".aside": b"half a segment", log_name(77).replace(".log", ".index"): b"PIDX"}


def half_a_truncation() -> Image:
    """The new segment is there, and all that the truncation should have dropped is still there, too."""
    disk = disk_with(make(FOUR_SEGMENTS, closed=False))
    before = image_of(disk)
    reopen(disk).upkeep.truncate(3)
    return {**image_of(disk), **before}


@pytest.mark.parametrize(
    "torn", [torn_tail, torn_head, torn_reservation, nothing_but_half_a_head, leftovers, half_a_truncation]
)
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
def test_a_recovery_that_is_cut_at_any_call_comes_to_the_same_end_later(
    torn: Callable[[], Image], policy: Policy
) -> None:
    image = torn()
    uncut = reopen(disk_with(image), policy)
    expected = messages(uncut)
    for cut, disk in cut_at_every_call(image, lambda disk: partial(reopen, disk, policy)):
        log = reopen(disk, policy)
        assert messages(log) == expected, cut
        assert log.end == uncut.end, cut
        offset = append(log, b"new")
        log.flush()
        assert messages(reopen(disk.power_cut(), policy)) == {**expected, offset: b"new"}, cut


@pytest.mark.parametrize("offset", range(13))
def test_a_truncation_that_is_cut_at_any_call_loses_nothing_below_and_gives_no_offset_again(offset: int) -> None:
    image = make(FOUR_SEGMENTS, closed=False)
    batches = [place.batch for place in places(image)]
    everything = messages_of(batches)
    below = messages_of([batch for batch in batches if batch.end <= offset])
    end = max(everything) + 1
    assert end == 12
    for cut, disk in cut_at_every_call(image, lambda disk: partial(reopen(disk).upkeep.truncate, offset)):
        log = reopen(disk)
        served = messages(log)
        assert below.items() <= served.items() <= everything.items(), cut
        again = append(log, b"new")
        log.flush()
        assert again >= end, cut
        log.upkeep.truncate(offset)
        assert messages(log) == below, cut
        newest = append(log, b"newest")
        log.flush()
        assert newest > again, cut
        log = reopen(disk.power_cut())
        assert messages(log) == {**below, newest: b"newest"}, cut
        assert not log.verify().damage, cut


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_directory", "remove", "rename"])
def test_a_truncation_that_fails_at_any_call_leaves_a_sound_log_that_goes_on(call: str, after: int) -> None:
    image = make(FOUR_SEGMENTS, closed=False)
    batches = [place.batch for place in places(image)]
    below = messages_of([batch for batch in batches if batch.end <= 3])
    everything = messages_of(batches)
    disk = disk_with(image)
    log = reopen(disk)
    disk.fail(call, errno.EIO, after=after)
    with contextlib.suppress(OSError, DiskError):
        log.upkeep.truncate(3)
    disk.heal()
    for value in (b"new", LARGE, b"newer"):
        if log.state is LogState.OPEN:
            everything[append(log, value)] = value
            log.flush()
    disk.kill()
    log = reopen(disk)
    assert below.items() <= messages(log).items() <= everything.items()
    assert [str(damage) for damage in log.verify().damage] == []


@pytest.mark.parametrize("offset", range(1, 6))
def test_a_truncation_of_what_is_not_synced_yet_that_is_cut_at_any_call_leaves_a_sound_log(offset: int) -> None:
    given = {number: b"%d" % number * 99 for number in range(6)}

    def truncation(disk: FaultyFiles) -> Callable[[], object]:
        log = reopen(disk, FLUSH)
        append(log, given[0])
        log.flush()
        for number in range(1, 6):
            append(log, given[number])
        write_only(log)
        assert messages(log) == given
        return partial(log.upkeep.truncate, offset)

    for cut, disk in cut_at_every_call({}, truncation):
        log = reopen(disk, FLUSH)
        served = messages(log)
        assert served[0] == given[0], cut
        assert served.items() <= given.items(), cut
        assert log.end > max(given), cut
        assert not log.verify().damage, cut


def write_only(log: Log) -> None:
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)


@pytest.mark.parametrize("tombstone_ms", [0, 1000], ids=["old tombstones", "young tombstones"])
def test_a_compaction_that_is_cut_at_any_call_keeps_the_latest_of_each_key_at_its_offset(tombstone_ms: int) -> None:
    policy = Policy(segment_bytes=4096, cleanup=Cleanup.COMPACT, tombstone_ms=tombstone_ms)
    disk = FaultyFiles()
    log = reopen(disk, policy)
    gone = set()
    for number in range(9):
        values = [b"%d" % number, b"%d" % number * 1500, b"%d none" % number, b"%d gone" % number]
        last = number == 5
        if number <= 5:
            gone.add(append(log, *values, keys=[b"a", b"b", None, b"gone"], tombstones=[False, False, False, last]) + 3)
        else:
            append(log, *values[:3], keys=[b"a", b"b", None])
        log.flush()
    assert len(log.segments) > 4
    tombstone = max(gone)
    image = image_of(disk)
    everything = messages(log)
    log.upkeep.compact()
    compacted = messages(log)
    assert compacted.keys() & gone == (set() if tombstone_ms == 0 else {tombstone})
    latest = messages_of([places(image)[-1].batch])
    keyless = {offset: value for offset, value in everything.items() if value.endswith(b"none")}
    assert latest.items() | keyless.items() <= compacted.items()

    for cut, disk in cut_at_every_call(image, lambda disk: reopen(disk, policy).upkeep.compact):
        log = reopen(disk, policy)
        served = messages(log)
        assert compacted.items() <= served.items() <= everything.items(), cut
        assert tombstone in served or not gone & served.keys(), f"{cut}: a deleted key came back"
        log.upkeep.compact()
        assert messages(log) == compacted, cut
        log = reopen(disk.power_cut(), policy)
        assert messages(log) == compacted, cut
        assert not log.verify().damage, cut


def test_a_retention_that_is_cut_at_any_call_drops_the_oldest_first() -> None:
    policy = Policy(segment_bytes=4096, retain_bytes=9000)
    image = make([[[b"%d" % number * 500]] for number in range(40)], closed=True)
    log = reopen(disk_with(image), policy)
    everything = messages(log)
    assert log.upkeep.retain() > 2
    retained = messages(log)
    for cut, disk in cut_at_every_call(image, lambda disk: reopen(disk, policy).upkeep.retain):
        log = reopen(disk, policy)
        served = messages(log)
        assert served == {offset: value for offset, value in everything.items() if offset >= log.start}, cut
        assert retained.items() <= served.items(), cut
        log.upkeep.retain()
        log = reopen(disk.power_cut(), policy)
        assert messages(log) == retained, cut
        assert not log.verify().damage, cut


# A sync that failed.


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", [FSYNC, FLUSH], ids=["fsync", "flush"])
@pytest.mark.parametrize("value", [b"small", LARGE], ids=["round", "roll"])
def test_what_is_served_after_a_failed_sync_and_a_restart_is_there_for_good(
    policy: Policy, value: bytes, seed: int
) -> None:
    disk = FaultyFiles(seed=seed)
    log = reopen(disk, policy)
    append(log, b"first")
    log.flush()
    told: list[PenstockError | None] = []
    log.append(encode([value], timestamp=TIMESTAMP), outcome=Outcome(told.append))
    append(log, b"with it")
    disk.fail("sync", errno.EIO, path_suffix=log_name(0))

    log.flush()

    assert log.state is LogState.FAILED
    assert [type(error) for error in told] == [LogFailed if policy is FSYNC or value is LARGE else type(None)]
    with pytest.raises(LogFailed, match=rf"{log_name(0)}: fsync failed: {os.strerror(errno.EIO)}"):
        append(log, b"refused")
    log.flush()
    committed = messages(log)
    assert committed[0] == b"first"
    assert log.committed == len(committed)

    disk.kill()
    log = reopen(disk, policy)
    served = messages(log)
    assert committed.items() <= served.items()
    served[append(log, b"second")] = b"second"
    log.flush()
    log = reopen(disk.power_cut(), policy)
    assert messages(log) == served
    assert b"refused" not in served.values()


@pytest.mark.parametrize("seed", range(20))
def test_a_recovery_whose_sync_fails_is_not_over(seed: int) -> None:
    disk = FaultyFiles(seed=seed)
    log = reopen(disk)
    for values in SMALL[0]:
        append(log, *values)
    write_only(log)
    disk.kill()
    disk.fail("sync", errno.EIO, path_suffix=".log")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reopen(disk)
    disk.kill()
    served = messages(reopen(disk))
    assert served
    assert messages(reopen(disk.power_cut())) == served


# Offsets under `flush`, where readers see what a power cut can take.


def test_after_a_clean_stop_offsets_go_on_without_a_jump() -> None:
    image = make(SMALL, policy=FLUSH, closed=True)
    log = reopen(disk_with(image), FLUSH)
    assert append(log, b"new") == len(messages_of([place.batch for place in places(image)]))


def test_a_sync_of_a_later_write_also_makes_the_reservation_durable() -> None:
    log = reopen(FaultyFiles(), FLUSH)
    append(log, b"a")
    write_only(log)
    append(log, b"b")
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    sync = write.sync()
    log.flusher.finish_write(write)
    log.flusher.finish_sync(sync, None)
    append(log, b"c")
    write_only(log)
    assert messages(log) == {0: b"a", 1: b"b", 2: b"c"}


@pytest.mark.parametrize("rolls", [False, True], ids=["one segment", "rolls"])
def test_no_offset_that_a_reader_saw_is_given_out_again_wherever_the_power_goes(rolls: bool) -> None:
    lives: list[dict[int, bytes]] = []

    def work(disk: FaultyFiles) -> Callable[[], object]:
        lives.append({})
        return partial(live, disk, lives[-1])

    def live(disk: FaultyFiles, seen: dict[int, bytes]) -> None:
        """Append and read, with a sync after every third write."""
        clock = ManualClock()
        log = open_log(DIRECTORY, files=disk, clock=clock, policy=FLUSH)
        seen.update(messages(log))
        for number in range(6):
            append(log, b"%d/%d" % (len(lives), number))
            append(log, b"%d/%d" % (len(lives), number) * (400 if rolls else 1))
            if number % 3 == 2:
                log.flush()
            else:
                write_only(log)
            seen.update(messages(log))

    cuts = 0
    for cut, disk in cut_at_every_call({}, work):
        seen = lives[-1]
        log = reopen(disk, FLUSH)
        served = messages(log)
        assert all(served.get(offset, value) == value for offset, value in seen.items()), cut
        if seen:
            cuts += 1
            assert log.end > RESERVE_AHEAD, cut
        # A second life, which ends as suddenly, must not collide with the first.
        later: dict[int, bytes] = {}
        live(disk, later)
        assert all(later.get(offset, value) == value for offset, value in seen.items()), cut
        assert served.items() <= later.items(), cut
        log = reopen(disk.power_cut(), FLUSH)
        assert log.end > max(later), cut
        assert messages(log).items() <= later.items(), cut
        assert not log.verify().damage, cut
    assert cuts >= 20


def test_a_roll_keeps_the_reservation() -> None:
    disk = FaultyFiles()
    log = reopen(disk, FLUSH)
    append(log, b"first")
    log.flush()
    for _ in range(5):
        append(log, LARGE)
        log.flush()
    image = image_of(disk)
    last = places(image)[-1].name
    assert last == log_name(5)
    head = next(place for place in places(image) if place.name == last)
    assert head.batch.control().reserved >= RESERVE_AHEAD
    # Even if nothing of the new segment but its head is left.
    log = reopen(disk_with({**image, last: image[last][: head.stop]}), FLUSH)
    assert log.end == head.batch.control().reserved


def test_a_torn_first_round_behind_a_jump_of_offsets_is_cut_off() -> None:
    image = extend(make([[[b"a"]]], policy=FLUSH, closed=False), [[[b"b"], [b"c"]]], policy=FLUSH, closed=False)
    everything = places(image)
    assert everything[-1].batch.base_offset > RESERVE_AHEAD
    before = [place for place in everything if place.batch.base_offset < RESERVE_AHEAD]
    content = image[log_name(0)]
    for torn in everything[len(before) :]:
        # The disk wrote what is behind it first, and then the power went.
        zeros = content[: torn.start] + bytes(torn.stop - torn.start) + content[torn.stop :]
        log = reopen(disk_with({log_name(0): zeros}), FLUSH)
        assert messages(log) == messages_of([place.batch for place in everything if place.start < torn.start])
