"""What users try, to do or to see more than they may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from penstock.wire import binary
from penstock.wire.binary import Append, StageTarget, Type
from tests.support.frames import Frames, batch
from tests.support.server import Raw, Serve
from tests.support.users import PASSWORD, write_users

USERS: Final = """
[users]
admin = { password = "{password}", admin = true }
nobody = { password = "{password}" }
[users.service]
password = "{password}"
subscribe = ["svc.>"]
publish = ["svc.req"]
allow_responses = true
[users.joiner]
password = "{password}"
subscribe = { allow = ["open.>"], deny = ["open.secret"] }
groups = { join = ["*"], reset = ["*"] }
[users.undertaker]
password = "{password}"
subscribe = { allow = ["DLQ.>"], deny = ["vault.>"] }
[users.forger]
password = "{password}"
publish = ["orders.>", "DLQ.orders.>"]
"""

DEAD_LETTERS: Final = {"call": "dead_letters", "pattern": "attic.>"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("boundaries")
    users = write_users(directory / "users.toml", USERS)
    with Serve(directory / "serve", auth_users=users) as server:
        yield server


def _say(raw: Raw, text: str) -> list[str]:
    """Return the lines that come, up to the PONG."""
    raw.send(f"{text}PING\r\n")
    lines = []
    while (line := raw.line()) != "PONG":
        lines.append(line)
    return lines


def test_a_request_of_its_own_lets_no_user_store_a_reply(server: Serve) -> None:
    with Raw(server.port) as raw:
        _say(raw, f"CONNECT {json.dumps({'user': 'service', 'pass': PASSWORD, 'verbose': False})}\r\nSUB svc.> 1\r\n")
        raw.send("PUB svc.req secret.hijack 1\r\nx\r\n")
        while raw.line() != "MSG svc.req 1 secret.hijack 1":
            pass
        _say(raw, "")
        answers = _say(raw, "PUB secret.hijack 6\r\nstolen\r\n")
        assert "-ERR 'Permissions Violation for Publish to \"secret.hijack\"'" in answers
    with Frames(server, user="admin", password=PASSWORD) as admin:
        assert "secret" not in {row["name"] for row in admin.call("topics")["topics"]}


def test_topics_by_id_are_unknown_to_who_may_not_know_of_them(server: Serve) -> None:
    with Frames(server, user="admin", password=PASSWORD) as admin:
        hidden = admin.topic_id("hidden")
        # An administrator is told the same of one that does not exist.
        unknown = admin.refused("wait", positions=[[999, 0, 0]], wait_ms=0)
    with Frames(server, user="nobody", password=PASSWORD) as nobody:
        for topic_id in (hidden, 999):
            stage = StageTarget(Append(topic_id, 0, 1), b"t", 1)
            nobody.send(binary.stage_frame(77, stage, batch(b"x").data))
            for error in (
                nobody.error_of(nobody.ask_fetch(topic_id)),
                nobody.error_of(nobody.ask_fetch(topic_id, partition=9)),
                nobody.error_of(nobody.ask_append(topic_id, batch(b"x"))),
                nobody.error_of(77),
                nobody.refused("wait", positions=[[topic_id, 0, 0]], wait_ms=0),
            ):
                told = json.loads(json.dumps(unknown).replace("999", str(topic_id)))
                assert error == told


def test_a_forged_dead_letter_is_not_redriven_elsewhere(server: Serve) -> None:
    def forged(subject: str) -> bytes:
        told = {"Subject": subject, "Topic": "secret", "Partition": 0, "Offset": 0, "Group": "g", "Reason": "r"}
        return "".join(f"Dead-Letter-{name}: {value}\r\n" for name, value in told.items()).encode()

    long = "orders." + "x" * 1015
    with Frames(server, user="forger", password=PASSWORD) as forger:
        for at, subject in (("y", "secret.forged"), ("y", "orders.z"), ("y", long), ("own", "orders.own")):
            [receipt] = forger.publish(f"DLQ.orders.{at}", b"x", headers=[forged(subject)])
            assert receipt[0] == "DLQ", receipt
    with Frames(server, user="admin", password=PASSWORD) as admin:
        # What pipelines write for a subject that is too long with its prefix.
        for at in ("DLQ", "DLQ.orders"):
            admin.publish(at, b"x", headers=[forged(long)])
        listed = [letter["subject"] for letter in admin.call("dead_letters", pattern=">")["letters"]]
        assert listed == ["orders.own", long]
        assert admin.call("redrive", pattern=">")["redriven"] == 2
        assert "secret" not in {row["name"] for row in admin.call("topics")["topics"]}


def test_dead_letters_are_read_by_their_own_subjects_except_what_is_denied(server: Serve) -> None:
    with Frames(server, user="undertaker", password=PASSWORD) as reader:
        reader.open(1, "DLQ.>")
        for kind, asked in ((Type.OPEN, {"subscription": 2, "pattern": "DLQ.vault.x"}), (Type.CALL, DEAD_LETTERS)):
            assert reader.error(kind, asked)["code"] == "PERMISSION_DENIED"
        with Frames(server, user="admin", password=PASSWORD) as admin:
            admin.publish("DLQ.vault.x", b"denied")
            admin.publish("DLQ.attic.x", b"allowed")
        assert [message.value for message in reader.delivered(1)] == [b"allowed"]
    with Frames(server, user="forger", password=PASSWORD) as other:
        assert other.open_refused(1, "DLQ.orders.>")["code"] == "PERMISSION_DENIED"


def test_a_group_is_neither_shown_nor_moved_without_the_right_to_read(server: Serve) -> None:
    with Frames(server, user="admin", password=PASSWORD) as admin:
        for name in ("closed", "open.fine", "open.secret"):
            admin.publish(name, b"x")
        for name, pattern in (("c", "closed"), ("partly", "open.>"), ("fine", "open.fine")):
            admin.call("create_group", name=name, pattern=pattern, start="earliest")
    moved = {"partition": 0, "offset": 1}
    with Frames(server, user="joiner", password=PASSWORD) as joiner:
        assert [row["name"] for row in joiner.call("groups")["groups"]] == ["fine"]
        for group, topic in (("c", "closed"), ("partly", "open")):
            for error in (
                joiner.refused("group", name=group),
                joiner.refused("commit", group=group, topic=topic, **moved),
                joiner.refused("reset_group", name=group, start="latest"),
            ):
                assert error["code"] == "PERMISSION_DENIED"
                assert topic not in str(error)
        assert joiner.call("group", name="fine")["name"] == "fine"
        joiner.call("commit", group="fine", topic="open", **moved)
        joiner.call("reset_group", name="fine", start="latest")
    with Raw(server.port) as raw:
        _say(raw, f"CONNECT {json.dumps({'user': 'joiner', 'pass': PASSWORD, 'verbose': False})}\r\n")
        [answer] = _say(raw, "ACK 1 c\r\n")
        assert "PERMISSION_DENIED" in answer
        assert "closed" not in answer
    with Frames(server, user="admin", password=PASSWORD) as admin:
        assert admin.call("group", name="c")["lag"] == 1
