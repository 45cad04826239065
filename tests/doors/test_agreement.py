"""One log, many doors: whichever way a message comes in, the same is stored, and everyone gets it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from penstock.model import headers
from penstock.model.run import open_batch
from tests.support.frames import Frames
from tests.support.lengths import CREATE_SUBSCRIPTION, PUBLISH, Cursus, Qb
from tests.support.server import Flux, Serve

# A time that no clock here has.
_MADE_S: Final = 1_500_000_000
_names = itertools.count()


class Message(NamedTuple):
    """What may be said of a message at one door or another."""

    below: str
    value: bytes
    key: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012
    made_ms: int | None = None

    @property
    def is_bare(self) -> bool:
        """Cursus' commands have no place for the rest, and no headers."""
        return not self.headers and self.made_ms is None


class Stored(NamedTuple):
    subject: str
    value: bytes
    key: bytes | None
    headers: dict[str, str]
    made_ms: int | None


@dataclass
class Door:
    """A broker that is used through one door only, and its log."""

    name: str
    server: Serve
    publish: Callable[[str, Message], None]
    frames: Frames
    close: Callable[[], None] = field(repr=False)

    def create(self, topic: str, partitions: int) -> None:
        self.frames.call("create_topic", name=topic, partitions=partitions)

    def log(self, topic: str) -> list[list[Stored]]:
        """What each partition holds."""
        told = self.frames.call("topic", name=topic)
        found = []
        for position in told["positions"]:
            messages: list[Stored] = []
            offset = 0
            while (fetched := self.frames.fetch(told["id"], offset, partition=position["partition"])).batches:
                for batch in fetched.batches:
                    run = open_batch(batch, topic.encode())
                    messages += [
                        Stored(
                            run.subjects[index].decode(),
                            run.values[index],
                            run.keys.get(index),
                            _own_headers(run.headers.get(index, b"")),
                            _made_ms(run.timestamp if run.timestamps is None else run.timestamps[index]),
                        )
                        for index in range(len(run))
                    ]
                offset = fetched.batches[-1].end
            found.append(messages)
        return found


def _own_headers(block: bytes) -> dict[str, str]:
    """Without those that stand for what this log has another place for."""
    kept = headers.without(block, b"penstock-")
    return {
        name.decode(): value.strip().decode()
        for name, colon, value in (line.partition(b":") for line in kept.split(b"\r\n"))
        if colon
    }


def _made_ms(time_us: int) -> int | None:
    """If its publisher said it."""
    return time_us // 1000 if time_us < (_MADE_S + 10_000) * 1_000_000 else None


def _subject(topic: str, message: Message) -> str:
    return f"{topic}.{message.below}" if message.below else topic


def _named(message: Message) -> dict[str, str]:
    """Headers, with those for what the door has no other place for."""
    named = dict(message.headers)
    if message.key is not None:
        named["Penstock-Key"] = message.key
    if message.made_ms is not None:
        named["Penstock-Timestamp"] = f"{message.made_ms / 1000:.3f}"
    return named


def _by_text(server: Serve) -> Door:
    client = Flux(server)

    def publish(topic: str, message: Message) -> None:
        named = _named(message)
        subject = _subject(topic, message)
        answer = (
            client.publish_with_headers(subject, message.value, **named)
            if named
            else client.publish(subject, message.value)
        )
        assert answer == "+OK", answer

    return Door("text", server, publish, Frames(server), client.close)


def _by_binary(server: Serve) -> Door:
    client = Frames(server)

    def publish(topic: str, message: Message) -> None:
        named = _named(message)
        named.pop("Penstock-Key", None)
        block = "".join(f"{name}: {value}\r\n" for name, value in named.items()).encode()
        columns = {"headers": [block]} if block else {}
        if message.key is not None:
            columns["keys"] = [message.key.encode()]
        [receipt] = client.publish(_subject(topic, message), message.value, asks=bool(block), **columns)
        assert isinstance(receipt, list), receipt

    return Door("binary", server, publish, Frames(server), client.close)


def _by_qb(server: Serve) -> Door:
    client = Qb(server)

    def publish(topic: str, message: Message) -> None:
        named = _named(message)
        named.pop("Penstock-Timestamp", None)
        properties = {"topic": _subject(topic, message), "client_id": "doors", **named}
        answer = client.done(PUBLISH, message.value, made_ms=message.made_ms or 0, **properties)
        assert answer["topic"] == properties["topic"]

    return Door("qb", server, publish, Frames(server), client.close)


def _by_cursus(server: Serve) -> Door:
    client = Cursus(server)

    def publish(topic: str, message: Message) -> None:
        subject = _subject(topic, message)
        if message.key is None:
            client.publish(subject, message.value)
        else:
            command = f"PUBLISH topic={subject} key={message.key} message=".encode()
            assert '"status": "OK"' in client.ask(command + message.value)

    return Door("cursus", server, publish, Frames(server), client.close)


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Door]]:
    """One broker for each door, so that they can have topics of the same name."""
    servers = [Serve(tmp_path_factory.mktemp("serve")) for _ in range(4)]
    made = [make(server) for make, server in zip((_by_text, _by_binary, _by_qb, _by_cursus), servers, strict=True)]
    yield made
    for door in made:
        door.close()
        door.frames.close()
        assert door.server.stop().code == 0


_words = st.text("abcxyz019", min_size=1, max_size=6)
_header_names = st.from_regex(r"X-[A-Z][a-z]{0,5}", fullmatch=True)
_header_values = st.from_regex(r"[!-~]([ -~]{0,10}[!-~])?", fullmatch=True)
_bare = st.builds(
    Message,
    below=st.sampled_from(["", "", "eu", "us.west"]),
    value=st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\xff\xfe\x00", b"PUB x 1\r\n", b"message=x"])),
    key=st.none() | _words,
    headers=st.just({}),
    made_ms=st.none(),
)
_full = st.builds(
    Message,
    below=st.sampled_from(["", "eu", "us.west"]),
    value=st.binary(max_size=40),
    key=st.none() | _words,
    headers=st.dictionaries(_header_names, _header_values, max_size=3),
    made_ms=st.none() | st.integers(_MADE_S * 1000, _MADE_S * 1000 + 10**6),
)
_many: Final = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _publish(doors: list[Door], partitions: int, workload: list[Message]) -> str:
    topic = f"topic-{next(_names)}"
    note(topic)
    for door in doors:
        door.create(topic, partitions)
        for message in workload:
            door.publish(topic, message)
    return topic


@_many
@given(partitions=st.integers(1, 4), workload=st.lists(_bare, max_size=12))
def test_the_same_messages_make_the_same_log_at_every_door(
    doors: list[Door], partitions: int, workload: list[Message]
) -> None:
    topic = _publish(doors, partitions, workload)
    logs = {door.name: door.log(topic) for door in doors}
    assert logs["binary"] == logs["qb"] == logs["cursus"] == logs["text"]
    expected = {(_subject(topic, message), message.value) for message in workload}
    assert {(stored.subject, stored.value) for part in logs["text"] for stored in part} == expected
    assert sum(map(len, logs["text"])) == len(workload)


@_many
@given(partitions=st.integers(1, 4), workload=st.lists(_full, max_size=12))
def test_with_headers_and_times_the_same_log_where_there_is_a_place_for_them(
    doors: list[Door], partitions: int, workload: list[Message]
) -> None:
    able = [door for door in doors if door.name != "cursus"]
    topic = _publish(able, partitions, workload)
    logs = {door.name: door.log(topic) for door in able}
    assert logs["binary"] == logs["qb"] == logs["text"]
    stored = sorted(
        (each.value, each.made_ms or 0, sorted(each.headers.items())) for part in logs["qb"] for each in part
    )
    assert stored == sorted((each.value, each.made_ms or 0, sorted(each.headers.items())) for each in workload)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workload=st.lists(st.tuples(st.sampled_from(["text", "binary", "qb", "cursus"]), _bare), min_size=1, max_size=12)
)
def test_what_comes_in_at_one_door_goes_out_at_all(doors: list[Door], workload: list[tuple[str, Message]]) -> None:
    server = doors[0].server
    topic = f"all-{next(_names)}"
    writers = {make.__name__[4:]: make(server) for make in (_by_text, _by_binary, _by_qb, _by_cursus)}
    doors[0].create(topic, 1)
    with Flux(server) as flux, Frames(server) as frames, Qb(server) as qb, Cursus(server) as cursus:
        flux.subscribe(topic, "1")
        frames.open(1, topic)
        qb.done(CREATE_SUBSCRIPTION, subscription_id=topic, topic=topic)
        qb.subscribe(topic)
        cursus.subscribe(topic)
        # An empty frame is a sign of life there, so an empty message is not to be seen.
        values = [message.value or b"something" for _, message in workload]
        for (door, message), value in zip(workload, values, strict=True):
            writers[door].publish(topic, message._replace(below="", value=value))
        count = len(values)
        assert [message.payload for message in flux.messages(count)] == values
        assert [message.value for message in frames.delivered(count)] == values
        assert qb.bodies(count) == values
        assert cursus.messages(count) == values
    for writer in writers.values():
        writer.close()
        writer.frames.close()


def test_an_empty_value_is_told_apart_where_a_client_asks_by_name(doors: list[Door]) -> None:
    door = doors[3]
    door.create("empty", 1)
    door.publish("empty", Message("", b""))
    with Cursus(door.server) as client:
        assert client.batch("CONSUME topic=empty partition=0 offset=0") == [(0, b"", b"")]
