"""A flipped byte in the files of a real server: what it serves, says and accepts, before and after a repair."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from penstock import Client, Message
from penstock.errors import LogDamaged, ReadFailed, TimedOut
from penstock.log.witness import NOBODY
from penstock.store import witnesses
from penstock.store.meta import look_into
from tests.support.registries import until
from tests.support.server import Serve
from tests.support.web import get


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def segment_with(server: Serve, value: bytes) -> Path:
    [found] = [path for path in server.data.glob("topics/*/*/*.log") if value in path.read_bytes()]
    return found


def consume(messages: Iterable[Message]) -> None:
    for message in messages:
        message.ack()


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_damage_is_named_and_left_behind_until_it_is_repaired(tmp_path: Path, is_clean: bool) -> None:
    with Serve(tmp_path / "serve") as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            for value in (b"first", b"second", b"third"):
                client.publish("orders", value)
            client.create_group("audit", "orders", start="earliest")
        server.stop() if is_clean else server.kill()
        segment = segment_with(server, b"second")
        segment.write_bytes(segment.read_bytes().replace(b"second", b"sfcond"))
        server.restart()

        answer = get(server, "/healthz")
        health = answer.json
        assert (answer.status, health["status"]) == (200, "degraded")
        [damage] = health["damage"]
        assert (damage["topic"], damage["partition"], damage["file"]) == ("orders", 0, str(segment))
        assert (damage["first"], damage["next"]) == (1, 2)
        assert "penstock log repair" in health["remedy"]
        with Client(f"127.0.0.1:{server.port}") as client:
            last = client.publish("orders", b"new").offset
            assert last >= 3
            pattern = rf"{segment}: damaged at byte \d+, offsets 1 to 2: .*log repair"
            with pytest.raises(LogDamaged, match=pattern) as fetched:
                list(client.fetch("orders", 0, 0))
            assert fetched.value.last is not None
            assert [each.value for each in client.fetch("orders", 0, fetched.value.last)] == [b"third", b"new"]
            # It may be told with the answer to the subscription already.
            with (
                pytest.raises(LogDamaged, match="1 to 2") as consumed,
                client.subscribe("orders", group="audit") as messages,
            ):
                consume(messages)
            for error in (fetched.value, consumed.value):
                assert (error.path, error.first, error.last) == (segment, 1, 2)
                assert 0 < error.position < segment.stat().st_size
                assert error.reason in str(error)
                assert error.holds(1)
            told = get(server, "/healthz").json["stopped"]
            assert told == [{"group": "audit", "topic": "orders", "partition": 0}]
            client.alter_topic("orders", on_damage="skip")
            assert [message.offset for message in client.fetch("orders", 0, 0)] == [0, 2, last]
        # The broker runs.
        verified = penstock("log", "verify", server.data, "--json")
        assert verified.returncode == 1
        [found] = [each for log in json.loads(verified.stdout)["logs"] for each in log["damage"]]
        assert (found["path"], found["first"], found["last"]) == (str(segment), 1, 2)

        server.stop()
        assert penstock("log", "repair", server.data).returncode == 0
        server.restart()
        assert get(server, "/healthz").json == {"status": "ok"}
        with Client(f"127.0.0.1:{server.port}") as client:
            client.alter_topic("orders", on_damage="stop")
            assert [message.offset for message in client.fetch("orders", 0, 0)] == [0, 2, last]


def test_a_topic_that_cannot_be_opened_says_why_when_it_is_fetched(tmp_path: Path) -> None:
    with Serve(tmp_path / "serve") as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish("orders", b"alone")
        server.stop()
        stray = segment_with(server, b"alone").with_name("notes.txt")
        stray.touch()
        server.restart()
        result = penstock("fetch", "orders", "--servers", f"127.0.0.1:{server.port}")
        assert result.returncode == 1
        reason = f"orders cannot be read: {stray} is not a file of a log"
        assert reason in result.stderr
        with Client(f"127.0.0.1:{server.port}") as client, pytest.raises(ReadFailed, match=reason):
            list(client.fetch("orders"))


class Attack:
    """A server whose files are hit between its lives, and a journal of all that it stored and delivered."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = Random(seed)
        self.server = Serve(directory, storage_upkeep_ms=50)
        self.journal: dict[int, bytes] = {}
        self.delivered: set[int] = set()
        self.reported: set[int] = set()
        self.topic_id = 0

    @property
    def log(self) -> Path:
        return self.server.data / "topics" / str(self.topic_id) / "0"

    def begin(self) -> None:
        with Client(f"127.0.0.1:{self.server.port}") as client:
            client.create_topic("orders", segment_bytes=4096, on_damage="skip")
            client.create_group("audit", "orders", start="earliest")
            self.topic_id = client.topic("orders").id

    def publish(self, client: Client) -> None:
        for _ in range(self.random.randint(1, 25)):
            value = b"%d:" % len(self.journal) + bytes(self.random.choice((10, 600)))
            offset = client.publish("orders", value).offset
            assert offset > max(self.journal, default=-1), "an offset is given out twice"
            self.journal[offset] = value

    def consume(self, client: Client, present: dict[int, bytes]) -> None:
        """Take all that is there: what is there was delivered now or before."""
        with client.subscribe("orders", group="audit") as messages:
            while present.keys() - self.delivered:
                try:
                    message = messages.get(timeout=5)
                except TimedOut:
                    break
                assert self.journal[message.offset] == message.value
                self.delivered.add(message.offset)
                message.ack()
            messages.flush()
        assert present.keys() <= self.delivered, "a group skips messages"

    def judge(self, client: Client) -> dict[int, bytes]:
        present = {message.offset: message.value for message in client.fetch("orders", 0, 0)}
        assert present.items() <= self.journal.items()
        health = get(self.server, "/healthz").json
        for damage in health.get("damage", ()):
            self.reported |= {each for each in self.journal if damage["first"] <= each < damage["next"]}
        assert self.journal.keys() - present.keys() <= self.reported, "something is lost, and not told"
        return present

    def stop(self) -> None:
        if self.random.random() < 0.5:
            self.server.stop()
            return

        def is_witnessed() -> bool:
            with look_into(self.server.data / "meta.db", is_live=True) as meta:
                known = witnesses.of_topics(meta, []).get((self.topic_id, 0), NOBODY)
                return known.durable > max(self.journal)

        until(is_witnessed)
        self.server.kill()

    def hit(self) -> set[int]:
        """Hit some files; which offsets may be lost with them."""
        if self.random.random() < 0.15:
            meta = self.server.data / "meta.db"
            meta.write_bytes(b"garbage") if self.random.random() < 0.5 else meta.unlink()
            return set()
        names = sorted(self.log.iterdir())
        bases = sorted(int(path.stem) for path in names if path.suffix == ".log")
        lost: set[int] = set()
        for path in self.random.sample(names, min(len(names), self.random.choice((1, 1, 2)))):
            content = bytearray(path.read_bytes())
            match self.random.randint(0, 3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(b"")
                case 2:
                    path.write_bytes(content[: self.random.randint(0, len(content))])
                case _ if content:
                    content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
                    path.write_bytes(content)
                case _:
                    pass
            if path.suffix == ".log":
                after = [base for base in bases if base > int(path.stem)]
                end = after[0] if after else max(self.journal) + 1
                lost |= {each for each in self.journal if int(path.stem) <= each < end}
        return lost

    def run(self, lives: int) -> None:
        with self.server as server:
            self.begin()
            may_be_lost: set[int] = set()
            for _ in range(lives):
                with Client(f"127.0.0.1:{server.port}") as client:
                    present = self.judge(client)
                    assert self.journal.keys() - present.keys() <= may_be_lost, "more is lost than was hit"
                    self.publish(client)
                    if self.random.random() < 0.6:
                        self.consume(client, {**present, **self.judge(client)})
                self.stop()
                if self.random.random() < 0.25:
                    assert penstock("log", "repair", server.data).returncode == 0
                may_be_lost |= self.hit()
                server.restart(storage_upkeep_ms=50)
            with Client(f"127.0.0.1:{server.port}") as client:
                self.consume(client, self.judge(client))


@pytest.mark.parametrize("seed", [1, 2])
def test_files_that_are_cut_removed_emptied_or_flipped_between_lives(tmp_path: Path, seed: int) -> None:
    Attack(tmp_path / "serve", seed).run(5)


def test_a_group_goes_on_behind_what_was_cut_off_and_the_server_says_so(tmp_path: Path) -> None:
    with Serve(tmp_path / "serve") as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.create_group("audit", "orders", start="earliest")
            for number in range(10):
                client.publish("orders", b"order %d" % number)
            with client.subscribe("orders", group="audit") as messages:
                for _ in range(10):
                    messages.get(timeout=10).ack()
                messages.flush()
        server.stop()
        segment = segment_with(server, b"order 9")
        segment.write_bytes(segment.read_bytes()[:500])
        (server.data / "topics" / "77" / "0").mkdir(parents=True)
        verified = json.loads(penstock("log", "verify", server.data, "--json").stdout)
        [lost] = [each for log in verified["logs"] for each in log["damage"]]
        assert (lost["path"], lost["last"]) == (str(segment), 10)
        server.restart()

        health = get(server, "/healthz").json
        assert health["status"] == "degraded"
        [damage] = health["damage"]
        assert (damage["file"], damage["first"], damage["next"]) == (str(segment), lost["first"], 10)
        [unknown] = health["unknown"]
        assert unknown.startswith(str(server.data / "topics" / "77"))
        with Client(f"127.0.0.1:{server.port}") as client:
            assert client.publish("orders", b"new").offset >= 10
            with client.subscribe("orders", group="audit") as messages:
                assert messages.get(timeout=10).value == b"new"
            with pytest.raises(LogDamaged, match=f"offsets {lost['first']} to 10"):
                list(client.fetch("orders", 0, 0))
        server.stop()
        (server.data / "topics" / "77" / "0").rmdir()
        (server.data / "topics" / "77").rmdir()
        assert penstock("log", "repair", server.data).returncode == 0
        server.restart()
        assert get(server, "/healthz").json == {"status": "ok"}
