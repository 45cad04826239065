"""A real replica in a process of its own, what it answers, and whether that is all that its broker has."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.client.sync import Client
from penstock.client.values import Outgoing
from tests.support import forks
from tests.support.server import PATIENCE_S, Ended, Serve, clean_environment

_READY: Final = re.compile(r"^penstock \S+ replica (\S+) ready: http on 127\.0\.0\.1:(\d+), ")
_VARIABLES: Final = ("CONSUMER_", "BROKER_", "STORAGE_")


class ReplicaProcess:
    """`penstock replica` on a free port, set by the environment. It ends with its block, by a clean stop that must
    succeed; unless the test ended it before."""

    def __init__(
        self,
        directory: Path,
        broker_port: int,
        topic: str = "price-topic",
        *,
        flags: Sequence[str] = (),
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
        **environment: object,
    ) -> None:
        """`before`: called in the new process before it is one."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.data = directory / "copy"
        self.port = 0
        self.ready = ""
        self._environment: dict[str, object] = {
            "CONSUMER_TYPE": "price",
            "CONSUMER_TOPIC": topic,
            "CONSUMER_GROUP": f"{topic}-group",
            "CONSUMER_PORT": 0,
            "BROKER_HOST": "localhost",
            "BROKER_PORT": broker_port,
            "STORAGE_DATA_DIR": self.data,
        } | environment
        self._flags = list(flags)
        self._cwd = cwd
        self._before = before
        self._starts = 0
        self.process = self._start()
        self._wait_ready()

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        """The status, and the JSON of the answer. Headers are named as in Python: `sec_fetch_site`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method, headers=named)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read())

    def get(self, path: str) -> Any:
        """What a query answers, which must be right."""
        status, answer = self.ask(f"/api/query/{path}")
        assert status == 200, answer
        return answer

    def records(self, partition: int = 0) -> list[dict[str, Any]]:
        """All of a partition."""
        found: list[dict[str, Any]] = []
        begin: int | None = 0
        while begin is not None:
            answer = self.get(f"range?from={begin}&limit=1000&partition={partition}")
            found += answer["records"]
            begin = answer["next"]
        return found

    def wait_records(self, count: int) -> None:
        self.wait_for(lambda: self.get("stats")["totalRecords"] >= count)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None, f"it has ended:\n{self.stderr}"
            assert time.monotonic() < until, f"in vain: {self.ask('/api/query/health')}\n{self.stderr}"
            time.sleep(0.01)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Ended:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the replica does not end:\n{self.stderr}") from None
        return self._ended()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ended()

    def restart(self, **environment: object) -> None:
        """On the same directory, after `stop` or `kill`."""
        assert self.process.returncode is not None, "it must end first"
        self._environment |= environment
        self.process = self._start()
        self._wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.process.returncode is not None:
            return
        if kind is not None:
            self.kill()
            return
        died = self.process.poll() is not None
        ended = self.wait() if died else self.stop()
        assert not died, f"it ended by itself, with exit code {ended.code}:\n{ended.stderr}"
        assert ended.code == 0, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr

    def _start(self) -> forks.Process:
        self._starts += 1
        self._stderr_path = self.directory / f"stderr.{self._starts}"
        environment = {name: str(value) for name, value in self._environment.items()}
        inherited = {name: value for name, value in clean_environment().items() if not name.startswith(_VARIABLES)}
        with self._stderr_path.open("wb") as stderr:
            if self._before is None:
                arguments = ["replica", *self._flags]
                return forks.start(arguments, environment=inherited | environment, stderr=stderr, cwd=self._cwd)
            return subprocess.Popen(
                [sys.executable, "-m", "penstock", "replica", *self._flags],
                cwd=self._cwd,
                env=inherited | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                preexec_fn=self._before,  # noqa: PLW1509  there are no threads yet
            )

    def _wait_ready(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        until = time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0, until - time.monotonic()))[0]:
                self.kill()
                raise AssertionError(f"the replica does not get ready:\n{self.stderr}")
            more = os.read(stdout.fileno(), 4096)
            if not more:
                ended = self.wait()
                raise AssertionError(f"the replica ends with exit code {ended.code}:\n{ended.stderr}")
            line += more
        self.ready = line.decode().rstrip("\n")
        found = _READY.match(self.ready)
        assert found, self.ready
        self.port = int(found[2])

    def _ended(self) -> Ended:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return Ended(self.process.returncode, self.stderr)


def quiet(server: Serve) -> int:
    return server.ports["quiet"]


def wait_acknowledged(replica: ReplicaProcess, client: Client, topic: str) -> None:
    replica.wait_for(lambda: client.lag(f"{topic}-group") == 0)


@contextmanager
def publishing(port: int, topic: str, total: int) -> Iterator[None]:
    """So many messages, while the block runs; all are stored when it has ended."""

    def publish() -> None:
        with Client(f"127.0.0.1:{port}") as client:
            for first in range(0, total, 50):
                client.publish_many(
                    [Outgoing(topic, b"%d" % number, key=f"k{number % 7}") for number in range(first, first + 50)]
                )

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def wait_some_more(replica: ReplicaProcess, count: int) -> None:
    replica.wait_records(replica.get("stats")["totalRecords"] + count)


def check_copy(replica: ReplicaProcess, client: Client, topic: str, total: int) -> None:
    """All that the broker has, each once, in its order."""
    replica.wait_records(total)
    partitions = client.topic(topic).partitions
    for partition in range(partitions):
        stored = [(each.offset, each.value.decode()) for each in client.fetch(topic, partition)]
        assert [(each["offset"], each["data"]) for each in replica.records(partition)] == stored
    assert replica.get("stats")["totalRecords"] == total
    wait_acknowledged(replica, client, topic)
