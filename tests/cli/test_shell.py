"""`penstock shell`: at a real terminal, from stdin, and with a command as its arguments."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.client.sync import Client
from penstock.wire.cursus import VERBS, usage
from tests.support.commands import NOBODY, Done, Penstock, at_terminal, interrupt, line_of
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

TRIES: Final = 20
PROMPT: Final = "penstock> "
UP: Final = "\x10"  # Ctrl-P, which every terminal has
# Ctrl-C is a signal to whom the terminal belongs.
_OWNS_TERMINAL: Final = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One for all tests here; each has topics of its own."""
    with Serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    """What sets the stage, and looks what came of it."""
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def penstock(tmp_path: Path) -> Penstock:
    """With a home of its own."""
    return Penstock(NOBODY, HOME=str(tmp_path), XDG_STATE_HOME="", INPUTRC="/dev/null", TERM="dumb")


class Shell:
    """`penstock shell` for a server."""

    def __init__(self, penstock: Penstock, server: Serve) -> None:
        self.penstock = penstock
        self.command = ("shell", "--port", server.ports["quiet"])

    def __call__(self, *arguments: object) -> Done:
        return self.penstock(*self.command, *arguments)

    def reads(self, *lines: str | bytes) -> Done:
        """From stdin."""
        encoded = [line.encode() if isinstance(line, str) else line for line in lines]
        return self.penstock(*self.command, stdin=b"".join(line + b"\n" for line in encoded))

    @contextmanager
    def at_terminal(self) -> Iterator[Terminal]:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", _OWNS_TERMINAL, *self.penstock.command(*self.command)]
        environment = self.penstock.environment
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            terminal = Terminal(process, ours)
            try:
                terminal.until(PROMPT)
                yield terminal
            finally:
                process.kill()
                os.close(ours)


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, until there is a new prompt: Python overlooks one that comes just when it begins to wait."""
        for _ in range(TRIES):
            self.type("\x03")
            if self._shows(f"\r\n{PROMPT}", PATIENCE_S / TRIES):
                self.until(f"\r\n{PROMPT}")
                return
        raise AssertionError(f"it is not interrupted: {self._shown!r}")

    def ask(self, line: str) -> str:
        """Type a line; what is shown before the next prompt, without what was typed."""
        self.type(f"{line}\r")
        return self.until(f"\r\n{PROMPT}").partition("\r\n")[2]

    def until(self, text: str) -> str:
        """What is shown before it."""
        assert self._shows(text, PATIENCE_S), f"only this is shown: {self._shown!r}"
        before, _, self._shown = self._shown.partition(text)
        return before

    def _shows(self, text: str, patience_s: float) -> bool:
        while text not in self._shown and select.select([self._descriptor], [], [], patience_s)[0]:
            self._shown += os.read(self._descriptor, 1 << 16).decode()
        return text in self._shown

    def ends(self) -> int:
        return self._process.wait(PATIENCE_S)


@pytest.fixture
def shell(penstock: Penstock, server: Serve) -> Shell:
    return Shell(penstock, server)


def history_of(home: Path) -> list[str]:
    return (home / ".local" / "state" / "penstock" / "history").read_text().splitlines()


# ---- at a terminal


def test_what_is_typed_is_answered(shell: Shell, client: Client) -> None:
    with shell.at_terminal() as terminal:
        assert "'typed' now has 2 partitions" in terminal.ask("CREATE typed 2")
        assert "Published to 'typed'" in terminal.ask("publish typed two  words ")
        assert terminal.ask("CONSUME typed 0 0") == "two  words "
        # The connection has ended with it, which nobody needs to know.
        assert terminal.ask("nonsense").startswith("ERROR: unknown command")
        assert terminal.ask("  ") == ""
        terminal.type("\x04")
        assert terminal.ends() == 0
    assert client.topic("typed").partitions == 2


@pytest.mark.parametrize("word", ["EXIT", "exit", "quit"])
def test_it_ends_when_it_is_told_to(shell: Shell, word: str) -> None:
    with shell.at_terminal() as terminal:
        terminal.type(f"{word}\r")
        assert terminal.ends() == 0


def test_json_is_laid_out_for_people(shell: Shell, client: Client) -> None:
    client.create_topic("laid-out")
    with shell.at_terminal() as terminal:
        assert '\r\n  "topic": "laid-out",\r\n' in terminal.ask("DESCRIBE laid-out")


def test_help_tells_how_one_command_is_written(shell: Shell) -> None:
    with shell.at_terminal() as terminal:
        assert terminal.ask("help create") == usage("CREATE")
        listed = terminal.ask("HELP")
        assert [verb for verb in VERBS if usage(verb) not in listed] == []


def test_lines_are_remembered_also_the_next_time(shell: Shell, tmp_path: Path) -> None:
    with shell.at_terminal() as terminal:
        assert "now has 3" in terminal.ask("CREATE remembered 3")
        assert "now has 3" in terminal.ask(UP)
        terminal.type("\x04")
        assert terminal.ends() == 0
    assert history_of(tmp_path) == ["CREATE remembered 3"] * 2
    with shell.at_terminal() as terminal:
        assert "now has 3" in terminal.ask(UP)


def test_a_password_is_not_remembered(shell: Shell, tmp_path: Path) -> None:
    with shell.at_terminal() as terminal:
        terminal.ask("AUTH token=secret")
        terminal.ask("LIST")
        terminal.type("exit\r")
        assert terminal.ends() == 0
    assert history_of(tmp_path) == ["LIST"]


def test_only_so_much_is_remembered(shell: Shell, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shell.penstock.environment["XDG_STATE_HOME"] = str(state)
    (state / "penstock").mkdir(parents=True)
    history = state / "penstock" / "history"
    history.write_text("".join(f"LINE {number}\n" for number in range(1500)))
    with shell.at_terminal() as terminal:
        terminal.ask("LIST")
        terminal.type("exit\r")
        assert terminal.ends() == 0
    lines = history.read_text().splitlines()
    assert (len(lines), lines[-2:]) == (1000, ["LINE 1499", "LIST"])


def test_tab_completes_verbs_topics_and_follow(shell: Shell, client: Client) -> None:
    client.create_topic("completed-one")
    client.create_topic("completed-two")
    client.publish("completed-two", b"here")
    with shell.at_terminal() as terminal:
        assert '"topic": "completed-one"' in terminal.ask("descr\tcompleted-o\t")
        terminal.type("CONSUME completed-\t\t")
        # What is common is there already; the rest is shown.
        assert "completed-one" in terminal.until("completed-two")
        terminal.until(f"{PROMPT}CONSUME completed-")
        terminal.type("tw\t0 0 fo\t\r")
        terminal.until("\r\nhere\r\n")
        terminal.interrupt()
        assert '"topic": "completed-two"' in terminal.ask("DESCRIBE topic=completed-t\t")


def test_a_topic_that_was_made_meanwhile_is_completed(shell: Shell, client: Client) -> None:
    with shell.at_terminal() as terminal:
        terminal.type("DELETE meanwhile-\t")
        terminal.until("meanwhile-")
        client.create_topic("meanwhile-made")
        # What was asked for one line is known for that line only.
        terminal.interrupt()
        assert "'meanwhile-made' deleted" in terminal.ask("DELETE meanwhile-\t")


def test_an_interruption_clears_the_line(shell: Shell, client: Client) -> None:
    with shell.at_terminal() as terminal:
        terminal.type("CREATE cleared")
        terminal.until("CREATE cleared")
        terminal.interrupt()
        assert "cleared" not in terminal.ask("LIST")


@pytest.mark.parametrize("command", ["CONSUME followed 0 0 follow", "SUBSCRIBE followed"])
def test_an_interruption_ends_what_goes_on(shell: Shell, client: Client, command: str) -> None:
    if "followed" not in [topic.name for topic in client.topics()]:
        client.create_topic("followed")
    with shell.at_terminal() as terminal:
        terminal.type(f"{command}\r")
        terminal.until(f"{command}\r\n")
        if command.startswith("SUBSCRIBE"):
            terminal.until("Subscribed to 'followed'\r\n")
        for text in (f"one of {command}", f"two of {command}"):
            client.publish("followed", text.encode())
            terminal.until(f"{text}\r\n")
        terminal.interrupt()
        assert "followed" in terminal.ask("LIST")


def test_a_broker_that_is_gone_is_told_of_and_found_again(penstock: Penstock, tmp_path: Path) -> None:
    with Serve(tmp_path / "server") as server, Shell(penstock, server).at_terminal() as terminal:
        assert terminal.ask("LIST") == "(no topics)"
        server.kill()
        assert terminal.ask("LIST").startswith("error: no broker at 127.0.0.1:")
        server.restart()
        assert terminal.ask("LIST") == "(no topics)"


# ---- without one


def test_lines_of_stdin_are_commands(shell: Shell) -> None:
    done = shell.reads(
        "CREATE lines 1", "", "  PUBLISH lines välue", "CONSUME lines 0 0", "DESCRIBE lines", "exit", "?"
    )
    assert (done.code, done.err) == (0, "")
    made, published, value, described = done.out.splitlines()
    assert ("'lines' now has 1 partitions" in made, "Published" in published, value) == (True, True, "välue")
    assert described.startswith('{"status": "OK", "topic": "lines"')


def test_a_refusal_is_an_exit_code(shell: Shell) -> None:
    done = shell.reads("DESCRIBE missing", "LIST")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("ERROR: ")
    assert len(done.out.splitlines()) == 2


@pytest.mark.parametrize(
    "command",
    [
        "CONSUME missing 0 0",
        "CONSUME missing 0 0 follow",
        "CONSUME topic=missing partition=0 offset=0",
        "CONSUME topic=missing partition=0 offset=0 follow=true",
        "STREAM topic=missing partition=0 offset=0",
        "SUBSCRIBE missing",
        "CONSUME missing",
        "nonsense",
    ],
)
def test_what_is_refused_is_over_whatever_was_asked(shell: Shell, command: str) -> None:
    done = shell(*command.split())
    assert (done.code, done.err) == (1, "")
    assert re.fullmatch("ERROR: .*\n", done.out)


def test_messages_are_printed_as_they_are_unless_a_terminal_would_obey(shell: Shell, client: Client) -> None:
    for value in (
        b"plain text",
        b"",
        b"\xff\0",
        b"\x1b[31mred",
        b"\0\0\0\x01",
        b"\xba\x7c",
        b"ERROR: is a message, too",
    ):
        client.publish("values", value)
    done = shell("CONSUME", "values", 0, 0)
    assert done.lines == [
        "plain text",
        "",
        r"b'\xff\x00'",
        r"'\x1b[31mred'",
        r"'\x00\x00\x00\x01'",
        "b'\\xba|'",
        "ERROR: is a message, too",
    ]


def test_messages_that_are_asked_for_by_name_have_offsets_and_keys(shell: Shell, client: Client) -> None:
    client.publish("named-one", b"first value", key="k")
    client.publish("named-one", b"second")
    client.publish("named-two", b"third")
    done = shell.reads(
        "CONSUME topic=named-* partition=0 offset=0", "CONSUME topic=named-two partition=0 offset=1", "LIST"
    )
    assert done.lines[:-1] == ["0:0 k first value", "0:1 - second", "0:0 - third"]
    # What is answered to one is not taken for the answer to another.
    assert "named-one" in done.lines[-1]


def test_bytes_are_published_as_they_come(shell: Shell, client: Client) -> None:
    client.create_topic("bytes")
    assert shell.reads(b"PUBLISH bytes \xff --partition 7").code == 0
    assert shell("PUBLISH", "bytes", "--help", "is", "a", "message").code == 0
    assert [message.value for message in client.fetch("bytes")] == [b"\xff --partition 7", b"--help is a message"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("CONSUME gone-on 0 0 follow", "{}"),
        ("SUBSCRIBE topic=gone-on", "0:{offset} - {}"),
        ("STREAM topic=gone-on partition=0 offset=0", "0:{offset} - {}"),
    ],
)
def test_an_interruption_is_how_it_ends(shell: Shell, client: Client, command: str, line: str) -> None:
    topic = command.partition(" ")[0].lower()
    command = command.replace("gone-on", f"gone-on-{topic}")
    client.create_topic(f"gone-on-{topic}")
    with shell.penstock.begin(*shell.command, *command.split()) as process:
        if topic == "subscribe":
            assert "Subscribed" in line_of(process)
        for offset, text in enumerate(("one", "two")):
            client.publish(f"gone-on-{topic}", text.encode())
            assert line_of(process) == line.format(text, offset=offset)
        assert interrupt(process) == Done(0, "", "")


def test_without_a_broker_it_says_so_and_how_to_start_one(penstock: Penstock) -> None:
    where = "no broker at 127.0.0.1:1: start one with `penstock serve`, or use --host and --port"
    assert penstock("shell", "--port", 1, "LIST") == Done(1, "", f"error: {where}\n")
    assert penstock("shell", "--port", 1, stdin=b"LIST\n") == Done(1, "", f"error: {where}\n")
    at_once = at_terminal(penstock, "shell", "--port", 1)
    assert (at_once.code, at_once.out) == (1, f"error: {where}\r\n")


def answer_once(listener: socket.socket, answer: bytes) -> None:
    taken, _ = listener.accept()
    with taken:
        taken.recv(100)
        taken.sendall(answer)
        taken.recv(100)


def test_what_listens_on_a_wrong_port_is_named(penstock: Penstock, tmp_path: Path) -> None:
    def told(port: int) -> str:
        done = penstock("shell", "--port", port, "LIST")
        assert (done.code, done.out) == (1, "")
        needs = "the shell needs the broker's port for clients that speak first (9092 by default); set it with --port"
        assert done.err.endswith(f": {needs}\n")
        return done.err.removeprefix(f"error: 127.0.0.1:{port} ").removesuffix(f": {needs}\n")

    with Serve(tmp_path) as server:
        assert told(server.ports["text"]) == "is the text port of a Penstock broker"
        assert told(server.ports["http"]) == "is an HTTP port"
    for answer, what in (
        (b'INFO {"server_id":"x"}\r\n', "is a NATS server"),
        (b"-ERR unknown command 'LIST'\r\n", "answers like Redis"),
        (b"SSH-2.0-x\r\n", r"is another service (it replied b'SSH-2.0-x\r\n')"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            served = pool.submit(answer_once, listener, answer)
            assert told(listener.getsockname()[1]) == what
            served.result(PATIENCE_S)


def test_a_broker_that_wants_to_know_who_asks_is_told_on_every_connection(penstock: Penstock, tmp_path: Path) -> None:
    with Serve(tmp_path / "guarded", auth_token="secret") as server:
        shell = Shell(penstock, server)
        refused = shell("LIST")
        assert (refused.code, refused.out.startswith("ERROR: ")) == (1, True)
        wrong = shell("--token", "wrong", "LIST")
        assert (wrong.code, wrong.out) == (1, "")
        assert wrong.err.startswith("error: ")
        given: dict[str, Any] = {"auth": shell.reads("AUTH token=secret", *_SESSION)}
        shell.penstock.environment["PENSTOCK_AUTH_TOKEN"] = "secret"
        given["option"] = shell.reads(*_SESSION)
        assert [done.code for done in given.values()] == [0, 0]
        assert given["auth"].lines[-2:] == given["option"].lines[-2:] == ["one", "t"]


# A CONSUME in order ends the connection.
_SESSION: Final = ("CREATE t 1", "PUBLISH topic=t partition=0 message=one", "CONSUME t 0 0", "LIST")
