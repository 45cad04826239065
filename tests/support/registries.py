"""A real registry in a process of its own; and a small HTTP server that answers whatever a test wants."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self

import httpx

from penstock.address import join
from tests.support import forks
from tests.support.process import PATIENCE_S, Running
from tests.support.server import clean_environment, reserve_port

_READY: Final = re.compile(r"penstock \S+ registry ready: http on \S+:(\d+), (\d+) nodes in (.*), version (\d+)")


def until(ask: Callable[[], Any]) -> Any:
    """What is true in the end."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ask()):
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.01)
    return found


def get(url: str, **params: str) -> httpx.Response:
    return httpx.get(url, params=params, timeout=PATIENCE_S)


class Registry(Running):
    """`penstock registry` on a free port."""

    def __init__(self, path: Path, host: str = "127.0.0.1", flags: Sequence[str] = ()) -> None:
        super().__init__(path.parent)
        self._flags = flags
        self.path = path
        self.host = host
        self.port = reserve_port(self)
        self._start()

    @property
    def url(self) -> str:
        return f"http://{join(self.host, self.port)}"

    def start(self) -> None:
        """On the same port, after `stop` or `kill`."""
        self._start_again()

    def topology(self, node_id: str) -> dict[str, Any]:
        answer = get(f"{self.url}/registry/topology", nodeId=node_id)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def _launch(self, stderr: IO[bytes]) -> forks.Process:
        arguments = ["registry", str(self.path), "--host", self.host, "--port", str(self.port), *self._flags]
        return forks.start(arguments, environment=clean_environment(), stderr=stderr)

    def _read_ready(self, line: str) -> None:
        found = _READY.fullmatch(line)
        assert found, line
        assert found[3] == str(self.path)
        self.port, self.nodes, self.version = int(found[1]), int(found[2]), int(found[4])


class MockCloud:
    """`penstock registry --mock-cloud` on a free port."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "registry", "--mock-cloud", "--port", "0"],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.url = f"http://{self.ready.partition('http on ')[2].partition(',')[0]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    # How many bytes it promises; it ends the connection when it has sent what it has.
    promised: int | None = None


def as_json(document: object, status: int = 200) -> Answer:
    return Answer(json.dumps(document).encode(), status)


class Answers:
    """Answers every GET with what `answer` makes of its path. `asked` counts."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        self.asked: list[str] = []
        # The Authorization headers, by path.
        self.given: dict[str, str] = {}
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append(self.path)
                if "Authorization" in self.headers:
                    answers.given[self.path.partition("?")[0]] = self.headers["Authorization"]
                body, status, headers, promised = answers.answer(self.path)
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(promised or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Who asked has gone: a test may want that."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
