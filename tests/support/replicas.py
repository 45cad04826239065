"""A real replica in a process of its own, what it answers, and whether that is all that its broker has."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from penstock.client.sync import Client
from penstock.client.values import Outgoing
from tests.support import forks
from tests.support.process import PATIENCE_S, Running
from tests.support.server import Serve, clean_environment

_READY: Final = re.compile(r"^penstock \S+ replica (\S+) ready: http on 127\.0\.0\.1:(\d+), ")
_VARIABLES: Final = ("CONSUMER_", "BROKER_", "STORAGE_")


class ReplicaProcess(Running):
    """`penstock replica` on a free port, set by the environment."""

    def __init__(
        self,
        directory: Path,
        broker_port: int,
        topic: str = "price-topic",
        *,
        flags: Sequence[str] = (),
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
        https: ssl.SSLContext | None = None,
        **environment: object,
    ) -> None:
        """`before`: called in the new process before it is one. `https`: how it is asked, if not in plain."""
        super().__init__(directory)
        self.data = directory / "copy"
        self.port = 0
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
        self._https = https
        self._start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        """The status, and the JSON of the answer. Headers are named as in Python: `sec_fetch_site`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        scheme = "http" if self._https is None else "https"
        request = urllib.request.Request(f"{scheme}://127.0.0.1:{self.port}{path}", method=method, headers=named)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self._https) as answer:
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

    def restart(self, **environment: object) -> None:
        """On the same directory, after `stop` or `kill`."""
        self._environment |= environment
        self._start_again()

    def _launch(self, stderr: IO[bytes]) -> forks.Process:
        environment = {name: str(value) for name, value in self._environment.items()}
        inherited = {name: value for name, value in clean_environment().items() if not name.startswith(_VARIABLES)}
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

    def _read_ready(self, line: str) -> None:
        found = _READY.match(line)
        assert found, line
        self.port = int(found[2])


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
