"""Acknowledgements through restarts, power cuts and full disks: those that were confirmed count."""

from __future__ import annotations

import asyncio
import errno

from penstock.broker.broker import Settings
from penstock.errors import AppendFailed, PenstockError
from penstock.log.policy import Policy
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of
from tests.support.ends import DEADLINE, End, attempts, ends

# ---- shared: restarts


@ends
@in_loop
async def test_what_is_acknowledged_never_comes_again_and_everything_else_does(end: End) -> None:
    disk = FaultyFiles()
    acknowledged: set[bytes] = set()
    published = [b"%d" % number for number in range(60)]
    floor = 0
    settings = Settings(policy=Policy(deliveries_max=100))
    for life_number in range(5):
        async with Life(disk, settings=settings) as life:
            ann = Recorder()
            group, _ = await life.join(b"g", b"orders", ann)
            if not life_number:
                await life.stored(b"orders", *published)
            assert set(ann.values) == set(published) - acknowledged
            assert len(ann.values) == len(set(ann.values))
            [position] = group.positions.values()
            assert position.inflight.floor >= floor, "the floor never moves back"
            some = [message for message in ann.got if int(message.value) % 5 == life_number]
            await life.ack(group, *some)
            acknowledged |= {message.value for message in some}
            floor = position.inflight.floor
            disk = await end(life)
    assert acknowledged == set(published)


@ends
@in_loop
async def test_attempts_survive(end: End) -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        await life.advance(DEADLINE)
        await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == [1, 2, 3]
        disk = await end(life)
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.advance(DEADLINE)
        assert [message.attempts for message in ann.got] == [4]
        assert life.in_log(b"DLQ") == [b"a"]


@in_loop
async def test_a_delay_goes_on_after_a_restart() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        group.nack(ann.got[0].place, 0, 10 * SECOND)
        await life.settle()
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert not ann.got
        await life.advance(10 * SECOND)
        assert attempts(ann) == [(b"a", 2)]


@in_loop
async def test_an_acknowledgement_that_is_not_saved_says_so_and_is_saved_when_there_is_room() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await life.settle()
        assert [getattr(answer, "code", None) for answer in answers] == ["APPEND_FAILED"]
        await life.advance(2 * SECOND)
        await life.kill()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert ann.values == [b"b"]


@in_loop
async def test_an_acknowledgement_that_comes_while_another_one_is_refused_by_the_disk_is_answered() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await asyncio.sleep(0)  # its write begins
        assert group.ack(ann.got[1].place, 1, Outcome(answers.append))
        await life.advance(2 * SECOND)
        assert len(answers) == 2


@in_loop
async def test_an_acknowledgement_that_was_refused_and_is_repeated_counts_when_it_is_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        answers: list[PenstockError | None] = []
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        await life.settle()
        assert [type(answer) for answer in answers] == [AppendFailed]
        assert group.ack(ann.got[0].place, 0, Outcome(answers.append))
        assert len(answers) == 1
        await life.settle()
        assert answers[1:] == [None]
        [(_, stored)] = life.store.state.items("position")
        assert stored["floor"] == 1


# ---- between publishing and storing


@in_loop
async def test_a_new_group_gets_what_is_published_after_something_that_could_not_be_stored() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"first")
        path = life.log(b"orders").segments[0].path
        disk.fail("write", errno.ENOSPC, path_suffix=str(path))
        failed = life.offer(run_of(b"orders", b"x", b"y"))
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        assert (await failed).error is not None
        await life.stored(b"orders", b"a", b"b", b"c")
        assert ann.values == [b"a", b"b", b"c"]


@in_loop
async def test_a_new_group_gets_what_is_published_after_a_power_cut_that_took_what_came_before_it() -> None:
    """The group is durable before the messages that were published before it."""
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"first")
        log = life.log(b"orders")
        # The disk is slow with this log: its batches wait.
        log.flusher.begin_write, begin_write = lambda: None, log.flusher.begin_write  # type: ignore[method-assign]
        life.offer(run_of(b"orders", b"x", b"y"))
        assert (log.end, log.committed) == (3, 1)
        await life.do(life.broker.groups.create(b"g", b"orders"))
        log.flusher.begin_write = begin_write  # type: ignore[method-assign]
        life.store.rounds._dirty.clear()
        disk = await life.power_cut()
    async with Life(disk) as life:
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        assert ann.values == [b"a", b"b", b"c"]


# ---- many at once


@in_loop
async def test_of_many_acknowledgements_those_that_cannot_be_are_told_and_the_others_count() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann, buffer=6)
        await life.stored(b"orders", *(b"%d" % number for number in range(10)))
        place = ann.got[0].place
        assert len(ann.take()) == 6
        told: list[PenstockError | None] = []
        assert list(group.ack_many(place, [0, 2, 4, 77], Outcome(told.append))) == [77]
        assert told == []
        await life.settle()
        assert told == [None]
        # It has room again for as many as were done, and no more.
        assert [message.offset for message in ann.take()] == [6, 7, 8]
        assert member.out == 6
        assert group.lag() == 7


@in_loop
async def test_acknowledgements_none_of_which_can_be_are_refused_and_nothing_is_saved() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        place = ann.got[0].place
        told: list[PenstockError | None] = []
        assert list(group.ack_many(place, [5, 6], Outcome(told.append))) == [5, 6]
        assert list(group.ack_many((99, 0), [0], Outcome(told.append))) == [0]
        await life.settle()
        assert told == []
        assert group.lag() == 1


@in_loop
async def test_acknowledgements_that_are_repeated_in_one_breath_are_told_once_and_count_once() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, member = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        place = ann.got[0].place
        told: list[PenstockError | None] = []
        assert not group.ack_many(place, [0, 0, 1], Outcome(told.append))
        await life.settle()
        assert not group.ack_many(place, [0, 1], Outcome(told.append))
        await life.settle()
        assert told == [None, None]
        assert (group.lag(), member.out) == (1, 1)


@in_loop
async def test_many_acknowledgements_that_the_disk_refuses_are_told_so() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a", b"b", b"c")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        told: list[PenstockError | None] = []
        group.ack_many(ann.got[0].place, [0, 1], Outcome(told.append))
        await life.settle()
        [error] = told
        assert isinstance(error, AppendFailed)
