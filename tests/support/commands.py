"""Commands that talk to a broker, run as their users run them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.client.sync import Client
from tests.support import forks
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment

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


def topic_names(client: Client) -> list[str]:
    return [topic.name for topic in client.topics()]


def until(ask: Any) -> Any:
    """What is true in the end."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ask()):
        assert time.monotonic() < end, "it never comes"
    return found
