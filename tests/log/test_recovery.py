"""What a log serves after its last segment was cut short or damaged, byte by byte."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from penstock.errors import (
    LogDamaged,
)
from penstock.log.log import Log
from penstock.log.policy import OnDamage, Policy
from penstock.log.segment import log_name
from penstock.testing import FaultyFiles
from tests.support.log_images import (
    DIRECTORY,
    FLUSH,
    FOUR_SEGMENTS,
    FSYNC,
    LARGE,
    MASKS,
    ONE_SEGMENT,
    SMALL,
    TWO_SEGMENTS,
    Image,
    Place,
    Rounds,
    cut_at_every_call,
    disk_with,
    extend,
    flipped,
    image_of,
    make,
    messages_of,
    places,
    read_around,
    reopen,
)
from tests.support.logs import append, messages, open_log
from tests.support.sampling import sampled

# The checksum of a batch's header covers the bytes before this one; the rest is under the producer's.
HEADER_CRC_ENDS: Final = 96


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of recoveries would fill the report, and half the time."""
    caplog.set_level(logging.CRITICAL, "penstock")


# ---- cut short at every byte.


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


# ---- every byte flipped.


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
