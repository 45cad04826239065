"""The oracle: whatever hostile clients do, the process lives on, and nobody else notices.

A *bystander* publishes numbered messages and reads them during the whole attack. Afterwards every message that was
acknowledged has been delivered once and in order, the process is the same one, `/healthz` is ok, `/varz` counts no
fault, and memory, descriptors and connections are back within bounds.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tests.support import web
from tests.support.process import PATIENCE_S
from tests.support.server import Nats, Serve, pub

USER: Final = "bystander"
PASSWORD: Final = "correct-horse"
SUBJECT: Final = "bystander.numbers"

# What may stay when all hostile clients are gone: caches at their limits, which are the tail of the logs (4 MiB in a
# siege), batches read ahead (8), opened batches (4), who wants a subject and which topic owns it (16 each), and the
# topics and groups that they made (some MB); and what Python's allocator cannot give back: an arena of 1 MiB stays
# while one of its blocks is in use. After four minutes at the NATS port 115 arenas had 40 MB in use and 78 MB free.
# These do not grow with time: sieges of 150, 200, 240 and 400 seconds left 177 to 191 MiB.
RSS_GROWTH_MAX: Final = 160 << 20
# Groups that they made are remembered, as those of honest clients: about 40 kB each. Their number is limited.
RSS_GROUP_MAX: Final = 48 << 10
# Files of the topics that they made: open segments are limited, and so are topics.
FILES_GROWTH_MAX: Final = 400
# The broker takes its time to close what does not read, and to keep up its segments.
RETURN_S: Final = 75.0

_PUBLISH_S: Final = 0.01
_PROBE_S: Final = 0.005


class Figures(NamedTuple):
    """What one siege did to a server."""

    door: str
    attacks: int
    connections: int
    messages: int
    # The longest stall of the event loop, as the server measured it; that a PING waited for its PONG, and a publish for
    # its acknowledgement, as the bystander did, which shares a machine with the attackers.
    stall_ms: float
    ping_ms: float
    publish_ms: float
    rss_before: int
    rss_peak: int
    rss_after: int
    files_peak: int


def table(rows: Iterable[Figures]) -> str:
    head = f"{'door':<10}{'attacks':>9}{'connections':>13}{'bystander':>11}{'stall ms':>10}{'ping ms':>9}"
    lines = [head + f"{'publish ms':>12}{'RSS MB: before':>16}{'peak':>7}{'after':>7}{'files':>7}"]
    for row in rows:
        before, peak, after = (round(size / 1e6) for size in (row.rss_before, row.rss_peak, row.rss_after))
        lines.append(
            f"{row.door:<10}{row.attacks:>9}{row.connections:>13}{row.messages:>11}{row.stall_ms:>10.0f}"
            f"{row.ping_ms:>9.0f}{row.publish_ms:>12.0f}{before:>16}{peak:>7}{after:>7}{row.files_peak:>7}"
        )
    return "\n".join(lines)


class Oracle:
    """Watch a server while the block runs. `judge` raises AssertionError with all that is wrong."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._pid = server.process.pid
        self._bystander = Bystander(server)
        self._probe = _Probe(server)
        self._rss_before = server.rss()
        self._files_before = open_files(self._pid)
        # From here on the kernel notes the peak anew.
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")

    def __enter__(self) -> Self:
        self._bystander.start()
        self._probe.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self._probe.stop()
            self._bystander.abandon()

    def judge(self, door: str = "", attacks: int = 0, connections: int = 0) -> Figures:
        server = self._server
        # A process that ended explains everything else.
        self._check_alive()
        problems = [*self._bystander.finish(), *self._probe.stop()]
        self._check_alive()
        rss_peak = _status_bytes(self._pid, "VmHWM")
        assert _eventually(lambda: bool(get(server, "/healthz").status)), "the HTTP port does not answer"
        if not _eventually(lambda: get(server, "/healthz").status == 200):
            problems.append(f"/healthz: {get(server, '/healthz').body!r}")
        faults = varz(server)["faults"]
        if faults:
            problems.append(f"unexpected exceptions, by seam: {faults}")
        if not _eventually(lambda: varz(server)["connections"] == 0):
            problems.append(f"{varz(server)['connections']} connections are left, and nobody is there")
        allowed = self._rss_before + RSS_GROWTH_MAX + RSS_GROUP_MAX * varz(server)["groups"]
        if not _eventually(lambda: server.rss() <= allowed):
            problems.append(f"RSS stays at {server.rss() >> 20} MiB, it was {self._rss_before >> 20}")
        if not _eventually(lambda: open_files(self._pid) <= self._files_before + FILES_GROWTH_MAX):
            problems.append(f"{open_files(self._pid)} descriptors stay open, there were {self._files_before}")
        self._check_alive()
        if "Traceback" in server.stderr:
            problems.append("it logged a traceback")
        figures = Figures(
            door=door,
            attacks=attacks,
            connections=connections,
            messages=self._bystander.acknowledged,
            stall_ms=varz(server)["loop_stalls"]["longest_ms"],
            ping_ms=self._probe.longest_s * 1000,
            publish_ms=self._bystander.longest_s * 1000,
            rss_before=self._rss_before,
            rss_peak=rss_peak,
            rss_after=server.rss(),
            files_peak=self._probe.files_peak,
        )
        assert not problems, "\n".join([*problems, table([figures]), "its last words:", server.stderr[-8000:]])
        return figures

    def _check_alive(self) -> None:
        code = self._server.process.poll()
        assert code is None, f"the server ended with exit code {code}:\n{self._server.stderr[-8000:]}"


class _Client(Nats):
    """It answers PINGs."""

    def __init__(self, server: Serve) -> None:
        super().__init__(server, **credentials())

    def line(self) -> str:
        while (line := super().line()) == "PING":
            self.send("PONG\r\n")
        return line


class Bystander:
    """It publishes numbers, one at a time, and reads them over another connection."""

    def __init__(self, server: Serve) -> None:
        self._publisher, self._reader = _Client(server), _Client(server)
        self.acknowledged = 0
        self.received = 0
        self.longest_s = 0.0
        self._problems: list[str] = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True) for work in (self._publish, self._read)
        ]
        self._reader.send(f"SUB {SUBJECT} 1\r\n")
        assert self._reader.ask("PING") == "PONG"

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[str]:
        """Stop publishing, and wait for what is on its way; what went wrong."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        self.abandon()
        if not self._problems and self.received != self.acknowledged:
            self._problems.append(f"{self.acknowledged} messages were acknowledged, {self.received} were delivered")
        return [f"bystander: {problem}" for problem in self._problems]

    def abandon(self) -> None:
        self._stopping.set()
        self._publisher.close()
        self._reader.close()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (AssertionError, OSError) as error:
            if not self._stopping.is_set():
                self._problems.append(f"after {self.acknowledged} messages: {error!r}")

    def _publish(self) -> None:
        while not (self._stopping.wait(_PUBLISH_S) and self.acknowledged):
            begun = time.monotonic()
            self._publisher.send(pub(SUBJECT, b"%d" % self.acknowledged))
            answer = self._publisher.ask("PING")
            assert answer == "PONG", answer
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.acknowledged += 1
        self._publisher.send(pub(SUBJECT, b"end"))
        assert self._publisher.ask("PING") == "PONG"

    def _read(self) -> None:
        while (payload := self._reader.message().payload) != b"end":
            if payload != b"%d" % self.received:
                self._problems.append(f"{payload!r} was delivered, {self.received} was due")
                return
            self.received += 1


class _Probe:
    """It asks for a PONG again and again, and publishes nothing: what it waits for is the event loop."""

    def __init__(self, server: Serve) -> None:
        self._client = _Client(server)
        self._pid = server.process.pid
        self.longest_s = 0.0
        self.files_peak = 0
        self._problems: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[str]:
        self._stopping.set()
        self._thread.join(2 * PATIENCE_S)
        self._client.close()
        return self._problems

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_PROBE_S):
                begun = time.monotonic()
                assert self._client.ask("PING") == "PONG"
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self.files_peak = max(self.files_peak, open_files(self._pid))
        except (AssertionError, OSError) as error:
            self._problems.append(f"probe: {error!r}")


def credentials() -> dict[str, Any]:
    """As CONNECT takes them."""
    return {"user": USER, "pass": PASSWORD}


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def get(server: Serve, path: str) -> web.Answer:
    """What somebody who may ask is answered."""
    return web.get(server, path, **web.basic(USER, PASSWORD))


def varz(server: Serve) -> dict[str, Any]:
    figures: dict[str, Any] = get(server, "/varz").json
    return figures


def _eventually(holds: Callable[[], bool]) -> bool:
    """Whether it holds in time. A server that does not answer is asked again."""
    until = time.monotonic() + RETURN_S
    while time.monotonic() < until:
        try:
            if holds():
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _status_bytes(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024
