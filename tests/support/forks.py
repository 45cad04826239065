"""Processes that run `penstock`, forked from one that has imported it.

Imports are nine tenths of the start of a server or a command, and the tests start hundreds of them. A forked process
has a pid, memory and files of its own, takes signals, and ends like any other. Tests of the start itself, and the
commands in the documents, use `subprocess`: so what a command forgets to import is noticed there.

    test process ── control ── parent process ── fork ── penstock serve
         └────────────────────── status ────────┘

The test sends the arguments and the file descriptors over `control`. The parent process sends the pid over `status`,
and the exit code as soon as it has reaped the process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, NamedTuple

# Python and the loader of libraries read these only when a program is started.
_READ_AT_START: Final = ("PYTHON", "LD_", "MALLOC_", "LC_", "LANG")
# Whether output is buffered is for all as it is for most users.
_UNBUFFERED: Final = "PYTHONUNBUFFERED"
_PRELOADED: Final = (
    "penstock.cli.serve",
    "penstock.cli.replica",
    "penstock.cli.registry",
    "penstock.cli.publish",
    "penstock.cli.topic",
    "rich.table",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.h11_impl",
)
_REQUEST_BYTES_MAX: Final = 1 << 17


class Fork:
    """A process, with those methods of `subprocess.Popen` that the tests use, from any thread."""

    def __init__(self, pid: int, status: int, stdout: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | Any = None
        self._status = status
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = int(os.read(self._status, 64))
        code: int | None = self.returncode
        return code

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("penstock", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        waiting = select.poll()  # `select.select` takes no descriptor above 1023
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))


Process = subprocess.Popen[bytes] | Fork


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    stderr: IO[bytes],
    cwd: Path | None = None,
    descriptors_max: int | None = None,
) -> Process:
    """Start `penstock` with these arguments, without input. Its output is a pipe."""
    if _read_at_start(environment) != _read_at_start(os.environ):
        assert descriptors_max is None
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    request = _Request(list(arguments), dict(environment), str(cwd or Path.cwd()), descriptors_max)
    output, output_of_process = os.pipe()
    with open(os.devnull, "rb") as nothing, open(output_of_process, "wb") as written:
        pid, status = _fork(request, nothing, written, stderr)
    return Fork(pid, status, open(output, "rb", buffering=0))


def run(
    arguments: Sequence[str], *, environment: Mapping[str, str], stdin: bytes = b"", timeout: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "penstock", *arguments]
    if _read_at_start(environment) != _read_at_start(os.environ):
        return subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=timeout, check=False)
    request = _Request(list(arguments), dict(environment), str(Path.cwd()), None)
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = Fork(*_fork(request, given, out, err))
        try:
            process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


def _fork(request: _Request, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> tuple[int, int]:
    """Return the pid, and the descriptor that has the exit code in the end."""
    status, status_of_parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with status_of_parent:
        descriptors = [each.fileno() for each in (stdin, stdout, stderr, status_of_parent)]
        socket.send_fds(_parent(_read_at_start(os.environ)), [json.dumps(request).encode()], descriptors)
    return int(status.recv(64)), status.detach()


class _Request(NamedTuple):
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    descriptors_max: int | None


def _read_at_start(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value) for name, value in environment.items() if name.startswith(_READ_AT_START) and name != _UNBUFFERED
    )


@cache
def _parent(_environment: frozenset[tuple[str, str]]) -> socket.socket:
    """Start the process that the others are forked from, one for each environment that matters to its start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            env={name: value for name, value in os.environ.items() if name != _UNBUFFERED},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as the forked processes have it: `sys.stdout` remembers that it cannot seek
            pass_fds=[theirs.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# In the parent process.


def _fork_on_request(control: socket.socket) -> None:
    """Return in each forked process. Exit when the test process closes `control`."""
    statuses: dict[int, int] = {}
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process ends it
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            awake.recv(4096)
            _report_ended(statuses)
        if control not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES_MAX, 4)
        if not request:
            sys.exit()
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (control, awake, wake):
                each.close()
            for status in statuses.values():
                os.close(status)
            _become(_Request(*json.loads(request)), descriptors)
            return
        *given, status = descriptors
        for descriptor in given:
            os.close(descriptor)
        statuses[pid] = status
        os.write(status, b"%d" % pid)


def _report_ended(statuses: dict[int, int]) -> None:
    while statuses:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        status = statuses.pop(pid)
        try:
            os.write(status, b"%d" % os.waitstatus_to_exitcode(ended))
        except OSError:
            pass  # the test has dropped it
        os.close(status)


def _become(request: _Request, descriptors: list[int]) -> None:
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if request.descriptors_max is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request.descriptors_max, request.descriptors_max))
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    os.chdir(request.cwd)
    sys.path[0] = request.cwd  # as `python -m` has it
    sys.argv = ["penstock", *request.arguments]


if __name__ == "__main__":
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()  # a collector that looks at all of this in each process would copy its memory
    _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
