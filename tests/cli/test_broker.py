"""The commands that talk to a broker, run as their users run them, against a real server."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from penstock.cli import MODULES, app
from penstock.cli.bench import histogram
from penstock.cli.jsonlines import read_message, read_object
from penstock.client.sync import Client
from penstock.client.values import Outgoing
from penstock.errors import BadRequest, UnknownGroup
from tests.support import forks
from tests.support.server import PATIENCE_S, Serve, clean_environment

# Nobody listens there: it is never given out.
NOBODY: Final = "127.0.0.1:1"


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert (self.code, self.err) == (0, "")
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        assert (self.code, self.err) == (0, "")
        return self.out.splitlines()

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    @property
    def rows(self) -> list[list[str]]:
        """A table, by its cells."""
        return [line.split() for line in self.lines]


class Penstock:
    """`penstock`, for a server."""

    def __init__(self, servers: str, **environment: str) -> None:
        self.environment = clean_environment() | {"PENSTOCK_SERVERS": servers} | environment
        # As it is for most users, whatever it is here.
        for name in ("COLUMNS", "PYTHONUNBUFFERED"):
            self.environment.pop(name, None)

    def __call__(self, *arguments: object, stdin: bytes = b"") -> Done:
        done = forks.run([*map(str, arguments)], environment=self.environment, stdin=stdin, timeout=3 * PATIENCE_S)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "penstock", *map(str, arguments)]

    @contextmanager
    def begin(self, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
        """One that goes on until it is ended."""
        # Unbuffered, so that `select` knows of every line that is not read.
        with subprocess.Popen(
            self.command(*arguments), bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def interrupt(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGINT) -> Done:
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    return Done(process.returncode, out.decode(), err.decode())


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], PATIENCE_S)[0], "it prints nothing"
    return process.stdout.readline().decode().rstrip("\n")


def at_terminal(penstock: Penstock, *arguments: object, typed: bytes = b"") -> Done:
    """With a terminal for everything: what it shows, escapes and all."""
    ours, theirs = pty.openpty()
    command, environment = penstock.command(*arguments), penstock.environment | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        os.write(ours, typed)
        shown = b""
        while select.select([ours], [], [], PATIENCE_S)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # it has ended
                break
        else:
            process.kill()
        os.close(ours)
    return Done(process.returncode, shown.decode(), "")


def wrong_usage(*arguments: object) -> str:
    """What is said about it. No broker is asked, so it needs none."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"PENSTOCK_SERVERS": NOBODY}, catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests here; each has topics of its own."""
    with Serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def penstock(server: Serve) -> Penstock:
    return Penstock(f"127.0.0.1:{server.port}")


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    """What sets the stage for a command, and looks what came of it."""
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


def publish(client: Client, subject: str, *values: str) -> None:
    for value in values:
        client.publish(subject, value.encode())


def values_of(client: Client, topic: str) -> list[bytes]:
    return [message.value for message in client.fetch(topic)]


def topic_names(client: Client) -> list[str]:
    return [topic.name for topic in client.topics()]


# ---- topics


def test_a_message_to_an_inbox_is_said_not_to_be_stored(penstock: Penstock) -> None:
    assert penstock("publish", "_INBOX.x", "x").out == "published to current subscribers, not stored\n"


def test_a_topic_is_made_as_it_is_asked_for(penstock: Penstock, client: Client) -> None:
    options = "--partitions 3 --durability flush --retain 7d --retain-bytes 5GB --segment-bytes 1MiB --dedup off"
    options += " --ack-deadline 2s --deliveries-max 2 --no-dead-letters --cleanup compact --tombstone 1h"
    options += " --refresh-wait 90s"
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
        "tombstone_ms": 3_600_000,
        "dedup": "off",
        "dedup_window_ms": None,
        "ack_deadline_ms": 2000,
        "deliveries_max": 2,
        "dead_letters": False,
        "refresh_wait_ms": 90_000,
        "on_damage": "stop",
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


# ---- publish


def test_each_argument_has_a_receipt(penstock: Penstock) -> None:
    assert penstock("publish", "receipts.eu", "one", "two").lines == [
        "stored in receipts at 0:0",
        "stored in receipts at 0:1",
    ]
    receipt = penstock("publish", "receipts.eu", "three", "--json").json
    assert receipt == {"topic": "receipts", "partition": 0, "offset": 2, "duplicate": False}


def test_a_message_is_published_as_it_is_given(penstock: Penstock, client: Client) -> None:
    options = ("--key", "k", "--header", "Trace=1=2", "--header", "Other=", "--message-id", "m-1")
    assert penstock("publish", "given", "välue", *options).code == 0
    [message] = client.fetch("given")
    assert (message.value, message.key, message.message_id) == ("välue".encode(), b"k", "m-1")
    assert message.headers.items() >= {"Trace": "1=2", "Other": ""}.items()
    again = penstock("publish", "given", "välue", *options)
    assert again.lines == ["duplicate of given 0:0"]


def test_a_delayed_message_comes_later(penstock: Penstock, client: Client) -> None:
    with client.subscribe("later") as subscription:
        for delay in ("1h", "1ms", "2000-01-01"):
            delayed = penstock("publish", "later", delay, "--delay", delay)
            assert delayed.code == 0
            assert ("when due" in delayed.out) == (delay != "2000-01-01")
        assert {subscription.get(PATIENCE_S).value, subscription.get(PATIENCE_S).value} == {b"1ms", b"2000-01-01"}


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_lines_of_stdin_are_messages(penstock: Penstock, client: Client, arguments: tuple[str, ...]) -> None:
    subject = f"lines{len(arguments)}"
    done = penstock("publish", subject, *arguments, stdin=b" one \r\n\n\xff\x00\nlast")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("published 4 messages: ")
    assert values_of(client, subject) == [b" one \r", b"", b"\xff\x00", b"last"]


def test_many_messages_tell_programs_how_many(penstock: Penstock, client: Client) -> None:
    done = penstock("publish", "many", "--json", stdin=b"x\n" * 5000).json
    assert done["published"] == 5000
    assert done["seconds"] > 0
    [position] = client.topic("many").positions
    assert position.committed == 5000


def test_a_file_of_json_lines_says_all_of_each_message(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    lines = [
        {"subject": "jsonl.plain", "value": "plain"},
        {"subject": "jsonl.other", "value_base64": "/wA=", "key": "k"},
        {"subject": "jsonl", "json": {"a": [1, "é"]}, "headers": {"Own": "1"}, "message_id": "7"},
        {"subject": "jsonl", "json": {"a": 2}, "message_id": "7"},
        {"subject": "jsonl", "key": "k", "tombstone": True},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = penstock("publish", "--file", path, "--header", "Common=c")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("published 4 messages, and 1 duplicate not stored again: ")
    plain, other, own, tombstone = client.fetch("jsonl")
    assert (plain.subject, plain.value, plain.headers) == ("jsonl.plain", b"plain", {"Common": "c"})
    assert (other.subject, other.value, other.key) == ("jsonl.other", b"\xff\x00", b"k")
    assert own.json() == {"a": [1, "é"]}
    assert own.headers.items() >= {"Common": "c", "Own": "1"}.items()
    assert (tombstone.key, tombstone.deleted) == (b"k", True)


def test_a_subject_replaces_those_of_the_file(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.publish("originals.eu", b"one", message_id="1")
    client.publish("originals.us", b"two")
    path = tmp_path / "originals.jsonl"
    penstock("fetch", "originals", "--json", "--output", path)

    first = penstock("publish", "replaced", "--file", path, "--json").json
    again = penstock("publish", "replaced", "--file", path, "--json").json

    assert [(message.subject, message.value) for message in client.fetch("replaced")] == [
        ("replaced", b"one"),
        ("replaced", b"two"),
        ("replaced", b"two"),
    ]
    assert [(each["published"], each["duplicates"]) for each in (first, again)] == [(2, 0), (1, 1)]
    assert len(values_of(client, "originals")) == 2


def test_a_file_of_lines_is_published_as_it_is(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"value": 1}\nno json\n')
    assert penstock("publish", "plain", "--file", path, "--format", "lines").code == 0
    assert values_of(client, "plain") == [b'{"value": 1}', b"no json"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no json", "invalid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "invalid JSON"),
        ('{"value": "x", "colour": "red"}', "unknown field colour"),
        ("{}", "one of value, value_base64, json, tombstone"),
        ('{"value": "x", "json": 1}', "one of value, value_base64, json, tombstone"),
        ('{"value": 1}', "value must be a string"),
        ('{"value_base64": "%"}', "value_base64 must be base64"),
        ('{"value": "x", "key": 1}', "key must be a string"),
        ('{"value": "x", "headers": {"a": 1}}', "headers must be an object of strings"),
        ('{"value": "x", "headers": []}', "headers must be an object of strings"),
        ('{"value": "x", "delay": "soon"}', "'soon': it must be seconds, a duration like"),
        ('{"value": "x", "delay": "-5s"}', "'-5s': it must be seconds, a duration like"),
        ('{"value": "x", "delay": []}', "delay must be"),
        ('{"value": "x", "delay": true}', "delay must be"),
        ('{"value": "x", "delay": NaN}', "NaN is not allowed in JSON"),
        ('{"value": "x", "delay": 1e300}', "it must be from 0 to a year"),
        ('{"tombstone": true}', "tombstone needs a key"),
        ('{"key": "k", "tombstone": false}', "tombstone must be true"),
        ('{"value": "x", "subject": 1}', "subject must be a string"),
        ('{"value": "x", "message_id": 1}', "message_id must be a string"),
    ],
)
def test_a_line_of_json_that_is_no_message_says_why(line: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(reason)):
        read_message(read_object(line.encode()), Outgoing("subject"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no json", "invalid JSON"),
        ('{"value": 1}', "value must be a string"),
        ('{"value": "x", "headers": {"a b": ""}}', "invalid header name 'a b'"),
    ],
)
def test_a_wrong_line_is_named_and_what_came_before_is_stored(
    penstock: Penstock, tmp_path: Path, line: str, reason: str
) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_text(f'{{"value": "a"}}\n{{"value": "b"}}\n{line}\n{{"value": "c"}}\n')
    done = penstock("publish", "wrong", "--file", path)
    assert done.code == 1
    assert done.out.startswith("published 2 messages: ")
    assert done.err.startswith(f"error: {path} line 3: {reason}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("s", "a", "b", "--message-id", "1"),
        ("s", "--message-id", "1"),
        ("s", "a", "--file", "f"),
        ("s", "--format", "lines"),
        ("--format", "lines", "--file", "f"),
        ("s", "--key-field", "id"),
        ("s", "--file", "f", "--subject-field", "s"),
        ("s", "--file", "f", "--key", "k", "--key-field", "id"),
        ("--file", "f", "--format", "messages", "--subject-field", "s"),
        ("s", "a", "--header", "name"),
        ("s", "a", "--delay", "soon"),
        ("s", "a", "--delay", "nan"),
    ],
)
def test_what_does_not_fit_together_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert "Error" in wrong_usage("publish", *arguments)


def test_a_file_that_is_not_there_is_an_error(penstock: Penstock, tmp_path: Path) -> None:
    done = penstock("publish", "s", "--file", tmp_path / "none")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: {tmp_path / 'none'}: No such file or directory\n"


def test_a_line_that_is_too_long_is_named(penstock: Penstock) -> None:
    done = penstock("publish", "long", stdin=b"one\n" + b"x" * (2 << 20) + b"\nthree\n")
    assert done.code == 1
    assert done.out.startswith("published 1 message: ")
    assert done.err.startswith("error: <stdin> line 2: ")


def test_a_bad_subject_is_an_error(penstock: Penstock) -> None:
    done = penstock("publish", "a..b", "x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")


def test_an_interrupted_publisher_tells_what_is_stored(penstock: Penstock, client: Client) -> None:
    command = penstock.command("publish", "interrupted")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=penstock.environment
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        # It is at work when they can be read.
        with client.subscribe("interrupted", start="earliest") as subscription:
            assert [subscription.get(PATIENCE_S).value for _ in range(2)] == [b"one", b"two"]
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (130, b"")
        assert process.stdout.read().startswith(b"published 2 messages: ")


def test_progress_is_for_terminals(penstock: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 100 + b"\n" + b"y\n" * 20_000)
    piped = penstock("publish", "progress", "--file", path, "--format", "lines")
    assert (piped.code, piped.err) == (0, "")
    assert piped.out.count("\n") == 1
    shown = at_terminal(penstock, "publish", "progress", "--file", path, "--format", "lines")
    assert shown.code == 0
    assert "publishing" in shown.out
    assert "published 20,001 messages" in shown.out


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


# ---- fetch


@pytest.fixture(scope="module")
def spread(client: Client) -> list[str]:
    """A topic of three partitions, with twelve messages: their values."""
    client.create_topic("spread", partitions=3)
    values = [f"value {number}" for number in range(12)]
    for number, value in enumerate(values):
        client.publish("spread.it", value.encode(), key=f"key {number}")
    return values


def test_all_partitions_are_fetched_one_after_the_other(penstock: Penstock, spread: list[str]) -> None:
    messages = penstock("fetch", "spread", "--json").documents
    assert sorted(each["value"] for each in messages) == sorted(spread)
    places = [(each["partition"], each["offset"]) for each in messages]
    assert places == sorted(places)
    assert {partition for partition, _ in places} == {0, 1, 2}
    lines = penstock("fetch", "spread", "--partition", 1).lines
    assert lines == [f"spread.it  1:{each['offset']}  {each['value']}" for each in messages if each["partition"] == 1]


def test_a_fetch_begins_and_ends_where_it_is_told(penstock: Penstock, client: Client) -> None:
    publish(client, "ranged", *map(str, range(5)))

    def values(*options: object) -> list[str]:
        return [line.split()[-1] for line in penstock("fetch", "ranged", *options).lines]

    assert values() == ["0", "1", "2", "3", "4"]
    assert values("--from", 2) == ["2", "3", "4"]
    assert values("--from", 1, "--to", 3) == ["1", "2"]
    assert values("--from", 1, "--count", 2) == ["1", "2"]
    assert values("--to", 100) == ["0", "1", "2", "3", "4"]
    assert values("--from", "latest") == []
    assert values("--from", "2000-01-01") == ["0", "1", "2", "3", "4"]
    assert values("--to", "2000-01-01") == values("--to", "@946684800") == values("--to", "-1h") == []
    assert values("--from", "-1h") == ["0", "1", "2", "3", "4"]
    third = penstock("fetch", "ranged", "--from", 3, "--count", 1, "--json").documents[0]["timestamp"]
    assert values("--from", third) == ["3", "4"]
    assert values("--to", third) == ["0", "1", "2"]


def test_what_is_fetched_can_be_published_again(penstock: Penstock, client: Client, spread: list[str]) -> None:
    fetched = penstock("fetch", "spread", "--json")
    lines = [json.dumps(each | {"subject": "again"}) for each in fetched.documents]
    assert penstock("publish", "--file", "-", stdin="\n".join(lines).encode()).code == 0
    again = [(message.key, message.value) for message in client.fetch("again")]
    assert again == [(each["key"].encode(), each["value"].encode()) for each in fetched.documents]


def test_a_fetch_as_csv(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.publish("tabular", b'with "quotes", commas')
    client.publish("tabular", b"\xff")
    client.publish("tabular", b"keyed", key="k", headers={"A": "b"})
    printed = penstock("fetch", "tabular", "--format", "csv").out
    path = tmp_path / "out.csv"
    assert penstock("fetch", "tabular", "--format", "csv", "--output", path).out.startswith("wrote 3 messages to ")
    assert path.read_text() == printed
    first, binary, keyed = csv.DictReader(printed.splitlines())
    assert (first["value"], first["offset"], first["key"]) == ('with "quotes", commas', "0", "")
    assert (binary["value"], binary["value_base64"]) == ("", "/w==")
    assert (keyed["key"], json.loads(keyed["headers"])) == ("k", {"A": "b"})


def test_a_fetch_as_parquet(penstock: Penstock, tmp_path: Path, spread: list[str]) -> None:
    path = tmp_path / "out.parquet"
    done = penstock("fetch", "spread", "--format", "parquet", "--output", path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote 12 messages to {path}: ")
    table = pyarrow.parquet.read_table(path)
    fetched = penstock("fetch", "spread", "--json").documents
    for name in ("partition", "offset", "subject"):
        assert table[name].to_pylist() == [each[name] for each in fetched]
    assert [value.decode() for value in table["value"].to_pylist()] == [each["value"] for each in fetched]
    assert [key.decode() for key in table["key"].to_pylist()] == [each["key"] for each in fetched]
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1
    assert penstock("fetch", "spread", "--format", "parquet", "--output", path, "--count", 7).code == 0
    assert pyarrow.parquet.read_table(path).num_rows == 7


def test_parquet_has_the_topics_name_where_a_message_has_no_other_subject(
    penstock: Penstock, client: Client, tmp_path: Path
) -> None:
    publish(client, "nameless", "one")
    path = tmp_path / "out.parquet"
    assert penstock("fetch", "nameless", "--format", "parquet", "--output", path).code == 0
    assert pyarrow.parquet.read_table(path)["subject"].to_pylist() == ["nameless"]


def test_parquet_without_pyarrow_says_what_to_install(
    penstock: Penstock, client: Client, server: Serve, tmp_path: Path
) -> None:
    publish(client, "arrowless", "one")
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    without = Penstock(f"127.0.0.1:{server.port}", PYTHONPATH=str(tmp_path))
    done = without("fetch", "arrowless", "--format", "parquet", "--output", tmp_path / "out.parquet")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: Parquet needs pyarrow: pip install 'penstock[arrow]'\n"


@pytest.mark.parametrize("partitions", [1, 3])
def test_following_goes_on_until_it_is_interrupted(penstock: Penstock, client: Client, partitions: int) -> None:
    topic = f"followed{partitions}"
    client.create_topic(topic, partitions=partitions)
    keys = [f"key {number}" for number in range(6)]
    with penstock.begin("fetch", topic, "--follow", "--json") as process:
        for key in keys:
            client.publish(topic, b"x", key=key)
        assert sorted(json.loads(line_of(process))["key"] for _ in keys) == keys
        assert interrupt(process) == Done(0, "", "")


def test_following_goes_on_in_partitions_that_come(penstock: Penstock, client: Client) -> None:
    publish(client, "growing", "first")
    with penstock.begin("fetch", "growing", "--follow", "--json") as process:
        assert json.loads(line_of(process))["partition"] == 0
        client.alter_topic("growing", partitions=2)
        written = [client.publish("growing", b"x", key=f"key {number}").partition for number in range(8)]
        assert set(written) == {0, 1}
        read = [json.loads(line_of(process))["partition"] for _ in written]
        assert sorted(read) == sorted(written)
        assert interrupt(process) == Done(0, "", "")


def test_following_ends_after_so_many(penstock: Penstock, spread: list[str]) -> None:
    assert len(penstock("fetch", "spread", "--follow", "--count", 5).lines) == 5


def test_a_fetch_to_a_file_shows_progress_at_a_terminal(penstock: Penstock, tmp_path: Path, spread: list[str]) -> None:
    path = tmp_path / "out"
    assert penstock("fetch", "spread", "--output", path).err == ""
    shown = at_terminal(penstock, "fetch", "spread", "--output", path)
    assert shown.code == 0
    assert "fetching" in shown.out
    assert len(path.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "parquet"),
        ("--format", "parquet", "--output", "f", "--follow"),
        ("--follow", "--to", "3"),
        ("--format", "csv", "--json"),
    ],
)
def test_a_fetch_that_cannot_be_is_wrong_usage(options: tuple[str, ...]) -> None:
    assert "Error" in wrong_usage("fetch", "any", *options)


def test_an_offset_that_is_not_there_yet_is_an_error(penstock: Penstock, client: Client) -> None:
    client.publish("short", b"0")

    assert penstock("fetch", "short", "--from", 1) == Done(0, "", "")
    done = penstock("fetch", "short", "--from", 1900000000)
    reason = "short has no offset 1900000000 yet, it ends at 0:1; to give a time, write @1900000000"
    assert done == Done(1, "", f"error: {reason}\n")


def test_a_partition_that_is_not_there_is_an_error(penstock: Penstock, spread: list[str]) -> None:
    done = penstock("fetch", "spread", "--partition", 3)
    assert done == Done(1, "", "error: invalid partition 3: spread has 0 to 2\n")


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


def until(ask: Any) -> Any:
    """What is true in the end."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ask()):
        assert time.monotonic() < end, "it never comes"
    return found


# ---- top and bench


def test_top_tells_programs_the_rates(penstock: Penstock, client: Client) -> None:
    publish(client, "rated", "one")
    client.create_group("raters", "rated")
    with penstock.begin("top", "--json", "--interval", "0.1") as process:
        first = json.loads(line_of(process))
        [topic] = [each for each in first["topics"] if each["name"] == "rated"]
        assert (topic["messages"], topic["messages_per_second"]) == (1, 0)
        publish(client, "rated", "two", "three")
        flow = 0.0
        lag = 0
        end = time.monotonic() + PATIENCE_S
        while not flow or lag < 2:
            assert time.monotonic() < end, "nothing flows"
            sample = json.loads(line_of(process))
            [topic] = [each for each in sample["topics"] if each["name"] == "rated"]
            [group] = [each for each in sample["groups"] if each["name"] == "raters"]
            flow += topic["messages_per_second"]
            lag = group["lag"]
        assert topic["bytes"] > 0
        assert interrupt(process).code == 0


def test_top_prints_tables_to_a_pipe(penstock: Penstock, client: Client) -> None:
    publish(client, "piped", "one")
    printed = penstock("top", "--interval", "0.1", "--count", 2)
    assert len([row for row in printed.rows if row[:1] == ["piped"]]) == 2
    assert "\x1b" not in printed.out


def test_top_is_live_at_a_terminal(penstock: Penstock, client: Client) -> None:
    publish(client, "watched", "one")
    shown = at_terminal(penstock, "top", "--interval", "0.1", "--count", 2)
    assert shown.code == 0
    assert "watched" in shown.out
    assert "messages/s" in shown.out


def test_bench_measures_and_leaves_nothing_behind(penstock: Penstock, client: Client) -> None:
    options = ("--messages", 2000, "--size", "1KiB", "--topic", "measured")
    done = penstock("bench", *options, "--durability", "flush", "--json").json
    assert (done["messages"], done["size"], done["durability"]) == (2000, 1024, "flush")
    for step in ("publish", "consume"):
        assert done[step]["messages_per_second"] > 0
        assert done[step]["bytes_per_second"] == pytest.approx(1024 * done[step]["messages_per_second"])
    latency = done["latency"]
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"] <= latency["max_ms"]
    assert "measured" not in topic_names(client)
    shown = penstock("bench", *options)
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[0] for line in shown.lines[1:4]] == ["publish", "consume", "latency"]
    assert "█" in shown.out
    assert "measured" not in topic_names(client)


def test_bench_does_not_touch_a_topic_that_exists(penstock: Penstock, client: Client) -> None:
    publish(client, "precious", "one")
    done = penstock("bench", "--topic", "precious", "--messages", 10)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert "precious" in topic_names(client)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_behind(penstock: Penstock, client: Client, number: signal.Signals) -> None:
    topic = f"cut-{number.name}"
    with penstock.begin("bench", "--topic", topic, "--messages", 50_000_000) as process:
        until(lambda: topic in topic_names(client))
        done = interrupt(process, number)
    assert done.code == 128 + number
    assert "Traceback" not in done.err
    assert topic not in topic_names(client)


def test_a_histogram_counts_every_time_once() -> None:
    times = sorted([0.5, 0.5, 0.6, 1.0, 2.0, 30.0])
    counts = [int(line.split()[-1]) for line in histogram(times)]
    assert sum(counts) == len(times)
    assert counts[-1] == 1
    assert sum(int(line.split()[-1]) for line in histogram([0.5])) == 1


# ---- where the broker is, and who asks


ASKING = [
    ("topic", "list"),
    ("publish", "x", "y"),
    ("subscribe", "x", "--json"),
    ("fetch", "x"),
    ("top",),
    ("bench",),
]


@pytest.mark.parametrize("arguments", ASKING, ids=" ".join)
def test_without_a_broker_it_says_so_and_how_to_start_one(arguments: tuple[str, ...]) -> None:
    done = Penstock(NOBODY)(*arguments)
    assert done == Done(
        1, "", f"error: no broker at {NOBODY}: start one with `penstock serve`, or name another with --servers\n"
    )


@pytest.mark.parametrize("servers", ["", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:4222,"])
def test_an_address_that_is_none_is_wrong_usage(servers: str) -> None:
    assert "it must be host:port" in wrong_usage("topic", "list", f"--servers={servers}")


def test_servers_are_tried_in_turn(server: Serve) -> None:
    assert Penstock(NOBODY)("topic", "list", "--servers", f"{NOBODY},127.0.0.1:{server.port}").code == 0


def test_a_server_does_not_mind_where_commands_look_for_one() -> None:
    assert Penstock(NOBODY)("config").code == 0


def test_a_broker_that_wants_a_token_is_given_one(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="secret") as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        for options in ((), ("--token", "wrong"), ("--user", "me", "--password", "wrong")):
            refused = penstock("topic", "list", *options)
            assert (refused.code, refused.out) == (1, "")
            assert refused.err.startswith("error: ")
            assert refused.err.endswith(": give --user and --password, or --token\n")
        assert penstock("topic", "list", "--token", "secret").code == 0
        assert Penstock(f"127.0.0.1:{server.port}", PENSTOCK_AUTH_TOKEN="secret")("topic", "list").code == 0


def test_a_broker_that_wants_a_user_is_given_one(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="me", auth_password="secret") as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        assert penstock("topic", "list").code == 1
        assert penstock("topic", "list", "--user", "me", "--password", "secret").code == 0


# ---- the command line itself


def completions(penstock: Penstock, *words: str) -> list[str]:
    """What Tab proposes in bash for the last of the words."""
    line = " ".join(("penstock", *words))
    asking = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        penstock.command(), capture_output=True, text=True, check=False, env=penstock.environment | asking
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_tab_completes_commands_options_and_choices(penstock: Penstock) -> None:
    assert completions(penstock, "sub") == ["subscribe"]
    assert completions(penstock, "topic", "de") == ["describe", "delete"]
    assert completions(penstock, "topic", "create", "x", "--durability", "f") == ["fsync", "flush"]
    assert "--follow" in completions(penstock, "fetch", "x", "--f")


def test_tab_completes_names_that_the_broker_knows(penstock: Penstock, client: Client) -> None:
    publish(client, "tabbed-one", "x")
    publish(client, "tabbed-two", "x")
    client.create_group("tabbers", "tabbed-one")
    assert sorted(completions(penstock, "topic", "describe", "tabbed-")) == ["tabbed-one", "tabbed-two"]
    assert completions(penstock, "group", "delete", "tabb") == ["tabbers"]


def test_tab_says_nothing_without_a_broker() -> None:
    assert completions(Penstock(NOBODY), "topic", "describe", "t") == []


def test_every_listed_command_is_there() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    # They talk to no broker, or by HTTP.
    alone = ("serve", "config", "demo", "registry", "replica", "restore", "topology")
    for name in (*MODULES, "serve", "config", "demo", "worker"):
        assert f" {name} " in listed
        helped = CliRunner().invoke(app, [name, "--help"], catch_exceptions=False)
        assert helped.exit_code == 0
        assert "--servers" in helped.stdout or "COMMAND" in helped.stdout or name in alone


def test_a_command_that_is_not_there_is_wrong_usage_and_near_ones_are_named() -> None:
    assert "Did you mean 'topic'" in wrong_usage("topc", "list")


def test_help_does_not_wait_for_what_commands_need() -> None:
    modules = [f"penstock.cli.{name}" for name in MODULES] + ["penstock.client", "asyncio"]
    code = (
        "import sys; from typer.testing import CliRunner; from penstock.cli import app\n"
        f"CliRunner().invoke(app, ['--help']); print([name for name in {modules} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
