"""How the positions of groups are stored: an ack costs a few bytes, however much is pending."""

from __future__ import annotations

import asyncio
import errno
import json
from random import Random

import pytest

from penstock.broker.group import Group
from penstock.broker.start import Start
from penstock.errors import AppendFailed, PenstockError
from penstock.log.log import Log
from penstock.log.policy import Cleanup, Policy
from penstock.outcome import Outcome
from penstock.store import maintenance
from penstock.store import store as stores
from penstock.store.meta import Change, Meta
from penstock.store.state import STATE_TOPIC, Addition, StoreState
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import DATA, SECOND, Life, Recorder, each_cut, in_loop

PLACE = (2, 0)  # the first topic of a broker is its own


async def ack(life: Life, group: Group, *offsets: int) -> None:
    """Acknowledge, and wait until it counts; without `settle`, which takes longer than the ack."""
    saved: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
    assert not group.ack_many(PLACE, offsets, Outcome(saved.set_result))

    async def wait() -> None:
        error = await saved
        if error is not None:
            raise error

    await life.do(wait())


async def fill(life: Life, count: int) -> None:
    await life.do(life.broker.changes.create(b"orders", policy=Policy(ack_deadline_ms=10**9)))
    assert life.partition(b"orders").topic_id == PLACE[0]
    await life.do(life.broker.groups.create(b"g", b"orders", start=Start.EARLIEST))
    await life.stored(b"orders", *(b"%d" % number for number in range(count)))


def state_log(life: Life) -> Log:
    return life.store.log(STATE_TOPIC)


def live_bytes(state: StoreState) -> int:
    return sum(len(json.dumps(value)) for kind in ("position", "position+") for _, value in state.items(kind))


@in_loop
async def test_acks_in_random_order_cost_a_few_bytes_each() -> None:
    disk = FaultyFiles()
    order = list(range(10_000))
    Random(13).shuffle(order)
    async with Life(disk) as life:
        await fill(life, len(order))
        group, _ = await life.join(b"g", b"orders", Recorder(), buffer=10_000)
        assert len(group.positions[PLACE].inflight) == 10_000
        before, largest = state_log(life).flusher.stored_bytes, 0
        for count, offset in enumerate(order[:3000]):
            await ack(life, group, offset)
            if count % 100 == 0:
                largest = max(largest, live_bytes(life.store.state))
        written = state_log(life).flusher.stored_bytes - before
        assert written < 3000 * 600, f"{written / 3000:.0f} bytes for each ack"
        assert largest < 100_000, "of one position and its changes"
        assert len(life.store.state.unprojected()[0]) < 2000, "only the latest of each key is kept"
        await life.kill()
    async with Life(disk) as life:
        sink = Recorder()
        await life.join(b"g", b"orders", sink, buffer=10_000)
        assert [message.offset for message in sink.got] == sorted(order[3000:])


@in_loop
async def test_the_state_topic_is_compacted_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Policy(cleanup=Cleanup.COMPACT, segment_bytes=16 << 10, tombstone_ms=0)
    monkeypatch.setattr(stores, "_STATE_POLICY", small)
    monkeypatch.setattr(maintenance, "_STATE_GROWTH_BYTES", 32 << 10)
    async with Life(FaultyFiles(), upkeep_ms=10**9) as life:
        log = state_log(life)
        for number in range(2000):
            await life.store.write_state([Change("test", str(number % 10), {"text": "x" * 100, "number": number})])
        assert log.flusher.stored_bytes > 500_000
        assert sum(segment.size for segment in log.segments) < 250_000, "what is superseded is gone"


@in_loop
async def test_acks_survive_a_power_cut_at_any_call_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With changes, whole positions, segments that are sealed and compacted, and messages that fail in between."""
    small = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096, tombstone_ms=0)
    monkeypatch.setattr(stores, "_STATE_POLICY", small)
    monkeypatch.setattr(maintenance, "_STATE_GROWTH_BYTES", 2048)
    order = list(range(60))
    Random(7).shuffle(order)
    acked: set[int] = set()
    tried: set[int] = set()
    written: set[str] = set()

    async def prepare(disk: FaultyFiles, clock: ManualClock) -> None:
        async with Life(disk, clock=clock) as life:
            await fill(life, len(order))
        acked.clear()
        tried.clear()

    async def work(life: Life) -> None:
        group, _ = await life.join(b"g", b"orders", Recorder(), buffer=100)
        for at in range(0, 24, 2):
            tried.update(order[at : at + 2])
            await ack(life, group, *order[at : at + 2])
            acked.update(order[at : at + 2])
            group.nack(PLACE, order[-1 - at], at * SECOND)
            written.update(kind for kind in ("position", "position+") if life.store.state.items(kind))

    async for disk, clock, cut in each_cut(prepare, work):
        async with Life(disk, clock=clock) as life:
            sink = Recorder()
            await life.join(b"g", b"orders", sink, buffer=100)
            await life.advance(100 * SECOND)
            got = sorted(message.offset for message in sink.got)
            assert not acked & set(got), f"cut {cut}: acknowledged messages came again"
            assert set(order) - tried <= set(got), f"cut {cut}: messages that nobody acknowledged are lost"
            assert len(set(got)) == len(got), f"cut {cut}"
    assert written == {"position", "position+"}


@in_loop
async def test_changes_that_could_not_be_written_are_in_the_next_write() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await fill(life, 100)
        group, _ = await life.join(b"g", b"orders", Recorder(), buffer=100)
        await ack(life, group, *range(1, 100, 2))  # so that a whole position is larger than a change
        await ack(life, group, 10)
        await ack(life, group, 20)
        assert life.store.state.additions("position", "g/2/0")
        disk.fail("write", errno.ENOSPC)
        with pytest.raises(AppendFailed):
            await ack(life, group, 30)
        await ack(life, group, 40)
        await life.kill()
    async with Life(disk) as life:
        sink = Recorder()
        await life.join(b"g", b"orders", sink, buffer=100)
        assert {message.offset for message in sink.got} == {*range(0, 100, 2)} - {10, 20, 30, 40}


@in_loop
async def test_a_position_in_the_old_form_is_read() -> None:
    disk = FaultyFiles()
    old = {"floor": 1, "next": 6, "pending": [[1, 1, 0], [3, 2, 0]], "dead": [], "buried": 0, "burying": None}
    async with Life(disk) as life:
        await fill(life, 8)
        await life.do(life.store.write_state([Change("position", "g/2/0", old)]))
        await life.kill()
    async with Life(disk) as life:
        sink = Recorder()
        await life.join(b"g", b"orders", sink)
        assert [(message.offset, message.attempts) for message in sink.got] == [(1, 2), (3, 3), (6, 1), (7, 1)]


@in_loop
async def test_a_deleted_group_leaves_nothing_behind() -> None:
    async with Life(FaultyFiles()) as life:
        await fill(life, 100)
        group, _ = await life.join(b"g", b"orders", Recorder(), buffer=100)
        await ack(life, group, *range(1, 100, 2))  # so that a whole position is larger than a change
        await ack(life, group, 10)
        await ack(life, group, 20)
        assert life.store.state.additions("position", "g/2/0")
        group.ack(PLACE, 30, Outcome())  # on its way when the group is deleted
        await life.do(life.broker.groups.delete(b"g"))
        group.ack(PLACE, 40, Outcome())
        await life.settle()
        assert not life.store.state.items("position")
        assert not life.store.state.items("position+")


@in_loop
async def test_a_group_saves_after_a_topic_was_deleted_while_it_saved() -> None:
    async with Life(FaultyFiles()) as life:
        await fill(life, 3)
        await life.do(life.broker.groups.create(b"all", b">", start=Start.EARLIEST))
        sink = Recorder()
        group, _ = await life.join(b"all", b">", sink)
        answers: list[PenstockError | None] = []
        group.ack(PLACE, 1, Outcome(answers.append))
        group.detach(life.partition(b"orders"))
        await life.settle()
        assert answers == [None]
        await life.stored(b"payments", b"1")
        await life.ack(group, sink.got[-1])


# The state itself.


def opened(disk: FaultyFiles, meta: Meta) -> Store:
    return Store(DATA, files=disk, clock=ManualClock(), meta=meta)


def write(store: Store, *changes: Change | Addition) -> None:
    store.state.write(changes)
    store.flush()


def test_additions_are_read_in_order_until_their_value_is_set_again() -> None:
    disk = FaultyFiles()
    store = opened(disk, Meta(None))
    write(store, Change("kind", "a/b", "whole"))
    for number in range(12):
        write(store, Addition("kind", "a/b", number))
    write(store, Addition("kind", "a", "another key"))
    disk.kill()
    store._meta.close()
    store = opened(disk, Meta(None))
    assert store.state.get("kind", "a/b") == "whole"
    assert store.state.additions("kind", "a/b") == list(range(12))
    write(store, Addition("kind", "a/b", 12))
    assert store.state.additions("kind", "a/b") == list(range(13))
    write(store, Change("kind", "a/b", "anew"))
    assert store.state.additions("kind", "a/b") == []
    write(store, Addition("kind", "a/b", "first"), Addition("kind", "a/b", "second"))
    assert store.state.additions("kind", "a/b") == ["first", "second"]
    write(store, Change("kind", "a/b", None))
    store.close()
    with opened(disk, Meta(None)) as store:
        assert store.state.items("kind") == []
        assert store.state.items("kind+") == [("a/1", "another key")]


def test_additions_made_while_their_value_is_written_are_kept() -> None:
    with opened(FaultyFiles(), Meta(None)) as store:
        write(store, Change("kind", "a", 0), Addition("kind", "a", 1), Addition("kind", "a", 2))
        for change in (
            Change("kind", "a", 10),
            Addition("kind", "a", 11),
            Change("kind", "a", 20),
            Change("kind", "a", 30),
            Addition("kind", "a", 31),
        ):
            store.state.write([change])
        store.flush()
        assert (store.state.get("kind", "a"), store.state.additions("kind", "a")) == (30, [31])
        write(store, Addition("kind", "a", 32))
        write(store, Change("kind", "a", 40))
        assert store.state.items("kind+") == []


def test_a_value_that_cannot_be_written_leaves_its_additions() -> None:
    disk = FaultyFiles()
    with opened(disk, Meta(None)) as store:
        write(store, Change("kind", "a", 0), Addition("kind", "a", 1))
        disk.fail("write", errno.ENOSPC)
        write(store, Change("kind", "a", 10), Addition("kind", "a", 11))
        assert (store.state.get("kind", "a"), store.state.additions("kind", "a")) == (0, [1])
        write(store, Addition("kind", "a", 2))
        assert store.state.additions("kind", "a") == [1, 2]
        write(store, Change("kind", "a", 20))
        assert (store.state.get("kind", "a"), store.state.items("kind+")) == (20, [])


def test_only_the_latest_change_of_a_key_waits_for_the_projection() -> None:
    with opened(FaultyFiles(), Meta(None)) as store:
        store.upkeep()
        for number in range(100):
            write(store, Change("kind", "a", number), Change("kind", "b", number))
        changes, offset = store.state.unprojected()
        assert changes == [Change("kind", "a", 99), Change("kind", "b", 99)]
        # While another thread writes these, one of them changes again.
        write(store, Change("kind", "b", 100))
        store._meta.apply(changes, offset)
        store.state.projected(changes)
        assert store.state.unprojected()[0] == [Change("kind", "b", 100)]
        store.upkeep()
        assert store.state.unprojected()[0] == []
        assert [change for change in store._meta.state() if change.kind == "kind"] == [
            Change("kind", "a", 99),
            Change("kind", "b", 100),
        ]
