"""`penstock worker` as a process of its own: how it begins, what it refuses, and that no end of it loses a message."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Self

import pytest

from penstock.client.sync import Client
from tests.support.process import PATIENCE_S, Ended
from tests.support.server import Serve, clean_environment

# As the command `penstock` does it, and unlike `python -m`, -P does not look for modules where it is run.
COMMAND = [sys.executable, "-P", "-m", "penstock", "worker"]
# A handler says what it does on stdout, and goes on when it reads a line.
SHOP = """
import sys

from penstock.app import App, Retry

app = App(stop_timeout={stop_timeout})
PATTERN, GROUP = "{topic}", "{topic}"


@app.consumer(PATTERN, group=GROUP)
def bill(message):
    print("begins", message.value.decode(), message.attempts, flush=True)
    sys.stdin.readline()
    print("ends", message.value.decode(), flush=True)
"""
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("worker"), topic_ack_deadline_ms="1h") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"t{next(_numbers)}"


def until(is_so: Callable[[], bool]) -> None:
    """For what only a log or the broker tells."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.005)


class Worker:
    """`penstock worker` in a directory. What is left of it at the end of the block is killed."""

    def __init__(self, directory: Path, target: str, port: int) -> None:
        self._stderr_path = directory / f"stderr.{next(_numbers)}"
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, target, "--servers", f"127.0.0.1:{port}"],
                cwd=directory,
                env=clean_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([stdout], [], [], PATIENCE_S)[0], f"it says nothing:\n{self.stderr}"
            more = os.read(stdout.fileno(), 1)
            assert more, f"it ended, after {line!r}:\n{self.stderr}"
            line += more
        return line.decode().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def says(self, text: str) -> None:
        """Until its log has it."""
        until(lambda: text in self.stderr)

    def end(self) -> Ended:
        return Ended(self.process.wait(PATIENCE_S), self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def write_shop(directory: Path, topic: str, *, stop_timeout: float = 30.0) -> None:
    (directory / "shop.py").write_text(SHOP.format(topic=topic, stop_timeout=stop_timeout))


# How it ends


def test_a_signal_lets_the_handler_finish_and_begins_no_other(
    tmp_path: Path, server: Serve, client: Client, topic: str
) -> None:
    write_shop(tmp_path, topic)
    for number in range(3):
        client.publish(topic, b"%d" % number)
    for number, interrupt in enumerate((signal.SIGTERM, signal.SIGINT)):
        with Worker(tmp_path, "shop:app", server.port) as worker:
            assert worker.line().startswith(f"begins {number}")
            worker.process.send_signal(interrupt)
            worker.says(f"{interrupt.name}: stopping")
            worker.go_on()
            assert worker.line() == f"ends {number}"
            ended = worker.end()
        assert ended.code == 0, ended.stderr
        assert f"consumer bill: {topic}, group {topic} (shared), concurrency 1" in ended.stderr
        assert client.lag(topic) == 2 - number


def test_a_worker_that_is_killed_in_the_middle_leaves_its_message_to_the_next(
    tmp_path: Path, server: Serve, client: Client, topic: str
) -> None:
    write_shop(tmp_path, topic)
    client.publish(topic, b"x")
    with Worker(tmp_path, "shop:app", server.port) as first:
        assert first.line() == "begins x 1"
        first.process.kill()
    with Worker(tmp_path, "shop:app", server.port) as second:
        assert second.line() == "begins x 2"
        second.go_on()
        assert second.line() == "ends x"
        second.process.terminate()
        assert second.end().code == 0
    assert client.lag(topic) == 0


def test_a_handler_that_never_returns_does_not_keep_it(
    tmp_path: Path, server: Serve, client: Client, topic: str
) -> None:
    write_shop(tmp_path, topic, stop_timeout=0.05)
    client.publish(topic, b"x")
    with Worker(tmp_path, "shop:app", server.port) as worker:
        assert worker.line() == "begins x 1"
        worker.process.terminate()
        ended = worker.end()
    assert ended.code == 0, ended.stderr
    assert "consumer bill: 1 handlers did not finish within 0.05 s; their messages will be redelivered" in ended.stderr
    assert client.lag(topic) == 1


def test_a_second_signal_ends_it_at_once(tmp_path: Path, server: Serve, client: Client, topic: str) -> None:
    write_shop(tmp_path, topic)
    client.publish(topic, b"x")
    with Worker(tmp_path, "shop:app", server.port) as worker:
        assert worker.line() == "begins x 1"
        worker.process.terminate()
        worker.says("SIGTERM: stopping")
        worker.process.terminate()
        assert worker.end().code == -signal.SIGTERM
    assert client.lag(topic) == 1


def test_it_outlives_the_server_and_goes_on_with_the_next(tmp_path: Path, topic: str) -> None:
    """The message in its hands comes again: the server that would hear of its end is gone."""
    write_shop(tmp_path, topic)
    with Serve(tmp_path / "server", topic_ack_deadline_ms="1h") as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish(topic, b"x")
        with Worker(tmp_path, "shop:app", server.port) as worker:
            assert worker.line().startswith("begins x")
            server.kill()
            server.restart()
            with Client(f"127.0.0.1:{server.port}") as client:
                client.publish(topic, b"y")
                worker.go_on()
                lines = [worker.line()]
                while lines[-1] != "ends y":
                    worker.go_on()
                    lines.append(worker.line())
                worker.process.terminate()
                assert worker.end().code == 0
                assert client.lag(topic) == 0
    assert lines[0] == "ends x"


def test_a_group_that_is_deleted_ends_all_its_consumers_without_a_traceback(
    tmp_path: Path, server: Serve, client: Client, topic: str
) -> None:
    write_shop(tmp_path, topic)
    with (tmp_path / "shop.py").open("a") as shop:
        shop.write(
            "\napp.consumer(PATTERN, group=GROUP, name='other')(lambda message: print(message.value, flush=True))\n"
        )
    with Worker(tmp_path, "shop:app", server.port) as worker:
        worker.says("consumer other: ")
        until(lambda: topic in [group.name for group in client.groups() if len(group.members) == 2])
        client.delete_group(topic)
        ended = worker.end()
    assert ended.code == 1
    assert f"error: the group {topic} was deleted" in ended.stderr
    assert "Traceback" not in ended.stderr


# What it refuses


def refused(directory: Path, target: str, *arguments: str) -> str:
    """A start that must fail by itself, and what it says."""
    done = subprocess.run(
        [*COMMAND, target, *arguments],
        cwd=directory,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("shop", "invalid app 'shop': use module:app, such as shop.billing:app"),
        (":app", "invalid app ':app': use module:app, such as shop.billing:app"),
        ("shop:", "invalid app 'shop:': use module:app, such as shop.billing:app"),
        ("shpo:app", "no module 'shpo' in {directory} or on Python's path"),
        ("shop.billing:app", "no module 'shop.billing' in {directory} or on Python's path"),
        ("shop:ap", "module shop has no 'ap'; it has shop:app"),
        ("shop:PATTERN", "shop:PATTERN is a str, not a penstock.App; it has shop:app"),
        ("empty:app", "empty:app has no consumers: decorate a function with @app.consumer(pattern, group=...)"),
        ("empty:apps", "module empty has no 'apps'; it has empty:app"),
        ("nothing:app", "module nothing has no 'app'"),
    ],
)
def test_a_target_that_is_no_app_is_refused_with_what_might_be_meant(
    tmp_path: Path, target: str, complaint: str
) -> None:
    write_shop(tmp_path, "orders")
    (tmp_path / "empty.py").write_text("from penstock.app import App\napp = App()\n")
    (tmp_path / "nothing.py").write_text("")
    assert refused(tmp_path, target) == f"error: {complaint.format(directory=tmp_path)}\n"


def test_a_module_that_cannot_be_imported_shows_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import does_not_exist\n")
    assert "ModuleNotFoundError: No module named 'does_not_exist'" in refused(tmp_path, "broken:app")


def test_without_a_broker_it_says_how_to_start_one(tmp_path: Path) -> None:
    write_shop(tmp_path, "orders")
    said = refused(tmp_path, "shop:app", "--servers", "127.0.0.1:1")
    assert "error: no broker at 127.0.0.1:1: start one with `penstock serve`" in said
    assert "Traceback" not in said


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    write_shop(tmp_path, "orders")
    assert refused(tmp_path, "shop:app", "--servers", "127.0.0.1:1,nowhere:x") == (
        "error: invalid address 'nowhere:x': it must be host:port, such as 127.0.0.1:4222 or [::1]:4222\n"
    )


def test_a_group_that_is_another_one_is_an_error_without_a_traceback(
    tmp_path: Path, server: Serve, client: Client, topic: str
) -> None:
    write_shop(tmp_path, topic)
    client.create_group(topic, topic, mode="partitioned")
    said = refused(tmp_path, "shop:app", "--servers", f"127.0.0.1:{server.port}")
    assert f"error: the group {topic} is partitioned" in said
    assert "Traceback" not in said
