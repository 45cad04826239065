"""`penstock shell`: Cursus' commands, typed at a prompt, read from stdin, or given as arguments.

A command is one frame, and so is most of what is answered. What comes instead, a connection that ends or messages that
go on, is known from the command: it is read here as the server reads it.
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
from penstock.cli.options import COMPLETION_S
from penstock.cli.text import safe, shown
from penstock.client.listener import Listener, recognise
from penstock.errors import BadFrame, ConnectionLost, NoBroker, PenstockError, TimedOut, Unauthorized
from penstock.wire import prefixed

app = typer.Typer(add_completion=False)

PROMPT: Final = "penstock> "
HISTORY_MAX: Final = 1000

_DIAL_S: Final = 5.0
# Of what somebody else says: enough to recognise it.
_SAID_BYTES: Final = 4096
PORT: Final = 9092
# Python can overlook a signal that comes just when it begins to wait: it looks up so often.
_LOOK_UP_S: Final = 0.5
_ENDS: Final = ("EXIT", "QUIT")
_ERROR: Final = b"ERROR: "


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def shell(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Run this one; HELP lists what there is.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where the broker is.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its port for clients that speak first.")] = PORT,
    user: User = None,
    password: Password = None,
    token: Token = None,
) -> None:
    """Type Cursus' commands, with history and completion; Ctrl-D ends it.

    Without a terminal commands are the lines of stdin. The exit code is 1 if one of them was refused.
    """
    who = {"user": user, "password": password, "token": token}
    given = " ".join(f"{name}={value}" for name, value in who.items() if value is not None)
    with _opened(host, port, f"AUTH {given}".encode() if given else None) as broker:
        if command:
            is_done = _run_all(broker, [os.fsencode(" ".join(command))])
        elif sys.stdin.isatty() and sys.stdout.isatty():
            _prompt(broker)
            return
        else:
            is_done = _run_all(broker, sys.stdin.buffer)
    if not is_done:
        raise typer.Exit(1)


# Commands.


class _Form(Enum):
    """What is answered."""

    FRAME = auto()
    # Batches, in a number that nobody tells.
    BATCHES = auto()
    # Messages until the connection ends: one in each frame, or batches.
    MESSAGES = auto()
    MESSAGES_FOLLOWED = auto()
    BATCHES_FOLLOWED = auto()


def _form(payload: bytes) -> _Form:
    try:
        command = prefixed.read_command(payload)
    except PenstockError:
        return _Form.FRAME
    followed = _Form.BATCHES_FOLLOWED if command.is_named else _Form.MESSAGES_FOLLOWED
    match command.verb:
        case "STREAM":
            return _Form.BATCHES_FOLLOWED
        case "SUBSCRIBE":
            return followed
        case "CONSUME" if command.arguments.get("follow", "").lower() in ("follow", "tail", "true"):
            return followed
        case "CONSUME":
            return _Form.BATCHES if command.is_named else _Form.MESSAGES
        case _:
            return _Form.FRAME


def _run_all(broker: _Broker, lines: Iterator[bytes] | list[bytes]) -> bool:
    """Whether none was refused. What only an interruption ends is done when it comes, and with it all of them."""
    is_done = True
    for line in lines:
        # Blanks at its end belong to what is published.
        command = line.lstrip().rstrip(b"\r\n")
        if _word(command) in _ENDS:
            break
        if command:
            try:
                is_done &= _run(broker, command)
            except KeyboardInterrupt:
                if _form(command) in (_Form.MESSAGES_FOLLOWED, _Form.BATCHES_FOLLOWED):
                    break
                raise
    return is_done


def _run(broker: _Broker, command: bytes) -> bool:
    """Print what is answered to a command; False if it was refused."""
    if told := _tell_usage(command):
        print(told, flush=True)
        return True
    form = _form(command)
    if form is _Form.BATCHES:
        # How many there are depends on what matches. They are over when something else is answered.
        broker.send(command, b"LIST")
        return _print_batches(broker)
    broker.send(command)
    word = _word(command)
    if form is _Form.FRAME or word == "SUBSCRIBE":
        answer = broker.answer()
        _print_answer(answer)
        if answer.startswith(_ERROR):
            return False
        if word == "AUTH":
            broker.introduction = command
        if form is _Form.FRAME:
            return True
    return _print_messages(broker, form)


def _tell_usage(command: bytes) -> str | None:
    """HELP for one verb, which the server does not have."""
    match command.decode(errors="replace").upper().split():
        case ["HELP", verb] if verb in prefixed.VERBS:
            return prefixed.usage(verb)
    return None


def _word(command: bytes) -> str:
    return command.split(None, 1)[0].decode(errors="replace").upper() if command.strip() else ""


def _print_batches(broker: _Broker) -> bool:
    is_done = True
    while True:
        frame = broker.answer()
        if prefixed.is_batch(frame):
            _print_batch(frame)
        elif frame.startswith(_ERROR):
            _print_answer(frame)
            is_done = False
        else:
            return is_done


def _print_messages(broker: _Broker, form: _Form) -> bool:
    """Until the connection ends, which is how they end; False if there were none because they were refused."""
    count, is_refused = 0, False
    try:
        while (frame := broker.frame()) is not None:
            if form is _Form.BATCHES_FOLLOWED and prefixed.is_batch(frame):
                _print_batch(frame)
            elif frame or form is _Form.MESSAGES:
                # Where messages are waited for, what is empty is a sign of life.
                print(shown(frame, alone=True), flush=True)
            is_refused = frame.startswith(_ERROR) and not count
            if is_refused and form is _Form.BATCHES_FOLLOWED:
                break  # it is no batch, and nothing comes behind it
            count += 1
    finally:
        broker.close()
    return not is_refused


def _print_batch(frame: bytes) -> None:
    records = prefixed.read_batch(frame)
    for record in records.records:
        key = shown(record.key, alone=False) if record.key else "-"
        print(f"{records.partition}:{record.offset} {key} {shown(record.value, alone=True)}", flush=True)


def _print_answer(frame: bytes) -> None:
    text = frame.decode(errors="backslashreplace")
    if sys.stdout.isatty() and text.startswith(("{", "[")):
        with suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    print("\n".join(map(safe, text.split("\n"))), flush=True)


# The prompt.


def _prompt(broker: _Broker) -> None:
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
            if _word(command) in _ENDS:
                return
            if command:
                _remember(line)
                _run_typed(broker, command)


def _run_typed(broker: _Broker, command: bytes) -> None:
    """Whatever becomes of it, the prompt comes again."""
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
    """Lines of earlier times; those of now are added to them."""
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

    # A password is not for a file.
    if _word(line.encode(errors="surrogateescape")) != "AUTH":
        readline.add_history(line)


class _Completion:
    """What Tab offers: a verb, a topic where the verb takes one, `follow`."""

    def __init__(self, broker: _Broker) -> None:
        import readline

        self._broker = broker
        self._topics: list[str] | None = None
        self._offers: list[str] = []
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")

    def forget(self) -> None:
        """A new line: there may be other topics now."""
        self._topics = None

    def _complete(self, word: str, state: int) -> str | None:
        import readline

        if state == 0:
            before = readline.get_line_buffer()[: readline.get_begidx()].split()
            self._offers = [offer for offer in self._offered(before, word) if offer.upper().startswith(word.upper())]
        return self._offers[state] if state < len(self._offers) else None

    def _offered(self, before: list[str], word: str) -> list[str]:
        if not before:
            return [f"{verb} " for verb in prefixed.VERBS]
        verb = before[0].upper()
        if verb == "HELP" and len(before) == 1:
            return list(prefixed.VERBS)
        if verb not in prefixed.VERBS or "<topic>" not in prefixed.usage(verb):
            return []
        if word.startswith("topic="):
            return [f"topic={name} " for name in self._topic_names()]
        if len(before) == 1:
            return [f"{name} " for name in self._topic_names()]
        return ["follow"] if verb == "CONSUME" and len(before) == 4 else []

    def _topic_names(self) -> list[str]:
        """Without a broker there is nothing to offer, and nothing to say."""
        if self._topics is None:
            try:
                self._topics = self._broker.topics()
            except (PenstockError, OSError):
                self._broker.close()
                self._topics = []
        return self._topics


# The connection.


@contextmanager
def _opened(host: str, port: int, introduction: bytes | None) -> Iterator[_Broker]:
    broker = _Broker(host, port, introduction)
    try:
        yield broker
    finally:
        broker.close()


class _Broker:
    """A connection that is opened when it is needed: some commands end it."""

    def __init__(self, host: str, port: int, introduction: bytes | None) -> None:
        self._place = (bare(host), port)
        # What is said first on every connection.
        self.introduction = introduction
        self._socket: socket.socket | None = None
        self._reader = prefixed.FrameReader()
        self._frames: deque[bytes] = deque()
        # How the first answer of this connection begins; None once it was a frame.
        self._said: bytes | None = None

    def open(self) -> None:
        if self._is_alive():
            return
        self.close()
        try:
            self._socket = socket.create_connection(self._place, _DIAL_S)
        except OSError:
            raise NoBroker(
                f"no broker at {join(*self._place)}: start one with `penstock serve`, or name another with --host "
                "and --port"
            ) from None
        self._socket.settimeout(_LOOK_UP_S)
        self._reader = prefixed.FrameReader()
        # A message may begin like one of another protocol.
        self._reader.dialect = prefixed.Dialect.CURSUS
        self._frames.clear()
        self._said = b""
        if self.introduction is not None:
            self._write(self.introduction)
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

    def answer(self, patience_s: float | None = None) -> bytes:
        """The next frame that is not a sign of life."""
        while not (frame := self.frame(patience_s)):
            if frame is None:
                raise ConnectionLost(f"{join(*self._place)} ended the connection: it may or may not have been done")
        return frame

    def frame(self, patience_s: float | None = None) -> bytes | None:
        """None: the connection has ended."""
        while not self._frames:
            if not self._receive(patience_s):
                return None
        return self._frames.popleft()

    def topics(self) -> list[str]:
        """Quickly, for who waits for completion."""
        self.send(b"LIST")
        names = self.answer(COMPLETION_S).decode(errors="replace")
        return [] if names.startswith(("(", "ERROR:")) else names.split(", ")

    def _write(self, *commands: bytes) -> None:
        assert self._socket is not None, "it is open"
        self._socket.sendall(b"".join(map(prefixed.frame, commands)))

    def _receive(self, patience_s: float | None) -> bool:
        """Whether something came; what has not come in time is lost with the connection."""
        assert self._socket is not None, "it is open"
        if patience_s is not None and not select.select([self._socket], [], [], patience_s)[0]:
            raise TimedOut(f"{join(*self._place)} does not answer")
        while True:
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                continue
            break
        self._said = None if self._said is None else (self._said + data)[:_SAID_BYTES]
        self._frames.extend(frame for frame in self._reader.feed(data) if isinstance(frame, bytes))
        if self._frames:
            self._said = None
        if self._reader.refusal is not None:
            raise self._reader.refusal if self._said is None else self._wrong_port(self._said)
        return bool(data)

    def _wrong_port(self, said: bytes) -> NoBroker:
        """Return what is there, if it does not answer as the broker does on this port."""
        match recognise(said):
            case Listener.BROKER:
                what = "is the text port of a Penstock broker"
            case Listener.NATS:
                what = "is a NATS server"
            case Listener.HTTP:
                what = "is an HTTP port"
            case Listener.REDIS:
                what = "answers like Redis"
            case Listener.OTHER:
                what = f"is another service (it says {said[:40]!r})"
        return NoBroker(
            f"what listens at {join(*self._place)} {what}: the shell needs the broker's port for clients that speak "
            f"first ({PORT} by default), name it with --port"
        )

    def _is_alive(self) -> bool:
        """Whether nothing came since the last answer but signs of life."""
        if self._socket is None:
            return False
        try:
            while select.select([self._socket], [], [], 0)[0]:
                if not self._receive(None):
                    return False
        except (OSError, BadFrame):
            return False
        is_alive = not any(self._frames)
        self._frames.clear()
        return is_alive
