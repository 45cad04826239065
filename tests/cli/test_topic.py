"""`penstock topic`, run as its users run it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.client.sync import Client
from tests.support.commands import Penstock, at_terminal, publish, topic_names, wrong_usage


def test_a_message_to_an_inbox_is_said_not_to_be_stored(penstock: Penstock) -> None:
    assert penstock("publish", "_INBOX.x", "x").out == "published to current subscribers, not stored\n"


def test_a_topic_is_made_as_it_is_asked_for(penstock: Penstock, client: Client) -> None:
    options = "--partitions 3 --durability flush --retain 7d --retain-bytes 5GB --segment-bytes 1MiB --dedup off"
    options += " --ack-deadline 2s --deliveries-max 2 --no-dead-letters --cleanup compact --tombstone 1h"
    options += " --refresh-wait 90s --retain-for archive-orders --schema-compatibility full --schema-enforced"
    made = penstock("topic", "create", "made", *options.split(), "--json").json
    assert made == asdict(client.topic("made"))
    assert (made["name"], made["partitions"], made["refused"]) == ("made", 3, None)
    assert [each["partition"] for each in made["positions"]] == [0, 1, 2]
    assert made["policy"] == {
        "durability": "flush",
        "segment_bytes": 1 << 20,
        "cleanup": "compact",
        "retain_ms": 7 * 86_400_000,
        "retain_bytes": 5_000_000_000,
        "retain_for": "archive-orders",
        "tombstone_ms": 3_600_000,
        "dedup": "off",
        "dedup_window_ms": None,
        "ack_deadline_ms": 2000,
        "deliveries_max": 2,
        "dead_letters": False,
        "refresh_wait_ms": 90_000,
        "on_damage": "stop",
        "schema_compatibility": "full",
        "schema_enforced": True,
    }


def test_a_topic_is_shown_to_people(penstock: Penstock, client: Client) -> None:
    assert penstock("topic", "create", "shown", "--retain", "90m").out.startswith("created shown: id ")
    publish(client, "shown.here", "one", "two")
    described = penstock("topic", "describe", "shown")
    assert "1 partition, 2 messages" in described.lines[0]
    assert ["0", "0", "2", "2"] in [row[:4] for row in described.rows]
    assert ["retain_ms", "90m"] in described.rows
    assert ["dead_letters", "true"] in described.rows
    [row] = [row for row in penstock("topic", "list").rows if row[:1] == ["shown"]]
    assert (row[:3], row[-3:]) == (["shown", "1", "2"], ["fsync", "delete", "ok"])


def test_topics_are_shown_to_programs(penstock: Penstock, client: Client) -> None:
    topic = asdict(client.create_topic("listed"))
    assert topic in penstock("topic", "list", "--json").json
    assert topic == penstock("topic", "describe", "listed", "--json").json


def test_altering_changes_only_what_is_given(penstock: Penstock, client: Client) -> None:
    before = client.create_topic("altered", retain_ms=1000, retain_bytes=5000).policy
    assert penstock("topic", "alter", "altered", "--retain", "none", "--partitions", "2").code == 0
    after = client.topic("altered")
    assert after.partitions == 2
    assert after.policy == before | {"retain_ms": None}


def test_more_partitions_are_warned_of_if_there_are_messages(penstock: Penstock, client: Client) -> None:
    client.create_topic("moving")
    assert penstock("topic", "alter", "moving", "--partitions", 2).err == ""
    client.publish("moving", b"x", key="k")

    altered = penstock("topic", "alter", "moving", "--partitions", 3, "--json")
    again = penstock("topic", "alter", "moving", "--partitions", 3)

    assert altered.err.startswith("warning: with 3 partitions instead of 2, most keys and subjects of moving move to ")
    assert f"warning: {json.loads(altered.out)['warning']}\n" == altered.err
    assert (again.code, again.err) == (0, "")
    assert client.alter_topic("moving", retain_ms=60_000).warning is None


def test_altering_nothing_is_wrong_usage() -> None:
    assert "give at least one option to change" in wrong_usage("topic", "alter", "whatever")


def test_a_topic_is_purged_up_to_an_offset_or_a_time(penstock: Penstock, client: Client) -> None:
    publish(client, "purged", "one", "two", "three")
    by_offset = penstock("topic", "purge", "purged", "--offset", 2, "--partition", 0)
    assert by_offset.out.startswith("dropped 2 messages of purged: ")
    assert penstock("topic", "purge", "purged", "--before", "-1h").out.startswith("dropped 0 messages of purged: ")
    emptied = penstock("topic", "purge", "purged", "--before", "latest", "--json")
    assert json.loads(emptied.out)["positions"][0]["start"] == 3
    beyond = penstock("topic", "purge", "purged", "--offset", 4)
    assert (beyond.code, "offset 4" in beyond.err) == (1, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((), "either --before or --offset"),
        (("--before", "-1h", "--offset", "1"), "either --before or --offset"),
        (("--before", "5"), "use --offset 5"),
        (("--before", "1h"), "in the future"),
        (("--before", "soon"), "a time like"),
    ],
)
def test_a_purge_without_an_end_is_wrong_usage(given: tuple[str, ...], told: str) -> None:
    assert told in " ".join(wrong_usage("topic", "purge", "whatever", *given).split())


def test_a_deleted_topic_is_gone(penstock: Penstock, client: Client) -> None:
    publish(client, "doomed", "one")
    assert penstock("topic", "delete", "doomed").out.startswith("deleted doomed: ")
    gone = penstock("topic", "describe", "doomed")
    assert (gone.code, gone.out) == (1, "")
    assert gone.err.startswith("error: ")
    assert "doomed" in gone.err


def test_at_a_terminal_it_asks_before_it_deletes(penstock: Penstock, client: Client) -> None:
    publish(client, "asked", "one")
    refused = at_terminal(penstock, "topic", "delete", "asked", typed=b"n\n")
    assert refused.code == 1
    assert "Delete asked and 1 message?" in refused.out
    assert "asked" in topic_names(client)
    assert at_terminal(penstock, "topic", "delete", "asked", typed=b"y\n").code == 0
    assert "asked" not in topic_names(client)


def test_at_a_terminal_yes_deletes_at_once(penstock: Penstock, client: Client) -> None:
    publish(client, "unasked", "one")
    assert at_terminal(penstock, "topic", "delete", "unasked", "--yes").code == 0


def test_a_topic_that_exists_is_an_error(penstock: Penstock, client: Client) -> None:
    client.create_topic("twice")
    again = penstock("topic", "create", "twice", "--json")
    assert (again.code, again.out) == (1, "")
    assert again.err.startswith("error: ")
    assert "twice" in again.err


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--retain", "7 weeks", "milliseconds"),
        ("--segment-bytes", "12", "4096 to"),
        ("--durability", "maybe", "fsync"),
        ("--deliveries-max", "0", "1 to 1000"),
        ("--partitions", "257", "1 to 256"),
    ],
)
def test_a_value_that_cannot_be_is_wrong_usage_and_says_what_can(option: str, value: str, allowed: str) -> None:
    said = wrong_usage("topic", "create", "never", option, value)
    assert option in said
    assert allowed in said


def test_schemas_are_registered_checked_and_shown(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.create_topic("typed")
    file = tmp_path / "typed.ddl"
    file.write_text("id bigint NOT NULL, name string\n")
    assert penstock("topic", "schema", "check", "typed", str(file)).out == (
        "typed has no schema yet: this would be version 1\n"
    )
    assert penstock("topic", "schema", "set", "typed", str(file)).out == "typed: schema version 1 (ddl)\n"
    assert penstock("topic", "schema", "set", "typed", str(file), "--json").json["version"] == 1
    assert penstock("topic", "schema", "show", "typed").out == "id bigint NOT NULL, name string\n"
    shown = penstock("topic", "schema", "show", "typed", "--as", "json").json
    assert shown["properties"]["name"] == {"type": ["string", "null"]}
    (tmp_path / "next.json").write_text(json.dumps({**shown, "required": []}))
    checked = penstock("topic", "schema", "check", "typed", str(tmp_path / "next.json"))
    assert checked.out == "compatible with version 1 of typed (backward)\n"
    assert penstock("topic", "schema", "set", "typed", str(tmp_path / "next.json"), "--json").json["format"] == "json"
    assert penstock("topic", "schema", "show", "typed", "--as", "ddl", "--json").json["text"] == (
        "id BIGINT, name STRING"
    )
    rows = penstock("topic", "schema", "list", "typed").rows
    assert [row[:2] for row in rows if row[:1] in (["1"], ["2"])] == [["1", "ddl"], ["2", "json"]]
    assert [each["version"] for each in penstock("topic", "schema", "list", "typed", "--json").json] == [1, 2]
    file.write_text("id string")
    refused = penstock("topic", "schema", "check", "typed", str(file))
    assert refused.code == 1
    assert "not compatible with version 2 of typed (backward): " in refused.out
    assert "id is bigint and would be read as string" in refused.out
