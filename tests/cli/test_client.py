"""The Python broker's programs and command lines, as its document has them, and the rest of `penstock client`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.client.qb import BrokerClient, BrokerMessage
from penstock.client.sync import Client
from tests.support.commands import NOBODY, Done, Penstock, interrupt, line_of, wrong_usage
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment

PUBLISHER: Final = """\
from client import BrokerClient

# Create client
client = BrokerClient(host='localhost', port=9999, client_id='publisher-1')
client.connect()

# Create a topic
client.create_topic('events')

# Publish messages
client.publish_text('events', 'Hello, World!')
client.publish_text('events', 'Another message', custom_property='value')

client.disconnect()
"""
SUBSCRIBER: Final = """\
from client import BrokerClient

def message_handler(message):
    print(f"Received: {message.body.decode('utf-8')}")

# Create client
client = BrokerClient(host='localhost', port=9999, client_id='subscriber-1')
client.connect()

# Create a subscription for the topic
client.create_subscription('my-consumer-group', 'events', start_offset=0)

# Join the subscription
client.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Keep running to receive messages
try:
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    client.unsubscribe_from_subscription('my-consumer-group')
    client.disconnect()
"""
# What the document forgot; and when it is ready to be interrupted, it says so. Two threads print: each line is one
# write.
IMPORT_TIME: Final = """\
import os
import time

def print(text):
    os.write(1, f"{text}\\n".encode())

def tell_and_sleep(seconds, sleep=time.sleep):
    print("It waits.")
    time.sleep = sleep
    sleep(seconds)

time.sleep = tell_and_sleep
"""
SUBSCRIBERS: Final = """\
# Subscriber 1
client1 = BrokerClient(client_id='subscriber-1')
client1.connect()
client1.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Subscriber 2 (joins same subscription)
client2 = BrokerClient(client_id='subscriber-2') 
client2.connect()
client2.subscribe_to_subscription('my-consumer-group', handler=message_handler)

# Messages will be distributed round-robin between subscriber-1 and subscriber-2
"""  # noqa: W291
COMMANDS: Final = """\
# Create a topic
python client.py create-topic events --partitions 1

# Create a subscription
python client.py create-subscription my-group events --offset 0

# Publish a message
python client.py publish events "Hello World"

# Join a subscription to receive messages
python client.py join-subscription my-group

# Legacy subscribe (creates subscription automatically)
python client.py subscribe events --offset 0
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests here; each has topics of its own, and those of the document one server."""
    with Serve(tmp_path_factory.mktemp("server")) as server:
        yield server


class Programs:
    """A directory with a `client.py`, and programs beside it."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port
        (directory / "client.py").write_text("from penstock import BrokerClient\n")

    @contextmanager
    def begin(self, text: str) -> Iterator[subprocess.Popen[bytes]]:
        (self._directory / "program.py").write_text(text.replace("port=9999", f"port={self._port}"))
        command = [sys.executable, "-W", "error", "-u", "program.py"]
        with subprocess.Popen(
            command,
            cwd=self._directory,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, text: str) -> Done:
        with self.begin(text) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        return Done(process.returncode, out.decode(), err.decode())


@pytest.fixture
def programs(tmp_path: Path, server: Serve) -> Programs:
    return Programs(tmp_path, server.ports["quiet"])


@pytest.fixture(scope="module")
def penstock(server: Serve) -> Penstock:
    return Penstock(NOBODY, QB_SERVER_PORT=str(server.ports["quiet"]))


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    """Looks what came of it, through another door."""
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


# ---- as the document has it


def test_the_publisher_runs_as_it_stands_also_again(programs: Programs, client: Client) -> None:
    assert programs.run(PUBLISHER) == Done(0, "", "")
    again = programs.run(PUBLISHER)
    assert (again.code, again.out) == (0, "")
    assert "Topic 'events' already exists" in again.err
    first, second, *_ = messages = list(client.fetch("events"))
    assert [message.value for message in messages] == [b"Hello, World!", b"Another message"] * 2
    assert (first.headers, second.headers) == ({}, {"custom_property": "value"})
    client.delete_topic("events")


def test_the_subscriber_runs_as_it_stands_also_again(programs: Programs, client: Client) -> None:
    assert programs.run(PUBLISHER).code == 0
    text = f"{IMPORT_TIME}\n{SUBSCRIBER}"
    with programs.begin(text) as process:
        printed = {line_of(process) for _ in range(3)}
        assert printed == {"It waits.", "Received: Hello, World!", "Received: Another message"}
        assert interrupt(process) == Done(0, "", "")
    group = client.group("my-consumer-group")
    assert (group.lag, group.members) == (0, [])
    with programs.begin(text) as process:
        client.publish("events", b"third")
        assert {line_of(process), line_of(process)} == {"It waits.", "Received: third"}
        ended = interrupt(process)
    assert (ended.code, ended.out) == (0, "")
    assert "Subscription 'my-consumer-group' already exists" in ended.err
    client.delete_group("my-consumer-group")
    client.delete_topic("events")


def test_two_subscribers_run_as_they_stand_and_share_the_messages_in_turn(server: Serve, client: Client) -> None:
    received: defaultdict[str, list[str]] = defaultdict(list)
    all_came = threading.Semaphore(0)

    def message_handler(message: BrokerMessage) -> None:
        # A client's thread has its name.
        received[threading.current_thread().name.split()[1]].append(message.text())
        all_came.release()

    text = SUBSCRIBERS.replace("BrokerClient(", f"BrokerClient(port={server.ports['quiet']}, ")
    names: dict[str, Any] = {"BrokerClient": BrokerClient, "message_handler": message_handler}
    with BrokerClient(port=server.ports["quiet"]) as publisher:
        assert publisher.create_topic("events")
        assert publisher.create_subscription("my-consumer-group", "events")
        exec(text, names)
        for number in range(6):
            assert publisher.publish_text("events", str(number))
        for _ in range(6):
            assert all_came.acquire(timeout=PATIENCE_S)
        names["client1"].disconnect()
        names["client2"].disconnect()
    assert received == {"subscriber-1": [*"024"], "subscriber-2": [*"135"]}
    client.delete_group("my-consumer-group")
    client.delete_topic("events")


def test_its_command_lines_run_as_they_stand(tmp_path: Path, penstock: Penstock, client: Client) -> None:
    # `penstock` as it is for who has installed it.
    here = tmp_path / "penstock"
    here.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    here.chmod(0o755)
    environment = penstock.environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    lines = [line for line in COMMANDS.splitlines() if line.startswith("python client.py ")]
    commands = [line.replace("python client.py", "exec penstock client") for line in lines]
    printed = [
        "Created topic 'events' with 1 partitions",
        "Created subscription 'my-group' for topic 'events' starting at offset 0",
        "Published message to topic 'events'",
        "[events@0] (sub: my-group) Hello World",
        "[events@0] (sub: ",
    ]
    for command, expected in zip(commands, printed, strict=True):
        with subprocess.Popen(
            command, shell=True, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as process:
            assert line_of(process).startswith(expected)
            if expected.startswith("["):
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, out, err) == (0, b"", b"")
    [group] = [group for group in client.groups() if group.pattern == "events"]
    assert (group.name, group.lag, group.members) == ("my-group", 0, [])
    client.delete_group("my-group")
    client.delete_topic("events")


# ---- the rest


def test_a_topic_is_made_as_it_is_asked_for(penstock: Penstock, client: Client) -> None:
    done = penstock("client", "create-topic", "made", "--partitions", 3, "--retention", 24)
    assert done.lines == ["Created topic 'made' with 3 partitions"]
    topic = client.topic("made")
    assert (topic.partitions, topic.policy["retain_ms"]) == (3, 24 * 3_600_000)
    made = penstock("client", "create-topic", "other", "--json").json
    assert made == {"topic": "other", "partitions": 1, "retention_hours": None}


def test_a_message_has_its_partition_and_properties(penstock: Penstock, client: Client) -> None:
    client.create_topic("given", partitions=2)
    options = ("--partition", 1, "--properties", '{"colour": "red", "size": 7, "is-new": true}')
    assert penstock("client", "publish", "given", "välue", *options).lines == ["Published message to topic 'given'"]
    [message] = client.fetch("given", 1)
    assert message.value == "välue".encode()
    assert message.headers == {"colour": "red", "size": "7", "is-new": "true"}
    printed = penstock("client", "subscribe", "given", "--partition", 1, "--count", 1).lines
    assert printed[0].endswith(") välue")
    assert printed[1] == "  Properties: {'colour': 'red', 'size': '7', 'is-new': 'true'}"


def test_messages_are_json_lines_for_programs(penstock: Penstock, client: Client) -> None:
    before = datetime.now(UTC)
    for value in (b"one", b"\xff\0", b"three"):
        client.publish("jsoned", value, headers={"A": "b"})
    penstock("client", "create-subscription", "jsoners", "jsoned", "--offset", 1)
    binary, text = penstock("client", "join-subscription", "jsoners", "--count", 2, "--json").documents
    assert before <= datetime.fromisoformat(binary.pop("timestamp")) <= datetime.now(UTC)
    common = {"topic": "jsoned", "partition": 0, "subscription": "jsoners", "properties": {"A": "b"}}
    assert binary == common | {"offset": 1, "body_base64": "/wA="}
    assert text.items() >= (common | {"offset": 2, "body": "three"}).items()


def test_what_a_terminal_would_obey_is_escaped(penstock: Penstock, client: Client) -> None:
    client.publish("escaped", b"\x1b[31mred")
    [line] = penstock("client", "subscribe", "escaped", "--count", 1).lines
    assert line.endswith(r") '\x1b[31mred'")


def test_so_many_are_printed_and_the_others_left(penstock: Penstock, client: Client) -> None:
    for value in ("one", "two", "three"):
        client.publish("counted", value.encode())
    assert penstock("client", "create-subscription", "counters", "counted").code == 0
    first = penstock("client", "join-subscription", "counters", "--count", 2).lines
    assert [line.split()[-1] for line in first] == ["one", "two"]
    assert client.group("counters").lag == 1
    last = penstock("client", "join-subscription", "counters", "--count", 1).lines
    assert last[0].endswith(" three")


def test_a_subscription_is_deleted(penstock: Penstock, client: Client) -> None:
    client.create_topic("deleted")
    assert penstock("client", "create-subscription", "doomed", "deleted", "--json").json["start_offset"] == 0
    assert penstock("client", "delete-subscription", "doomed").lines == ["Deleted subscription 'doomed'"]
    assert "doomed" not in [group.name for group in client.groups()]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("create-topic", "there"), "Topic 'there' already exists"),
        (("create-subscription", "sub", "missing"), "Topic 'missing' does not exist"),
        (("delete-subscription", "missing"), "Subscription 'missing' does not exist"),
        (("publish", "missing", "x"), "Topic 'missing' does not exist"),
        (("join-subscription", "missing"), "Subscription 'missing' does not exist"),
        (("subscribe", "missing"), "Topic 'missing' does not exist"),
    ],
)
def test_what_the_broker_refuses_is_an_error(
    penstock: Penstock, client: Client, arguments: tuple[str, ...], reason: str
) -> None:
    if "there" not in [topic.name for topic in client.topics()]:
        client.create_topic("there")
    assert penstock("client", *arguments, "--json") == Done(1, "", f"error: {reason}\n")


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ("red", "is not JSON"),
        ("[]", "an object of strings"),
        ('{"a": {}}', "an object of strings"),
        ('{"topic": "x"}', "reserved property names: topic"),
        ('{"data": "x"}', "reserved property names: data"),
    ],
)
def test_properties_that_cannot_be_are_wrong_usage(properties: str, reason: str) -> None:
    assert reason in wrong_usage("client", "publish", "t", "x", "--properties", properties)


def test_without_a_broker_it_says_so_and_how_to_start_one() -> None:
    where = "no broker at 127.0.0.1:1: start one with `penstock serve --quiet-port 1`"
    for arguments in (("create-topic", "t"), ("join-subscription", "s"), ("subscribe", "t")):
        done = Penstock(NOBODY)("client", "--port", 1, *arguments)
        assert done == Done(1, "", f"error: {where}, or name another with --host and --port\n")


def test_it_waits_for_an_answer_as_long_as_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = ("client", "--port", silent.getsockname()[1], "--config", file, "create-topic", "t")
        file.write_text('{"client.request_timeout": 1, "server.prot": "is for the server to refuse"}')
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        assert Penstock(NOBODY)(*at) == Done(1, "", f"error: HEARTBEAT: no answer from {where} within 1 s\n")
        file.write_text('{"client.request_timeout": 0}')
        assert Penstock(NOBODY)(*at).err.startswith(f"error: client.request_timeout (file {file}:1) is 0: it must be ")


def test_a_broker_that_wants_a_token_is_given_one(tmp_path: Path) -> None:
    with Serve(tmp_path / "guarded", auth_token="secret") as server:
        penstock = Penstock(NOBODY)
        at = ("client", "--port", server.ports["quiet"])
        refused = penstock(*at, "create-topic", "t")
        assert (refused.code, refused.out) == (1, "")
        assert refused.err.endswith(": give --user and --password, or --token\n")
        assert penstock(*at, "--token", "secret", "create-topic", "t").code == 0
        assert Penstock(NOBODY, PENSTOCK_AUTH_TOKEN="secret")(*at, "publish", "t", "x").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it_and_leaves_nothing_behind(
    penstock: Penstock, client: Client, number: signal.Signals
) -> None:
    topic = f"ended-by-{number.name}"
    client.publish(topic, b"one")
    with penstock.begin("client", "--client-id", "me", "subscribe", topic) as process:
        assert line_of(process).endswith(" one")
        assert [group.name[:3] for group in client.groups() if group.pattern == topic] == ["me-"]
        assert interrupt(process, number) == Done(0, "", "")
    assert topic not in [group.pattern for group in client.groups()]


def test_a_broker_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with BrokerClient(port=server.ports["quiet"]) as client:
            assert client.create_topic("gone")
            assert client.publish_text("gone", "one")
        with Penstock(NOBODY).begin("client", "--port", client.port, "subscribe", "gone") as process:
            assert line_of(process).endswith(" one")
            server.kill()
            out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"error: ")
    assert err.count(b"\n") == 1


def test_it_ends_quietly_when_nobody_reads_on(penstock: Penstock, client: Client) -> None:
    client.publish("piped", b"one")
    assert penstock("client", "create-subscription", "pipers", "piped").code == 0
    with penstock.begin("client", "join-subscription", "pipers") as process:
        assert line_of(process).endswith(" one")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        client.publish("piped", b"two")
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr.read() == b""
    # What nobody has read is not acknowledged.
    assert client.group("pipers").lag == 1
