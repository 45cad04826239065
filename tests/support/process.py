"""A `penstock` command that runs until it is stopped, in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NamedTuple, Self

from tests.support import forks

# How long to wait for what must come. Only a test that fails waits so long.
PATIENCE_S: Final = 60.0


class Ended(NamedTuple):
    code: int
    stderr: str


class Running(ABC):
    """It is ready when the constructor returns. It ends with its block, by a clean stop that must succeed; unless the
    test ended it before."""

    process: forks.Process

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.ready = ""
        self._starts = 0

    @abstractmethod
    def _launch(self, stderr: IO[bytes]) -> forks.Process: ...

    @abstractmethod
    def _read_ready(self, line: str) -> None:
        """Take the line that it prints when it is ready."""

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Ended:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it does not end:\n{self.stderr}") from None
        return self._ended()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ended()

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

    def _start(self) -> None:
        self._starts += 1
        self._stderr_path = self.directory / f"{type(self).__name__}.stderr.{self._starts}"
        with self._stderr_path.open("wb") as stderr:
            self.process = self._launch(stderr)
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        until = time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0, until - time.monotonic()))[0]:
                self.kill()
                raise AssertionError(f"it does not get ready:\n{self.stderr}")
            more = os.read(stdout.fileno(), 4096)
            if not more:
                ended = self.wait()
                raise AssertionError(f"it ends with exit code {ended.code}:\n{ended.stderr}")
            line += more
        self.ready = line.decode().rstrip("\n")
        self._read_ready(self.ready)

    def _start_again(self) -> None:
        assert self.process.returncode is not None, "it must end first"
        self._start()

    def _ended(self) -> Ended:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return Ended(self.process.returncode, self.stderr)
