"""A flipped byte in the files of a real server: what it serves, says and accepts, before and after a repair."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock import Client, Message
from penstock.errors import LogDamaged
from tests.server import Serve
from tests.web import get


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
        assert f"orders cannot be read: {stray} is not a file of a log" in result.stderr
