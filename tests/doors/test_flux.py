"""The text door in Flux's dialect: every command, every answer, and what does not deserve one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Barrier, Thread

import pytest

from tests.support.server import Flux, Message, Nats, Raw, Serve, hpub, in_pieces, pub

# Nothing of `patient` is delivered again while a test runs, all of `quick` is at once.
TOPICS = """
[topics.patient]
ack_deadline_ms = "1h"
[topics.quick]
ack_deadline_ms = 500
deliveries_max = 3
"""
_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("flux"), config=TOPICS) as server:
        yield server


@pytest.fixture
def flux(server: Serve) -> Iterator[Flux]:
    with Flux(server) as client:
        yield client


@pytest.fixture
def other(server: Serve) -> Iterator[Flux]:
    with Flux(server) as client:
        yield client


@pytest.fixture
def subject() -> str:
    """One that no other test uses, and whose messages need no acknowledgement for now."""
    return f"patient.{next(_numbers)}"


@pytest.fixture
def quick() -> str:
    """One whose messages are delivered again after a moment."""
    return f"quick.{next(_numbers)}"


def payloads(messages: list[Message]) -> list[bytes]:
    return [message.payload for message in messages]


def pulled(client: Flux, subject: str, wanted: int = 100_000) -> list[bytes]:
    """What a subject holds, as far as this client has not asked for it before."""
    client.send(f"PULL {subject} {wanted}\r\n")
    messages, number = client.until_ok()
    assert len(messages) == int(number)
    return payloads(messages)


# ---- PUB, HPUB


def test_a_message_is_acknowledged_and_stored(flux: Flux, subject: str) -> None:
    assert flux.publish(subject, b"one") == "+OK"
    assert flux.publish(subject, b"") == "+OK"
    assert pulled(flux, subject) == [b"one", b""]


def test_the_quiet_door_does_not_greet(server: Serve, subject: str) -> None:
    with Flux(server, door="quiet") as flux:
        assert flux.publish(subject, b"one") == "+OK"
        assert flux.ask("PING") == "PONG"


def test_thousands_of_messages_in_one_write_are_acknowledged_one_by_one_and_in_order(flux: Flux, subject: str) -> None:
    wanted = [b"%d" % number for number in range(5000)]
    flux.send(b"".join(pub(subject, payload) for payload in wanted) + b"PING\r\n")
    assert [flux.line() for _ in range(5001)] == ["+OK"] * 5000 + ["PONG"]
    assert pulled(flux, subject) == wanted


def test_an_answer_has_the_place_of_its_question(flux: Flux, subject: str) -> None:
    flux.send(pub(subject, b"1") + b"PING\r\n" + pub("no..subject", b"2") + b"JOIN a b\r\n" + pub(subject, b"3"))
    answers = [flux.line() for _ in range(5)]
    assert answers == ["+OK", "PONG", "-ERR Invalid Publish Subject", "-ERR clustering not enabled", "+OK"]
    assert pulled(flux, subject) == [b"1", b"3"]


def test_a_command_may_be_split_at_any_byte(server: Serve, subject: str) -> None:
    whole = pub(subject, b"a\r\nb") + hpub(subject, b"c", trace_id="7") + b"PING\r\n"
    with Flux(server) as reader:
        for at in range(1, len(whole)):
            with Flux(server) as flux:
                flux.send(whole[:at])
                flux.send(whole[at:])
                assert [flux.line() for _ in range(3)] == ["+OK", "+OK", "PONG"], at
        assert pulled(reader, subject) == [b"a\r\nb", b"c"] * (len(whole) - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_commands_may_come_in_small_pieces(flux: Flux, subject: str, size: int) -> None:
    whole = pub(subject, b"first") + hpub(subject, b"second", trace_id="7") + pub(subject, b"") + b"PING\r\n"
    for piece in in_pieces(whole, size):
        flux.send(piece)
    assert [flux.line() for _ in range(4)] == ["+OK", "+OK", "+OK", "PONG"]
    assert pulled(flux, subject) == [b"first", b"second", b""]


def test_verbs_are_taken_in_any_case_with_any_blanks_and_line_ends(flux: Flux, subject: str) -> None:
    flux.send(f"\r\n\r\npub  {subject}   3 \r\nabc\r\n\r\nPub {subject} 3\ndef\nping\n")
    assert [flux.line() for _ in range(3)] == ["+OK", "+OK", "PONG"]
    assert pulled(flux, subject) == [b"abc", b"def"]


def test_headers_are_delivered_as_they_were_sent(flux: Flux, other: Flux, subject: str) -> None:
    other.subscribe(subject, "1")
    assert flux.publish_with_headers(subject, b"body", trace_id="7", priority="high") == "+OK"
    message = other.message()
    assert message.headers == b"Trace-Id: 7\r\nPriority: high\r\n\r\n"
    assert message.payload == b"body"


def test_a_message_with_a_known_id_is_not_stored_again(flux: Flux, other: Flux, subject: str) -> None:
    assert flux.publish_with_headers(subject, b"1", msg_id="a") == "+OK"
    assert flux.publish_with_headers(subject, b"2", msg_id="a") == "+OK DUP"
    assert flux.publish_with_headers(subject, b"3", msg_id="b") == "+OK"
    assert other.publish_with_headers(subject, b"4", msg_id="b") == "+OK DUP"
    assert pulled(flux, subject) == [b"1", b"3"]


def test_a_repetition_in_the_same_write_is_found(flux: Flux, subject: str) -> None:
    flux.send(hpub(subject, b"1", msg_id="x") + pub(subject, b"2") + hpub(subject, b"3", msg_id="x"))
    assert [flux.line() for _ in range(3)] == ["+OK", "+OK", "+OK DUP"]
    assert pulled(flux, subject) == [b"1", b"2"]


def test_ids_are_known_after_a_restart_and_after_a_crash(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        with Flux(server) as flux:
            assert flux.publish_with_headers("orders.new", b"1", msg_id="a") == "+OK"
        server.stop()
        server.restart()
        with Flux(server) as flux:
            assert flux.publish_with_headers("orders.new", b"2", msg_id="a") == "+OK DUP"
            assert flux.publish_with_headers("orders.new", b"3", msg_id="b") == "+OK"
        server.kill()
        server.restart()
        with Flux(server) as flux:
            assert flux.publish_with_headers("orders.new", b"4", msg_id="b") == "+OK DUP"
            assert pulled(flux, "orders.new") == [b"1", b"3"]


def test_of_one_id_from_many_connections_at_once_one_is_stored(server: Serve) -> None:
    for _ in range(3):
        subject = f"fresh{next(_numbers)}.x"
        clients = [Flux(server) for _ in range(4)]
        together = Barrier(len(clients))

        def publish(client: Flux, subject: str = subject, together: Barrier = together) -> None:
            together.wait()
            client.send(hpub(subject, b"x", msg_id="a"))

        threads = [Thread(target=publish, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(client.line() for client in clients) == ["+OK", *["+OK DUP"] * 3]
        assert pulled(clients[0], subject) == [b"x"]
        for client in clients:
            client.close()


def test_a_message_that_is_refused_does_not_take_others_with_it(flux: Flux, subject: str) -> None:
    flux.send(pub(subject, b"1") + hpub(subject, b"2", delay="soon") + pub(subject, b"3"))
    first, second, third = (flux.line() for _ in range(3))
    assert second.startswith("-ERR ")
    assert [first, third] == ["+OK", "+OK"]
    assert pulled(flux, subject) == [b"1", b"3"]


def test_a_message_without_a_topic_does_not_take_others_with_it(tmp_path: Path) -> None:
    with Serve(tmp_path, config="[topics.known]\n", topic_auto_create="false") as server, Flux(server) as flux:
        flux.send(pub("known.a", b"1") + pub("unknown.a", b"2") + pub("known.a", b"3"))
        first, second, third = (flux.line() for _ in range(3))
        assert second.startswith("-ERR ")
        assert "unknown.a" in second
        assert [first, third] == ["+OK", "+OK"]


# ---- SUB, MSG, UNSUB


@pytest.mark.parametrize("sid", ["1", "my-sid", "Ünicode"])
def test_a_subscriber_gets_messages_under_its_sid_with_their_sequence(
    flux: Flux, other: Flux, subject: str, sid: str
) -> None:
    flux.subscribe(subject, sid)
    for number in range(3):
        assert other.publish(subject, b"%d" % number) == "+OK"
    messages = flux.messages(3)
    assert [message.subject for message in messages] == [subject] * 3
    assert payloads(messages) == [b"0", b"1", b"2"]
    assert len({message.sequence for message in messages}) == 3
    assert {message.sid.encode().decode("unicode_escape") for message in messages} == {
        sid.encode().decode("unicode_escape")
    }


def test_wildcards(flux: Flux, other: Flux, subject: str) -> None:
    for sid, pattern in enumerate(["*.created", "us.*", ">", "us.created", "*"]):
        flux.subscribe(f"{subject}.{pattern}", str(sid))
    for tail in ("us.created", "us", "us.created.now", "eu.created"):
        other.publish(f"{subject}.{tail}", tail.encode())
    other.publish(f"{subject}", b"itself")
    other.publish(f"{subject}.end", b"end")
    got: dict[str, list[bytes]] = {}
    for message in flux.messages(11):
        got.setdefault(message.sid, []).append(message.payload)
    assert got == {
        "0": [b"us.created", b"eu.created"],
        "1": [b"us.created"],
        "2": [b"us.created", b"us", b"us.created.now", b"eu.created", b"end"],
        "3": [b"us.created"],
        "4": [b"us", b"end"],
    }


def test_a_subscriber_gets_messages_of_a_topic_that_is_made_later(flux: Flux, other: Flux) -> None:
    topic = f"later{next(_numbers)}"
    flux.subscribe(f"{topic}.>", "1")
    assert other.publish(f"{topic}.a", b"x") == "+OK"
    assert flux.message().payload == b"x"


def test_a_subscriber_of_everything_gets_messages_of_a_topic_that_is_made_later(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as flux, Flux(server) as other:
        flux.subscribe(">", "1")
        for number in range(3):
            assert other.publish(f"topic{number}", b"%d" % number) == "+OK"
        assert sorted(payloads(flux.messages(3))) == [b"0", b"1", b"2"]


def test_a_subscriber_gets_only_what_comes_after_it(flux: Flux, other: Flux, subject: str) -> None:
    other.publish(subject, b"before")
    flux.subscribe(subject, "1")
    other.publish(subject, b"after")
    assert flux.message().payload == b"after"


@pytest.mark.parametrize("words", [("7", "workers"), ("workers", "7"), ("seven", "workers")])
def test_the_sid_may_stand_on_either_side_of_the_group(
    flux: Flux, other: Flux, subject: str, words: tuple[str, str]
) -> None:
    flux.subscribe(subject, *words)
    other.publish(subject, b"x")
    message = flux.message()
    assert message.sid == ("seven" if "seven" in words else "7")
    assert flux.ask(f"ACK {message.sequence} {subject}:workers") == "+OK"
    assert flux.stats(message.sid)["unacknowledged"] == 0


def test_each_message_goes_to_one_member_of_a_group(server: Serve, other: Flux, subject: str) -> None:
    members = [Flux(server) for _ in range(3)]
    for member in members:
        member.subscribe(subject, "1", "workers")
    other.send(b"".join(pub(subject, b"%d" % number) for number in range(300)))
    assert [other.line() for _ in range(300)] == ["+OK"] * 300
    # A share of a hundred each, as none is slower than the others.
    got = [payload for member in members for payload in payloads(member.messages(100))]
    assert sorted(got, key=int) == [b"%d" % number for number in range(300)]
    assert [member.ask("PING") for member in members] == ["PONG"] * 3
    for member in members:
        member.close()


def test_a_second_subscription_with_the_same_sid_delivers_nothing_twice(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    flux.subscribe(subject, "1")
    other.publish(subject, b"x")
    assert flux.message().payload == b"x"
    other.publish(subject, b"y")
    assert flux.message().payload == b"y"


def test_unsubscribe(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    flux.subscribe(subject, "2")
    assert flux.ask("UNSUB 1") == "+OK"
    other.publish(subject, b"x")
    assert flux.message().sid == "2"
    assert flux.ask("STATS 1") == "-ERR unknown sid"


def test_unsubscribe_after_so_many(flux: Flux, other: Flux, subject: str) -> None:
    flux.subscribe(subject, "1")
    flux.subscribe(subject, "2")
    assert flux.ask("UNSUB 1 2") == "+OK"
    for number in range(4):
        other.publish(subject, b"%d" % number)
    got = [(message.sid, message.payload) for message in flux.messages(6)]
    assert sorted(got) == [("1", b"0"), ("1", b"1"), ("2", b"0"), ("2", b"1"), ("2", b"2"), ("2", b"3")]
    assert flux.ask("STATS 1") == "-ERR unknown sid"


@pytest.mark.parametrize("pattern", ["a..b", ".a", "a.", "a.>.b"])
def test_a_wrong_pattern_is_refused_and_the_connection_goes_on(flux: Flux, pattern: str) -> None:
    assert flux.ask(f"SUB {pattern} 1") == "-ERR Invalid Subject"
    assert flux.ask("PING") == "PONG"


@pytest.mark.parametrize("line", [b"SUB patient.x DURABLE:\xff 1", b"SUB patient.\xff DURABLE:x 1"])
def test_a_group_name_that_is_no_text_is_refused_and_leaves_nothing_behind(tmp_path: Path, line: bytes) -> None:
    with Serve(tmp_path, config=TOPICS) as server, Flux(server) as flux:
        for _ in range(2):
            answer = flux.ask(line)
            assert answer.startswith("-ERR ")
            assert "codec" not in answer
        assert flux.publish("patient.x", b"x") == "+OK"


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
    topic = f"later{next(_numbers)}"
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


# ---- what is wrong


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SHOUT loud\r\n", "Unknown Protocol Operation"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "Unknown Protocol Operation"),
        (b"\x00\x00\x00\x05hello\r\n", "Unknown Protocol Operation"),
        (b"\xff\xfe\xfd\r\n", "Unknown Protocol Operation"),
        (b"PUB a " + b"x" * 5000, "maximum control line exceeded"),
        (b"PUB a -1\r\n\r\n", "Parser Error"),
        (b"PUB a x\r\n\r\n", "Parser Error"),
        (b"PUB a\r\n", "Parser Error"),
        (b"PUB a " + b"9" * 30 + b"\r\n", "Parser Error"),
        (b"PUB a 2000000\r\n", "Maximum Payload Violation"),
        (b"PUB a 3\r\nlonger than it said\r\n", "Parser Error"),
        (b"HPUB a 10 5\r\n", "Parser Error"),
        (b"SUB a\r\n", "Parser Error"),
    ],
)
def test_what_cannot_be_understood_ends_the_connection(server: Serve, data: bytes, reason: str) -> None:
    with Flux(server) as flux:
        flux.send(pub("patient.before", b"x") + data)
        assert flux.line() == "+OK"
        assert flux.rest() in (f"-ERR {reason}\r\n", f"-ERR '{reason}'\r\n")


def test_errors_are_not_quoted(flux: Flux) -> None:
    flux.send("SHOUT\r\n")
    assert flux.rest() == "-ERR Unknown Protocol Operation\r\n"


@pytest.mark.parametrize("seed", range(20))
def test_junk_never_stops_the_server(server: Serve, seed: int) -> None:
    from random import Random

    random = Random(seed)
    words = [b"PUB", b"HPUB", b"SUB", b"ACK", b"PULL", b"FLOWCTL", b"STATS", b"REPLAY", b"a", b"1", b">", b"", b"\xff"]
    lines = [b" ".join(random.choices(words, k=random.randint(1, 6))) for _ in range(200)]
    with Flux(server) as flux:
        flux.send(random.choice([b"", random.randbytes(100)]) + b"\r\n".join(lines) + b"\r\nSHOUT\r\n")
        flux.rest()
    with Flux(server) as flux:
        assert flux.ask("PING") == "PONG"


def test_connections_that_do_not_say_anything_or_do_not_answer_are_closed(tmp_path: Path) -> None:
    with (
        Serve(tmp_path, server_handshake_s=1, server_heartbeat_s=1) as server,
        Raw(server.port) as silent,
        Raw(server.ports["quiet"]) as quiet,
        Flux(server) as half,
        Nats(server) as nats,
    ):
        half.send("PUB foo 10\r\nabc")
        assert silent.rest().endswith("-ERR 'Connection Timeout'\r\n")
        assert "-ERR" in quiet.rest()
        assert "-ERR" in half.rest()
        # Whoever has spoken may be quiet, but must answer.
        assert nats.rest() == "PING\r\nPING\r\n-ERR 'Stale Connection'\r\n"


def test_one_that_answers_is_not_closed(tmp_path: Path) -> None:
    with Serve(tmp_path, server_heartbeat_s=1) as server, Nats(server) as nats:
        for _ in range(4):
            assert nats.line() == "PING"
            nats.send("PONG\r\n")
        assert nats.ask("PING") == "PONG"


@pytest.mark.parametrize("command", [b"INFO\r\n", b"INFO\r\nPULL patient.none 1\r\n"], ids=["INFO", "INFO and PULL"])
def test_one_that_does_not_read_its_answers_is_not_asked_for_more(server: Serve, command: bytes) -> None:
    with Flux(server, receive_bytes=4096) as flux:
        before = server.rss()
        flux.flood(command * (20_000_000 // len(command)))
        assert server.rss() - before < 50 << 20
    with Flux(server) as flux:
        assert flux.ask("PING") == "PONG"
