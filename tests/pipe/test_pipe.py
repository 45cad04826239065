"""Brokers in a tree: what flows down from a parent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.errors import PenstockError, ReadOnlyTopic
from tests.support.pipes import Tree, broker, client_of, data, offsets, publish
from tests.support.server import Flux, Serve, hpub
from tests.support.trees import ask, batches, eventually, get, healthy, reason_of, records, status_of, url

# Segments that are sealed, and dropped, in no time.
SMALL: Final[dict[str, Any]] = {
    "topic_segment_bytes": 4096,
    "topic_retain_bytes": 4096,
    "storage_upkeep_ms": 20,
}


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A root that keeps next to nothing."""
    with broker(tmp_path_factory.mktemp("forgetful"), "forgetful", **SMALL) as root:
        yield root


# ---- down


def test_a_message_crosses_two_pipes_with_all_that_it_has(tree: Tree) -> None:
    root, l2, l3 = tree
    with client_of(root) as client:
        client.create_topic("prices", partitions=2)
        for number in range(20):
            client.publish(f"prices.{number % 3}", b"%d" % number, key=f"k{number}", headers={"Colour": "red"})
        client.publish("prices.0", key="k1")
    for partition in range(2):
        origin = batches(root, "prices", partition=partition)
        count = origin[-1].end
        assert len(records(l3, "prices", count, partition=partition)) == count
        for copy in (l2, l3):
            found = batches(copy, "prices", partition=partition)
            assert [batch.base_offset for batch in found] == [batch.base_offset for batch in origin]
            # What the producer signed: keys, headers, subjects, timestamps, tombstones.
            assert [bytes(batch.data[56:]) for batch in found] == [bytes(batch.data[56:]) for batch in origin]
    assert status_of(l3)["ancestry"] == ["root", "l2", "l3"]
    assert "l2" in [child["node"] for child in status_of(root)["children"]]


def test_readers_and_groups_of_the_child_read_the_copy(tree: Tree) -> None:
    root, l2, _ = tree
    publish(root, "read.eu", b"a", b"b")
    records(l2, "read", 2)
    with client_of(l2) as client, client.subscribe("read.>", start="earliest") as live:
        assert [live.get(10).value for _ in range(2)] == [b"a", b"b"]
        publish(root, "read.eu", b"c")
        message = live.get(10)
        assert (message.value, message.offset) == (b"c", 2)
        with client.subscribe("read.>", group="g", start="earliest") as members:
            for _ in range(3):
                members.get(10).ack()
            members.flush()
        assert client.lag("g") == 0
    l2.kill()
    publish(root, "read.eu", b"d")
    l2.restart()
    with client_of(l2) as client, client.subscribe("read.>", group="g") as members:
        message = members.get(10)
        assert message.value == b"d"
        message.ack()


def test_a_topic_that_the_parent_makes_later_comes_too_and_so_do_its_new_partitions(tree: Tree) -> None:
    root, l2, _ = tree
    publish(root, "late", b"a")
    records(l2, "late", 1)
    with client_of(root) as client:
        client.alter_topic("late", partitions=3)
        for number in range(30):
            client.publish("late", b"%d" % number, key=f"k{number}")
    ends = [batches(root, "late", partition=partition)[-1].end for partition in range(3)]
    eventually("the copy has as many", lambda: committed(l2, "late") == ends)


def committed(server: Serve, topic: str) -> list[int]:
    found = [each for each in get(server, "/pipe/topics")[1]["topics"] if each["name"] == topic]
    return [partition["committed"] for each in found for partition in each["partitions"]]


def test_only_the_topics_that_are_asked_for_come_down(tree: Tree, tmp_path: Path) -> None:
    publish(tree.root, "wanted", b"x")
    publish(tree.root, "unwanted", b"x")
    with broker(tmp_path, "picky", tree.root, pipe_topics="wanted, missing") as picky:
        records(picky, "wanted", 1)
        reason_of(picky, "the parent has no topic missing")
        publish(tree.root, "missing", b"x")
        records(picky, "missing", 1)
        healthy(picky)
        assert {topic["name"] for topic in get(picky, "/pipe/topics")[1]["topics"]} == {"wanted", "missing"}


def test_a_pattern_brings_down_every_topic_that_it_covers(tree: Tree, tmp_path: Path) -> None:
    for subject in ("stock.eu", "stock.us", "rates"):
        publish(tree.root, subject, b"x")
    with broker(tmp_path, "patterns", tree.root, pipe_topics="stock.>, rates.*, fares.>") as leaf:
        assert [record["subject"] for record in records(leaf, "stock", 2)] == ["stock.eu", "stock.us"]
        reason_of(leaf, "rates.* is a part of topic rates, and only whole topics are piped: list rates instead")
        reason_of(leaf, "the parent has no topic that fares.> matches")
        assert [topic["name"] for topic in get(leaf, "/pipe/topics")[1]["topics"]] == ["stock"]
        leaf.stop()
        leaf.restart(pipe_topics="stock.>, *")
        records(leaf, "rates", 1)
        healthy(leaf)


def test_a_pattern_pushes_every_topic_that_it_covers(tree: Tree, tmp_path: Path) -> None:
    with broker(tmp_path, "till", tree.root, pipe_topics="nothing", pipe_up="receipts.>, visits.eu") as till:
        publish(till, "receipts.eu", b"x")
        publish(till, "visits.eu", b"x")
        records(tree.root, "receipts", 1)
        reason_of(till, "visits.eu is a part of topic visits, and only whole topics are piped: list visits instead")


# ---- read-only


def test_nothing_is_published_to_a_copy_by_any_door(tree: Tree) -> None:
    root, l2, _ = tree
    publish(root, "closed", b"a")
    records(l2, "closed", 1)
    with client_of(l2) as client, Flux(l2) as flux:
        with pytest.raises(ReadOnlyTopic, match="publish it at its origin"):
            client.publish("closed", b"b")
        with pytest.raises(ReadOnlyTopic):
            client.publish("closed.below", b"b", delay=1)
        with pytest.raises(PenstockError, match="read-only"), client.producer() as producer:
            producer.publish("closed", b"b")
        with pytest.raises(ReadOnlyTopic), client.transaction() as transaction:
            transaction.publish("closed", b"b")
        with pytest.raises(ReadOnlyTopic):
            client.alter_topic("closed", partitions=2)
        assert "READ_ONLY" in flux.publish("closed", b"b")
        flux.send(hpub("closed", b"b", msg_id="1"))
        assert "READ_ONLY" in flux.line()
        client.alter_topic("closed", retain_ms=3_600_000)
    publish(root, "closed", b"c")
    assert data(records(l2, "closed", 2)) == ["a", "c"]


def test_dead_letters_of_a_copy_are_the_childs_own(tree: Tree) -> None:
    root, l2, _ = tree
    publish(root, "deadly", b"poison")
    publish(root, "DLQ.other", b"the root's own")
    records(l2, "deadly", 1)
    with client_of(l2) as client:
        with client.subscribe("deadly", group="dying", start="earliest") as members:
            members.get(10).reject()
            members.flush()
            eventually("it is a dead letter", client.dead_letters)
        assert [letter.value for letter in client.dead_letters()] == [b"poison"]
        with pytest.raises(ReadOnlyTopic):
            client.redrive()
        assert len(client.dead_letters()) == 1
    healthy(l2)


def test_a_topic_with_messages_of_its_own_is_not_overwritten(tree: Tree, tmp_path: Path) -> None:
    publish(tree.root, "both", b"the root's")
    publish(tree.root, "fine", b"fine")
    with broker(tmp_path, "own", "http://127.0.0.1:9") as own:
        publish(own, "both", b"mine")
        own.stop()
        own.restart(pipe_parent=url(tree.root))
        reason_of(own, "the topic both has messages of its own")
        records(own, "fine", 1)
        publish(own, "both", b"still mine")
        assert data(records(own, "both", 2)) == ["mine", "still mine"]
        with client_of(own) as client:
            client.delete_topic("both")
        eventually("it is the root's", lambda: committed(own, "both") == [1])
        assert data(records(own, "both", 1)) == ["the root's"]
        healthy(own)


def test_an_empty_topic_becomes_the_copy_that_it_is_configured_for(tree: Tree, tmp_path: Path) -> None:
    with client_of(tree.root) as client:
        client.create_topic("configured", partitions=3)
    with broker(tmp_path, "ready", tree.root, config='[topics.configured]\nretain_ms = "1h"\n') as ready:
        eventually("it has three partitions", lambda: len(committed(ready, "configured")) == 3)
        ready.stop()
        ready.restart()
        healthy(ready)
        with client_of(ready) as client:
            assert client.topic("configured").policy["retain_ms"] == 3_600_000
            with pytest.raises(ReadOnlyTopic):
                client.publish("configured", b"x")


def test_a_topic_that_is_deleted_at_the_root_and_made_again_is_another_one(tree: Tree) -> None:
    root, l2, l3 = tree
    publish(root, "again", b"a", b"b")
    records(l3, "again", 2)
    with client_of(root) as client:
        client.delete_topic("again")
        client.publish("again", b"c")
    status = reason_of(l2, "the topic again is a copy of")
    assert "delete it here to begin again" in status["reason"]
    assert data(records(l2, "again", 2)) == ["a", "b"]
    for copy in (l2, l3):
        with client_of(copy) as client:
            client.delete_topic("again")
        eventually("it is the new one", lambda copy=copy: committed(copy, "again") == [1])  # type: ignore[misc]
    assert data(records(l3, "again", 1)) == ["c"]
    healthy(l2)


# ---- parents


def test_a_child_changes_its_parent_and_loses_and_doubles_nothing(tree: Tree, tmp_path: Path) -> None:
    root, l2, _ = tree
    with broker(tmp_path, "leaf", l2, root, pipe_topics="moving") as leaf:
        publish(root, "moving", *[b"%d" % number for number in range(50)])
        records(leaf, "moving", 50)
        assert status_of(leaf)["ancestry"] == ["root", "l2", "leaf"]
        l2.kill()
        publish(root, "moving", *[b"%d" % number for number in range(50, 100)])
        found = records(leaf, "moving", 100)
        assert data(found) == [str(number) for number in range(100)]
        assert offsets(found) == list(range(100))
        healthy(leaf)
        assert status_of(leaf)["ancestry"] == ["root", "leaf"]
        l2.restart()
        records(l2, "moving", 100)


def test_a_child_that_is_ahead_of_its_new_parent_waits_for_it(tree: Tree, tmp_path: Path) -> None:
    root, l2, _ = tree
    publish(root, "ahead", b"a")
    with broker(tmp_path, "slow", root, pipe_topics="ahead") as slow, broker(tmp_path, "leaf", l2) as leaf:
        records(slow, "ahead", 1)
        slow.stop()
        publish(root, "ahead", b"b", b"c")
        records(leaf, "ahead", 3)
        leaf.stop()
        # It cannot reach its own parent: what it has is old.
        slow.restart(pipe_parent="http://127.0.0.1:9")
        leaf.restart(pipe_parent=url(slow), pipe_topics="ahead")
        healthy(leaf)
        slow.stop()
        slow.restart(pipe_parent=url(root))
        publish(root, "ahead", b"d")
        assert data(records(leaf, "ahead", 4)) == ["a", "b", "c", "d"]


def test_another_root_is_another_origin_and_is_refused_by_name(tree: Tree, tmp_path: Path, forgetful: Serve) -> None:
    publish(tree.root, "origin", b"old")
    publish(forgetful, "origin", b"new", b"newer")
    with broker(tmp_path, "leaf", tree.root, pipe_topics="origin") as leaf:
        records(leaf, "origin", 1)
        leaf.stop()
        leaf.restart(pipe_parent=url(forgetful))
        reason_of(leaf, "the topic origin is a copy of")
        assert data(records(leaf, "origin", 1)) == ["old"]


def test_health_tells_that_the_parent_is_gone_and_that_it_is_back(tree: Tree) -> None:
    root, l2, _ = tree
    assert (status_of(root)["health"], status_of(root)["parent"]) == ("HEALTHY", None)
    healthy(l2)
    since = status_of(l2)["since"]
    root.kill()
    status = reason_of(l2, "no answer from", health="UNHEALTHY")
    assert status["since"] > since
    root.restart()
    healthy(l2)
    publish(root, "back", b"a")
    records(l2, "back", 1)


# ---- what is gone


def test_a_gap_stops_the_pipe_until_it_is_told_to_skip(forgetful: Serve, tmp_path: Path) -> None:
    publish(forgetful, "gaps", b"first")
    with broker(tmp_path, "leaf", forgetful, pipe_topics="gaps") as leaf:
        records(leaf, "gaps", 1)
        leaf.kill()
        drop_some(forgetful, "gaps")
        leaf.restart()
        reason_of(leaf, "offset 1 is out of range")
        assert [topic["gaps"] for topic in status_of(leaf)["topics"]] == [1]
        assert committed(leaf, "gaps") == [1]
        leaf.kill()
        leaf.restart(pipe_on_gap="skip")
        eventually("it goes on", lambda: committed(leaf, "gaps") == committed(forgetful, "gaps"))
        healthy(leaf)
        assert [topic["gaps"] for topic in status_of(leaf)["topics"]] == [1]
        # Whoever follows the copy is told of what it lacks.
        status, told = get(leaf, "/pipe/stream", topic="gaps", offset=1)
        assert (status, told["code"]) == (410, "OFFSET_OUT_OF_RANGE")
        behind = told["start"]
        assert behind > 1
        assert [batch.base_offset for batch in batches(leaf, "gaps")] == [0]
        assert batches(leaf, "gaps", offset=behind)[0].base_offset == behind
        assert get(leaf, "/pipe/stream", topic="gaps", offset=behind - 1)[1]["start"] == behind


def test_a_new_child_begins_where_its_parent_does_and_an_old_one_finds_another_parent(
    forgetful: Serve, tmp_path: Path
) -> None:
    publish(forgetful, "kept", b"first")
    with (
        broker(tmp_path, "archive", forgetful, pipe_topics="kept") as archive,
        broker(tmp_path, "leaf", forgetful, pipe_topics="kept") as leaf,
    ):
        records(archive, "kept", 1)
        records(leaf, "kept", 1)
        leaf.kill()
        drop_some(forgetful, "kept")
        with broker(tmp_path, "late", forgetful, pipe_topics="kept") as late:
            eventually("it has what there is", lambda: committed(late, "kept") == committed(forgetful, "kept"))
            healthy(late)
            assert [topic["gaps"] for topic in status_of(late)["topics"]] == [0]
            assert offsets(records(late, "kept", 1))[0] > 1
            # What it never had it does not pass off as nothing.
            assert get(late, "/pipe/stream", topic="kept", offset=1)[0] == 410
        leaf.restart()
        reason_of(leaf, "offset 1 is out of range")
        leaf.stop()
        leaf.restart(pipe_parent=url(archive))
        count = committed(archive, "kept")[0]
        assert offsets(records(leaf, "kept", count)) == list(range(count))
        healthy(leaf)
        assert [topic["gaps"] for topic in status_of(leaf)["topics"]] == [0]


def drop_some(server: Serve, topic: str) -> None:
    """Publish until retention has dropped all that was there before."""
    [end] = committed(server, topic)
    for _ in range(4):
        publish(server, topic, *[b"x" * 1500] * 6)
    eventually("retention drops some", lambda: ask(server, "/pipe/stream", topic=topic, offset=end)[0] == 410)
