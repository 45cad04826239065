"""`penstock publish`, run as its users run it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.cli.jsonlines import read_message, read_object
from penstock.client.sync import Client
from penstock.client.values import Outgoing
from penstock.errors import BadRequest
from tests.support.commands import Penstock, at_terminal, wrong_usage
from tests.support.process import PATIENCE_S


def values_of(client: Client, topic: str) -> list[bytes]:
    return [message.value for message in client.fetch(topic)]


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
