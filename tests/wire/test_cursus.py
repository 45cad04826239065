"""Cursus' commands, as documented."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.wire.cursus import (
    VERBS,
    Command,
    is_command,
    read_command,
    usage,
)
from tests.support.prefixed_frames import BATCH, methods_called, peak_bytes

ORDERED: Final[dict[bytes, Command]] = {
    b"CREATE orders": Command("CREATE", {"topic": "orders"}),
    b"CREATE orders 8": Command("CREATE", {"topic": "orders", "partitions": "8"}),
    b"DELETE orders": Command("DELETE", {"topic": "orders"}),
    b"LIST": Command("LIST", {}),
    b"DESCRIBE orders": Command("DESCRIBE", {"topic": "orders"}),
    b"SUBSCRIBE orders": Command("SUBSCRIBE", {"topic": "orders"}),
    b"SUBSCRIBE orders g": Command("SUBSCRIBE", {"topic": "orders", "group": "g"}),
    b"SUBSCRIBE orders g 3": Command("SUBSCRIBE", {"topic": "orders", "group": "g", "consumers": "3"}),
    b"PUBLISH orders hello": Command("PUBLISH", {"topic": "orders"}, b"hello"),
    b"CONSUME orders 0 10": Command("CONSUME", {"topic": "orders", "partition": "0", "offset": "10"}),
    b"CONSUME ord*s? 0 10": Command("CONSUME", {"topic": "ord*s?", "partition": "0", "offset": "10"}),
    b"CONSUME orders 0 10 follow": Command(
        "CONSUME", {"topic": "orders", "partition": "0", "offset": "10", "follow": "follow"}
    ),
    b"STREAM orders 0": Command("STREAM", {"topic": "orders", "partition": "0"}),
    b"STREAM orders 0 10": Command("STREAM", {"topic": "orders", "partition": "0", "offset": "10"}),
    b"REGISTER_GROUP orders g": Command("REGISTER_GROUP", {"topic": "orders", "group": "g"}),
    b"JOIN_GROUP orders g m": Command("JOIN_GROUP", {"topic": "orders", "group": "g", "member": "m"}),
    **{
        f"{verb} orders g m 3".encode(): Command(
            verb, {"topic": "orders", "group": "g", "member": "m", "generation": "3"}
        )
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    **{
        f"{verb} orders g m".encode(): Command(verb, {"topic": "orders", "group": "g", "member": "m"})
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    b"COMMIT_OFFSET orders 0 g 10": Command(
        "COMMIT_OFFSET", {"topic": "orders", "partition": "0", "group": "g", "offset": "10"}
    ),
    b"FETCH_OFFSET orders 0 g": Command("FETCH_OFFSET", {"topic": "orders", "partition": "0", "group": "g"}),
    b"BATCH_COMMIT orders g m 3 P0:100,P1:200": Command(
        "BATCH_COMMIT",
        {"topic": "orders", "group": "g", "member": "m", "generation": "3", "offsets": "P0:100,P1:200"},
    ),
    b"GROUP_STATUS g": Command("GROUP_STATUS", {"group": "g"}),
    b"GROUP_STATUS g orders": Command("GROUP_STATUS", {"group": "g", "topic": "orders"}),
    b"AUTH": Command("AUTH", {}),
    b"HELP": Command("HELP", {}),
    b"EXIT": Command("EXIT", {}),
}


def by_name(verb: str, message: bytes = b"", **arguments: str) -> Command:
    return Command(verb, arguments, message, is_named=True)


NAMED: Final[dict[bytes, Command]] = {
    b"CREATE topic=orders": by_name("CREATE", topic="orders"),
    b"CREATE topic=orders partitions=8": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE partitions=8 topic=orders": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE topic=orders retention_hours=2 retention_bytes=1000": by_name(
        "CREATE", topic="orders", retention_hours="2", retention_bytes="1000"
    ),
    b"DELETE topic=orders": by_name("DELETE", topic="orders"),
    b"DESCRIBE topic=orders": by_name("DESCRIBE", topic="orders"),
    b"SUBSCRIBE topic=orders group=g consumers=3": by_name("SUBSCRIBE", topic="orders", group="g", consumers="3"),
    b"PUBLISH topic=orders message=hello": by_name("PUBLISH", b"hello", topic="orders"),
    b"PUBLISH topic=a acks=all producerId=p seqNum=1 epoch=2 isIdempotent=true key=k partition=0 message=hi": by_name(
        "PUBLISH",
        b"hi",
        topic="a",
        acks="all",
        producerId="p",
        seqNum="1",
        epoch="2",
        isIdempotent="true",
        key="k",
        partition="0",
    ),
    b"CONSUME topic=orders partition=0 offset=10 group=g member=m": by_name(
        "CONSUME", topic="orders", partition="0", offset="10", group="g", member="m"
    ),
    b"CONSUME topic=orders partition=0 offset=10 follow=true autoOffsetReset=latest batch=5 wait_ms=100": by_name(
        "CONSUME",
        topic="orders",
        partition="0",
        offset="10",
        follow="true",
        autoOffsetReset="latest",
        batch="5",
        wait_ms="100",
    ),
    b"STREAM topic=orders partition=0 group=g member=m": by_name(
        "STREAM", topic="orders", partition="0", group="g", member="m"
    ),
    b"STREAM topic=orders partition=0 offset=7": by_name("STREAM", topic="orders", partition="0", offset="7"),
    b"REGISTER_GROUP topic=orders group=g": by_name("REGISTER_GROUP", topic="orders", group="g"),
    b"JOIN_GROUP topic=orders group=g member=m": by_name("JOIN_GROUP", topic="orders", group="g", member="m"),
    **{
        f"{verb} topic=orders group=g member=m generation=3".encode(): by_name(
            verb, topic="orders", group="g", member="m", generation="3"
        )
        for verb in ("SYNC_GROUP", "LEAVE_GROUP", "HEARTBEAT")
    },
    b"COMMIT_OFFSET topic=orders partition=0 group=g offset=10 generation=3 member=m": by_name(
        "COMMIT_OFFSET", topic="orders", partition="0", group="g", offset="10", generation="3", member="m"
    ),
    b"FETCH_OFFSET topic=orders partition=0 group=g": by_name("FETCH_OFFSET", topic="orders", partition="0", group="g"),
    b"BATCH_COMMIT topic=orders group=g generation=3 member=m P0:100,P1:200": by_name(
        "BATCH_COMMIT", topic="orders", group="g", generation="3", member="m", offsets="P0:100,P1:200"
    ),
    b"BATCH_COMMIT topic=orders group=g offsets=P0:100 generation=3 member=m": by_name(
        "BATCH_COMMIT", topic="orders", group="g", generation="3", member="m", offsets="P0:100"
    ),
    b"GROUP_STATUS group=g": by_name("GROUP_STATUS", group="g"),
    b"GROUP_STATUS topic=orders group=g": by_name("GROUP_STATUS", topic="orders", group="g"),
    b"AUTH user=u password=p": by_name("AUTH", user="u", password="p"),
    b"AUTH token=t": by_name("AUTH", token="t"),
}
BLANKS: Final[dict[bytes, Command]] = {
    b"LIST\n": Command("LIST", {}),
    b"\r\n LIST \r\n": Command("LIST", {}),
    b"\tCREATE \t orders\r\n 8\n": Command("CREATE", {"topic": "orders", "partitions": "8"}),
    b"CREATE\norders": Command("CREATE", {"topic": "orders"}),
    b"  CREATE   topic=orders \t partitions=8  ": by_name("CREATE", topic="orders", partitions="8"),
    b"CREATE topic=orders\r\n": by_name("CREATE", topic="orders"),
    b"CREATE topic=": by_name("CREATE", topic=""),
    "CREATE grüße".encode(): Command("CREATE", {"topic": "grüße"}),
    "CREATE topic=grüße".encode(): by_name("CREATE", topic="grüße"),
}
EQUALS: Final[dict[bytes, Command]] = {
    b"CREATE a=b": Command("CREATE", {"topic": "a=b"}),
    b"CREATE a=b 3": Command("CREATE", {"topic": "a=b", "partitions": "3"}),
    b"CREATE =b": Command("CREATE", {"topic": "=b"}),
    b"CREATE topic=a=b": by_name("CREATE", topic="a=b"),
    b"CREATE topic==": by_name("CREATE", topic="="),
    b"CREATE Topic=a": Command("CREATE", {"topic": "Topic=a"}),
    b"DELETE partitions=1": Command("DELETE", {"topic": "partitions=1"}),
    b"PUBLISH a=b topic=c": Command("PUBLISH", {"topic": "a=b"}, b"topic=c"),
    b"PUBLISH orders topic=c message=d": Command("PUBLISH", {"topic": "orders"}, b"topic=c message=d"),
    b"SUBSCRIBE orders group=g": Command("SUBSCRIBE", {"topic": "orders", "group": "group=g"}),
}
COMMANDS: Final = {**ORDERED, **NAMED, **BLANKS, **EQUALS}


@pytest.mark.parametrize(("payload", "command"), COMMANDS.items(), ids=lambda given: repr(given)[:60])
def test_a_command_is_read(payload: bytes, command: Command) -> None:
    assert read_command(payload) == command
    assert is_command(payload)


def test_the_tables_above_have_every_verb_in_both_forms() -> None:
    assert {command.verb for command in ORDERED.values()} == set(VERBS)
    assert {command.verb for command in NAMED.values()} == set(VERBS) - {"LIST", "HELP", "EXIT"}


@pytest.mark.parametrize("payload", [*ORDERED, *NAMED])
def test_the_case_of_a_verb_does_not_matter(payload: bytes) -> None:
    verb, blank, rest = payload.partition(b" ")
    for written_verb in (verb.lower(), verb.title(), verb.swapcase()):
        assert read_command(written_verb + blank + rest) == read_command(payload)
        assert is_command(written_verb + blank + rest)


PUBLISHED: Final[dict[str, bytes]] = {
    "nothing": b"",
    "one blank": b" ",
    "blanks around": b"  hello  world  ",
    "lines around": b"\r\nhello\r\nworld\r\n",
    "a tab first": b"\thello",
    "every byte": bytes(range(256)),
    "bytes that are not UTF-8": b"\xff\xfe\x80",
    "zero bytes": bytes(5),
    "message= within": b"hello message=again",
    "message= first": b"message=again",
    "parameters": b"key=value topic=other partition=9 ",
    "a command": b"PUBLISH other hello",
}


@pytest.mark.parametrize("value", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_what_is_published_stays_as_it_came(value: bytes) -> None:
    ordered, named = Command("PUBLISH", {"topic": "a"}, value), by_name("PUBLISH", value, topic="a", key="message")

    assert read_command(b"PUBLISH a " + value) == ordered
    assert read_command(b" publish   a " + value) == ordered
    assert read_command(b"PUBLISH topic=a key=message message=" + value) == named
    assert read_command(b"\npublish  topic=a \r\n\tkey=message  message=" + value) == named


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=300)
def test_any_bytes_can_be_published(value: bytes, is_named: bool) -> None:
    begin = b"PUBLISH topic=a message=" if is_named else b"PUBLISH a "

    assert read_command(begin + value) == Command("PUBLISH", {"topic": "a"}, value, is_named)


BAD_COMMANDS: Final[dict[bytes, str]] = {
    **dict.fromkeys((b"", b" ", b"\r\n\t "), "empty command"),
    b"NONSENSE": "unknown command: NONSENSE. Type HELP for available commands.",
    b"nonsense and more": "unknown command: NONSENSE. Type HELP for available commands.",
    b"LISTS": "unknown command: LISTS. Type HELP for available commands.",
    b"LIST\0": "unknown command: LIST\0. Type HELP for available commands.",
    b"\xff": "unknown command: \ufffd. Type HELP for available commands.",
    b"topic=a": "unknown command: TOPIC=A. Type HELP for available commands.",
    **dict.fromkeys((b"CREATE", b"CREATE ", b"DELETE", b"DESCRIBE\n", b"SUBSCRIBE"), "missing topic name"),
    **{
        payload: f"invalid {payload.split()[0].decode()} syntax. Expected: {expected}"
        for expected, payloads in {
            "CREATE <topic> [partitions] [retention_hours=] [retention_bytes=]": (b"CREATE a 1 2", b"CREATE a x=b 3"),
            "DELETE <topic>": (b"DELETE a b",),
            "LIST": (b"LIST a", b"LIST topic=a"),
            "DESCRIBE <topic>": (b"DESCRIBE a b",),
            "SUBSCRIBE <topic> [group] [consumers]": (b"SUBSCRIBE a b 1 2",),
            "PUBLISH <topic> <message> [key=] [partition=] [acks=] [producerId=] [seqNum=] [epoch=] [isIdempotent=]": (
                b"PUBLISH",
                b"PUBLISH ",
                b"PUBLISH a",
                b"PUBLISH  a",
                b"PUBLISH topic=a",
                b"PUBLISH topic=a key=b ",
                b"PUBLISH key=b",
            ),
            "CONSUME <topic> <partition> <offset> [follow] [group=] [member=] [autoOffsetReset=] [batch=] [wait_ms=]": (
                b"CONSUME",
                b"CONSUME a",
                b"CONSUME a 0",
                b"CONSUME a 0 0 follow more",
            ),
            "STREAM <topic> <partition> [offset] [group=] [member=]": (b"STREAM", b"STREAM a", b"STREAM a 0 0 0"),
            "REGISTER_GROUP <topic> <group>": (b"REGISTER_GROUP a", b"REGISTER_GROUP a b c"),
            "JOIN_GROUP <topic> <group> <member>": (b"JOIN_GROUP", b"JOIN_GROUP a b", b"JOIN_GROUP a b c d"),
            "SYNC_GROUP <topic> <group> <member> [generation]": (b"SYNC_GROUP a b", b"SYNC_GROUP a b c d e"),
            "LEAVE_GROUP <topic> <group> <member> [generation]": (b"LEAVE_GROUP a b", b"LEAVE_GROUP a b c d e"),
            "HEARTBEAT <topic> <group> <member> [generation]": (b"HEARTBEAT", b"HEARTBEAT a b c d e"),
            "COMMIT_OFFSET <topic> <partition> <group> <offset> [member=] [generation=]": (
                b"COMMIT_OFFSET a 0 g",
                b"COMMIT_OFFSET a 0 g 1 2",
            ),
            "FETCH_OFFSET <topic> <partition> <group>": (b"FETCH_OFFSET a 0", b"FETCH_OFFSET a 0 g 1"),
            "BATCH_COMMIT <topic> <group> <member> <generation> <offsets>": (
                b"BATCH_COMMIT a g m 1",
                b"BATCH_COMMIT a g m 1 P0:1 P1:2",
            ),
            "GROUP_STATUS <group> [topic]": (b"GROUP_STATUS", b"GROUP_STATUS g orders more"),
            "AUTH [user=] [password=] [token=]": (b"AUTH me", b"AUTH name=me", b"AUTH me token=t"),
            "HELP": (b"HELP me",),
            "EXIT": (b"EXIT now",),
        }.items()
        for payload in payloads
    },
    **{
        payload: f"unknown parameter, or one that came before: {shown}. Expected: {usage(payload.split()[0].decode())}"
        for payload, shown in {
            b"CREATE topic=a nonsense=1": "nonsense=1",
            b"CREATE topic=a Partitions=1": "Partitions=1",
            b"CREATE topic=a 4": "4",
            b"CREATE topic=a =4": "=4",
            b"CREATE topic=a \xff=4": "\ufffd=4",
            b"CREATE topic=a topic=b": "topic=b",
            b"DELETE topic=a partitions=4": "partitions=4",
            b"DELETE topic=a b": "b",
            b"PUBLISH topic=a message": "message",
            b"PUBLISH topic=a QbMessage=b": "QbMessage=b",
            b"PUBLISH topic=a key=b topic=a message=c": "topic=a",
            b"CONSUME topic=a message=b": "message=b",
            b"BATCH_COMMIT topic=a P0:1 P1:2": "P1:2",
            b"BATCH_COMMIT topic=a P0:1 offsets=P1:2": "offsets=P1:2",
            b"AUTH user=u password=p me": "me",
        }.items()
    },
    **dict.fromkeys(
        (
            b"CREATE \xff",
            b"CREATE topic=\xff",
            b"PUBLISH \xff hello",
            b"PUBLISH topic=\xff message=hello",
            b"PUBLISH topic=a key=\xff message=hello",
            b"CONSUME a 0 \xff",
            b"BATCH_COMMIT topic=a \xff",
        ),
        "a command must be UTF-8, except the published message",
    ),
}


@pytest.mark.parametrize(("payload", "text"), BAD_COMMANDS.items(), ids=lambda given: repr(given)[:60])
def test_a_command_that_is_none_is_refused_with_what_cursus_says(payload: bytes, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_command(payload)

    assert str(caught.value) == text


@pytest.mark.parametrize("payload", [b"", b" ", b"NONSENSE", b"LISTS", b"\xff\xfe", b"\0LIST", BATCH, bytes(40)])
def test_what_does_not_begin_with_a_verb_is_no_command(payload: bytes) -> None:
    assert not is_command(payload)


@pytest.mark.parametrize("verb", VERBS)
def test_how_a_verb_is_used_begins_with_it(verb: str) -> None:
    assert usage(verb).split(" ")[0] == verb


@pytest.mark.parametrize("payload", [b"\xff" * 100_000, b"CREATE topic=a " + b"\xff" * 100_000])
def test_a_refusal_is_short_whatever_is_refused(payload: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_command(payload)

    assert len(str(caught.value)) < 1000


def test_words_that_are_too_many_cost_no_object_each() -> None:
    payload = b"CREATE " + b"ab " * 100_000

    assert peak_bytes(lambda: read_command(payload)) < 3 * len(payload)


def test_a_command_is_read_in_time_that_grows_with_its_bytes() -> None:
    def work(times: int) -> int:
        payload = b"PUBLISH topic=a " + b"key=value " * times + b"message=hello"
        return sum(size for _, size in methods_called(lambda: read_command(payload)))

    assert work(400) <= 3 * work(200)


@given(st.sampled_from([*COMMANDS, *BAD_COMMANDS]), st.integers(0, 100), st.integers(0, 10), st.binary(max_size=10))
@settings(max_examples=300)
def test_whatever_comes_as_a_command_is_read_or_refused(payload: bytes, at: int, removed: int, put: bytes) -> None:
    changed = payload[:at] + put + payload[at + removed :]
    try:
        assert read_command(changed).verb in VERBS
    except BadRequest:
        return
    assert is_command(changed)
