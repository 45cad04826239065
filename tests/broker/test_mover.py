"""Moving messages, in decisions and batches of limited size; one target does not hold up the others."""

from __future__ import annotations

import errno

import pytest

from penstock.broker import changes, delay, moves, sources
from penstock.broker.broker import Settings
from penstock.broker.delay import Delays
from penstock.broker.partition import Partition
from penstock.broker.sources import source_number
from penstock.log.policy import Policy
from penstock.model.run import Run
from penstock.store.meta import Change
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, each_cut, in_loop, refuse, run_of
from tests.support.sampling import covered

HOUR = 3600 * SECOND
YEAR = 365 * 24 * HOUR
PROBLEM = "delayed messages"


def delays_of(life: Life) -> Delays:
    assert life.broker.delays is not None
    return life.broker.delays


def problem(life: Life) -> str | None:
    return life.store.health.problems.get(PROBLEM)


async def decide(life: Life, number: int, target: bytes, offsets: list[int]) -> None:
    """Write a decision as an older version did, whatever its size."""
    name, place = f"delayed {life.partition(b'$delayed').topic_id}", life.partition(target)
    value = [[place.topic_id, place.number, offsets]]
    await life.do(life.store.write_state([Change("moved", f"{name}/{number}", value)]))


# Limited in bytes


@in_loop
async def test_a_decision_covers_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DECISION_BYTES_MAX", 1000)
    async with Life(FaultyFiles()) as life:
        values = [bytes([number]) * 300 for number in range(10)] + [bytes(5000), b"last"]
        await life.stored(b"orders", *values, headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == values
        decided = [offsets for _, [[_, _, offsets]] in life.store.state.items("moved")]
        assert decided == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10], [11]]


@in_loop
async def test_a_decision_covers_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DECISION_MESSAGES_MAX", 7)
    async with Life(FaultyFiles()) as life:
        values = [b"%d" % number for number in range(20)]
        await life.stored(b"orders", *values, headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders") == values
        assert [len(offsets) for _, [[_, _, offsets]] in life.store.state.items("moved")] == [7, 7, 6]


@in_loop
async def test_an_old_decision_that_is_larger_than_a_batch_is_completed_in_parts() -> None:
    disk = FaultyFiles()
    values = [bytes([number]) * 1_000_000 for number in range(70)]
    async with Life(disk) as life:
        await life.stored(b"orders", b"now")
        for value in values:
            await life.publish(b"orders", value, headers=b"Delay: 5s\r\n")
        await decide(life, 1, b"orders", list(range(70)))
    async with Life(disk) as life:
        await life.settle()
        assert life.in_log(b"orders") == [b"now", *values]
        assert problem(life) is None


async def prepare_old_decision(disk: FaultyFiles, clock: ManualClock) -> None:
    async with Life(disk, clock=clock) as life:
        await life.stored(b"orders", b"now")
        for number in range(5):
            await life.stored(b"orders", b"%d" % number, headers=b"Delay: 5s\r\n")
        await decide(life, 1, b"orders", [3, 1, 0, 2])


async def complete(life: Life) -> None:
    await life.settle()
    await life.advance(5 * SECOND)


@in_loop
async def test_parts_are_appended_once_wherever_the_power_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    some = 0
    async for disk, clock, cut in each_cut(prepare_old_decision, complete):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock) as life:
            some += 1 < len(life.in_log(b"orders")) < 5
            # It does not matter how the rest is cut into batches.
            monkeypatch.setattr(sources, "PART_BYTES", 1 << 20)
            await life.advance(HOUR)
            assert life.in_log(b"orders") == [b"now", b"3", b"1", b"0", b"2", b"4"]
            await life.kill()
        async with Life(disk, clock=clock) as life:
            await life.advance(HOUR)
            assert life.in_log(b"orders") == [b"now", b"3", b"1", b"0", b"2", b"4"]
        monkeypatch.setattr(sources, "PART_BYTES", 1)
    assert covered(some)


@in_loop
async def test_parts_are_appended_once_though_messages_are_gone_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 2000)
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    disk = FaultyFiles()
    values = [b"%d" % number * 900 for number in range(10)]
    async with Life(disk) as life:
        await life.stored(b"orders", b"now")
        for value in values:
            await life.stored(b"orders", value, headers=b"Delay: 5s\r\n")
        await decide(life, 1, b"orders", [9, 0, 4, 8, 1, 5, 7, 2, 6, 3])
        disk.fail("write", errno.ENOSPC, after=3, times=99, path_suffix=str(life.log(b"orders").segments[0].path))
        await life.kill()
    async with Life(disk) as life:
        await life.settle()
        arrived = [values[9], values[0], values[4], values[8]]
        assert life.in_log(b"orders") == [b"now", *arrived]
        assert problem(life) is not None
        log = life.log(b"$delayed")
        log.upkeep.unneeded = log.segments[1].base
        assert log.upkeep.retain() == 1
        first = log.start
        assert first > 1
        disk.heal()
        await life.advance(HOUR)
        left = [offset for offset in (1, 5, 7, 2, 6, 3) if offset >= first]
        assert life.in_log(b"orders") == [b"now", *arrived, *(values[offset] for offset in left)]
        assert problem(life) is None


@in_loop
async def test_what_an_older_version_completed_is_not_appended_again() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"now")
        for value in (b"a", b"b"):
            await life.stored(b"orders", value, headers=b"Delay: 5s\r\n")
        await decide(life, 1, b"orders", [0, 1])
        target = life.partition(b"orders")
        whole = source_number("moved", f"delayed {life.partition(b'$delayed').topic_id}")
        target.append_batch(run_of(b"orders", b"a", b"b").encode(b"orders", 0), whole, 1, None)
        await life.settle()
    async with Life(disk) as life:
        await life.stored(b"orders", b"c", headers=b"Delay: 5s\r\n")
        await life.advance(HOUR)
        assert life.in_log(b"orders") == [b"now", b"a", b"b", b"c"]


@in_loop
async def test_what_is_decided_for_a_topic_that_is_refused_is_not_lost() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"now")
        await life.stored(b"orders", b"a", headers=b"Delay: 5s\r\n")
        refused = life.log(b"orders").segments[0].path
        await decide(life, 1, b"orders", [0])
        await life.kill()
    stray = refuse(disk, refused)
    async with Life(disk) as life:
        assert life.broker.refused == ["orders"]
        await life.advance(HOUR)
        assert problem(life) is not None
    disk.remove(stray)
    async with Life(disk) as life:
        await life.advance(HOUR)
        assert life.in_log(b"orders") == [b"now", b"a"]


@in_loop
async def test_moves_are_folded_though_a_target_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_MOVES_MAX", 4)
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"full", b"now")
        disk.fail("write", errno.ENOSPC, times=999, path_suffix=str(life.log(b"full").segments[0].path))
        await life.stored(b"full", b"a", headers=b"Delay: 1s\r\n")
        await life.advance(SECOND)
        for number in range(20):
            await life.stored(b"orders", b"%d" % number, headers=b"Delay: 1s\r\n")
            await life.advance(SECOND)
        assert len(life.store.state.items("moved")) < 8
        await life.kill()
    disk.heal()
    async with Life(disk) as life:
        await life.advance(HOUR)
        assert life.in_log(b"full") == [b"now", b"a"]
        assert life.in_log(b"orders") == [b"%d" % number for number in range(20)]


# One target does not hold up the others


@in_loop
async def test_a_target_that_failed_delays_only_its_own() -> None:
    disk = FaultyFiles()
    clock = ManualClock()
    async with Life(disk, clock=clock) as life:
        for name in (b"orders", b"failed"):
            await life.stored(name, b"now")
        disk.fail("sync", errno.EIO, path_suffix=str(life.log(b"failed").segments[0].path))
        await life.publish(b"failed", b"lost")
        await life.settle()
        for number in range(5):
            for name in (b"failed", b"orders"):
                await life.stored(name, b"%d" % number, headers=b"Delay: %ds\r\n" % (number + 1))
        for _ in range(8):
            await life.advance(SECOND)
        assert life.in_log(b"orders")[1:] == [b"%d" % number for number in range(5)]
        text = problem(life)
        assert text is not None
        assert text.startswith("5 that are due")
        await life.kill()
    async with Life(disk, clock=clock) as life:
        await life.advance(HOUR)
        assert [value for value in life.in_log(b"failed") if value not in (b"now", b"lost")] == [
            b"%d" % number for number in range(5)
        ]
        assert problem(life) is None


@in_loop
async def test_a_target_that_a_transaction_holds_does_not_hold_up_the_others() -> None:
    async with Life(FaultyFiles()) as life:
        for name in (b"held", b"orders"):
            await life.stored(name, b"now")
        life.log(b"held").hold()
        for name in (b"held", b"orders"):
            await life.stored(name, b"a", headers=b"Delay: 1s\r\n")
            await life.stored(name, b"b", headers=b"Delay: 3s\r\n")
        for _ in range(4):
            await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"now", b"a", b"b"]
        assert life.in_log(b"held") == [b"now"]
        life.log(b"held").release()
        await life.settle()
        assert life.in_log(b"held") == [b"now", b"a", b"b"]


class Bug(Exception):
    pass


@in_loop
async def test_an_unexpected_error_delays_only_the_message_that_causes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:
        route = delays_of(life)._mover._route

        async def broken(run: Run) -> Partition:
            if run.subjects[0] == b"bad":
                raise Bug
            return await route(run)

        delays_of(life)._mover._route = broken
        for name in (b"bad", b"orders"):
            await life.stored(name, b"a", headers=b"Delay: 1s\r\n")
        await life.advance(SECOND)
        assert (life.in_log(b"orders"), life.in_log(b"bad")) == ([b"a"], [])
        assert life.store.health.faults["mover"] == 1
        assert problem(life) is not None
        delays_of(life)._mover._route = route
        await life.advance(SECOND)
        assert life.in_log(b"bad") == [b"a"]
        assert problem(life) is None


@pytest.mark.parametrize("step", ["_look", "_move", "_trim"])
@in_loop
async def test_an_unexpected_error_does_not_end_the_timer(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:
        with monkeypatch.context() as patched:

            async def broken() -> None:
                raise Bug

            broken.__name__ = step
            patched.setattr(delays_of(life), step, broken)
            await life.stored(b"orders", b"a", headers=b"Delay: 1s\r\n")
            await life.advance(SECOND)
            assert life.store.health.faults["delays"]
            assert problem(life) is not None
        await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"a"]
        assert problem(life) is None


@in_loop
async def test_damage_delays_only_the_messages_that_it_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    disk = FaultyFiles()
    values = [b"%d" % number * 900 for number in range(9)]
    async with Life(disk) as life:
        for value in values:
            await life.stored(b"orders", value, headers=b"Delay: 5s\r\n")
        damaged = life.log(b"$delayed").segments[0].path
    content = disk.content(damaged)
    other = bytearray(content)
    other[len(other) // 2] ^= 1
    disk.set_content(damaged, other)
    async with Life(disk) as life:
        await life.advance(5 * SECOND)
        arrived = life.in_log(b"orders")
        assert 5 < len(arrived) < 9
        assert "restore" in life.store.health.problems["delayed messages, damaged"]
        assert life.broker.damage()
        life.store.upkeep()
    disk.set_content(damaged, content)
    async with Life(disk) as life:
        await life.advance(5 * SECOND)
        assert sorted(life.in_log(b"orders")) == values
        assert life.store.health.problems == {}
        assert life.broker.damage() == []


# What was delivered is removed


def stored_bytes(life: Life) -> int:
    life.store.upkeep()
    return sum(segment.size for segment in life.log(b"$delayed").segments)


@in_loop
async def test_upkeep_removes_what_was_delivered() -> None:
    disk = FaultyFiles()
    value = bytes(1_000_000)
    async with Life(disk) as life:
        for _ in range(30):
            await life.publish(b"orders", value, headers=b"Delay: 5s\r\n")
        assert stored_bytes(life) > 30_000_000
        await life.advance(5 * SECOND)
        assert len(life.in_log(b"orders")) == 30
        assert stored_bytes(life) < 8 << 20
    async with Life(disk) as life:
        await life.settle()
        await life.stored(b"orders", b"b", headers=b"Delay: 5s\r\n")
        await life.advance(5 * SECOND)
        assert life.in_log(b"orders")[30:] == [b"b"]


@in_loop
async def test_offsets_without_a_message_do_not_keep_what_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    disk = FaultyFiles()
    async with Life(disk) as life:
        for number in range(20):
            await life.stored(b"orders", b"%d" % number * 400, headers=b"Delay: %ds\r\n" % (5 if number < 10 else 50))
        log = life.log(b"$delayed")
        # Some are gone before they are delivered, and one is no delayed message.
        log.upkeep.unneeded = log.segments[1].base
        assert log.upkeep.retain() == 1
        life.partition(b"$delayed").append(run_of(b"orders", b"not delayed"), None)
        await life.settle()
        await life.advance(5 * SECOND)
        await life.kill()
    async with Life(disk) as life:
        await life.advance(50 * SECOND)
        delays = delays_of(life)
        assert delays._mover.moves.floor == life.partition(b"$delayed").end
        assert delays._mover.moves.range_count == 0
        assert stored_bytes(life) <= 4096
        assert len(delays) == 0


async def prepare_years(disk: FaultyFiles, clock: ManualClock) -> None:
    async with Life(disk, clock=clock) as life:
        for number in range(24):
            header = b"Delay: 300d\r\n" if number % 8 == 0 else b"Delay: 1s\r\n"
            await life.stored(b"orders", b"%d" % number * 200, headers=header)


async def let_pass(life: Life) -> None:
    await life.advance(SECOND)


@in_loop
async def test_one_that_is_due_in_a_year_does_not_keep_what_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    monkeypatch.setattr(delay, "_SLACK_BYTES", 8192)
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"year", headers=b"Delay: 300d\r\n")
        for number in range(40):
            await life.stored(b"orders", b"%d" % number * 400, headers=b"Delay: 1s\r\n")
            await life.advance(2 * SECOND)
            assert stored_bytes(life) < 16384, number
        assert len(delays_of(life)) == 1
        assert life.in_log(b"orders") == [b"%d" % number * 400 for number in range(40)]
        await life.advance(YEAR)
        assert life.in_log(b"orders")[40:] == [b"year"]


@in_loop
async def test_those_that_are_stored_again_are_delivered_once_wherever_the_power_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "_OWN_POLICY", Policy(segment_bytes=4096))
    monkeypatch.setattr(delay, "_SLACK_BYTES", 0)
    late = [b"%d" % number * 200 for number in range(0, 24, 8)]
    soon = [b"%d" % number * 200 for number in range(24) if number % 8]
    again = 0
    async for disk, clock, cut in each_cut(prepare_years, let_pass):
        print(f"cut {cut}, which is the seed too")
        async with Life(disk, clock=clock) as life:
            await life.advance(SECOND)
            assert life.in_log(b"orders") == soon
            again += life.log(b"$delayed").end > 24
            await life.advance(YEAR)
            assert sorted(life.in_log(b"orders")) == sorted(soon + late)
    assert covered(again)


@in_loop
async def test_topics_of_an_older_version_get_small_segments() -> None:
    disk = FaultyFiles()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "_OWN_POLICY", Policy())
        async with Life(disk) as life:
            await life.stored(b"orders", b"a", headers=b"Delay: 1s\r\n")
            assert life.log(b"$delayed").policy.segment_bytes == 64 << 20
    async with Life(disk, settings=Settings()) as life:
        assert life.log(b"$delayed").policy.segment_bytes == 8 << 20
        await life.advance(SECOND)
        assert life.in_log(b"orders") == [b"a"]
