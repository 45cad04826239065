"""The clients of a broker that is killed under load: publishers, members, and the journal of what they were told."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, NamedTuple, Self

from tests.support.server import Serve, hpub, pub

TOPICS: Final = ("alpha", "beta", "gamma", "delta")
# The first goes to each partition in turn, the others each have one. Most traffic is where there are most readers.
SUBJECTS: Final = ("alpha", "alpha.a", "alpha.b", "alpha.c", "beta.a", "beta.b", "gamma.a", "delta.a")
WEIGHTS: Final = (3, 6, 6, 6, 6, 6, 4, 1)
# How long to wait for what must come. Only a failure waits so long.
PATIENCE_S: Final = 60.0
DELAY_MS: Final = 200


@dataclass(slots=True, eq=False)
class Message:
    publisher: str
    number: int
    subject: str
    value: bytes = field(repr=False)
    has_id: bool
    is_delayed: bool
    # When it was first sent, among all that the judge noted.
    sent_at: int
    sent: int = 0
    acknowledged: bool = False


def is_poison(value: bytes) -> bool:
    """Whether a group that buries never acknowledges it."""
    return b"/poison/" in value


@dataclass(slots=True, eq=False)
class Group:
    # As clients name it, and as the server does, which has the pattern in front.
    word: str
    pattern: str
    buries: bool = False
    # When its first member was told that it is one.
    made_at: int | None = None
    # What members said is done; and sequence -> the life in which it was last delivered, was confirmed to be done.
    acknowledged: set[int] = field(default_factory=set)
    delivered: dict[int, int] = field(default_factory=dict)
    confirmed: dict[int, int] = field(default_factory=dict)
    values: set[bytes] = field(default_factory=set)
    lag: int | None = None
    # What one member has just acknowledged, for another to do the same: as if both had been given it.
    rumours: deque[int] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"{self.pattern}:{self.word.removeprefix('DURABLE:')}"


class Figures(NamedTuple):
    kills: int
    published: int
    acknowledged: int
    confirmed: int
    redelivered: int
    resent: int
    dead_letters: int

    def __str__(self) -> str:
        return (
            f"{self.kills} kills of a server, {self.acknowledged} of {self.published} messages acknowledged, "
            f"{self.resent} sent again, {self.confirmed} deliveries confirmed, {self.redelivered} delivered again "
            f"after a kill, {self.dead_letters} dead letters"
        )


class Journal:
    """What the server told its clients, in all lives. All threads write to it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.life = 0
        self.now = count(1)
        self.messages: dict[bytes, Message] = {}
        self.values: dict[int, bytes] = {}
        self.failures: list[BaseException] = []
        # Of publishes and of deliveries; the two together decide when to kill.
        self.acknowledged = self.confirmed = 0
        self.redelivered = 0

    def published(self, message: Message) -> None:
        with self.changed:
            message.sent += 1
            self.messages.setdefault(message.value, message)

    def acknowledge(self, messages: list[Message]) -> None:
        with self.changed:
            for message in messages:
                message.acknowledged = True
            self.acknowledged += len(messages)
            self.changed.notify_all()

    def made(self, group: Group) -> None:
        with self.changed:
            group.made_at = group.made_at or next(self.now)
            self.changed.notify_all()

    def deliver(self, group: Group, sequence: int, value: bytes) -> None:
        with self.changed:
            before = self.values.setdefault(sequence, value)
            assert before == value, f"sequence {sequence} was of {before!r} and is of {value!r}"
            confirmed = group.confirmed.get(sequence, self.life)
            assert confirmed == self.life, (
                f"{group.name}: {value[:40]!r}, sequence {sequence}, is delivered in life {self.life}, "
                f"though its acknowledgement was confirmed in life {confirmed}"
            )
            self.redelivered += group.delivered.get(sequence, self.life) != self.life
            group.delivered[sequence] = self.life
            group.values.add(before)
            self.changed.notify_all()

    def confirm(self, group: Group, sequences: list[int]) -> None:
        with self.changed:
            for sequence in sequences:
                group.confirmed.setdefault(sequence, self.life)
            self.confirmed += len(sequences)
            self.changed.notify_all()

    def tell_lag(self, group: Group, lag: int) -> None:
        with self.changed:
            group.lag = lag
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def wait(self, what: str, happened: Callable[[], bool], missing: Callable[[], object] = lambda: "") -> None:
        with self.changed:
            self.changed.wait_for(lambda: bool(self.failures) or happened(), PATIENCE_S)
            if self.failures:
                raise self.failures[0]
            assert happened(), f"not within {PATIENCE_S} s: {what} {missing()}"


class Ended(Exception):
    """The connection is gone."""


class Connection:
    def __init__(self, port: int) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        except ConnectionError as error:
            raise Ended from error
        # Who waits for messages may wait for long; who waits for answers is waited for by the judge.
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Ended from error

    def line(self) -> bytes:
        line = self._read(self._file.readline)
        if not line.endswith(b"\r\n"):
            raise Ended
        return line[:-2]

    def payload(self, size: int) -> bytes:
        data = self._read(lambda: self._file.read(size + 2))
        if len(data) < size + 2:
            raise Ended
        assert data.endswith(b"\r\n"), data
        return data[:-2]

    def say_connect(self) -> None:
        """As a NATS client does."""
        assert self.line().startswith(b"INFO ")
        self.send(b'CONNECT {"verbose":false,"headers":true,"protocol":1}\r\nPING\r\n')
        assert self.line() == b"PONG"
        assert self.line().startswith(b"INFO ")

    def shut(self) -> None:
        """From another thread: whoever reads finds the end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def _read(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except OSError as error:
            raise Ended from error


class Life:
    """A server from its start to its end, and the threads of its clients."""

    def __init__(self, journal: Journal, server: Serve) -> None:
        self.journal = journal
        self.server = server
        # Set before the server is killed or the clients are told to go: from then on a connection may end.
        self.is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: set[Connection] = set()

    @contextmanager
    def connect(self, door: str) -> Iterator[Connection]:
        with Connection(self.server.ports[door]) as connection:
            self._connections.add(connection)
            try:
                yield connection
            finally:
                self._connections.discard(connection)

    def start(self, work: Callable[[Life], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def kill(self) -> None:
        self.is_over.set()
        self.server.kill()
        self._join()

    def part(self) -> None:
        """The clients go, the server stays."""
        self.is_over.set()
        for connection in list(self._connections):
            connection.shut()
        self._join()

    def _run(self, work: Callable[[Life], None]) -> None:
        try:
            work(self)
        except Ended as error:
            if not self.is_over.is_set():
                error.add_note("the server ended a connection, and was not killed")
                self.journal.fail(error)
        except BaseException as error:  # noqa: BLE001 - the journal's reader raises it
            self.journal.fail(error)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a client does not end"


class Publisher:
    def __init__(self, name: str, journal: Journal, seed: int, *, is_nats: bool) -> None:
        self.name = name
        self.resent = 0
        self._journal = journal
        self._random = Random(f"{seed} {name}")
        self._is_nats = is_nats
        self._number = 0
        # Messages that share an answer, by the order of the answers; and those with ids that were answered last.
        self._unanswered: deque[list[Message]] = deque()
        self._answered: deque[Message] = deque(maxlen=8)

    def run(self, life: Life) -> None:
        with self._connect(life) as connection:
            again = self._again()
            self.resent += len(again)
            self._send(connection, again)
            while not life.is_over.is_set():
                self._send(connection, [self._message() for _ in range(self._random.randint(1, 50))])
                if self._random.random() < 0.1:
                    # Once more, though they may be answered by now.
                    self._send(connection, [message for message in again if message.has_id])
                window = self._random.randint(0, 4 if self._is_nats else 150)
                while len(self._unanswered) > window:
                    self._take_answer(connection)

    def make_last(self) -> list[Message]:
        """For each subject a message that comes behind all that were sent before, delayed or not."""
        return [self._make(subject, is_delayed=True) for subject in SUBJECTS]

    def publish(self, messages: list[Message], life: Life) -> None:
        with self._connect(life) as connection:
            self._send(connection, messages)
            while self._unanswered:
                self._take_answer(connection)

    @contextmanager
    def _connect(self, life: Life) -> Iterator[Connection]:
        with life.connect("text" if self._is_nats else "quiet") as connection:
            if self._is_nats:
                connection.say_connect()
            yield connection

    def _again(self) -> list[Message]:
        """What is sent again, since nobody said that it is stored: all with an id, also of those that are; and some
        others, which may then be stored twice."""
        lost = dict.fromkeys(message for messages in self._unanswered for message in messages)
        self._unanswered.clear()
        again = [
            message for message in lost if message.has_id or (_keeps_order(message) and self._random.random() < 0.2)
        ]
        return list(dict.fromkeys([*self._answered, *again]))

    def _message(self) -> Message:
        [subject] = self._random.choices(SUBJECTS, WEIGHTS)
        return self._make(subject, has_id=self._random.random() < 0.2, is_delayed=self._random.random() < 0.05)

    def _make(self, subject: str, *, has_id: bool = False, is_delayed: bool = False) -> Message:
        self._number += 1
        kind = "poison" if subject == "delta.a" and not is_delayed and self._random.random() < 0.2 else "message"
        padding = "x" * self._random.choice((0, 10, 100, 1000))
        value = f"{self.name}/{self._number}/{kind}/{padding}".encode()
        return Message(self.name, self._number, subject, value, has_id, is_delayed, next(self._journal.now))

    def _send(self, connection: Connection, messages: list[Message]) -> None:
        data = []
        for message in messages:
            self._journal.published(message)
            data.append(self._encode(message))
        if self._is_nats:
            data.append(b"PING\r\n")
            self._unanswered.append(messages)
        else:
            self._unanswered.extend([message] for message in messages)
        connection.send(b"".join(data))

    def _encode(self, message: Message) -> bytes:
        headers: dict[str, object] = {}
        if message.has_id:
            headers["nats_msg_id" if self._is_nats else "msg_id"] = f"{message.publisher}-{message.number}"
        if message.is_delayed:
            headers["delay"] = f"{DELAY_MS}ms"
        if headers:
            return hpub(message.subject, message.value, **headers)
        return pub(message.subject, message.value)

    def _take_answer(self, connection: Connection) -> None:
        answer = connection.line()
        messages = self._unanswered[0]
        if self._is_nats:
            assert answer == b"PONG", answer
        else:
            [message] = messages
            is_known = message.has_id and message.acknowledged
            wanted = [b"+OK DUP"] if is_known else [b"+OK"] if message.sent == 1 else [b"+OK", b"+OK DUP"]
            assert answer in wanted, f"{message}: {answer!r}, not {wanted}"
        self._unanswered.popleft()
        self._journal.acknowledge(messages)
        self._answered.extend(message for message in messages if message.has_id and message not in self._answered)


def _keeps_order(message: Message) -> bool:
    return message.subject not in TOPICS and not message.is_delayed


class Member:
    """One connection, with a subscription in each of its groups."""

    def __init__(self, name: str, journal: Journal, seed: int, groups: list[Group], *, is_nats: bool = False) -> None:
        self._journal = journal
        self._random = Random(f"{seed} {name}")
        self._groups = {str(sid): group for sid, group in enumerate(groups, start=1)}
        self._is_nats = is_nats
        # What the next answers mean, in their order, and whether they may be refusals.
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()
        # What is to be acknowledged with the next write, and how much makes one.
        self._gathered: list[tuple[Group, int]] = []
        self._gather = 1
        self._is_thorough = False
        self._connection: Connection | None = None

    def run(self, life: Life) -> None:
        """Leave some messages for later, and the group now and then."""
        self._is_thorough = False
        while not life.is_over.is_set():
            self._stay(life, self._random.randint(100, 5000))

    def run_thoroughly(self, life: Life) -> None:
        self._is_thorough = True
        self._stay(life, sys.maxsize)

    def ask_lags(self) -> None:
        """From another thread; the journal is told."""
        if self._connection is not None:
            self._connection.send(b"".join(b"STATS %b\r\n" % sid.encode() for sid in self._groups))

    def _stay(self, life: Life, messages_max: int) -> None:
        self._waiting.clear()
        self._gathered.clear()
        with life.connect("text" if self._is_nats else "quiet") as connection:
            if self._is_nats:
                connection.say_connect()
            self._join(connection)
            self._connection = connection
            try:
                for _ in range(messages_max):
                    self._take(connection)
            finally:
                self._connection = None

    def _join(self, connection: Connection) -> None:
        for sid, group in self._groups.items():
            is_word_first = self._is_nats or group.word.startswith("DURABLE:")
            words = f"{group.word} {sid}" if is_word_first else f"{sid} {group.word}"
            self._ask(connection, f"SUB {group.pattern} {words}\r\n".encode(), partial(self._journal.made, group))

    def _ask(
        self, connection: Connection, data: bytes, then: Callable[[], None], *, may_be_refused: bool = False
    ) -> None:
        self._waiting.append((then, may_be_refused))
        connection.send(data + b"PING\r\n" if self._is_nats else data)

    def _take(self, connection: Connection) -> None:
        line = connection.line()
        verb, *words = line.decode().split(" ")
        if verb in ("MSG", "HMSG"):
            self._take_message(connection, verb, words)
        elif verb in ("+STATS", "INFO"):
            found: dict[str, Any] = json.loads(line.partition(b" ")[2])
            found = found["stats"] if self._is_nats else found
            self._journal.tell_lag(self._groups[found["id"]], found["buffered"])
        else:
            then, may_be_refused = self._waiting.popleft()
            if may_be_refused and verb == "-ERR":
                return
            assert line == (b"PONG" if self._is_nats else b"+OK"), line
            then()

    def _take_message(self, connection: Connection, verb: str, words: list[str]) -> None:
        if self._is_nats:
            _, sid, reply, *sizes = words
            number = reply.rpartition(".")[2]
        else:
            _, sid, *sizes, number = words
        payload = connection.payload(int(sizes[-1]))
        value = payload[int(sizes[0]) :] if verb == "HMSG" else payload
        group, sequence = self._groups[sid], int(number)
        self._journal.deliver(group, sequence, value)
        if group.buries and is_poison(value):
            return
        if self._is_thorough or self._random.random() < 0.97:
            self._gathered.append((group, sequence))
        if len(self._gathered) >= (1 if self._is_thorough else self._gather):
            self._acknowledge(connection)

    def _acknowledge(self, connection: Connection) -> None:
        gathered, self._gathered = self._gathered, []
        for group, sequence in gathered:
            group.acknowledged.add(sequence)
        group, sequence = gathered[-1]
        if group.rumours and not self._is_nats:
            gathered.append((group, group.rumours.popleft()))
        elif self._random.random() < 0.1:
            group.rumours.append(sequence)
        self._gather = self._random.choice((1, 1, 5, 20))
        if self._is_nats:
            sid = next(iter(self._groups))
            data = b"".join(b"PUB $ACK.%b.%d 0\r\n\r\n" % (sid.encode(), sequence) for _, sequence in gathered)
            sequences = [sequence for _, sequence in gathered]
            self._ask(connection, data, partial(self._journal.confirm, gathered[0][0], sequences))
            return
        several = len(self._groups) > 1
        for group, sequence in gathered:
            name = f" {group.name}" if several else ""
            confirm = partial(self._journal.confirm, group, [sequence])
            # What was delivered in an earlier life the server may not know of any more, and what was not acknowledged
            # in time may be a dead letter by now. It must not say +OK then.
            self._ask(connection, f"ACK {sequence}{name}\r\n".encode(), confirm, may_be_refused=True)
