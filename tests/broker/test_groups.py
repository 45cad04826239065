"""Groups are created, stored and deleted."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.broker.flow import Flow
from penstock.broker.group_state import Mode
from penstock.broker.member import Member
from penstock.errors import BadSubject, GroupConflict, PenstockError, UnknownGroup
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, Recorder, in_loop
from tests.support.ends import DEADLINE, End, attempts, ends


@in_loop
async def test_a_group_is_what_it_is() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.groups.create(b"g", b"orders"))
        for pattern, mode in ((b"bills", Mode.SHARED), (b"orders", Mode.PARTITIONED)):
            with pytest.raises(GroupConflict):
                await life.join(b"g", pattern, Recorder(), mode=mode)
        with pytest.raises(GroupConflict):
            await life.do(life.broker.groups.create(b"g", b"orders"))
        with pytest.raises(BadSubject):
            await life.do(life.broker.groups.create(b"h", b"or..ders"))
        with pytest.raises(UnknownGroup):
            await life.do(life.broker.groups.delete(b"h"))
        assert [group.name for group in life.broker.groups] == [b"g"]


@in_loop
async def test_two_who_join_a_new_group_at_once_are_in_one_group() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        ann, bob = Recorder(), Recorder()
        members = [Member(b"1", sink, Flow()) for sink in (ann, bob)]
        first, second = await asyncio.gather(*(life.broker.groups.join(b"g", b"orders", member) for member in members))
        assert first is second
        await life.stored(b"orders", b"a", b"b")
        assert (len(ann.got), len(bob.got)) == (1, 1)


@ends
@in_loop
async def test_a_deleted_group_is_forgotten_with_its_positions(end: End) -> None:
    """GR-06"""
    disk = FaultyFiles()
    async with Life(disk) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        await life.ack(group, *ann.got)
        await life.do(life.broker.groups.delete(b"g"))
        await life.stored(b"orders", b"b")
        assert ann.values == [b"a"]
        disk = await end(life)
    async with Life(disk) as life:
        assert not life.broker.groups
        assert life.store.state.items("position") == []
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"c")
        assert ann.values == [b"c"]


@in_loop
async def test_an_acknowledgement_just_before_a_group_is_deleted_leaves_nothing_behind() -> None:
    async with Life(FaultyFiles()) as life:
        ann = Recorder()
        group, _ = await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        assert group.ack(ann.got[0].place, 0, Outcome())
        await life.do(life.broker.groups.delete(b"g"))
        await life.settle()
        assert life.store.state.items("position") == []


@in_loop
async def test_a_group_that_cannot_be_stored_is_not_there() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await life.stored(b"orders", b"old")
        disk.fail("write", errno.ENOSPC, path_suffix="topics/0/0/" + "0" * 20 + ".log")
        with pytest.raises(PenstockError):
            await life.join(b"g", b"orders", Recorder())
        assert not life.broker.groups
        ann = Recorder()
        await life.join(b"g", b"orders", ann)
        await life.stored(b"orders", b"a")
        assert ann.values == [b"a"]


@in_loop
async def test_a_group_without_a_name_is_gone_with_its_last_member() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"old")
        ann = Recorder()
        group, member = await life.join(None, b"orders", ann)
        await life.stored(b"orders", b"a", b"b")
        await life.ack(group, ann.take()[0])
        await life.advance(DEADLINE)
        assert attempts(ann) == [(b"b", 2)]
        life.broker.groups.leave(group, member)
        await life.stored(b"orders", b"c")
        await life.advance(DEADLINE)
        assert len(ann.got) == 1
        assert life.store.state.items("group") == []
        assert not life.partition(b"orders").groups
