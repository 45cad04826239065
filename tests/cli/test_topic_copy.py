"""`penstock topic copy`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import copying
from penstock.client.message import Message
from penstock.client.sync import Client
from penstock.client.values import Topic
from penstock.errors import PenstockError
from tests.support.commands import Penstock
from tests.support.server import Serve


def content(client: Client, topic: str, source: str) -> list[list[object]]:
    """All that a copy keeps, by partition."""

    def kept(message: Message) -> object:
        below = message.subject.removeprefix(topic)
        block, times = message.header_block, message.timestamp_us
        return (f"{source}{below}", message.key, message.value, block, times, message.deleted)

    return [[kept(each) for each in client.fetch(topic, number)] for number in range(client.topic(topic).partitions)]


def fill(client: Client, topic: str) -> None:
    client.create_topic(topic, partitions=3, dedup="payload")
    for number in range(40):
        client.publish(
            f"{topic}.eu", b"%d" % number, key=f"k{number % 7}", headers={"Colour": "red", "Msg-ID": str(number)}
        )
    client.publish(topic, b"plain")
    client.publish(topic, None, key="k1")


def test_a_copy_keeps_keys_headers_times_partitions_and_the_policy(
    penstock: Penstock,
    client: Client,
) -> None:
    fill(client, "kept")
    client.alter_topic("kept", retain_for="archive")

    done = penstock("topic", "copy", "kept", "kept-copy", "--json").json

    assert (done["copied"], done["resumed"], done["lost"], done["interrupted"]) == (42, 0, 0, False)
    assert content(client, "kept-copy", "kept") == content(client, "kept", "kept")
    # The group that archives the original does not read the copy.
    assert client.topic("kept-copy").policy == client.topic("kept").policy | {"retain_for": None}


def test_the_same_command_goes_on_and_stores_nothing_twice(
    penstock: Penstock,
    client: Client,
) -> None:
    fill(client, "again")
    penstock("topic", "copy", "again", "again-copy")
    client.publish("again.eu", b"new", key="k1")

    done = penstock("topic", "copy", "again", "again-copy").out

    assert done.startswith("copied 1 message to again-copy, resumed after 42 offsets: ")
    assert content(client, "again-copy", "again") == content(client, "again", "again")


@pytest.mark.parametrize("after", range(4))
def test_a_copy_that_was_interrupted_anywhere_is_finished(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    monkeypatch.setattr(copying, "_PART_MESSAGES", 5)
    topic = f"cut{after}"
    fill(client, topic)
    source = client.topic(topic)
    target = copying.prepare(source, client, f"{topic}-copy")
    run(client, source, target, stop_after=after)
    monkeypatch.setattr(copying, "_PART_MESSAGES", 7)

    done = run(client, source, client.topic(f"{topic}-copy"))

    assert done.copied + done.resumed == 42
    assert content(client, f"{topic}-copy", topic) == content(client, topic, topic)


def run(client: Client, source: Topic, target: Topic, stop_after: int | None = None) -> copying.Copied:
    done, parts = copying.Copied(), 0

    def advance(count: int) -> None:
        nonlocal parts
        parts += bool(count)
        if stop_after is not None and parts > stop_after:
            raise KeyboardInterrupt

    counting: Callable[[int], None] = advance
    try:
        copying.copy(client, source, client, target, done, counting)
    except KeyboardInterrupt:
        assert stop_after is not None
    return done


def test_to_another_broker(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    fill(client, "moved")
    with Serve(tmp_path, auth_token="secret") as other:
        url = f"nats://secret@127.0.0.1:{other.port}"
        assert penstock("topic", "copy", "moved", "moved", "--to", url).out.startswith("copied 42 messages to moved: ")
        with Client(url) as there:
            assert content(there, "moved", "moved") == content(client, "moved", "moved")


def test_a_target_with_other_messages_since_the_last_run_is_refused(
    penstock: Penstock,
    client: Client,
) -> None:
    fill(client, "foreign")
    penstock("topic", "copy", "foreign", "foreign-copy")
    client.publish("foreign.eu", b"new", key="k1")
    stranger = client.publish("foreign-copy.eu", b"stranger", key="k1")
    before = content(client, "foreign-copy", "foreign")

    done = penstock("topic", "copy", "foreign", "foreign-copy")

    where = f"offset {stranger.offset} of partition {stranger.partition}"
    assert (done.code, done.out) == (1, "")
    assert f"foreign-copy has messages that are not of this copy, such as {where}" in done.err
    assert content(client, "foreign-copy", "foreign") == before


def test_a_partition_that_the_copy_has_not_written_to_must_be_empty(
    penstock: Penstock,
    client: Client,
) -> None:
    client.create_topic("half", partitions=2)
    first = client.publish("half", b"a", key="k").partition
    penstock("topic", "copy", "half", "half-copy")
    other = next(key for key in map(str, range(100)) if client.publish("half", b"b", key=key).partition != first)
    assert client.publish("half-copy", b"stranger", key=other).partition != first
    assert "has messages that are not of this copy" in penstock("topic", "copy", "half", "half-copy").err


def test_a_copy_says_when_it_cannot_tell_whether_the_target_has_other_messages(
    penstock: Penstock,
    client: Client,
) -> None:
    for number in range(3):
        client.publish("purged", b"%d" % number)
    penstock("topic", "copy", "purged", "purged-copy")
    client.publish("purged", b"new")
    client.purge_topic("purged", 3)

    done = penstock("topic", "copy", "purged", "purged-copy")

    assert (done.code, done.out.startswith("copied 1 message to purged-copy")) == (0, True)
    assert "cannot tell whether purged-copy has other messages in partition 0" in done.err
    assert [each.value for each in client.fetch("purged-copy")] == [b"0", b"1", b"2", b"new"]


def test_what_a_copy_would_mix_up_is_refused(penstock: Penstock, client: Client) -> None:
    fill(client, "mixed")
    client.create_topic("narrow", partitions=2)
    client.create_topic("taken", partitions=3)
    client.publish("taken", b"x")
    source = client.topic("mixed")
    with pytest.raises(PenstockError, match="narrow has 2 partitions and mixed has 3: a copy needs the same number"):
        copying.prepare(source, client, "narrow")
    with pytest.raises(PenstockError, match="taken has messages that are not of this copy"):
        run(client, source, client.topic("taken"))
    done = penstock("topic", "copy", "mixed", "mixed")
    assert (done.code, "a topic cannot be copied to itself" in done.err) == (2, True)


def test_a_copy_does_not_enforce_the_schema_which_older_messages_may_not_match(
    penstock: Penstock, client: Client
) -> None:
    client.create_topic("loose")
    client.publish("loose", b"old")
    client.set_schema("loose", "id bigint")
    client.alter_topic("loose", schema_enforced=True)

    assert penstock("topic", "copy", "loose", "loose-copy").out.startswith("copied 1 message")
    assert client.topic("loose-copy").policy["schema_enforced"] is False
