"""What users try, to do or to see more than they may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.support.frames import Frames
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
"""


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
