"""nats-py over TLS meets the same at nats-server and here."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import nats
import pytest

from tests.nats.run import NATS_SERVER, nats_server
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

FIELDS: Final = ("tls_required", "tls_available", "tls_verify")
FIRST: Final = "handshake first"
# What each server is told: nats-server within its `tls` and outside of it, and Penstock.
CASES: Final[dict[str, tuple[list[str], list[str], dict[str, object]]]] = {
    "required": ([], [], {}),
    "available": ([], ["allow_non_tls: true"], {"required": False}),
    "verify": (["verify: true", "ca_file: CA"], [], {"client_certificates": "required", "client_ca": "CA"}),
    FIRST: (["handshake_first: true"], [], {"handshake_first": True}),
}


def greeting(port: int, certificates: Certificates, *, is_first: bool) -> dict[str, Any]:
    """The INFO that a client gets: in plain, or behind the handshake."""
    with socket.create_connection(("localhost", port), PATIENCE_S) as plain:
        connected = certificates.context().wrap_socket(plain, server_hostname="localhost") if is_first else plain
        with connected.makefile() as lines:
            found: dict[str, Any] = json.loads(lines.readline().removeprefix("INFO "))
        connected.close()
    return found


async def converse(port: int, certificates: Certificates, client: str | None, *, is_first: bool, scheme: str) -> Any:
    """What a client sees: an error, or its messages."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    try:
        connection = await nats.connect(
            f"{scheme}://localhost:{port}",
            tls=certificates.context(client) if scheme == "tls" else None,
            tls_handshake_first=is_first,
            allow_reconnect=False,
            connect_timeout=PATIENCE_S,
            error_cb=note,
        )
    except Exception:  # noqa: BLE001 - which of several depends on how far the client is
        return "no connection"
    subscription = await connection.subscribe("a.*")
    await connection.flush()
    for number in range(3):
        await connection.publish(f"a.{number}", b"x" * 10 ** (2 * number + 1))
    messages = [await subscription.next_msg(PATIENCE_S) for _ in range(3)]
    await connection.drain()
    return [f"{message.subject} {len(message.data)}" for message in messages], errors


@pytest.mark.parametrize("case", CASES)
def test_nats_py_meets_the_same_over_tls(tmp_path: Path, certificates: Certificates, case: str) -> None:
    if not NATS_SERVER.exists():
        pytest.skip("nats-server is not installed")
    inside, outside, settings = CASES[case]
    given = {name: certificates.ca if value == "CA" else value for name, value in settings.items()}
    cert, key = certificates.server("oracle")
    lines = [f"cert_file: {cert}", f"key_file: {key}", *(line.replace("CA", str(certificates.ca)) for line in inside)]
    path = tmp_path / "nats.conf"
    path.write_text("\n".join(["tls {", *lines, "}", *outside]))

    def look(port: int) -> dict[str, Any]:
        info = greeting(port, certificates, is_first=case == FIRST)
        found: dict[str, Any] = {name: bool(info.get(name, False)) for name in FIELDS}
        for client, scheme in ((None, "tls"), ("ann", "tls"), (None, "nats")):
            if (scheme, case) != ("nats", FIRST):  # nats-server waits for a handshake that does not come
                conversation = converse(port, certificates, client, is_first=case == FIRST, scheme=scheme)
                found[f"{scheme} {client}"] = asyncio.run(conversation)
        return found

    with nats_server("-c", str(path)) as real:
        theirs = look(real.port)
    with Serve(tmp_path, **certificates.settings("oracle", **given)) as server:
        ours = look(server.port)

    assert ours == theirs


def test_a_plain_client_is_told_at_once_if_the_handshake_comes_first(strict: Serve) -> None:
    with socket.create_connection(("localhost", strict.port), PATIENCE_S) as plain:
        plain.sendall(b"CONNECT {}\r\n")
        with suppress(ConnectionResetError):
            assert b"-ERR 'Secure Connection - TLS Required'" in plain.makefile("rb").read()
