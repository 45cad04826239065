"""Flux's dialect of the text door: flow control, figures, and REPLAY."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.flux_door import payloads, pulled
from tests.support.server import Flux, Serve, pub

# ---- FLOWCTL, STATS, INFO


def test_flow_control_says_what_holds_now(flux: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask("FLOWCTL 1 PUSH 100 20") == "+OK mode=PUSH rate=100 burst=20 buffer=1000"
    assert flux.ask("FLOWCTL 1 push 2.5 3 7") == "+OK mode=PUSH rate=2.5 burst=3 buffer=7"
    assert flux.ask("FLOWCTL 1 PULL") == "+OK mode=PULL rate=2.5 burst=3 buffer=7"


def test_flow_control_refuses_what_it_does_not_know(flux: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    for wrong in ("FLOWCTL 1 SHOVE", "FLOWCTL 1", "FLOWCTL", "FLOWCTL 1 PUSH 1 1 1 1 1"):
        assert flux.ask(wrong) == "-ERR invalid mode (PUSH or PULL)"
    assert flux.ask("FLOWCTL 2 PULL") == "-ERR unknown sid"
    assert flux.ask("FLOWCTL 1 PUSH 1e99") == "-ERR invalid rate"
    assert flux.ask("FLOWCTL 1 PUSH -1") == "-ERR invalid rate"
    assert flux.ask("FLOWCTL 1 PUSH 1 0") == "-ERR invalid burst"
    assert flux.ask("FLOWCTL 1 PUSH 1 1 0") == "-ERR invalid buffer"


def test_a_rate_lets_a_burst_through_and_then_so_many_a_second(flux: Flux, other: Flux, subject: str) -> None:
    rate, burst, total = 100, 10, 40
    flux.subscribe(subject, "1")
    begun = time.monotonic()
    assert flux.ask(f"FLOWCTL 1 PUSH {rate} {burst}").startswith("+OK mode=PUSH")
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(total)))
    for number in range(total):
        assert flux.message().payload == b"%d" % number
        # However slow this machine is: no more than the bucket holds can have come by now.
        assert number + 1 <= burst + rate * (time.monotonic() - begun)


def test_a_high_rate_does_not_stall(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask("FLOWCTL 1 PUSH 8000 1").startswith("+OK mode=PUSH")
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(500)))
    assert payloads(flux.messages(500)) == [b"%d" % number for number in range(500)]


def test_a_rate_may_be_given_up_again(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask("FLOWCTL 1 PUSH 0.001 1").startswith("+OK mode=PUSH")
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(10)))
    assert [other.line() for _ in range(10)] == ["+OK"] * 10
    assert flux.message().payload == b"0"
    flux.send("FLOWCTL 1 PUSH 0\r\n")
    assert flux.line().startswith("+OK mode=PUSH rate=0 ")
    assert payloads(flux.messages(9)) == [b"%d" % number for number in range(1, 10)]


@pytest.mark.parametrize(("mode", "kept"), [("drop", range(10)), ("shed", range(90, 100))])
def test_a_full_buffer_drops_what_its_mode_says(flux: Flux, other: Flux, subject: str, mode: str, kept: range) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask(f"FLOWCTL 1 PULL 0 1 10 {mode}").startswith("+OK mode=PULL")
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(100)))
    assert [other.line() for _ in range(100)] == ["+OK"] * 100
    assert pulled(flux, subject, 1000) == [b"%d" % number for number in kept]
    assert flux.stats("1")["dropped"] == 90


def test_statistics_of_a_subscription(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    flux.ask("FLOWCTL 1 PUSH 5 10")
    other.publish(subject, b"x")
    flux.message()
    stats = flux.stats("1")
    assert (
        stats
        | {
            "id": "1",
            "mode": "PUSH",
            "active": True,
            "dropped": 0,
            "delivered": 1,
            "slow_consumer": False,
        }
        == stats
    )
    assert 0 <= stats["rate_limit_tokens"] <= 10
    assert stats["buffered"] == 1
    assert stats["buffer_usage"] == pytest.approx(1 / 1000)
    assert flux.ask("STATS nobody") == "-ERR unknown sid"


def test_statistics_of_a_connection(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    flux.subscribe(subject, "two")
    assert other.publish(subject, b"12345") == "+OK"
    flux.messages(2)
    stats = flux.stats()
    assert [each["id"] for each in stats["subscriptions"]] == ["1", "two"]
    assert (stats["in_msgs"], stats["out_msgs"]) == (0, 2)
    assert other.stats()["in_msgs"] == 1
    assert stats["server"]["connections"] >= 2


def test_info_tells_who_the_broker_is(server: Serve, flux: Flux) -> None:
    verb, _, fields = flux.ask("INFO").partition(" ")
    assert verb == "INFO"
    info = json.loads(fields)
    assert {"server_id", "version", "cluster_id", "node_id", "leader", "is_leader", "raft_stats"} <= info.keys()
    assert server.version in info["version"]
    assert info["is_leader"] is True
    assert info["leader"] == info["node_id"]
    assert info["max_payload"] == 1 << 20
    assert info["server_id"] == flux.info["server_id"]


def test_a_broker_alone_has_nobody_join_or_leave_it(flux: Flux) -> None:
    assert flux.ask("JOIN node2 127.0.0.1:1") == "-ERR clustering not enabled"
    assert flux.ask("LEAVE node2") == "-ERR clustering not enabled"


# ---- REPLAY


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, list[str], float]]:
    """Messages in the order in which they were published, over three topics; the time is before the fourth."""
    with Serve(tmp_path_factory.mktemp("past"), config="[topics.b]\npartitions = 3\n") as server, Flux(server) as flux:
        subjects = ["a.x", "b.x", "c", "b.y", "a.x", "b.z", "c", "a.y", "b.x", "b.y", "c", "a.x"]
        times = []
        for number, subject in enumerate(subjects):
            times.append(time.time())
            assert flux.publish(subject, b"%d" % number) == "+OK"
        yield server, subjects, times[3]


def replayed(client: Flux, *words: object) -> list[int]:
    client.send(" ".join(["REPLAY", *map(str, words)]) + "\r\n")
    messages, number = client.until_ok()
    assert len(messages) == int(number)
    assert {message.sid for message in messages} <= {"replay"}
    return [int(message.payload) for message in messages]


def test_replay_from_the_first(past: tuple[Serve, list[str], float]) -> None:
    server, subjects, _ = past
    with Flux(server) as flux:
        assert replayed(flux, "FIRST") == list(range(len(subjects)))
        assert replayed(flux, "first", 5) == [0, 1, 2, 3, 4]
        assert replayed(flux, "FIRST", 1000) == list(range(len(subjects)))


def test_replay_the_last(past: tuple[Serve, list[str], float]) -> None:
    server, subjects, _ = past
    with Flux(server) as flux:
        assert replayed(flux, "LAST") == [len(subjects) - 1]


def test_replay_from_a_time(past: tuple[Serve, list[str], float]) -> None:
    server, subjects, moment = past
    with Flux(server) as flux:
        assert replayed(flux, "TIME", repr(moment)) == list(range(3, len(subjects)))
        assert replayed(flux, "TIME", repr(moment), 4) == [3, 4, 5, 6]
        assert replayed(flux, "TIME", 0, 2) == [0, 1]
        assert replayed(flux, "TIME", int(time.time()) + 1000) == []


def test_replay_one_sequence(past: tuple[Serve, list[str], float]) -> None:
    server, subjects, _ = past
    with Flux(server) as flux:
        flux.send("REPLAY FIRST\r\n")
        messages, _ = flux.until_ok()
        assert [message.subject for message in messages] == subjects
        for message in messages:
            assert replayed(flux, message.sequence) == [int(message.payload)]
        assert replayed(flux, (messages[-1].sequence or 0) + 1_000_000) == []


def test_replay_from_a_sequence(past: tuple[Serve, list[str], float]) -> None:
    """What follows a message over all topics is what REPLAY FIRST has after it."""
    server, subjects, _ = past
    everything = list(range(len(subjects)))
    with Flux(server) as flux:
        flux.send("REPLAY FIRST\r\n")
        messages, _ = flux.until_ok()
        for number, message in enumerate(messages):
            assert replayed(flux, "seq", message.sequence) == everything[number:]
            assert replayed(flux, "SEQ", message.sequence, 3) == everything[number : number + 3]
        # The sequence after the last one of its partition, and two that nothing has.
        last_of_c = messages[10].sequence or 0
        assert replayed(flux, "SEQ", last_of_c + 1) == everything[11:]
        assert replayed(flux, "SEQ", last_of_c + 1_000_000) == []


@pytest.mark.parametrize("words", ["SEQ 0", "SEQ 1 10", "0", "42"])
def test_replay_says_that_a_number_which_no_topic_gives_out_is_not_a_sequence(
    past: tuple[Serve, list[str], float], words: str
) -> None:
    number = words.removeprefix("SEQ ").split()[0]
    with Flux(past[0]) as flux:
        told = flux.ask(f"REPLAY {words}")
        assert told.startswith(f"-ERR BAD_REQUEST {number} is not a sequence: take one from a message")
        assert told.endswith("or use REPLAY FIRST")
        assert flux.ask("PING") == "PONG"


@pytest.mark.parametrize(
    "words", ["", "seq", "seq x", "seq 1 1 1", "SIDEWAYS", "SIDEWAYS 5", "FIRST 5 5", "LAST 1", "-1", "TIME"]
)
def test_replay_refuses_what_it_does_not_know(past: tuple[Serve, list[str], float], words: str) -> None:
    with Flux(past[0]) as flux:
        assert flux.ask(f"REPLAY {words}") == "-ERR invalid replay mode"
        assert flux.ask("PING") == "PONG"


@pytest.mark.parametrize("words", ["FIRST x", "FIRST 0", "SEQ 1 0", "TIME 1 x", "TIME x", "TIME nan", "TIME -1"])
def test_replay_refuses_wrong_numbers(past: tuple[Serve, list[str], float], words: str) -> None:
    with Flux(past[0]) as flux:
        assert flux.ask(f"REPLAY {words}").startswith("-ERR invalid ")
        assert flux.ask("PING") == "PONG"
