"""Addresses: how they are written, and what listens at them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import address
from penstock.client.servers import BrokerAddress


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:4222", "127.0.0.1", 4222),
        ("127.0.0.1", "127.0.0.1", 7),
        ("shop.example:1", "shop.example", 1),
        (" localhost ", "localhost", 7),
        ("[::1]:4222", "::1", 4222),
        ("[::1]", "::1", 7),
        ("::1", "::1", 7),
        ("fe80::1%eth0", "fe80::1%eth0", 7),
        ("[fe80::1%eth0]:0", "fe80::1%eth0", 0),
        ("2001:db8::4222", "2001:db8::4222", 7),
        ("a:65535", "a", 65535),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    assert address.split(text, 7) == (host, port)
    assert address.split(address.join(host, port), 7) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":4222", "a:", "a:b", "a:-1", "a:65536", "a:²", "a b:1", "a,b:1", "http://a:1", "user@a:1"),
        *("[::1", "::1]", "[::1]4222", "[::1]:", "[::1]:x", "[a]:1", "[]:1", "::1::", "a:b:c", "1:2:3:4222"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid address .*it must be host:port, such as 127.0.0.1:7 or \[::1\]:7"):
        address.split(text, 7)


def test_hosts_are_listed_with_commas() -> None:
    assert address.hosts(" 127.0.0.1, [::1],localhost,") == ["127.0.0.1", "::1", "localhost"]


@contextmanager
def bound(names: Sequence[str], port: int = 0) -> Iterator[list[tuple[str, int]]]:
    sockets = address.bind(names, port)
    try:
        yield [each.getsockname()[:2] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def test_several_hosts_share_one_port() -> None:
    with bound(["127.0.0.1", "::1", "127.0.0.2"]) as found:
        assert [host for host, _ in found] == ["127.0.0.1", "::1", "127.0.0.2"]
        assert len({port for _, port in found}) == 1
        for each in found:
            socket.create_connection(each).close()


def test_a_host_that_is_given_twice_is_listened_at_once() -> None:
    with bound(["127.0.0.1", "127.0.0.1", "localhost"]) as found:
        assert [host for host, _ in found].count("127.0.0.1") == 1


@pytest.mark.parametrize("names", [["::"], ["::", "127.0.0.1", "0.0.0.0"], ["::1", "::"]])
def test_all_addresses_are_those_of_both_kinds(names: list[str]) -> None:
    with bound(names) as found:
        assert [host for host, _ in found] == ["::", "0.0.0.0"]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, found[0][1])) as connection:
                # Not ::ffff:127.0.0.1.
                assert connection.getpeername()[0] == host


def test_all_addresses_of_ipv4_include_each_of_them() -> None:
    with bound(["127.0.0.1", "0.0.0.0", "::1"]) as found:
        assert [host for host, _ in found] == ["0.0.0.0", "::1"]


def test_a_port_in_use_at_one_host_leaves_none_open() -> None:
    # Another test, or another program, may have the same port of 127.0.0.1.
    elsewhere = "127.0.0.77"
    with bound(["::1"]) as [(_, port)]:
        with pytest.raises(OSError, match=rf"cannot listen on \[::1\]:{port}: Address already in use: another process"):
            address.bind([elsewhere, "::1"], port)
        with bound([elsewhere], port):
            pass


def test_a_port_that_is_not_free_at_all_hosts_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    listen = address._listen

    def fail_at_first(family: socket.AddressFamily, place: Any) -> socket.socket:
        if len(opened) == 1:
            opened.append(opened[0])
            raise OSError(errno.EADDRINUSE, "in use")
        opened.append(listen(family, place))
        return opened[-1]

    monkeypatch.setattr(address, "_listen", fail_at_first)
    with bound(["127.0.0.1", "::1"]) as found:
        assert opened[0].fileno() == -1, "it is closed"
        assert found[0][1] == found[1][1]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192.0.2.1:7: .*: this machine does not have the address: use"):
        address.bind(["127.0.0.1", "192.0.2.1"], 7)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(OSError, match=r"unknown host 'nobody.invalid' .*: use an address"):
        address.bind(["nobody.invalid"], 0)


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Let every name have these addresses."""
    real = socket.getaddrinfo

    def getaddrinfo(_: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        return [found for host in hosts for found in real(host, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_is_listened_at_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve_to(monkeypatch, "127.0.0.1", "::1")
    with bound(["shop"]) as found:
        assert [host for host, _ in found] == ["127.0.0.1", "::1"]
        assert found[0][1] == found[1][1]


def test_addresses_of_a_name_that_the_machine_does_not_have_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where localhost is ::1 too, and IPv6 is off."""
    _resolve_to(monkeypatch, "192.0.2.1", "127.0.0.1")
    with bound(["shop"]) as found:
        assert [host for host, _ in found] == ["127.0.0.1"]


def test_a_name_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve_to(monkeypatch, "192.0.2.1")
    with pytest.raises(OSError, match=r"cannot listen on 192.0.2.1:0 \(shop\)"):
        address.bind(["shop"], 0)


def test_a_client_tries_all_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(port: int) -> Any:
        transport = await BrokerAddress.read(f"shop:{port}").dial(asyncio.Protocol)
        try:
            return transport.get_extra_info("peername")[0]
        finally:
            transport.close()

    with bound(["127.0.0.1"]) as [(_, port)]:
        _resolve_to(monkeypatch, "::1", "127.0.0.1")
        assert asyncio.run(dial(port)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "host", "port", "login"),
    [
        ("nats://broker", "broker", 7, {}),
        ("NATS://broker:4222/", "broker", 4222, {}),
        ("nats://[::1]:4222", "::1", 4222, {}),
        ("nats://ann:p%40ss@broker:4222", "broker", 4222, {"user": "ann", "password": "p@ss"}),
        ("nats://secret@broker", "broker", 7, {"token": "secret"}),
    ],
)
def test_a_url_is_an_address_and_may_have_credentials(text: str, host: str, port: int, login: dict[str, str]) -> None:
    assert (address.split(text, 7), address.login(text)) == ((host, port), login)


def test_an_error_does_not_show_the_credentials_of_a_url() -> None:
    with pytest.raises(ValueError, match="invalid address 'host:x'"):
        address.split("nats://ann:secret@host:x", 7)
    with pytest.raises(ValueError, match="it must be host:port"):
        address.split("http://host:8222", 7)
