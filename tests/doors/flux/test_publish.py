"""Flux's dialect of the text door: publishing, subscribing, and errors."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest

from tests.support.flux_door import NUMBERS, TOPICS, payloads, pulled
from tests.support.server import Flux, Nats, Raw, Serve, hpub, in_pieces, pub

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
        subject = f"fresh{next(NUMBERS)}.x"
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
    topic = f"later{next(NUMBERS)}"
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
