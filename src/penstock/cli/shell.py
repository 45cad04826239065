"""`penstock shell`: run Cursus commands from a prompt, stdin or the arguments.

A command is one frame, and so is the reply to most. Some commands are answered with several frames, or with messages
until the connection ends; the shell parses each command like the server does, to know what to expect.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.address import bare, join
from penstock.cli.client import Password, Token, User
from penstock.cli.options import COMPLETION_S, TlsCa, TlsCert, TlsKey, read_tls
from penstock.cli.text import safe, shown
from penstock.client.identify import ServiceKind, recognise
from penstock.errors import BadFrame, ConnectionLost, NoBroker, PenstockError, TimedOut, Unauthorized
from penstock.tls.blocking import BlockingTls
from penstock.tls.options import TlsOptions
from penstock.wire import cursus, prefixed

app = typer.Typer(add_completion=False)

PROMPT: Final = "penstock> "
HISTORY_MAX: Final = 1000

_DIAL_S: Final = 5.0
# Bytes of an unexpected reply to keep: enough to recognise the service.
_REPLY_BYTES_MAX: Final = 4096
PORT: Final = 9092
# Python can miss a signal that arrives just as a wait begins, so no wait is longer than this.
_POLL_S: Final = 0.5
_EXIT_COMMANDS: Final = ("EXIT", "QUIT")
_ERROR: Final = b"ERROR: "


@app.command(context_settings={"allow_interspersed_args": False})
def shell(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Run this command and exit; HELP lists all commands."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the broker.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the broker for clients that speak first.")
    ] = PORT,
    user: User = None,
    password: Password = None,
    token: Token = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run Cursus commands, with history and completion; Ctrl-D exits.

    Without a terminal, each line of stdin is a command. Exit code 1 if a command fails.
    """
    credentials = {"user": user, "password": password, "token": token}
    given = " ".join(f"{name}={value}" for name, value in credentials.items() if value is not None)
    tls = read_tls(tls_ca, tls_cert, tls_key)
    with _opened(host, port, f"AUTH {given}".encode() if given else None, tls) as broker:
        if command:
            is_done = _run_all(broker, [os.fsencode(" ".join(command))])
        elif sys.stdin.isatty() and sys.stdout.isatty():
            _prompt(broker)
            return
        else:
            is_done = _run_all(broker, sys.stdin.buffer)
    if not is_done:
        raise typer.Exit(1)


# ---- commands


class _ReplyForm(Enum):
    """The form of the reply to a command."""

    FRAME = auto()
    # An unknown number of batches.
    BATCHES = auto()
    # Messages until the connection ends: one per frame, or batches.
    MESSAGES = auto()
    MESSAGES_FOLLOWED = auto()
    BATCHES_FOLLOWED = auto()


def _reply_form(payload: bytes) -> _ReplyForm:
    try:
        command = cursus.read_command(payload)
    except PenstockError:
        return _ReplyForm.FRAME
    followed = _ReplyForm.BATCHES_FOLLOWED if command.is_named else _ReplyForm.MESSAGES_FOLLOWED
    match command.verb:
        case "STREAM":
            return _ReplyForm.BATCHES_FOLLOWED
        case "SUBSCRIBE":
            return followed
        case "CONSUME" if command.arguments.get("follow", "").lower() in ("follow", "tail", "true"):
            return followed
        case "CONSUME":
            return _ReplyForm.BATCHES if command.is_named else _ReplyForm.MESSAGES
        case _:
            return _ReplyForm.FRAME


def _run_all(broker: _ShellConnection, lines: Iterator[bytes] | list[bytes]) -> bool:
    """Run all commands; return whether all succeeded. Ctrl-C during a command that follows messages ends them all."""
    is_done = True
    for line in lines:
        # Trailing blanks belong to the published message.
        command = line.lstrip().rstrip(b"\r\n")
        if _word(command) in _EXIT_COMMANDS:
            break
        if command:
            try:
                is_done &= _run(broker, command)
            except KeyboardInterrupt:
                if _reply_form(command) in (_ReplyForm.MESSAGES_FOLLOWED, _ReplyForm.BATCHES_FOLLOWED):
                    break
                raise
    return is_done


def _run(broker: _ShellConnection, command: bytes) -> bool:
    """Run a command and print its reply; return False if it failed."""
    if usage := _usage(command):
        print(usage, flush=True)
        return True
    form = _reply_form(command)
    if form is _ReplyForm.BATCHES:
        # Their number depends on the matching topics. The reply to LIST marks their end.
        broker.send(command, b"LIST")
        return _print_batches(broker)
    broker.send(command)
    word = _word(command)
    if form is _ReplyForm.FRAME or word == "SUBSCRIBE":
        answer = broker.answer()
        _print_answer(answer)
        if answer.startswith(_ERROR):
            return False
        if word == "AUTH":
            broker.login = command
        if form is _ReplyForm.FRAME:
            return True
    return _print_messages(broker, form)


def _usage(command: bytes) -> str | None:
    """Return the usage for HELP with a verb, which the server does not support."""
    match command.decode(errors="replace").upper().split():
        case ["HELP", verb] if verb in cursus.VERBS:
            return cursus.usage(verb)
    return None


def _word(command: bytes) -> str:
    return command.split(None, 1)[0].decode(errors="replace").upper() if command.strip() else ""


def _print_batches(broker: _ShellConnection) -> bool:
    is_done = True
    while True:
        frame = broker.answer()
        if cursus.is_batch(frame):
            _print_batch(frame)
        elif frame.startswith(_ERROR):
            _print_answer(frame)
            is_done = False
        else:
            return is_done


def _print_messages(broker: _ShellConnection, form: _ReplyForm) -> bool:
    """Print messages until the connection ends; return False if the command failed."""
    count, is_refused = 0, False
    try:
        while (frame := broker.frame()) is not None:
            if form is _ReplyForm.BATCHES_FOLLOWED and cursus.is_batch(frame):
                _print_batch(frame)
            elif frame or form is _ReplyForm.MESSAGES:
                # While new messages are awaited, an empty frame is a heartbeat.
                print(shown(frame, alone=True), flush=True)
            is_refused = frame.startswith(_ERROR) and not count
            if is_refused and form is _ReplyForm.BATCHES_FOLLOWED:
                break  # not a batch: nothing follows it
            count += 1
    finally:
        broker.close()
    return not is_refused


def _print_batch(frame: bytes) -> None:
    records = cursus.read_batch(frame)
    for record in records.records:
        key = shown(record.key, alone=False) if record.key else "-"
        print(f"{records.partition}:{record.offset} {key} {shown(record.value, alone=True)}", flush=True)


def _print_answer(frame: bytes) -> None:
    text = frame.decode(errors="backslashreplace")
    if sys.stdout.isatty() and text.startswith(("{", "[")):
        with suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    print("\n".join(map(safe, text.split("\n"))), flush=True)


# ---- the prompt


def _prompt(broker: _ShellConnection) -> None:
    broker.open()
    with _history():
        completion = _Completion(broker)
        while True:
            completion.forget()
            try:
                line = input(PROMPT)
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            command = line.lstrip().encode(errors="surrogateescape")
            if _word(command) in _EXIT_COMMANDS:
                return
            if command:
                _remember(line)
                _run_typed(broker, command)


def _run_typed(broker: _ShellConnection, command: bytes) -> None:
    """Run a command and print its errors, so that the prompt returns."""
    try:
        _run(broker, command)
    except KeyboardInterrupt:
        broker.close()
        print()
    except (PenstockError, OSError) as error:
        broker.close()
        print(f"error: {error}", file=sys.stderr)


@contextmanager
def _history() -> Iterator[None]:
    """Load the history of commands, and save it at the end."""
    import readline

    directory = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock"
    path = directory / "history"
    readline.set_auto_history(False)
    readline.set_history_length(HISTORY_MAX)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def _remember(line: str) -> None:
    import readline

    # Do not write credentials to a file.
    if _word(line.encode(errors="surrogateescape")) != "AUTH":
        readline.add_history(line)


class _Completion:
    """Complete verbs, topics where a verb takes one, and `follow`."""

    def __init__(self, broker: _ShellConnection) -> None:
        import readline

        self._broker = broker
        self._topics: list[str] | None = None
        self._offers: list[str] = []
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def forget(self) -> None:
        """Forget the topics: a new line may see other ones."""
        self._topics = None

    def _complete(self, word: str, state: int) -> str | None:
        import readline

        if state == 0:
            before = readline.get_line_buffer()[: readline.get_begidx()].split()
            self._offers = [offer for offer in self._offered(before, word) if offer.upper().startswith(word.upper())]
        return self._offers[state] if state < len(self._offers) else None

    def _offered(self, before: list[str], word: str) -> list[str]:
        if not before:
            return [f"{verb} " for verb in cursus.VERBS]
        verb = before[0].upper()
        if verb == "HELP" and len(before) == 1:
            return list(cursus.VERBS)
        if verb not in cursus.VERBS or "<topic>" not in cursus.usage(verb):
            return []
        if word.startswith("topic="):
            return [f"topic={name} " for name in self._topic_names()]
        if len(before) == 1:
            return [f"{name} " for name in self._topic_names()]
        return ["follow"] if verb == "CONSUME" and len(before) == 4 else []

    def _topic_names(self) -> list[str]:
        """Return the names of the topics; none, and no error, without a broker."""
        if self._topics is None:
            try:
                self._topics = self._broker.topics()
            except (PenstockError, OSError):
                self._broker.close()
                self._topics = []
        return self._topics


# ---- the connection


@contextmanager
def _opened(host: str, port: int, login: bytes | None, tls: TlsOptions | None) -> Iterator[_ShellConnection]:
    broker = _ShellConnection(host, port, login, tls)
    try:
        yield broker
    finally:
        broker.close()


class _ShellConnection:
    """A connection that is opened on demand, because some commands end it."""

    def __init__(self, host: str, port: int, login: bytes | None, tls: TlsOptions | None) -> None:
        self._tls = tls
        self._address = (bare(host), port)
        # The first command on each connection, if any.
        self.login = login
        self._socket: socket.socket | BlockingTls | None = None
        self._reader = prefixed.PrefixedReader()
        self._frames: deque[bytes] = deque()
        # The first bytes of this connection; None once a valid frame has arrived.
        self._first_bytes: bytes | None = None

    def open(self) -> None:
        if self._is_alive():
            return
        self.close()
        try:
            dialled = socket.create_connection(self._address, _DIAL_S)
        except OSError:
            raise NoBroker(
                f"no broker at {join(*self._address)}: start one with `penstock serve`, or use --host and --port"
            ) from None
        self._socket = dialled
        if self._tls is not None:
            self._socket = BlockingTls(dialled, self._tls.context(), self._address[0], join(*self._address))
        self._socket.settimeout(_POLL_S)
        self._reader = prefixed.PrefixedReader()
        # Set, not detected: a message may look like another dialect.
        self._reader.dialect = prefixed.PrefixedDialect.CURSUS
        self._frames.clear()
        self._first_bytes = b""
        if self.login is not None:
            self._write(self.login)
            answer = self.answer()
            if answer.startswith(_ERROR):
                raise Unauthorized(answer.removeprefix(_ERROR).decode(errors="replace"))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, *commands: bytes) -> None:
        self.open()
        self._write(*commands)

    def answer(self, timeout_s: float | None = None) -> bytes:
        """Return the next frame that is not a heartbeat."""
        while not (frame := self.frame(timeout_s)):
            if frame is None:
                raise ConnectionLost(
                    f"{join(*self._address)} closed the connection: the command may or may not have been executed"
                )
        return frame

    def frame(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next frame; None at the end of the connection."""
        while not self._frames:
            if not self._receive(timeout_s):
                return None
        return self._frames.popleft()

    def topics(self) -> list[str]:
        """Return the names of the topics, with a short timeout for completion."""
        self.send(b"LIST")
        names = self.answer(COMPLETION_S).decode(errors="replace")
        return [] if names.startswith(("(", "ERROR:")) else names.split(", ")

    def _write(self, *commands: bytes) -> None:
        assert self._socket is not None, "the connection is open"
        self._socket.sendall(b"".join(map(prefixed.frame, commands)))

    def _receive(self, timeout_s: float | None) -> bool:
        """Read from the socket; return False at its end. After a timeout the connection is unusable."""
        assert self._socket is not None, "the connection is open"
        if timeout_s is not None and not self._has_arrived(timeout_s):
            raise TimedOut(f"{join(*self._address)} does not answer")
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            break
        self._first_bytes = None if self._first_bytes is None else (self._first_bytes + data)[:_REPLY_BYTES_MAX]
        self._frames.extend(frame for frame in self._reader.feed(data) if isinstance(frame, bytes))
        if self._frames:
            self._first_bytes = None
        if self._reader.refusal is not None:
            raise self._reader.refusal if self._first_bytes is None else self._wrong_port(self._first_bytes)
        return bool(data)

    def _has_arrived(self, timeout_s: float) -> bool:
        """Return whether something can be read, or can within this time."""
        assert self._socket is not None, "the connection is open"
        if isinstance(self._socket, BlockingTls) and self._socket.has_data:
            return True
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def _wrong_port(self, reply: bytes) -> NoBroker:
        """Return an error that names the service which listens on the port."""
        match recognise(reply):
            case ServiceKind.BROKER:
                what = "is the text port of a Penstock broker"
            case ServiceKind.NATS:
                what = "is a NATS server"
            case ServiceKind.HTTP:
                what = "is an HTTP port"
            case ServiceKind.REDIS:
                what = "answers like Redis"
            case ServiceKind.TLS:
                what = "speaks TLS (use --tls-ca)"
            case ServiceKind.OTHER:
                what = f"is another service (it replied {reply[:40]!r})"
        return NoBroker(
            f"{join(*self._address)} {what}: the shell needs the broker's port for clients that speak first "
            f"({PORT} by default); set it with --port"
        )

    def _is_alive(self) -> bool:
        """Return whether only heartbeats have arrived since the last reply."""
        if self._socket is None:
            return False
        try:
            while self._has_arrived(0):
                if not self._receive(None):
                    return False
        except (OSError, BadFrame):
            return False
        is_alive = not any(self._frames)
        self._frames.clear()
        return is_alive
