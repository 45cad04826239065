"""Credentials that Penstock does not know, on nats-server and on Penstock: refused as where they are not configured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nats.run import NATS_SERVER, nats_server
from tests.support.server import Raw, Serve

TOKEN = "secret"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Of the real server and of ours, which require a token."""
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    with nats_server("--auth", TOKEN) as real, Serve(tmp_path_factory.mktemp("serve"), auth_token=TOKEN) as ours:
        yield real.port, ours.port


@pytest.mark.parametrize(
    ("options", "is_let_in"),
    [
        ({"nkey": "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4", "sig": "c2lnbmVk"}, False),
        ({"user": "ann", "pass": "wrong"}, False),
        ({"auth_token": "wrong"}, False),
        ({}, False),
        ({"auth_token": TOKEN}, True),
        ({"auth_token": TOKEN, "jwt": "eyJ0eXAiOiJKV1QifQ.e30.c2lnbmVk", "sig": "c2lnbmVk"}, True),
    ],
)
def test_credentials_that_are_not_configured(
    ports: tuple[int, int], options: dict[str, str], *, is_let_in: bool
) -> None:
    real, ours = (_answers(port, options) for port in ports)
    assert ours == real
    assert (ours[1:] == ["PONG"]) is is_let_in


def _answers(port: int, options: dict[str, Any]) -> list[Any]:
    """Return what INFO asks for, and the lines that answer CONNECT and PING."""
    with Raw(port) as raw:
        info = json.loads(raw.line().removeprefix("INFO "))
        raw.send(f"CONNECT {json.dumps(options | {'verbose': False})}\r\nPING\r\n")
        lines = [raw.line()]
        if lines != ["PONG"]:
            lines += raw.rest().splitlines()
        return [(info.get("auth_required"), info.get("nonce")), *lines]
