"""Flux's dialect of the text door: acknowledgements, redelivery, dead letters, and PULL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.flux_door import NUMBERS, payloads, pulled
from tests.support.server import Flux, Serve, pub


@pytest.fixture
def quick() -> str:
    """One whose messages are delivered again after a moment."""
    return f"quick.{next(NUMBERS)}"


# ---- ACK, redelivery, dead letters


def test_what_is_not_acknowledged_is_delivered_again(flux: Flux, other: Flux, quick: str) -> None:
    flux.subscribe(quick, "1", "group")
    other.publish(quick, b"acknowledged")
    first = flux.message()
    flux.ack(first)
    assert other.publish_with_headers(quick, b"not", trace_id="7") == "+OK"
    once, twice = flux.messages(2)
    assert once == twice._replace(headers=once.headers)
    assert once.header("Delivery-Count") is None
    assert twice.header("Delivery-Count") == "2"
    assert twice.header("Trace-Id") == "7"
    flux.ack(twice)
    # Both are done: what comes next is new.
    other.publish(quick, b"new")
    assert flux.message().payload == b"new"


def test_what_is_delivered_in_vain_too_often_becomes_a_dead_letter(
    server: Serve, flux: Flux, other: Flux, quick: str
) -> None:
    other.subscribe(f"DLQ.{quick}", "DURABLE:letters", "9")
    flux.subscribe(quick, "DURABLE:billing", "1")
    with Flux(server) as publisher:
        publisher.publish_with_headers(quick, b"poison", trace_id="7")
    tries = flux.messages(3)
    assert payloads(tries) == [b"poison"] * 3
    letter = other.message()
    assert (letter.subject, letter.payload) == (f"DLQ.{quick}", b"poison")
    assert letter.header("Trace-Id") == "7"
    assert letter.header("Dead-Letter-Reason") == "not acknowledged"
    assert letter.header("Dead-Letter-Attempts") == "3"
    assert letter.header("Dead-Letter-Group") == f"{quick}:billing"
    assert letter.header("Dead-Letter-Subject") == quick
    assert letter.header("Dead-Letter-Topic") == "quick"
    assert letter.header("Dead-Letter-Partition") == "0"
    assert letter.header("Dead-Letter-Offset") == str((tries[0].sequence or 0) % (1 << 40))
    other.ack(letter)
    # It is done for the group.
    assert flux.stats("1")["unacknowledged"] == 0


def test_a_dead_letter_does_not_become_one_again_though_a_client_made_their_topic(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, topic_ack_deadline_ms=100, topic_deliveries_max=2) as server,
        Flux(server) as flux,
        Flux(server) as other,
    ):
        assert other.publish("DLQ.before", b"x") == "+OK"
        flux.subscribe("DLQ.>", "DURABLE:letters", "1")
        assert other.publish("DLQ.quick", b"poison") == "+OK"
        assert [message.subject for message in flux.messages(5)] == ["DLQ.quick"] * 5


def test_an_acknowledgement_with_a_key_counts_for_that_group_only(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "DURABLE:a", "1")
    flux.subscribe(subject, "DURABLE:b", "2")
    other.publish(subject, b"x")
    first, second = flux.messages(2)
    assert first.sequence == second.sequence
    flux.ack(first, f"{subject}:b")
    assert (flux.stats("1")["unacknowledged"], flux.stats("2")["unacknowledged"]) == (1, 0)
    flux.ack(first, f"{subject}:a")
    assert (flux.stats("1")["unacknowledged"], flux.stats("2")["unacknowledged"]) == (0, 0)


def test_an_acknowledgement_with_a_key_counts_from_any_connection(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "DURABLE:a", "1")
    other.publish(subject, b"x")
    other.ack(flux.message(), f"{subject}:a")
    assert flux.stats("1")["unacknowledged"] == 0


def test_an_acknowledgement_for_a_group_that_does_not_exist_is_refused(flux: Flux) -> None:
    assert flux.ask("ACK 1 nobody:nothing").startswith("-ERR ")


def test_an_acknowledgement_needs_a_sequence(flux: Flux) -> None:
    for wrong in ("ACK", "ACK x", "ACK -1", "ACK 1 2 3", "ACK " + "9" * 30):
        assert flux.ask(wrong) == "-ERR invalid sequence"


def test_sequences_tell_topics_apart(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, config="[topics.a]\n[topics.b]\npartitions = 3\n") as server,
        Flux(server) as flux,
        Flux(server) as other,
    ):
        flux.subscribe(">", "DURABLE:all", "1")
        subjects = ["a.0", "b.0", "a.1", "b.1", "b.2", "b.3", "b.4"]
        for subject in subjects:
            assert other.publish(subject, subject.encode()) == "+OK"
        messages = {message.subject: message for message in flux.messages(len(subjects))}
        assert sorted(messages) == sorted(subjects)
        assert len({message.sequence for message in messages.values()}) == len(subjects)
        for subject, message in messages.items():
            other.send(f"REPLAY {message.sequence}\r\n")
            [again], number = other.until_ok()
            assert (again.subject, again.payload, again.sid, number) == (subject, subject.encode(), "replay", "1")
        for left, message in enumerate(reversed(messages.values())):
            assert flux.stats("1")["unacknowledged"] == len(subjects) - left
            flux.ack(message)


def test_what_a_lost_member_had_goes_to_the_others_at_once(server: Serve, subject: str) -> None:
    with Flux(server) as stays, Flux(server) as publisher:
        gone = Flux(server)
        gone.subscribe(subject, "1", "workers")
        for number in range(10):
            publisher.publish(subject, b"%d" % number)
        had = gone.messages(10)
        gone.ack(had[3])
        stays.subscribe(subject, "1", "workers")
        # Its deadline is in an hour.
        gone.close()
        again = stays.messages(9)
        assert payloads(again) == [b"%d" % number for number in range(10) if number != 3]
        publisher.publish(subject, b"new")
        assert stays.message().payload == b"new"


def test_a_durable_misses_nothing_while_it_is_away(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=3_600_000) as server:
        with Flux(server) as flux, Flux(server) as other:
            flux.subscribe("orders.>", "DURABLE:billing", "1")
            other.publish("orders.a", b"1")
            other.publish("orders.b", b"2")
            first, second = flux.messages(2)
            flux.ack(first)
            assert second.payload == b"2"
        with Flux(server) as other:
            other.publish("orders.a", b"3")
        server.kill()
        server.restart()
        with Flux(server) as other:
            other.publish("orders.a", b"4")
        with Flux(server) as flux:
            flux.subscribe("orders.>", "DURABLE:billing", "text-sid")
            found = flux.messages(3)
            assert payloads(found) == [b"2", b"3", b"4"]
            for message in found:
                flux.ack(message)
        server.stop()
        server.restart()
        with Flux(server) as flux, Flux(server) as other:
            flux.subscribe("orders.>", "DURABLE:billing", "1")
            other.publish("orders.a", b"5")
            assert flux.message().payload == b"5"


def test_how_many_ids_are_remembered_and_who_is_slow_are_settings(tmp_path: Path) -> None:
    """DD-05, FC-06: as `deduplication.max_entries` and `flow_control.default_slow_threshold` say."""
    file = tmp_path / "flux.json"
    flow = {"default_slow_threshold": 0.1, "enable_backpressure": True, "default_buffer_size": 10}
    file.write_text(json.dumps({"deduplication": {"max_entries": 2}, "flow_control": flow}))

    def answers(flux: Flux, ids: str) -> list[str]:
        return [flux.publish_with_headers("orders.new", b"", msg_id=name) for name in ids]

    with Serve(tmp_path / "serve", flags=("--config", str(file))) as server:
        with Flux(server) as flux:
            # Behind c only b and c are known, and behind the second a only c and a.
            assert answers(flux, "abacba") == ["+OK", "+OK", "+OK DUP", "+OK", "+OK DUP", "+OK"]
            flux.subscribe("orders.new", "1")
            assert flux.ask("FLOWCTL 1 PULL").startswith("+OK mode=PULL")
            assert [flux.publish("orders.new") for _ in range(2)] == ["+OK", "+OK"]
            stats = flux.stats("1")
            assert (stats["buffer_usage"], stats["slow_consumer"]) == (0.2, True)
        server.kill()
        server.restart()
        with Flux(server) as flux:
            assert answers(flux, "ab") == ["+OK DUP", "+OK"]


def test_a_slow_member_gets_no_more_than_its_buffer(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask("FLOWCTL 1 PUSH 0 1 10") == "+OK mode=PUSH rate=0 burst=1 buffer=10"
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(30)))
    assert [other.line() for _ in range(30)] == ["+OK"] * 30
    got = flux.messages(10)
    stats = flux.stats("1")
    assert (stats["unacknowledged"], stats["delivered"], stats["slow_consumer"]) == (10, 10, True)
    while len(got) < 30:
        flux.send(f"ACK {got[len(got) - 10].sequence}\r\n")
        answers: list[str] = []
        while len(answers) < 2:
            if flux.peek().startswith(b"+OK"):
                answers.append(flux.line())
            else:
                got.append(flux.message())
                answers.append("MSG")
    assert payloads(got) == [b"%d" % number for number in range(30)]


# ---- PULL


def test_pull_gives_what_there_is_and_goes_on_from_there(flux: Flux, other: Flux, subject: str) -> None:
    for number in range(5):
        other.publish(subject, b"%d" % number)
        # What it did not ask for does not hold it up.
        other.publish(f"{subject}0.foreign", b"foreign")
    flux.send(f"PULL {subject} 3\r\n")
    messages, number_of = flux.until_ok()
    assert (payloads(messages), number_of) == ([b"0", b"1", b"2"], "3")
    assert {message.sid for message in messages} == {"pull"}
    assert pulled(flux, subject, 100) == [b"3", b"4"]
    assert pulled(flux, subject, 100) == []
    other.publish(subject, b"5")
    assert pulled(flux, subject, 100) == [b"5"]


def test_pull_finds_a_topic_that_was_made_after_the_first_pull(flux: Flux, other: Flux) -> None:
    topic = f"later{next(NUMBERS)}"
    assert pulled(flux, f"{topic}.>") == []
    other.publish(f"{topic}.a", b"x")
    assert pulled(flux, f"{topic}.>") == [b"x"]


@pytest.mark.parametrize("number", ["0", "-1", "x", "", "1 2", "9" * 30])
def test_pull_needs_a_count(flux: Flux, subject: str, number: str) -> None:
    assert flux.ask(f"PULL {subject} {number}") == "-ERR invalid count"


def test_a_subscription_in_pull_mode_gets_what_it_asks_for(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    assert flux.ask("FLOWCTL 1 PULL") == "+OK mode=PULL rate=0 burst=100 buffer=1000"
    for number in range(5):
        other.publish(subject, b"%d" % number)
    assert flux.ask("PING") == "PONG"
    flux.send(f"PULL {subject} 2\r\n")
    messages, number_of = flux.until_ok()
    assert (payloads(messages), number_of) == ([b"0", b"1"], "2")
    assert {message.sid for message in messages} == {"1"}
    flux.send(f"PULL {subject} 10\r\n")
    messages, number_of = flux.until_ok()
    assert (payloads(messages), number_of) == ([b"2", b"3", b"4"], "3")
    # Back to push: nobody has to ask any more.
    assert flux.ask("FLOWCTL 1 PUSH").startswith("+OK mode=PUSH")
    other.publish(subject, b"5")
    assert flux.message().payload == b"5"


def test_what_was_pulled_in_vain_becomes_a_dead_letter(server: Serve, flux: Flux, other: Flux, quick: str) -> None:
    other.subscribe(f"DLQ.{quick}", "DURABLE:letters", "9")
    flux.subscribe(quick, "DURABLE:puller", "1")
    assert flux.ask("FLOWCTL 1 PULL").startswith("+OK mode=PULL")
    with Flux(server) as publisher:
        for number in range(4):
            publisher.publish(quick, b"%d" % number)
    got: list[bytes] = []
    while len(got) < 12:
        flux.send(f"PULL {quick} 10\r\n")
        got += payloads(flux.until_ok()[0])
    assert sorted(got) == sorted([b"0", b"1", b"2", b"3"] * 3)
    letters = other.messages(4)
    assert sorted(payloads(letters)) == [b"0", b"1", b"2", b"3"]
    for letter in letters:
        other.ack(letter)
