"""The benchmark runs and says what it should. What the figures are is no test's business."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import peers
from bench.__main__ import SECTIONS
from bench.load import Block, Subscriber, Worker

ROOT = Path(__file__).parents[1]


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


PLAIN = [name for name in SECTIONS if not name.startswith("spark")]
# It starts Spark again and again, and does nothing else: see tests/spark/test_session.py.
SPARK = [name for name in SECTIONS if name.startswith("spark") and name != "spark start"]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(PLAIN, id="plain"),
        # Spark's sections start Spark and take as long as all others; the tests of Spark prove the same calls.
        pytest.param(SPARK, id="spark", marks=pytest.mark.soak),
    ],
)
def test_prints_every_line_and_writes_the_same_as_json(tmp_path: Path, sections: list[str]) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    only = [argument for name in sections for argument in ("--only", name)]

    done = bench("--quick", "--directory", directory, "--json", tmp_path / "figures.json", *only)

    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["quick"] is True
    assert {line["section"] for line in figures["lines"]} == set(sections)
    for line in figures["lines"]:
        assert line["what"] in done.stdout
        for name in ("penstock", "limit", "ratio"):
            assert math.isfinite(line[name])
            assert line[name] >= 0
        assert (line["met"] is None) == (line["target"] is None)
    if "promised" in sections:
        promised = [line["against"] for line in figures["lines"] if line["section"] == "promised"]
        assert set(promised) == {"promised: Cursus", "promised: Provider", "promised: PulsyFlux"}
    assert not list(directory.iterdir()), "its files were left behind"


def test_runs_only_the_sections_that_are_named(tmp_path: Path) -> None:
    done = bench("--quick", "--directory", tmp_path, "--only", "batch")

    assert done.returncode == 0, done.stderr
    assert "encode a list" in done.stdout
    assert "append, fsync" not in done.stdout


@pytest.mark.parametrize(("option", "value"), [("--only", "nothing"), ("--directory", "/nowhere")])
def test_refuses_what_it_does_not_know(option: str, value: str) -> None:
    done = bench("--quick", option, value)

    assert done.returncode == 2
    assert option in done.stderr
    assert value in done.stderr


def test_a_subscriber_receives_what_a_publisher_sent_through_a_server(tmp_path: Path) -> None:
    with (
        peers.nats(tmp_path / "nats") as peer,
        Worker("subscribe", peer.port, "bench", 100) as subscriber,
        Worker("publish", peer.port, "bench", 100) as publisher,
    ):
        for worker in (subscriber, publisher):
            worker.wait_until_ready()
        for _ in range(2):
            for worker in (subscriber, publisher):
                worker.begin(3)
            begun, sent = publisher.end()
            _, received = subscriber.end()
            assert begun < sent
            assert begun < received
    assert not Path(f"/proc/{peer.pid}").exists(), "the server was left behind"
    assert not list(tmp_path.iterdir()), "its files were left behind"


HEAD = b"MSG bench 1 1024\r\n"


def subscribe(stream: bytes, blocks: int) -> bytes:
    """Let a subscriber receive this, and the end of the stream. What it answered."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(1) as pool, theirs, ours:
        pool.submit(send)
        Subscriber(ours, "bench", 1024).run(blocks)
        ours.shutdown(socket.SHUT_WR)
        return theirs.recv(1024)


def first_block() -> bytes:
    block = Block(HEAD, 1024)
    block.advance()
    return bytes(block.data)


FRAME = len(HEAD) + 1024 + 2


@pytest.mark.parametrize("place", [0, FRAME, 5 * FRAME])
def test_a_subscriber_answers_a_ping_between_messages(place: int) -> None:
    block = first_block()

    assert subscribe(block[:place] + b"PING\r\n" + block[place:], 1) == b"PONG\r\n"


def test_a_subscriber_notices_what_is_lost_altered_repeated_or_out_of_order() -> None:
    block = first_block()
    messages = [block[at : at + FRAME] for at in range(0, len(block), FRAME)]
    wrong = {
        "lost": [*messages[:5], *messages[6:], messages[0]],
        "altered": [*messages[:5], messages[5].replace(b"..", b".,", 1), *messages[6:]],
        "repeated": [*messages[:5], messages[4], *messages[5:]],
        "out of order": [*messages[:5], messages[6], messages[5], *messages[7:]],
    }
    for stream in wrong.values():
        with pytest.raises(RuntimeError, match="was to come"):
            subscribe(b"".join(stream), 1)
    with pytest.raises(RuntimeError, match="was to come"):
        subscribe(block + block, 2)
    with pytest.raises(ConnectionError):
        subscribe(block[:-FRAME], 1)
