"""One rule for the names of groups, whichever way a group is created."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from penstock.wire.binary import Type
from tests.support.frames import Frames
from tests.support.lengths import CREATE_SUBSCRIPTION, Cursus, Qb
from tests.support.server import Flux, Nats, Raw, Serve
from tests.support.web import ask, get

CONTROL: Final = ["a\x01b", "a\x7fb", "a\x85b", "a\u2028b"]
# Client commands cut at these, so they never reach a group's name there.
BLANK: Final = ["a\nb", "a\tb", "a\rb"]


def by_http(server: Serve, name: str) -> bool:
    return ask(server, "POST", "/admin/groups", {"name": name, "topic": "orders"}).status < 300


def by_call(server: Serve, name: str) -> bool:
    with Frames(server) as client:
        number = client.request(Type.CALL, {"call": "create_group", "name": name, "topic": "orders"})
        return client.answer(number).type != Type.ERROR


def by_open(server: Serve, name: str) -> bool:
    with Frames(server) as client:
        number = client.request(Type.OPEN, {"subscription": 1, "pattern": "orders", "credit": 1, "group": name})
        return client.answer(number).type != Type.ERROR


def by_durable(server: Serve, name: str) -> bool:
    with Nats(server) as client:
        client.send(f"SUB orders DURABLE:{name} 1\r\n")
        return client.ask("PING") == "PONG"


def by_flux(server: Serve, name: str) -> bool:
    with Flux(server) as client:
        return client.ask(f"SUB orders {name} 1") == "+OK"


def by_flux_durable(server: Serve, name: str) -> bool:
    with Flux(server) as client:
        return client.ask(f"SUB orders DURABLE:{name} 1") == "+OK"


def by_qb(server: Serve, name: str) -> bool:
    with Qb(server) as client:
        return client.ask(CREATE_SUBSCRIPTION, subscription_id=name, topic="orders")["status"] == "success"


def by_cursus_register(server: Serve, name: str) -> bool:
    with Cursus(server) as client:
        return not client.ask(f"REGISTER_GROUP topic=orders group={name}").startswith("ERROR")


def by_cursus_join(server: Serve, name: str) -> bool:
    with Cursus(server) as client:
        return not client.ask(f"JOIN_GROUP topic=orders group={name} member=ann").startswith("ERROR")


def by_cursus_subscribe(server: Serve, name: str) -> bool:
    with Cursus(server) as client:
        return not client.ask(f"SUBSCRIBE topic=orders group={name}").startswith("ERROR")


def by_provider(server: Serve, name: str) -> bool:
    payload = json.dumps({"topic": "orders", "group": name}).encode()
    with Raw(server.ports["quiet"]) as client:
        client.send(b"\x03" + (7).to_bytes(8, "big") + len(payload).to_bytes(4, "big") + payload)
        return client.read(1) == b"\x02"


Way = Callable[[Serve, str], bool]
WITH_BLANKS: Final[list[Way]] = [by_http, by_call, by_open, by_qb, by_provider]
IN_LINES: Final[list[Way]] = [
    by_durable, by_flux, by_flux_durable, by_cursus_register, by_cursus_join, by_cursus_subscribe,
]  # fmt: skip
# A client of the Provider without a group is in the default group, and Flux's line has no empty word.
EMPTY: Final = [way for way in (*WITH_BLANKS, *IN_LINES) if way not in (by_provider, by_flux)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as server:
        assert ask(server, "POST", "/admin/topics", {"name": "orders"}).status == 201
        yield server


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((way, "") for way in EMPTY),
        *((way, name) for way in WITH_BLANKS for name in CONTROL + BLANK),
        *((way, name) for way in IN_LINES for name in CONTROL),
    ],
)
def test_an_empty_name_and_control_characters_are_refused(server: Serve, way: Way, name: str) -> None:
    assert not way(server, name)
    assert get(server, "/admin/groups").json["groups"] == []


def test_a_refusal_says_what_is_allowed(server: Serve) -> None:
    refused = ask(server, "POST", "/admin/groups", {"name": "a\nb", "topic": "orders"})

    assert (refused.status, refused.code) == (400, "BAD_SUBJECT")
    assert refused.json["text"] == r"invalid group name b'a\nb': it must be UTF-8 without control characters"
