"""Purging a topic up to an offset or a time: nothing below is read again, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.errors import BadRequest, OffsetOutOfRange, UnknownTopic
from penstock.log.policy import Durability, Policy
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta, values
from tests.support.registries import until
from tests.support.server import Serve
from tests.support.web import ask

DATA = Path("/data")
SMALL = Policy(segment_bytes=4096)


def open_store(files: FaultyFiles, **settings: Any) -> Store:
    return Store(DATA, files=files, clock=ManualClock(), meta=memory_meta(), settings=StoreSettings(**settings))


@pytest.mark.parametrize("tail_bytes", [0, 1 << 20])
@pytest.mark.parametrize("end", ["close", "kill", "power"])
@pytest.mark.parametrize("durability", Durability)
def test_nothing_below_is_read_again_even_within_a_batch(durability: Durability, end: str, tail_bytes: int) -> None:
    disk = FaultyFiles()
    store = open_store(disk, tail_bytes_max=tail_bytes)
    topic = store.create_topic("orders", policy=Policy(segment_bytes=4096, durability=durability))
    log = store.log(topic.id)
    append(log, *(b"%d" % number for number in range(10)))
    for number in range(10, 20):
        append(log, b"%d:" % number + bytes(1500))
        store.flush()
    store.purge_topic(topic.id, {0: 5})
    for offset in (0, 4):
        with pytest.raises(OffsetOutOfRange) as refused:
            log.read(offset, 1)
        assert refused.value.start == 5
        with pytest.raises(OffsetOutOfRange):
            log.read_disk(offset, 1)
    assert log.start == 5
    if end == "close":
        store.close()
    elif end == "kill":
        disk.kill()
    else:
        disk = disk.power_cut()
    with open_store(disk, tail_bytes_max=tail_bytes) as store:
        log = store.log(topic.id)
        assert log.start == 5
        with pytest.raises(OffsetOutOfRange):
            log.read(4, 1)
        assert values(log, 5)[-1].startswith(b"19:")
        store.purge_topic(topic.id, {0: 15})
        before = len(log.segments)
        store.upkeep()
        assert len(log.segments) < before, "whole segments are freed"
        assert log.start == 15
        store.purge_topic(topic.id, {0: log.end})
        store.upkeep()
        assert [segment.base for segment in log.segments] == [log.end]
        append(log, b"new")
        store.flush()
        assert values(log, log.start) == [b"new"]
        store.purge_topic(topic.id, {0: 3})
        assert values(log, log.start) == [b"new"], "a purge never goes back"
        store.delete_topic(topic.id)
        assert store.state.items("start") == []


def test_a_purge_that_was_acknowledged_counts_wherever_the_power_is_cut() -> None:
    cuts = 0
    while True:
        disk = FaultyFiles(seed=cuts)
        store = open_store(disk)
        topic = store.create_topic("orders", partitions=2)
        for partition in range(2):
            append(store.log(topic.id, partition), *(b"%d" % number for number in range(10)))
        store.flush()
        disk.cut_after = disk.calls + cuts
        told = False
        try:
            store.purge_topic(topic.id, {0: 4, 1: 7})
            told = True
            store.upkeep()
            store.close()
        except PowerCut:
            pass
        else:
            break
        with open_store(disk.power_cut()) as store:
            starts = [store.log(topic.id, partition).start for partition in range(2)]
            assert starts == [4, 7] or (starts == [0, 0] and not told)
            assert store.log(topic.id).end == 10
        cuts += 1
    assert cuts > 3


def test_what_is_not_committed_cannot_be_purged() -> None:
    with open_store(FaultyFiles()) as store:
        topic = store.create_topic("orders")
        append(store.log(topic.id), b"a")
        with pytest.raises(OffsetOutOfRange):
            store.purge_topic(topic.id, {0: 1})
        store.flush()
        store.purge_topic(topic.id, {0: 1})
        with pytest.raises(UnknownTopic):
            store.purge_topic(topic.id, {7: 1})


def test_a_piped_copy_that_the_power_cut_short_goes_on_where_it_ends() -> None:
    """What its parent sends again lies below the purge, and stays unread."""
    disk = FaultyFiles()
    with open_store(disk) as store:
        topic = store.create_topic("copy")
        append(store.log(topic.id), b"a", b"b")
        store.flush()
        store.purge_topic(topic.id, {0: 2})
        log = store.log(topic.id)
        log.upkeep.purge(100)
        assert (log.start, log.end, log.read(2, 1)) == (2, 2, [])
        append(log, b"c")
        store.flush()
        assert log.start == 3


# With a server.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("purge"), storage_upkeep_ms=20) as served:
        yield served


@pytest.fixture
def client(server: Serve) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as opened:
        yield opened


def fill(client: Client, topic: str, **policy: Any) -> None:
    client.create_topic(topic, **policy)
    client.publish_many([(topic, b"%d" % number) for number in range(10)])


def held(client: Client, topic: str) -> list[bytes]:
    return [message.value for message in client.fetch(topic)]


def test_a_client_purges_before_an_offset_a_time_or_all(client: Client) -> None:
    fill(client, "orders")
    [position] = client.purge_topic("orders", 4).positions
    assert (position.start, position.committed) == (4, 10)
    assert held(client, "orders") == [b"%d" % number for number in range(4, 10)]
    client.publish("orders", b"later")
    [moment] = [message.timestamp for message in client.fetch("orders") if message.value == b"later"]
    client.purge_topic("orders", moment)
    assert held(client, "orders") == [b"later"]
    client.purge_topic("orders", "-1h")
    assert held(client, "orders") == [b"later"]
    client.purge_topic("orders", "latest")
    assert held(client, "orders") == []
    until(lambda: client.topic("orders").positions[0].bytes < 300)


def test_groups_and_subscriptions_go_on_behind_what_was_purged(client: Client) -> None:
    fill(client, "jobs")
    client.create_group("idle", "jobs", start="earliest")
    with client.subscribe("jobs", group="busy", start="earliest", buffer=2) as busy:
        first = busy.get(timeout=20)
        client.purge_topic("jobs", 8)
        until(lambda: client.group("idle").positions[0].committed == 8)
        assert (client.group("idle").lag, client.group("idle").lost) == (2, 8)
        rest = [busy.get(timeout=20).value for _ in range(3)]
    assert first.value == b"0"
    assert rest[-2:] == [b"8", b"9"]
    with client.subscribe("jobs", group="idle") as idle:
        assert [idle.get(timeout=20).value for _ in range(2)] == [b"8", b"9"]


def test_a_group_without_members_is_not_behind_when_retention_has_emptied_an_idle_topic(tmp_path: Path) -> None:
    with Serve(tmp_path, storage_upkeep_ms=50) as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.create_group("idle", "jobs", start="earliest")
            fill(client, "jobs", retain_ms=100)
            until(lambda: client.group("idle").lag == 0)
            assert client.group("idle").lost == 10
        server.kill()
        server.restart()
        with Client(f"127.0.0.1:{server.port}") as client:
            assert (client.group("idle").lag, client.group("idle").lost) == (0, 10)


def test_a_purge_survives_a_kill(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            fill(client, "orders", durability="flush")
            client.purge_topic("orders", 7)
        server.kill()
        server.restart()
        with Client(f"127.0.0.1:{server.port}") as client:
            assert held(client, "orders") == [b"7", b"8", b"9"]


def test_what_cannot_be_purged_is_refused_and_nothing_is_dropped(client: Client) -> None:
    fill(client, "many", partitions=2)
    with pytest.raises(BadRequest, match="an offset is of one partition, and many has 2"):
        client.purge_topic("many", 1)
    with pytest.raises(OffsetOutOfRange):
        client.purge_topic("many", 11, partition=0)
    with pytest.raises(UnknownTopic, match="has 2 partitions"):
        client.purge_topic("many", "latest", partition=2)
    with pytest.raises(BadRequest, match="before an offset"):
        client.purge_topic("many", "earliest")
    with pytest.raises(UnknownTopic):
        client.purge_topic("$delayed", "latest")
    with pytest.raises(UnknownTopic):
        client.purge_topic("absent", "latest")
    assert sum(position.start for position in client.topic("many").positions) == 0


def test_a_purge_over_http(server: Serve, client: Client) -> None:
    fill(client, "web")
    answer = ask(server, "POST", "/admin/topics/web/purge", {"before": {"offset": 3}, "partition": 0})
    assert (answer.status, answer.json["positions"][0]["start"]) == (200, 3)
    answer = ask(server, "POST", "/admin/topics/web/purge", {"before": {"time": "-1h"}})
    assert (answer.status, answer.json["positions"][0]["start"]) == (200, 3)
    assert ask(server, "POST", "/admin/topics/web/purge", {"before": {"offset": 99}}).code == "OFFSET_OUT_OF_RANGE"
    assert ask(server, "POST", "/admin/topics/web/purge", {}).code == "BAD_REQUEST"
    assert ask(server, "POST", "/admin/topics/absent/purge", {"before": "latest"}).status == 404
