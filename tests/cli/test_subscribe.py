"""`penstock subscribe`, groups, delayed messages and dead letters, run as their users run them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.errors import UnknownGroup
from tests.support.commands import Done, Penstock, interrupt, line_of, publish, until, wrong_usage
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

# ---- subscribe


def test_messages_are_printed_as_they_come(penstock: Penstock, client: Client) -> None:
    with penstock.begin("subscribe", "live.>", "--start", "earliest") as process:
        publish(client, "live.eu", "one")
        assert line_of(process) == "live.eu  0:0  one"
        publish(client, "live.us", "two words")
        assert line_of(process) == "live.us  0:1  two words"
        assert interrupt(process) == Done(0, "", "")


def test_what_a_terminal_would_obey_is_escaped(penstock: Penstock, client: Client) -> None:
    client.publish("escaped", b"\x1b[31mred")
    client.publish("escaped", b"\xff\xfe")
    printed = penstock("subscribe", "escaped", "--start", "earliest", "--count", 2).lines
    assert printed == [r"escaped  0:0  '\x1b[31mred'", r"escaped  0:1  b'\xff\xfe'"]


def test_messages_are_json_lines_for_programs(penstock: Penstock, client: Client) -> None:
    before = datetime.now(UTC)
    client.publish("jsoned.a", b"one", key="k", headers={"A": "b"})
    [message] = penstock("subscribe", "jsoned.*", "--start", "earliest", "--count", 1, "--json").documents
    assert before <= datetime.fromisoformat(message.pop("timestamp")) <= datetime.now(UTC)
    message.pop("timestamp_us")
    assert message == {
        "topic": "jsoned",
        "partition": 0,
        "offset": 0,
        "subject": "jsoned.a",
        "key": "k",
        "headers": {"A": "b"},
        "value": "one",
    }


def test_a_group_goes_on_behind_what_was_printed(penstock: Penstock, client: Client) -> None:
    publish(client, "shared", "one", "two", "three")
    options = ("--group", "readers", "--start", "earliest")
    first = penstock("subscribe", "shared", *options, "--count", 2).lines
    assert [line.split()[-1] for line in first] == ["one", "two"]
    assert client.group("readers").lag == 1
    last = penstock("subscribe", "shared", *options, "--count", 1).lines
    assert [line.split()[-1] for line in last] == ["three"]
    assert client.group("readers").lag == 0


def test_a_partitioned_group_commits_what_was_printed(penstock: Penstock, client: Client) -> None:
    publish(client, "parted", "one", "two")
    options = ("--group", "parts", "--mode", "partitioned", "--start", "earliest", "--count", 2)
    assert len(penstock("subscribe", "parted", *options).lines) == 2
    group = client.group("parts")
    assert (group.mode, group.lag, group.positions[0].committed) == ("partitioned", 0, 2)


def test_without_acknowledgements_messages_come_again(penstock: Penstock, client: Client) -> None:
    publish(client, "unacked", "one")
    options = ("--group", "lookers", "--start", "earliest", "--count", 1)
    assert penstock("subscribe", "unacked", *options, "--no-ack").lines == ["unacked  0:0  one"]
    assert penstock("subscribe", "unacked", *options).lines == ["unacked  0:0  (delivery 2)  one"]
    assert client.group("lookers").lag == 0


def test_an_interrupted_member_has_acknowledged_what_it_printed(penstock: Penstock, client: Client) -> None:
    publish(client, "halted", "one")
    with penstock.begin("subscribe", "halted", "--group", "halting", "--start", "earliest") as process:
        assert line_of(process) == "halted  0:0  one"
        assert interrupt(process) == Done(0, "", "")
    assert client.group("halting").lag == 0


def test_it_ends_quietly_when_nobody_reads_on(penstock: Penstock, client: Client) -> None:
    client.publish_many(("broken", b"x") for _ in range(20_000))
    with penstock.begin("subscribe", "broken", "--start", "earliest") as process:
        assert line_of(process) == "broken  0:0  x"
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_options_of_a_group_need_one() -> None:
    for options in (("--no-ack",), ("--mode", "shared")):
        assert "it needs --group" in wrong_usage("subscribe", "x", *options)


# ---- groups


def test_a_group_is_made_shown_reset_and_deleted(penstock: Penstock, client: Client) -> None:
    publish(client, "grouped", "one", "two", "three")
    made = penstock("group", "create", "made-group", "grouped.>", "--start", "earliest", "--json").json
    assert (made["name"], made["pattern"], made["mode"], made["members"]) == ("made-group", "grouped.>", "shared", [])
    assert penstock("group", "create", "all-grouped", "grouped", "--mode", "partitioned").code == 0
    assert penstock("group", "reset", "all-grouped", "--to", "earliest").lines[0].endswith("3 messages behind")
    described = penstock("group", "describe", "all-grouped")
    assert described.lines[0] == "all-grouped: partitioned, grouped, 0 members, 3 messages behind"
    assert ["grouped", "0", "0", "0", "3", "0", "3"] in described.rows
    assert penstock("group", "reset", "all-grouped", "--to", 1, "--topic", "grouped", "--partition", 0).code == 0
    [position] = client.group("all-grouped").positions
    assert (position.committed, position.lag) == (1, 2)
    assert penstock("group", "reset", "all-grouped", "--to", "2000-01-01").lines[0].endswith("3 messages behind")
    assert penstock("group", "reset", "all-grouped", "--to", "latest").lines[0].endswith("0 messages behind")
    listed = penstock("group", "list")
    assert ["all-grouped", "grouped", "partitioned", "0", "0", "0", "0", "0", "0", "0"] in listed.rows
    assert asdict(client.group("made-group")) in penstock("group", "list", "--json").json
    assert penstock("group", "delete", "all-grouped").code == 0
    gone = penstock("group", "describe", "all-grouped")
    assert gone.code == 1
    assert "all-grouped" in gone.err


def test_a_group_of_a_whole_topic(penstock: Penstock, client: Client) -> None:
    publish(client, "wholesale", "one")
    publish(client, "wholesale.eu", "two")

    narrow = penstock("group", "create", "narrow", "wholesale", "--start", "earliest")
    whole = penstock("group", "create", "whole", "--topic", "wholesale", "--start", "earliest", "--json")

    hint = "hint: 'wholesale' reads only messages with the subject wholesale; the topic wholesale also holds subjects"
    assert narrow.err.startswith(hint)
    assert penstock("group", "describe", "narrow").err == narrow.err
    assert (whole.err, whole.json["pattern"], whole.json["hint"]) == ("", "wholesale wholesale.>", None)
    lines = penstock("subscribe", "--topic", "wholesale", "--group", "whole", "--count", 2).lines
    assert sorted(line.split()[-1] for line in lines) == ["one", "two"]
    assert client.lag("whole") == 0


def test_a_subscription_is_told_what_it_misses(penstock: Penstock, client: Client) -> None:
    publish(client, "partial", "one")
    publish(client, "partial.eu", "two")
    narrow = penstock("subscribe", "partial", "--start", "earliest", "--count", 1)
    assert narrow.err.startswith("hint: 'partial' reads only messages with the subject partial;")
    whole = penstock("subscribe", "--topic", "partial", "--start", "earliest", "--count", 2)
    assert (whole.err, sorted(line.split()[-1] for line in whole.lines)) == ("", ["one", "two"])
    for arguments in ((), ("partial", "--topic", "partial")):
        assert "give either a PATTERN of subjects or --topic" in wrong_usage("subscribe", *arguments)


def test_members_of_a_group_are_shown(penstock: Penstock, client: Client) -> None:
    publish(client, "members", "one")
    with client.subscribe("members", group="crowd", start="earliest") as subscription:
        assert subscription.get(PATIENCE_S).value == b"one"
        [member] = client.group("crowd").members
        assert [asdict(member)] == penstock("group", "describe", "crowd", "--json").json["members"]
        assert ["-", member.address, "1"] in penstock("group", "describe", "crowd").rows


def test_a_reset_of_a_partition_needs_its_topic() -> None:
    assert "--partition needs --topic" in wrong_usage("group", "reset", "any", "--to", "latest", "--partition", "0")


@pytest.mark.parametrize("place", ["yesterday", "-1", "", "2030-13-01", str(1 << 63)])
def test_a_place_that_is_none_is_wrong_usage(place: str) -> None:
    assert "it must be earliest, latest, an offset, a time" in wrong_usage("group", "reset", "any", f"--to={place}")


# ---- delayed messages


def test_delayed_messages_are_listed_and_cancelled(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish("orders.eu", b"later", key="k", delay=7200, message_id="a")
            client.publish("orders.us", b"soon", delay=3600)
            assert [message.value for message in client.delayed()] == [b"soon", b"later"]
            [later] = penstock("delayed", "list", "--message-id", "a", "--json").json
            assert (later["subject"], later["key"], later["value"]) == ("orders.eu", "k", "later")
            [row] = [row for row in penstock("delayed", "list", "*.us").rows if "orders.us" in row]
            assert row[0] == str(client.delayed("*.us")[0].offset)
            assert penstock("delayed", "cancel").code == 2
            assert penstock("delayed", "cancel", "*.eu", "--offset", row[0], "--json").json == {"cancelled": 0}
            assert penstock("delayed", "cancel", ">", "--message-id", "a").lines == ["cancelled 1 delayed message"]
            assert penstock("delayed", "cancel", "orders.>", "--offset", row[0], "--json").json == {"cancelled": 1}
            assert penstock("delayed", "list", "--json").json == []


# ---- dead letters


def test_dead_letters_are_chosen_given_back_to_their_group_and_purged(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish_many(("orders.eu", b"%d" % number) for number in range(4))
            with client.subscribe("orders.>", group="billing", start="earliest") as member:
                for number in range(4):
                    member.get(PATIENCE_S).reject(reason="bank away" if number % 2 else "no such account")
                member.flush()
            until(lambda: len(client.dead_letters()) == 4)
            away = ("--group", "billing", "--reason", "BANK", "--since", "-1h", "--until", "1h")
            assert [each["value"] for each in penstock("dlq", "list", *away, "--json").json] == ["1", "3"]
            assert penstock("dlq", "list", "--since", "1h", "--json").json == []
            one = ("--partition", 0, "--offset", 0)
            assert penstock("dlq", "purge", *one).lines == ["purged 1 dead letter"]
            given = penstock("dlq", "redrive", *away, "--to-group")
            assert given.lines == ["returned 2 dead letters to their groups"]
            with client.subscribe("orders.>", group="billing") as member:
                again = [member.get(PATIENCE_S) for _ in range(2)]
            assert sorted((message.value, message.attempts) for message in again) == [(b"1", 1), (b"3", 1)]
            assert penstock("dlq", "purge", "--json").json == {"purged": 1}
            assert penstock("dlq", "list", "--json").json == []
            assert client.topic("orders").positions[0].end == 4


def test_letters_that_cannot_be_redriven_are_counted_and_the_others_are_redriven(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_deliveries_max=1) as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        with Client(f"127.0.0.1:{server.port}") as client:
            client.create_topic("gone")
            for topic in ("orders", "gone", "orders"):
                client.publish(topic, b"bad")
            for topic, count in (("orders", 2), ("gone", 1)):
                with client.subscribe(topic, group=topic, start="earliest") as member:
                    for _ in range(count):
                        member.get(PATIENCE_S).reject()
                    member.flush()
            until(lambda: len(client.dead_letters()) == 3)
            client.delete_group("gone")
            done = penstock("dlq", "redrive", "--to-group")
            assert (done.code, done.out) == (1, "returned 2 dead letters to their groups\n")
            assert "1 dead letter could not be redriven: " in done.err
            assert [letter.subject for letter in client.dead_letters()] == ["gone"]
            with pytest.raises(UnknownGroup):
                client.redrive(to_group=True)


def test_dead_letters_are_listed_looked_at_and_redriven(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_deliveries_max=1) as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish("orders.eu", b"bad order", key="k", headers={"Trace": "\x1b[31m"})
        # It is delivered, and given back: its last try.
        options = ("--group", "billing", "--start", "earliest", "--count", 1, "--no-ack")
        assert penstock("subscribe", "orders.>", *options).code == 0
        [letter] = until(lambda: penstock("dlq", "list", "--json").json)
        assert (letter["subject"], letter["topic"], letter["group"]) == ("orders.eu", "orders", "billing")
        assert (letter["origin_offset"], letter["value"], letter["redriven"]) == (0, "bad order", False)
        assert penstock("dlq", "list", "other.>", "--json").json == []
        [row] = [row for row in penstock("dlq", "list").rows if "orders.eu" in row]
        assert (row[:2], row[3]) == (["0", "0"], "orders.eu")
        assert datetime.fromisoformat(row[2]).tzinfo is not None
        peeked = penstock("dlq", "peek", 0, 0)
        assert ["value", "bad", "order"] in peeked.rows
        assert ["Dead-Letter-Group", "billing"] in peeked.rows
        assert ["Trace", r"'\x1b[31m'"] in peeked.rows
        document = penstock("dlq", "peek", 0, 0, "--json").json
        assert (document["value"], document["key"]) == ("bad order", "k")
        nothing = penstock("dlq", "peek", 0, 7)
        assert (nothing.code, nothing.out) == (1, "")
        assert penstock("dlq", "redrive", "other.>", "--json").json == {"redriven": 0, "skipped": 0, "reason": None}
        assert penstock("dlq", "redrive", "--count", 5).lines == ["published 1 dead letter again"]
        assert penstock("dlq", "list", "--json").json == []
        [again] = penstock("dlq", "list", "--redriven", "--json").json
        assert again["redriven"] is True
        assert penstock("dlq", "list", "--since", "soon").code == 2
        values = [each["value"] for each in penstock("fetch", "orders", "--json").documents]
        assert values == ["bad order", "bad order"]
