"""Hostile clients of the HTTP port."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from tests.hostile.oracle import PASSWORD, USER
from tests.hostile.pieces import NUMBERS, SURROGATE, around, deep_json, dribble, name, wide_json
from tests.hostile.siege import Attack, Door, Step, Target
from tests.support import web

_BODY_BYTES_MAX: Final = 1 << 20
_PATHS: Final = (
    b"/healthz", b"/metrics", b"/varz", b"/connz?subs=1&limit=10000", b"/subsz?limit=10000", b"/admin/topics",
    b"/admin/groups", b"/admin/dead-letters", b"/admin/config", b"/admin/statistics", b"/openapi.json", b"/pipe/topics",
    b"/pipe/status", b"/nothing",
)  # fmt: skip


def _request(
    source: random.Random, target: Target, method: bytes, path: bytes, body: bytes = b"", *headers: bytes
) -> bytes:
    """With credentials or without, as the seed has it."""
    if source.random() < 0.5:
        headers += (b"Authorization: %b" % web.basic(USER, PASSWORD)["Authorization"].encode(),)
    if body:
        headers += (b"Content-Type: application/json", b"Content-Length: %d" % len(body))
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: " + target.host, *headers, b"", b""]
    return b"\r\n".join(lines) + body


def silence(source: random.Random, _: Target) -> Iterator[Step]:
    yield b"GET /healthz"[: source.randint(0, 12)]
    yield source.random() * 2


def noise(source: random.Random, _: Target) -> Iterator[Step]:
    yield source.randbytes(4096)


def dribbled_request(source: random.Random, target: Target) -> Iterator[Step]:
    yield from dribble(_request(source, target, b"GET", b"/healthz"))


def headers_without_end(source: random.Random, target: Target) -> Iterator[Step]:
    yield b"GET /healthz HTTP/1.1\r\nHost: %b\r\n" % target.host
    for _number in range(200):
        yield b"X-%b: %b\r\n" % (name(source), name(source, 1000))
    yield b"X-Large: " + bytes([120]) * (1 << 20)


def path_without_end(source: random.Random, target: Target) -> Iterator[Step]:
    yield _request(source, target, b"GET", b"/admin/topics/" + name(source, 100_000))
    yield _request(source, target, b"GET", b"/connz?" + b"&".join(b"limit=%d" % number for number in range(5000)))


def body_at_its_limit(source: random.Random, target: Target) -> Iterator[Step]:
    body = b'{"name":"%b"}' % name(source, around(_BODY_BYTES_MAX, source) - 11)
    yield _request(source, target, b"POST", b"/admin/topics", body)


def body_that_never_comes(source: random.Random, target: Target) -> Iterator[Step]:
    announced = b"Content-Length: %d" % source.choice((100, _BODY_BYTES_MAX, 1 << 40))
    yield _request(source, target, b"POST", b"/admin/topics", b"", b"Content-Type: application/json", announced)
    yield b"{"
    yield 1.0


def chunks_without_end(source: random.Random, target: Target) -> Iterator[Step]:
    path = source.choice((b"/admin/topics", b"/pipe/push?topic=hostile&partition=0&node=x"))
    yield _request(source, target, b"POST", path, b"", b"Content-Type: application/json", b"Transfer-Encoding: chunked")
    for _number in range(64):
        yield b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    yield b"ffffffffffffffff\r\n"


def chunks_that_are_none(source: random.Random, target: Target) -> Iterator[Step]:
    path = source.choice((b"/admin/topics", b"/pipe/push?topic=hostile&partition=0&node=x", b"/nothing", b"/healthz"))
    yield _request(source, target, b"POST", path, b"", b"Content-Type: application/json", b"Transfer-Encoding: chunked")
    if source.random() < 0.5:
        yield b"1\r\n{\r\n"
    yield source.choice((b"zz\r\n", b"-1\r\n", b"1\r\n{}\r\n", b"\r\n", source.randbytes(100)))


def lengths_that_are_none(source: random.Random, target: Target) -> Iterator[Step]:
    announced = b"Content-Length: " + source.choice(NUMBERS)
    yield _request(source, target, b"POST", b"/admin/topics", b"", b"Content-Type: application/json", announced) + b"{}"


def json_that_hurts(source: random.Random, target: Target) -> Iterator[Step]:
    texts = (
        deep_json(),
        wide_json(),
        b"[]",
        b"NaN",
        b"\xff",
        b'{"name":"%b"}' % SURROGATE,
        b'{"name":1}',
        b'{"name":"\\u0000"}',
    )
    for text in texts:
        yield _request(source, target, b"POST", source.choice((b"/admin/topics", b"/admin/groups")), text)


def fields_of_all_kinds(source: random.Random, target: Target) -> Iterator[Step]:
    for number in NUMBERS:
        yield _request(source, target, b"GET", b"/connz?limit=%b&offset=%b&cid=%b" % (number, number, number))
        yield _request(source, target, b"GET", b"/admin/dead-letters?limit=%b" % number)
        yield _request(source, target, b"GET", b"/pipe/stream?topic=hostile&partition=%b&offset=%b" % (number, number))
        yield _request(source, target, b"GET", b"/pipe/poll?topic=hostile&offset=%b&limit=%b" % (number, number))
        yield _request(source, target, b"POST", b"/admin/topics", b'{"name":"h1","partitions":%b}' % number)


def paths_of_all_kinds(source: random.Random, target: Target) -> Iterator[Step]:
    for path in (
        b"/admin/topics/%ff",
        b"/admin/topics/%00",
        b"/admin/groups/..%2f..",
        b"//",
        b"*",
        b"/%ed%a0%80",
        b"http://x/",
    ):
        yield _request(source, target, source.choice((b"GET", b"DELETE", b"PATCH", b"BREW")), path)


def methods_of_all_kinds(source: random.Random, target: Target) -> Iterator[Step]:
    for path in _PATHS:
        yield _request(
            source, target, source.choice((b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"CONNECT", b"X" * 300)), path
        )


def pipelined_requests(source: random.Random, target: Target) -> Iterator[Step]:
    """It never reads the answers."""
    for _number in range(100):
        yield b"".join(_request(source, target, b"GET", source.choice(_PATHS)) for _each in range(10))


def upgrades(source: random.Random, target: Target) -> Iterator[Step]:
    yield _request(source, target, b"GET", b"/healthz", b"", b"Upgrade: websocket", b"Connection: Upgrade")
    yield _request(
        source, target, b"GET", b"/healthz", b"", b"Upgrade: h2c", b"HTTP2-Settings: x", b"Expect: 100-continue"
    )


def flood_of_topics(source: random.Random, target: Target) -> Iterator[Step]:
    for _number in range(30):
        yield _request(source, target, b"POST", b"/admin/topics", b'{"name":"w%b","partitions":8}' % name(source))


def streams_that_are_not_read(source: random.Random, target: Target) -> Iterator[Step]:
    yield _request(source, target, b"GET", b"/pipe/stream?topic=hostile&partition=0&offset=0&node=x&wait_ms=60000")
    yield 1.0


def other_hosts(source: random.Random, target: Target) -> Iterator[Step]:
    elsewhere = target._replace(host=source.choice((b"evil.example", b"", b"[::1", b"127.0.0.1:1\tx", b"\xff")))
    yield _request(source, elsewhere, b"POST", b"/admin/topics", b'{"name":"rebound"}')


HTTP: Final = Door(
    "HTTP",
    "http",
    (
        Attack(silence, connections=10_000),
        Attack(noise, connections=20),
        Attack(dribbled_request, connections=20),
        Attack(headers_without_end, connections=3),
        Attack(path_without_end),
        Attack(body_at_its_limit, connections=3),
        Attack(body_that_never_comes, connections=100),
        Attack(chunks_without_end, connections=5),
        Attack(chunks_that_are_none, connections=20),
        Attack(lengths_that_are_none, connections=20),
        Attack(json_that_hurts, connections=3),
        Attack(fields_of_all_kinds, connections=3),
        Attack(paths_of_all_kinds, connections=3),
        Attack(methods_of_all_kinds, connections=3),
        Attack(pipelined_requests, connections=3, reads=False),
        Attack(upgrades, connections=3),
        Attack(flood_of_topics),
        Attack(streams_that_are_not_read, connections=10, reads=False),
        Attack(other_hosts, connections=5),
    ),
    None,
)
