"""Backups of a real `penstock serve` under load, with kill -9 of the backup and of the server, judged by what was
acknowledged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from typer.testing import CliRunner

from penstock.backup.restore import OFFSETS_AHEAD, manifests
from penstock.backup.target import DirectoryTarget
from penstock.cli import app
from penstock.client.snapshot import RemoteSnapshot
from penstock.client.sync import Client
from penstock.errors import BadRequest, PenstockError
from penstock.store.store import Store
from penstock.wire.binary import Read, read_frame
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment

CONFIG: Final = """
[storage]
upkeep_ms = 50
[topic]
segment_bytes = "16KiB"
[topics.safe]
partitions = 2
[topics.quick]
durability = "flush"
[topics.latest]
cleanup = "compact"
"""
PADDING: Final = bytes(1000)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "penstock", *map(str, words)]


class Ran(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


def penstock(*words: object, stdin: bytes | None = None) -> Ran:
    """A command in this process: to start one takes longer than what it does here."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    stderr = result.stderr_bytes or b""
    if isinstance(result.exception, PenstockError):
        return Ran(1, result.stdout_bytes, stderr + f"error: {result.exception}".encode())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout_bytes, stderr)


def succeed(*words: object, stdin: bytes | None = None) -> bytes:
    done = penstock(*words, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def wait_until(is_so: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


class Publisher(threading.Thread):
    """Publishes numbered messages, each again until it is acknowledged, and remembers where each is."""

    def __init__(self, server: Serve, topic: str) -> None:
        super().__init__()
        self.topic = topic
        self.stored: dict[tuple[int, int], bytes] = {}
        self.sent: set[bytes] = set()
        self._url = server.url
        self._is_over = threading.Event()

    def run(self) -> None:
        with Client(self._url, timeout=60) as client:
            while not self._is_over.is_set():
                value = b"%s %d " % (self.topic.encode(), len(self.sent)) + PADDING
                self.sent.add(value)
                key = str(len(self.sent) % 7) if self.topic == "latest" else None
                receipt = client.publish(self.topic, value, key=key, message_id=f"{self.topic} {len(self.sent)}")
                self.stored[receipt.partition, receipt.offset] = value

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def load(server: Serve) -> Iterator[list[Publisher]]:
    publishers = [Publisher(server, topic) for topic in ("safe", "quick", "latest")]
    for publisher in publishers:
        publisher.start()
    try:
        wait_until(lambda: all(len(publisher.stored) > 60 for publisher in publishers))
        yield publishers
    finally:
        for publisher in publishers:
            publisher.stop()


def read_all(server: Serve) -> dict[str, dict[tuple[int, int], bytes]]:
    with Client(server.url) as client:
        return {
            topic.name: {
                (partition, message.offset): message.value
                for partition in range(topic.partitions)
                for message in client.fetch(topic.name, partition)
            }
            for topic in client.topics()
        }


def interrupt(server: Serve, target: Path, random: Random, *, kill_server: bool) -> None:
    """Begin a backup, and kill it or the server at some moment, mostly while segments are copied."""
    before = set(target.rglob("*.log"))
    backup = subprocess.Popen(
        command("backup", target, "--rate", "600KiB", "--servers", server.url),
        env=clean_environment(),
        stderr=subprocess.PIPE,
    )
    copied = random.randint(0, 4)
    wait_until(lambda: len(set(target.rglob("*.log")) - before) >= copied or backup.poll() is not None)
    if kill_server:
        server.kill()
        _, stderr = backup.communicate(timeout=60)
        assert backup.returncode == 1, stderr
        assert b"error: " in stderr
        assert b"Traceback" not in stderr
        server.restart()
    else:
        backup.kill()
        backup.communicate()


@pytest.mark.parametrize("seed", [1])
def test_a_restore_has_all_that_was_acknowledged_before_the_backup(tmp_path: Path, seed: int) -> None:
    random, target = Random(seed), tmp_path / "backups"
    with Serve(tmp_path / "one", config=CONFIG) as server:
        with load(server) as publishers:
            acknowledged = [dict(publisher.stored) for publisher in publishers]
            first = json.loads(succeed("backup", target, "--json", "--servers", server.url))
            for kill_server in (False, True):
                interrupt(server, target, random, kill_server=kill_server)
            # What was interrupted left the former one as it was.
            assert [each.id for each in manifests(DirectoryTarget(target))] == [first["id"]]
            succeed("restore", target, "--check")
            last_acknowledged = [dict(publisher.stored) for publisher in publishers]
            last = json.loads(succeed("backup", target, "--json", "--servers", server.url))
            assert last["copied_segments"] < last["segments"]
        sent = {publisher.topic: publisher.sent for publisher in publishers}
    for backup, expected in ((first, acknowledged), (last, last_acknowledged)):
        directory = tmp_path / backup["id"]
        succeed("restore", target, directory / "data", "--backup", backup["id"])
        succeed("log", "verify", directory / "data")
        with Serve(directory, config=CONFIG) as restored:
            found = read_all(restored)
            for publisher, stored in zip(publishers, expected, strict=True):
                here = found[publisher.topic]
                if publisher.topic == "latest":
                    # Of each key there is the latest that was acknowledged then, or a later one.
                    assert {key for _, key in _latest(stored)} <= {key for _, key in _latest(here)}
                    assert set(here.values()) <= sent[publisher.topic]
                    continue
                assert stored.items() <= here.items()
                assert set(here.values()) <= sent[publisher.topic]
                assert len(set(here.values())) == len(here)  # each once
            with Client(restored.url) as client:
                receipt = client.publish("quick", b"new")
                assert receipt.offset >= OFFSETS_AHEAD
        succeed("log", "verify", directory / "data")


def _latest(stored: dict[tuple[int, int], bytes]) -> set[tuple[int, int]]:
    """The keys that messages of the compacted topic have."""
    return {(0, (int(value.split()[1]) + 1) % 7) for value in stored.values()}


def test_groups_letters_delays_and_ids_are_restored(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", topic_ack_deadline_ms=60_000) as server, Client(server.url) as client:
        client.create_topic("orders", partitions=1)
        client.create_group("billing", topic="orders", start="earliest")
        for number in range(6):
            client.publish("orders", b"%d" % number, message_id=f"id {number}")
        with client.subscribe(topic="orders", group="billing", buffer=3) as subscription:
            done, rejected = (subscription.get(timeout=10) for _ in range(2))
            done.ack()
            rejected.reject()
            wait_until(lambda: len(client.dead_letters()) == 1)
            client.publish("orders", b"late", delay=3600)
            with client.producer(timeout=10) as producer:
                producer.publish("orders", b"by a producer")
            succeed("backup", tmp_path / "b", "--servers", server.url)
            assert client.group("billing").pending > 0
        client.publish("orders", b"after the backup")
    succeed("restore", tmp_path / "b", tmp_path / "two" / "data")
    with Serve(tmp_path / "two") as server, Client(server.url) as client:
        assert client.group("billing").pending > 0
        assert [letter.value for letter in client.dead_letters()] == [b"1"]
        assert [message.value for message in client.delayed()] == [b"late"]
        again = client.publish("orders", b"3", message_id="id 3")
        assert (again.duplicate, again.offset) == (True, 3)
        client.publish("orders", b"new")
        with client.subscribe(topic="orders", group="billing") as subscription:
            got = [subscription.get(timeout=10).value for _ in range(6)]
            assert set(got) == {b"2", b"3", b"4", b"5", b"by a producer", b"new"}


def test_a_reader_that_was_further_than_the_backup_misses_nothing_new(tmp_path: Path) -> None:
    with Serve(tmp_path / "one") as server, Client(server.url) as client:
        client.publish("orders", b"before")
        succeed("backup", tmp_path / "b", "--servers", server.url)
        after = [client.publish("orders", b"after %d" % number).offset for number in range(5)]
    succeed("restore", tmp_path / "b", tmp_path / "two" / "data")
    with Serve(tmp_path / "two") as server, Client(server.url) as client:
        client.publish("orders", b"new")
        assert [message.value for message in client.fetch("orders", 0, after[-1] + 1)] == [b"new"]


def test_topics_that_change_during_a_backup_are_in_it_as_they_were(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", config=CONFIG) as server, Client(server.url) as client:
        for topic in ("deleted", "purged", "latest"):
            for number in range(100):
                client.publish(topic, b"%d" % number + PADDING, key="key" if topic == "latest" else None)
        expected = read_all(server)
        backup = subprocess.Popen(
            command("backup", tmp_path / "b", "--rate", "300KiB", "--servers", server.url), env=clean_environment()
        )
        wait_until(lambda: any(tmp_path.glob("b/segments/*/*.log")))
        client.delete_topic("deleted")
        client.purge_topic("purged", "latest")
        client.publish("latest", b"newest", key="key")
        client.publish("created", b"later")
        assert backup.wait(60) == 0
    succeed("restore", tmp_path / "b", tmp_path / "two" / "data")
    with Serve(tmp_path / "two", config=CONFIG) as server:
        found = read_all(server)
    assert found.keys() == expected.keys()
    for topic in ("deleted", "purged"):
        assert found[topic] == expected[topic]
    assert max(found["latest"].items()) == max(expected["latest"].items())


def test_two_backups_at_the_same_time(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", config=CONFIG) as server:
        with load(server):
            words = command("backup", tmp_path / "b", "--keep", "3", "--servers", server.url)
            running = [subprocess.Popen(words, env=clean_environment()) for _ in range(3)]
            assert [backup.wait(60) for backup in running] == [0, 0, 0]
        for manifest in manifests(DirectoryTarget(tmp_path / "b")):
            succeed("restore", tmp_path / "b", "--check", "--backup", manifest.id)
        assert not list((server.data / "snapshots").iterdir())


def test_a_broker_with_credentials_is_backed_up_with_them_only(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", auth_token="secret") as server:
        refused = penstock("backup", tmp_path / "b", "--servers", server.url)
        assert refused.returncode == 1
        assert b"give --user and --password, or --token" in refused.stderr
        assert not list(tmp_path.glob("b/backups/*"))
        succeed("backup", tmp_path / "b", "--servers", server.url, "--token", "secret")


def test_a_snapshot_belongs_to_its_connection_and_ends_with_it(tmp_path: Path) -> None:
    with Serve(tmp_path / "one") as server, Client(server.url) as other:
        with Client(server.url) as client:
            snapshot = RemoteSnapshot(client)
            file, size = snapshot.listing
            assert json.loads(snapshot.read(file, 0, size + 5))["logs"]
            with pytest.raises(BadRequest, match="invalid file 999"):
                snapshot.read(999, 0, 1)
            assert len(os.listdir(server.data / "snapshots")) == 1

            async def steal() -> Any:
                return await other._async._link.ask(lambda number: read_frame(number, Read(1, file, 0, 10)), "steal")

            with pytest.raises(PenstockError, match="has no snapshot 1"):
                other._loop.run(steal)
        wait_until(lambda: not os.listdir(server.data / "snapshots"))


def test_tar_data_directory_and_list(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", config=CONFIG) as server:
        with Client(server.url) as client:
            client.publish("orders", b"hello")
        tar = succeed("backup", "-", "--servers", server.url)
        in_use = penstock("backup", tmp_path / "b", "--data", server.data)
        assert in_use.returncode == 1
        assert b"is in use by process" in in_use.stderr
    succeed("restore", "-", "--check", stdin=tar)
    succeed("restore", "-", tmp_path / "two" / "data", stdin=tar)
    made = json.loads(succeed("backup", tmp_path / "b", "--json", "--data", server.data))
    listed = json.loads(succeed("backup", tmp_path / "b", "--list", "--json"))["backups"]
    assert [each["id"] for each in listed] == [made["id"]]
    succeed("restore", tmp_path / "b", tmp_path / "three" / "data", "--exact")
    for name, offset in (("two", 1 + OFFSETS_AHEAD), ("three", 1)):
        with Serve(tmp_path / name, config=CONFIG) as server, Client(server.url) as client:
            assert client.publish("orders", b"again").offset == offset
            assert [message.value for message in client.fetch("orders")] == [b"hello", b"again"]


def test_a_stdout_that_takes_no_tar_is_one_sentence(tmp_path: Path) -> None:
    with Store(tmp_path / "data") as store:
        store.create_topic("orders")
    with Path("/dev/full").open("wb") as full:
        told = subprocess.run(
            command("backup", "-", "--data", tmp_path / "data"), stdout=full, stderr=subprocess.PIPE, check=False
        )
    reason = "No space left on device: the backup is incomplete"
    assert (told.returncode, told.stderr.decode()) == (1, f"error: cannot write the tar stream: {reason}\n")


def test_a_target_or_source_that_is_none_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "data") as store:
        store.create_topic("orders")
    tar = succeed("backup", "-", "--data", tmp_path / "data")
    names = set(os.listdir(tmp_path / "data"))
    for words, reason in (
        (("backup", tmp_path / "data", "--data", tmp_path / "data"), "is the data directory of a broker"),
        (("backup", "", "--data", tmp_path / "data"), "the target is empty"),
        (("backup", tmp_path / "data" / "b", "--data", tmp_path / "data"), "the data directory of a broker"),
        (("backup", tmp_path / "none", "--data", tmp_path), "is not a data directory"),
        (("backup", tmp_path / "none", "--servers", "127.0.0.1:1"), "no broker"),
        (("backup", tmp_path / "none", "--list"), "none does not exist"),
        (("restore", tmp_path / "none", tmp_path / "new"), "none does not exist"),
        (("restore", "-", tmp_path / "new"), "the tar stream is damaged or truncated"),
    ):
        done = penstock(*words, stdin=tar[: len(tar) // 3])
        assert (done.returncode, done.stdout) == (1, b"")
        assert reason in done.stderr.decode()
    assert set(os.listdir(tmp_path / "data")) == names
    assert not (tmp_path / "none").exists()


def test_damage_in_the_source_is_told_with_an_exit_code(tmp_path: Path) -> None:
    with Serve(tmp_path / "one", config=CONFIG) as server, Client(server.url) as client:
        for number in range(60):
            client.publish("safe", b"%d" % number + PADDING, key="key")
        path = max(server.data.glob("topics/*/*/*.log"), key=lambda path: path.stat().st_size)
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        made = penstock("backup", tmp_path / "b", "--servers", server.url)
        assert made.returncode == 1
        assert b"warning: safe/" in made.stderr
        assert b"is damaged at byte" in made.stderr
        assert b"backup 2" in made.stdout
        restored = penstock("restore", tmp_path / "b", tmp_path / "two")
        assert restored.returncode == 0
        assert b"damaged before the backup was made: safe/" in restored.stderr
