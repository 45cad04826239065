"""Users with permissions, on nats-server and on Penstock: the same scenarios, and the same transcripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.nats.run import NATS_SERVER, Peer, nats_server, run_both
from tests.support.server import Raw, Serve
from tests.support.users import PASSWORD, Nkey, write_users

NKEY = Nkey()

# The same users twice: `*` in the name of a topic stands for the number of the run.
NATS_USERS = """
authorization {
  users = [
    {user: admin, password: "%(password)s"}
    {user: some, password: "%(password)s", permissions: {
        publish: {allow: ["tpub.>", "_INBOX.>"], deny: ["tpub.*.secret"]}
        subscribe: {allow: ["tsub.>", "_INBOX.>"], deny: ["tsub.*.secret", "tsub.*.deep.>"]}}}
    {user: reader, password: "%(password)s", permissions: {publish: {deny: ">"}, subscribe: {allow: [">"]}}}
    {user: service, password: "%(password)s", permissions: {
        publish: {allow: ["tlog.>"]}, subscribe: {allow: ["tsub.>"]}, allow_responses: true}}
    {user: twice, password: "%(password)s", permissions: {
        publish: {allow: ["tlog.>"]}, subscribe: {allow: ["tsub.>"]}, allow_responses: {max: 2, expires: "1m"}}}
    {nkey: %(nkey)s, permissions: {publish: {allow: ["tpub.>"]}, subscribe: {allow: ["tsub.>"]}}}
  ]
}
"""
OUR_USERS = """
[users]
admin = { password = "{password}", admin = true }
[users.some]
password = "{password}"
publish = { allow = ["tpub.>", "_INBOX.>"], deny = ["tpub.*.secret"] }
subscribe = { allow = ["tsub.>", "_INBOX.>"], deny = ["tsub.*.secret", "tsub.*.deep.>"] }
[users.reader]
password = "{password}"
subscribe = [">"]
[users.service]
password = "{password}"
publish = ["tlog.>"]
subscribe = ["tsub.>"]
allow_responses = true
[users.twice]
password = "{password}"
publish = ["tlog.>"]
subscribe = ["tsub.>"]
allow_responses = { count = 2, ttl_s = 60 }
[users.key]
nkeys = ["NKEY"]
publish = ["tpub.>"]
subscribe = ["tsub.>"]
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    directory = tmp_path_factory.mktemp("permissions")
    config = directory / "nats.conf"
    config.write_text(NATS_USERS % {"password": PASSWORD, "nkey": NKEY.public})
    users = write_users(directory / "users.toml", OUR_USERS.replace("NKEY", NKEY.public))
    with nats_server("-c", str(config)) as real, Serve(directory / "serve", auth_users=users) as ours:
        yield real, Peer("penstock", ours.port, ours.ports["http"], ours.process)


SCENARIOS = {
    "publish": """
s OPEN SOME
a OPEN ADMIN
a SUB > 1
s PUB ~pub.x =1
s PUB ~pub.secret =2
s PUB ~other =3
s PUB ~pub.y =4
  PUB ~pub.secret =5
  PUB ~pub.secret =6
  PUB ~pub.z =7
s PUB ~pub =8
s 30x PUB ~pub.secret =m%d
s HPUB ~pub.secret {A: 1} =9
s PUB ~pub.q ~pub.reply =10
""",
    "publish verbosely": """
s OPEN SOME verbose
s PUB ~pub.x =1
s PUB ~pub.secret =2
s PUB ~pub.y =4
  PUB ~pub.secret =5
  PUB ~pub.z =7
""",
    "publish nothing": """
r OPEN READER
a OPEN ADMIN
r SUB ~pub.> 1
r PUB ~pub.x =1
a PUB ~pub.x =2
""",
    "subscribe": """
s OPEN SOME
a OPEN ADMIN
s SUB ~sub.x 1
s SUB ~sub.secret 2
s SUB ~other 3
s SUB > 4
s SUB ~sub.deep.a.b 6
s SUB ~sub.deep.> 7
s SUB ~other queue 8
s SUB ~sub.x queue 9
a PUB ~sub.x =1
a PUB ~sub.secret =2
a PUB ~other =3
a PUB ~sub.deep.a.b =4
s UNSUB 1
a PUB ~sub.x =5
""",
    "a wildcard leaves out what is denied": """
s OPEN SOME
a OPEN ADMIN
s SUB ~sub.> 1
s SUB ~sub.* 2
a PUB ~sub.x =1
  PUB ~sub.secret =2
  PUB ~sub.y =3
  PUB ~sub.deep.a =4
  PUB ~sub.shallow.a =5
a 20x PUB ~sub.secret =m%d
a PUB ~sub.z =6
s UNSUB 1 9
a PUB ~sub.secret =7
a PUB ~sub.z =8
""",
    "replies to requests": """
s OPEN SERVICE
a OPEN ADMIN
a SUB _INBOX.# 1
s SUB ~sub.echo 1
s PUB _INBOX.# =early
a PUB ~sub.echo _INBOX.# =hi
s PUB _INBOX.# =reply
s PUB _INBOX.# =again
s PUB ~log.x =logged
a PUB ~sub.echo _INBOX.# =hi
s PUB _INBOX.# =1
  PUB _INBOX.# =2
""",
    "two replies to a request": """
s OPEN TWICE
a OPEN ADMIN
a SUB _INBOX.# 1
s SUB ~sub.echo 1
a PUB ~sub.echo _INBOX.# =hi
s PUB _INBOX.# =1
  PUB _INBOX.# =2
  PUB _INBOX.# =3
""",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_have_the_same_transcript(peers: tuple[Peer, Peer], name: str) -> None:
    text = SCENARIOS[name]
    for user in ("ADMIN", "SOME", "READER", "SERVICE", "TWICE"):
        options = {"user": user.lower(), "pass": PASSWORD}
        text = text.replace(f"OPEN {user} verbose\n", f"OPEN {json.dumps(options | {'verbose': True})}\n")
        text = text.replace(f"OPEN {user}\n", f"OPEN {json.dumps(options)}\n")
    real, ours = run_both(peers, text, is_relaxed=True)
    assert ours == real


def test_nats_py_sees_the_same(peers: tuple[Peer, Peer]) -> None:
    async def see(peer: Peer) -> list[Any]:
        errors: list[str] = []
        received: list[str] = []

        async def on_error(error: Exception) -> None:
            errors.append(str(error))

        async def take(message: Any) -> None:
            received.append(f"{message.subject} {message.data.decode()}")

        admin = await nats.connect(peer.url, user="admin", password=PASSWORD)
        client = await nats.connect(peer.url, user="some", password=PASSWORD, error_cb=on_error, allow_reconnect=False)
        await client.subscribe("tsub.>", cb=take)
        await client.subscribe("other.>", cb=take)
        await client.publish("tpub.1.x", b"1")
        await client.publish("tpub.1.secret", b"2")
        await client.flush()
        await client.flush()
        for subject in ("tsub.1.x", "tsub.1.secret", "other.x"):
            await admin.publish(subject, b"3")
        await admin.flush()
        await admin.flush()
        await client.flush()
        await client.flush()
        found = [errors, received, client.is_connected]
        await client.close()
        await admin.close()
        return found

    real, ours = (asyncio.run(see(peer)) for peer in peers)
    assert ours == real
    assert ours[2] is True


@pytest.mark.parametrize("forged", [False, True])
def test_an_nkey_signs_the_nonce(peers: tuple[Peer, Peer], *, forged: bool) -> None:
    real, ours = (_log_in_with_key(peer.port, forged=forged) for peer in peers)
    assert ours == real
    assert (ours[0] == "PONG") is not forged


def _log_in_with_key(port: int, *, forged: bool) -> list[str]:
    with Raw(port) as raw:
        info = json.loads(raw.line().removeprefix("INFO "))
        nonce = str(info["nonce"])
        assert len(nonce) == 15
        signature = NKEY.sign("another nonce!!" if forged else nonce)
        raw.send(f"CONNECT {json.dumps({'nkey': NKEY.public, 'sig': signature, 'verbose': False})}\r\nPING\r\n")
        lines = [raw.line()]
        if not forged:
            raw.send("PUB tother.1 1\r\nx\r\nPUB tpub.1 1\r\nx\r\nPING\r\n")
            lines += [raw.line(), raw.line()]
        return lines


def test_a_jwt_is_refused_with_the_reason(peers: tuple[Peer, Peer]) -> None:
    with Raw(peers[1].port) as raw:
        raw.line()
        raw.send('CONNECT {"jwt":"eyJ0eXAiOiJKV1QifQ.e30.c2lnbmVk","sig":"c2lnbmVk","verbose":false}\r\nPING\r\n')
        assert raw.line() == (
            "-ERR 'Authorization Violation: JWT accounts are not supported: use a user and a password, a token or an "
            "NKEY'"
        )


def test_users_file_is_private(tmp_path: Path) -> None:
    users = write_users(tmp_path / "users.toml", OUR_USERS.replace("NKEY", NKEY.public))
    assert users.stat().st_mode & 0o777 == 0o600
