"""Someone who follows a document from its top to its end, and looks whether what comes is what it shows.

- A block of `python` is run, and prints what a block of `text` right behind it shows, or nothing. One that begins with
  the name of a file (`# shop.py`) is saved under that name instead.
- A block of `console` is a session in a terminal. Each line behind a `$` is typed, and what stands below it comes; `…`
  stands for any lines, and `^C` is typed when all above it has come.
- A block of `toml` is saved as penstock.toml, and must be right; one that begins with `# users.toml` has users.

All of a document happens in one directory, with one server. It starts with `penstock serve`, or when it is first
needed, and ends with `kill %1`. With `penstock replica … &` there is a replica beside it. What is asked with `curl` is
asked again until it comes: a replica is a moment behind.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.security import users_file
from penstock.server.config import load
from tests.docs import Block, blocks
from tests.support.process import PATIENCE_S
from tests.support.replicas import ReplicaProcess
from tests.support.server import Serve, clean_environment, reserve_port

# The ports that documents tell of, and which door each is of.
_PORTS: Final = {"text": 4222, "quiet": 9092, "http": 8222, "qb": 9999}
_REPLICA_PORT: Final = 8082
# A script may start Spark.
_SCRIPT_S: Final = 240.0
# What set things up is not done again here.
_NOT_TYPED: Final = ("make ", "pip ", "python3 -m venv ", "source ")
# What is never the same twice.
_VARIES: Final = [
    (re.compile(r"\d+\.\d+ s, [\d,]+ messages/s"), "0.01 s, 100 messages/s"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"), "2030-01-31T12:00:00.000000"),
    (re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{6}"), "20300131T120000.000000Z-abcdef"),
    (re.compile(r'"timestamp_us": \d+'), '"timestamp_us": 0'),
    (re.compile(r"127\.0\.0\.1:\d{5}\b"), "127.0.0.1:50000"),
    (re.compile(r"passed in \d+\.\d+s"), "passed in 0.1s"),
    (re.compile(r" +$", re.MULTILINE), ""),
    # It is told if Ctrl-C comes before the last handler has returned.
    (re.compile(r"^.* waiting for \d+ handlers?\n", re.MULTILINE), ""),
]


class Reader:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: Serve | None = None
        self._replica: ReplicaProcess | None = None

    def follow(self, document: str, name: str) -> None:
        found = blocks(document)
        for index, block in enumerate(found):
            where = f"{name}, line {block.line}"
            match block.language:
                case "python":
                    shown = [behind.text for behind in found[index + 1 : index + 2] if behind.follows]
                    self._do_python(block.text, "".join(shown), where)
                case "console":
                    self._do_session(block, where)
                case "toml":
                    self._do_settings(block.text, where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._replica is not None:
            self._replica.__exit__(kind, None, None)
        if self._server is not None:
            self._server.__exit__(kind, None, None)

    # Blocks.

    def _do_python(self, code: str, shown: str, where: str) -> None:
        named = re.match(r"# (\w+\.py)\n", code)
        if named:
            (self._directory / named[1]).write_text(self._with_ports(code))
            return
        done = self._run(
            [sys.executable, "-W", "always::ResourceWarning", "-c", self._with_ports(code)], stderr=subprocess.PIPE
        )
        assert done.returncode == 0, f"{where}:\n{done.stderr}"
        assert "ResourceWarning" not in done.stderr, f"{where}:\n{done.stderr}"
        _compare(self._without_ports(done.stdout), shown, where)

    def _do_settings(self, text: str, where: str) -> None:
        if text.startswith("# users.toml\n"):
            assert len(users_file.parse(Path("users.toml"), text.encode())) > 0
            return
        path = self._directory / "penstock.toml"
        path.write_text(text)
        assert load(path=path, environ={}, flags={}).warnings == [], where

    def _do_session(self, block: Block, where: str) -> None:
        assert block.text.startswith("$ "), f"{where}: it begins with a command"
        for typed in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, shown = typed.partition("\n")
            command = line.partition("  #")[0].strip()
            if not command.startswith(_NOT_TYPED):
                _compare(self._type_until(command, shown), shown, f"{where}: {command}")

    def _type_until(self, command: str, shown: str) -> str:
        until = time.monotonic() + PATIENCE_S
        seen = self._type(command, shown)
        while command.startswith("curl ") and _same(seen) != _same(shown) and time.monotonic() < until:
            seen = self._type(command, shown)
        return seen

    def _type(self, command: str, shown: str) -> str:
        if command.startswith("penstock serve"):
            return self._serve(command.removesuffix("&").split()[2:])
        if re.search(r"penstock replica .*&$", command):
            return self._replicate(command)
        if command == "kill %1":
            assert self._server is not None
            assert self._server.stop().code == 0
            return ""
        if "^C\n" in shown:
            return self._interrupt(command, shown)
        if command.startswith("penstock cert "):
            return self._run(["sh", "-c", command], self._bare_environment()).stdout
        done = self._run(["sh", "-c", self._with_ports(command)])
        assert (done.returncode == 0) == ("error: " not in shown), done.stdout
        return self._without_ports(done.stdout)

    # What is typed.

    def _serve(self, flags: Sequence[str]) -> str:
        assert self._server is None, "a document has one server"
        named = [str(self._directory / flag) if (self._directory / flag).is_file() else flag for flag in flags]
        self._server = Serve(self._directory, flags=named, server_qb_port=reserve_port(self))
        return self._without_ports(self._server.ready) + "\n"

    def _replicate(self, command: str) -> str:
        """What stands before the command is its environment."""
        assert self._replica is None, "a document has one replica"
        variables, _, flags = command.removesuffix("&").partition("penstock replica")
        given: dict[str, Any] = dict(each.split("=", 1) for each in shlex.split(variables))
        self._replica = ReplicaProcess(
            self._directory, self._running().ports["quiet"], flags=shlex.split(flags), cwd=self._directory, **given
        )
        return self._without_ports(self._replica.ready) + "\n"

    def _run(
        self, command: Sequence[str], environment: dict[str, str] | None = None, stderr: int = subprocess.STDOUT
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._directory,
            env=environment or self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=_SCRIPT_S,
            check=False,
        )

    def _interrupt(self, command: str, shown: str) -> str:
        """Ctrl-C, when as many lines have come as are shown before it."""
        before = shown.partition("^C\n")[0]
        with subprocess.Popen(
            ["sh", "-c", f"exec {self._with_ports(command)}"],
            cwd=self._directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            try:
                seen = _read_lines(process.stdout.fileno(), before.count("\n"))
                process.send_signal(signal.SIGINT)
                rest, _ = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        assert process.returncode == 0, seen + rest.decode()
        return self._without_ports(f"{seen}^C\n{rest.decode()}")

    def _environment(self) -> dict[str, str]:
        return self._bare_environment() | {"PENSTOCK_SERVERS": f"127.0.0.1:{self._running().port}"}

    def _bare_environment(self) -> dict[str, str]:
        """For what needs no server, and may be typed before there is one."""
        added = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(self._directory / ".config"),
            "PYTHONUNBUFFERED": "1",
            "TERM": "dumb",
            "TMPDIR": str(self._directory),
        }
        taken = ("COLUMNS", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
        return {name: value for name, value in clean_environment().items() if name not in taken} | added

    def _running(self) -> Serve:
        if self._server is None:
            self._server = Serve(self._directory, server_qb_port=reserve_port(self))
        return self._server

    def _with_ports(self, text: str) -> str:
        for shown, port in self._ports().items():
            for before in ("127.0.0.1:", "--port "):
                text = text.replace(f"{before}{shown}", f"{before}{port}")
        return text

    def _ports(self) -> dict[int, int]:
        """Those that are shown, and what they are here."""
        ports = {port: self._running().ports[door] for door, port in _PORTS.items()}
        return ports if self._replica is None else ports | {_REPLICA_PORT: self._replica.port}

    def _without_ports(self, text: str) -> str:
        for shown, port in self._ports().items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{shown}")
        return text.replace(f"{self._directory}/", "./")


def _read_lines(descriptor: int, count: int) -> str:
    seen = b""
    until = time.monotonic() + PATIENCE_S
    while seen.count(b"\n") < count:
        assert select.select([descriptor], [], [], max(0, until - time.monotonic()))[0], f"only this came:\n{seen!r}"
        more = os.read(descriptor, 65536)
        assert more, f"it ended by itself:\n{seen.decode()}"
        seen += more
    return seen.decode()


def _same(text: str) -> str:
    """Without what is never the same twice."""
    for pattern, constant in _VARIES:
        text = pattern.sub(constant, text)
    return text


def _compare(seen: str, shown: str, where: str) -> None:
    seen, shown = _same(seen), _same(shown)
    if "…\n" in shown:
        assert re.fullmatch(re.escape(shown).replace("…\\\n", r"(?:.*\n)*"), seen), f"{where}:\n{seen}"
    else:
        assert seen == shown, where
