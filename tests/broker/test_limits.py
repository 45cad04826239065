"""Limited tables of the broker: groups, subscriptions, and the sources that a partition remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.broker import Settings
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.start import Start
from penstock.errors import BadSubject, TooManyGroups, TooManySources, TooManySubscriptions, TooManyTopics
from penstock.health import Usage
from penstock.log import producers
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, Recorder, in_loop
from tests.support.server import Flux, Serve


@in_loop
async def test_no_more_than_groups_max_are_created() -> None:
    async with Life(FaultyFiles(), settings=Settings(groups_max=2)) as life:
        for name in (b"a", b"b"):
            await life.do(life.broker.groups.create(name, b"orders"))
        with pytest.raises(TooManyGroups, match=r"there are 2 groups, so c is not .*: delete .* server\.groups_max"):
            await life.do(life.broker.groups.create(b"c", b"orders"))
        with pytest.raises(TooManyGroups):
            await life.join(b"c", b"orders", Recorder())
        await life.join(b"a", b"orders", Recorder())
        await life.join(None, b"orders", Recorder())
        assert life.broker.usage()["groups"] == Usage(2, 2)
        await life.do(life.broker.groups.delete(b"a"))
        await life.do(life.broker.groups.create(b"c", b"orders"))


@in_loop
async def test_a_group_name_has_a_limit() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.groups.create(b"n" * 4096, b"orders"))
        with pytest.raises(BadSubject, match="4097 bytes is too long: at most 4096"):
            await life.do(life.broker.groups.create(b"n" * 4097, b"orders"))


@in_loop
async def test_no_more_than_subscriptions_max_are_opened() -> None:
    async with Life(FaultyFiles(), settings=Settings(subscriptions_max=4)) as life:
        sink = Recorder()
        plain, member = life.subscribe(b"orders", sink)
        life.subscribe(b"orders", sink, queue=b"q")
        group, of_group = await life.join(b"g", b"orders", sink)
        alone, without_name = await life.join(None, b"orders", sink)
        assert life.broker.usage()["subscriptions"] == Usage(4, 4)
        with pytest.raises(TooManySubscriptions, match=r"there are 4 .*: end some, or raise server\.subscriptions_max"):
            life.subscribe(b"orders", sink, queue=b"q")
        with pytest.raises(TooManySubscriptions):
            await life.join(b"other", b"orders", sink)
        with pytest.raises(TooManySubscriptions):
            await life.join(None, b"orders", sink)
        assert [group.name for group in life.broker.groups] == [b"g"], "a group that nobody can join is not made"
        life.broker.subscriptions.unsubscribe(plain, member)
        life.broker.groups.leave(group, of_group)
        life.broker.groups.leave(group, of_group)
        life.broker.groups.leave(alone, without_name)
        assert life.broker.usage()["subscriptions"] == Usage(1, 4)
        await life.join(b"other", b"orders", sink, mode=Mode.PARTITIONED)


@in_loop
async def test_names_of_subscriptions_are_limited_in_bytes() -> None:
    async with Life(FaultyFiles(), settings=Settings(subscriptions_max=1000)) as life:
        sink = Recorder()
        opened = [life.subscribe(b"orders.%d.%b" % (number, b"x" * 4000), sink) for number in range(200)]
        used, limit = life.broker.usage()["subscription_name_bytes"]
        assert 200 * 4000 < used <= limit
        opened += [life.subscribe(b"a.%d" % number, sink, queue=b"q" * 4000) for number in range(50)]
        opened.append(life.subscribe(b"a", sink, sid=b"1" * 43_000))
        with pytest.raises(TooManySubscriptions, match=r"\d+ bytes, and 1048576 are the most: use shorter subjects"):
            life.subscribe(b"b", sink, queue=b"q" * 4000)
        for subscription, member in opened:
            life.broker.subscriptions.unsubscribe(subscription, member)
        assert life.broker.usage()["subscription_name_bytes"] == Usage(0, 1 << 20)


@in_loop
async def test_positions_of_groups_are_limited_in_bytes() -> None:
    async with Life(FaultyFiles(), settings=Settings(position_bytes_max=100_000)) as life:
        await life.do(life.broker.changes.create(b"orders", partitions=10))
        await life.do(life.broker.groups.create(b"a", b"orders"))
        await life.do(life.broker.groups.create(b"b", b">"))
        used = life.broker.usage()["position_bytes"].used
        assert 20 * 3000 < used < 25 * 3000
        # Groups: with a name and without.
        await life.do(life.broker.groups.create(b"c", b"orders"))
        with pytest.raises(TooManyGroups, match=r"10 positions .* reads orders: .* server\.position_bytes_max"):
            await life.do(life.broker.groups.create(b"d", b"orders"))
        with pytest.raises(TooManyGroups):
            await life.join(None, b"orders", Recorder())
        assert [group.name for group in life.broker.groups] == [b"a", b"b", b"c"]
        # Topics that these groups would read.
        with pytest.raises(TooManyTopics, match=r"payments cannot get 4 .*: 1 groups read it, .*position_bytes_max"):
            await life.do(life.broker.changes.create(b"payments", partitions=4))
        with pytest.raises(TooManyTopics):
            await life.do(life.broker.changes.alter(b"orders", partitions=12))
        await life.do(life.broker.changes.create(b"payments", partitions=3))
        # What goes gives its room back.
        await life.do(life.broker.groups.delete(b"c"))
        await life.do(life.broker.changes.delete(b"payments"))
        assert life.broker.usage()["position_bytes"] == Usage(used, 100_000)
        _, member = await life.join(None, b"orders", Recorder())
        life.broker.groups.leave(_, member)
        for name in (b"a", b"b"):
            await life.do(life.broker.groups.delete(name))
        assert life.broker.usage()["position_bytes"] == Usage(0, 100_000)


@in_loop
async def test_a_group_that_acknowledges_nothing_leaves_room_for_others() -> None:
    async with Life(FaultyFiles(), settings=Settings(position_bytes_max=100_000)) as life:
        await life.do(life.broker.changes.create(b"orders"))
        slow, good = Recorder(), Recorder()
        greedy, _ = await life.join(b"greedy", b"orders", slow)
        group, _ = await life.join(b"good", b"orders", good)
        place = next(iter(group.positions))
        for offset in range(300):
            await life.publish(b"orders", b"%d" % offset)
            await life.settle()
            assert len(good.got) == offset + 1, "it keeps up"
            assert group.ack(place, offset, Outcome())
        assert 16 < len(slow.got) < 100
        assert life.broker.usage()["position_bytes"].used < 60_000
        # Its messages are not lost: when it acknowledges, it gets the next ones.
        for offset in range(300):
            assert greedy.ack(place, offset, Outcome())
            await life.settle()
        assert len(slow.got) == 300


def test_a_client_is_told_that_there_are_too_many_subscriptions(tmp_path: Path) -> None:
    with Serve(tmp_path, server_subscriptions_max=1) as server, Flux(server) as first, Flux(server) as second:
        first.subscribe("orders", "1")
        assert "server.subscriptions_max" in first.ask("SUB payments 2")
        second.send('CONNECT {"verbose":true}\r\nSUB orders 1\r\n')
        assert second.line() == "+OK"
        assert "server.subscriptions_max" in second.line()
        assert first.publish("orders", b"1").startswith("+OK"), "the first one goes on"


async def bury(life: Life, group: Group) -> None:
    """Store a dead letter of the group's first message."""
    place = next(iter(group.positions))
    assert group.reject(place, 0)
    await life.settle()


@in_loop
async def test_dead_letters_of_too_many_sources_wait_until_a_group_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "SOURCES_MAX", 2)
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"0")
        groups = []
        for name in (b"a", b"b", b"c"):
            await life.do(life.broker.groups.create(name, b"orders", start=Start.EARLIEST))
            groups.append((await life.join(name, b"orders", Recorder()))[0])
            await bury(life, groups[-1])
        assert len(life.in_log(b"DLQ")) == 2
        assert life.store.usage()["sources"].used == 2
        assert groups[2].positions[next(iter(groups[2].positions))].inflight.dead() == [(0, 1)], "it is not lost"
        with pytest.raises(TooManySources, match="of 2 sources, the limit"):
            life.log(b"DLQ").producers.find(None, 77, 1)  # type: ignore[arg-type]
        await life.do(life.broker.groups.delete(b"a"))
        await life.advance(10_000_000)
        assert len(life.in_log(b"DLQ")) == 3
