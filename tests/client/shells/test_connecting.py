"""How both clients connect, and go on after a connection is lost."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import Receipt
from penstock.client import link
from penstock.client.message import Message
from penstock.errors import (
    Closed,
    ConnectionLost,
    NoBroker,
    TimedOut,
    Unauthorized,
)
from tests.support.client_calls import address_of, take, values, wait_until
from tests.support.process import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.server import Serve
from tests.support.shells import Shell


class TestReconnect:
    def test_a_killed_broker_that_comes_back_is_gone_on_with(self, shell: Shell, tmp_path: Path, topic: str) -> None:
        with Serve(tmp_path) as server:
            client = shell.client(address_of(server))
            subscription = client.subscribe(topic, buffer=7)
            producer = client.producer(linger=0.001)
            found: list[Message] = []
            for life in range(3):
                for number in range(100):
                    producer.publish(topic, b"%d" % (100 * life + number))
                found += take(subscription, 50)
                server.kill()
                server.restart()
            producer.flush()
            found += take(subscription, 150)
            client.publish(topic, b"end")

            assert values(found) == [b"%d" % number for number in range(300)]
            assert subscription.get(PATIENCE_S).value == b"end"
            client.close()

    @pytest.mark.parametrize("seed", range(2))
    def test_a_plain_subscription_loses_and_doubles_nothing(
        self, shell: Shell, server: Serve, topic: str, seed: int
    ) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            direct.create_topic(topic, partitions=3)
            subscription = client.subscribe(topic, buffer=30)
            proxy.rage(seed)
            with direct.producer(batch_bytes=3000) as producer:
                for number in range(1000):
                    producer.publish(topic, b"%d" % number, key=b"%d" % (number % 10))
            found: list[Message] = []
            for pause in (*range(200, 1000, 200), 1000):
                while len(found) < pause:
                    found += subscription.get_many(timeout=PATIENCE_S)
                proxy.force_reconnect()
            proxy.calm()
            direct.publish(topic, b"1000")
            found.append(subscription.get(PATIENCE_S))
            connections = proxy.connections
            client.close()

        assert connections > 5
        assert sorted(int(message.value) for message in found) == list(range(1001))
        for partition in range(3):
            offsets = [message.offset for message in found if message.partition == partition]
            assert offsets == sorted(offsets)

    def test_a_member_gets_again_what_it_has_not_acknowledged(self, shell: Shell, server: Serve, topic: str) -> None:
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            client.create_topic(topic, ack_deadline_ms=60_000)
            client.publish_many((topic, b"%d" % number) for number in range(10))
            member = client.subscribe(topic, group=topic, start="earliest")
            done, *_ = take(member, 5)
            done.ack()
            member.flush()

            proxy.cut()
            wait_until(lambda: proxy.connections == 2)

            again = take(member, 9)
            assert sorted(values(again)) == [b"%d" % number for number in range(1, 10)]
            for message in again:
                message.ack()
            member.flush()
            assert client.lag(topic) == 0
            client.close()

    @pytest.mark.parametrize("was_heard", [True, False])
    def test_acknowledgements_that_were_not_answered_are_said_again(
        self, shell: Shell, server: Serve, topic: str, was_heard: bool
    ) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            direct.publish(topic, b"x")
            member = client.subscribe(topic, group=topic, start="earliest")
            message = member.get(PATIENCE_S)
            if was_heard:
                proxy.mute()
                message.ack()
                wait_until(lambda: direct.lag(topic) == 0)
            else:
                proxy.deafen()
                message.ack()
            flushed = pool.submit(member.flush)

            proxy.cut()
            flushed.result(PATIENCE_S)

            assert direct.lag(topic) == 0
            client.close()

    def test_a_request_that_may_be_repeated_is(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            client.connect()
            proxy.mute()
            receipt = pool.submit(client.publish, topic, b"x", message_id="m")
            wait_until(lambda: any(each.name == topic and each.positions[0].committed for each in direct.topics()))

            proxy.cut()

            assert receipt.result(PATIENCE_S) == Receipt(topic, 0, 0, duplicate=True)
            client.close()

    def test_one_that_may_not_be_is_told(self, shell: Shell, server: Serve, topic: str) -> None:
        direct = shell.client(address_of(server))
        with Proxy(server.port) as proxy, ThreadPoolExecutor(1) as pool:
            client = shell.client(proxy.address)
            client.connect()
            proxy.mute()
            receipt = pool.submit(client.publish, topic, b"x")
            wait_until(lambda: any(each.name == topic and each.positions[0].committed for each in direct.topics()))

            proxy.cut()

            with pytest.raises(ConnectionLost, match="may or may not"):
                receipt.result(PATIENCE_S)
            assert client.publish(topic, b"y").offset == 1
            client.close()

    def test_while_the_broker_is_away_requests_wait_until_their_time_is_over(
        self, shell: Shell, tmp_path: Path, topic: str
    ) -> None:
        with Serve(tmp_path) as server, ThreadPoolExecutor(1) as pool:
            client = shell.client(address_of(server))
            client.connect()
            server.kill()
            # What is sent before the loss is noticed is lost with it.
            with suppress(ConnectionLost, TimedOut):
                client.publish(topic, b"early", timeout=0.2)

            with pytest.raises(TimedOut, match=rf"publish to {topic} \(no connection to 127.0.0.1"):
                client.publish(topic, b"late", timeout=0.2)
            waiting = pool.submit(client.publish, topic, b"x")
            server.restart()

            assert waiting.result(PATIENCE_S).offset == 0
            client.close()

    def test_the_next_server_is_tried(self, shell: Shell, server: Serve, topic: str) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            servers = [f"127.0.0.1:{unused.getsockname()[1]}", address_of(server)]

            assert shell.client(servers).publish(topic, b"x").offset == 0


class TestConnecting:
    def test_nobody_there(self, shell: Shell) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            client = shell.client(address)
            told = f"no broker at {address}: start one with `penstock serve`, or name another with servers="

            for attempt in (
                client.connect,
                client.topics,
                lambda: client.subscribe("t"),
                lambda: client.publish("t", b""),
            ):
                with pytest.raises(NoBroker) as caught:
                    attempt()
                assert str(caught.value) == told

    @pytest.mark.parametrize(
        ("greeting", "answer", "told"),
        [
            (
                b"",
                b"HTTP/1.1 400 Bad Request\r\n\r\n",
                "is an HTTP port: connect to the broker's text port (4222",
            ),
            (b'INFO {"version":"2.10.0"}\r\n', b"", "is another NATS server, not a Penstock broker: name another"),
            (
                b"",
                b"-ERR unknown command 'HELLO'\r\n",
                "answers like Redis, not like a Penstock broker: check the port",
            ),
            (b"-DENIED Redis is running in protected mode\r\n", b"", "answers like Redis, not like a Penstock broker"),
            (b"SSH-2.0-x\r\n", b"", "is another service, not a Penstock broker (it says b'SSH-2.0-x\\r\\n')"),
            (b"", b"", "is another service, not a Penstock broker (closed before HELLO was answered): check the port"),
        ],
    )
    def test_somebody_else_there(self, shell: Shell, greeting: bytes, answer: bytes, told: str) -> None:
        def serve(listener: socket.socket) -> None:
            # The client comes twice: as to a broker, then to find out what is there.
            for _ in range(2):
                taken, _ = listener.accept()
                with taken:
                    taken.sendall(greeting)
                    taken.recv(100)
                    taken.sendall(answer)

        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve, listener)
            with pytest.raises(NoBroker) as caught:
                shell.client(f"127.0.0.1:{listener.getsockname()[1]}").connect()
            served.result(PATIENCE_S)
        assert told in str(caught.value)

    @pytest.mark.parametrize(
        ("greeting", "dial_s", "told"),
        [
            (b'INFO {"version":"2.10.0"}\r\n', 2.0, "is another NATS server"),
            (b"", 0.2, r"no answer from 127.0.0.1:\d+ within 0.2 s: check the address"),
        ],
    )
    def test_somebody_there_who_does_not_answer(
        self, shell: Shell, greeting: bytes, dial_s: float, told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "DIAL_S", dial_s)
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            connections = []

            def serve() -> None:
                for _ in range(2):
                    taken, _ = listener.accept()
                    connections.append(taken)
                    taken.sendall(greeting)

            served = pool.submit(serve)
            with pytest.raises(NoBroker, match=told):
                shell.client(f"127.0.0.1:{listener.getsockname()[1]}").connect()
            served.result(PATIENCE_S)
            for each in connections:
                each.close()

    def test_the_brokers_http_port(self, shell: Shell, server: Serve) -> None:
        with pytest.raises(NoBroker, match=r"is an HTTP port: connect to the broker's text port"):
            shell.client(f"127.0.0.1:{server.ports['http']}").connect()

    def test_urls(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, auth_user="ann", auth_password="p@ss:1") as server:
            shell.client(f"nats://ann:p%40ss%3A1@{address_of(server)}/").publish("t", b"x")
            with pytest.raises(Unauthorized):
                shell.client(f"nats://ann:other@{address_of(server)}").connect()
            shell.client(f"nats://ann:other@{address_of(server)}", user="ann", password="p@ss:1").topics()
            shell.close()

    @pytest.mark.parametrize("servers", ["host:port", "", ":1", "a:99999", []])
    def test_what_is_no_address(self, shell: Shell, servers: Any) -> None:
        with pytest.raises(ValueError, match=r"address|empty"):
            shell.client(servers)

    def test_credentials(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, auth_token="secret") as server:
            shell.client(address_of(server), token="secret").publish("t", b"x")
            with pytest.raises(Unauthorized):
                shell.client(address_of(server), token="other").connect()
            with pytest.raises(Unauthorized):
                shell.client(address_of(server)).connect()
            shell.close()

    def test_after_close_nothing_is_done(self, shell: Shell, server: Serve) -> None:
        client = shell.client(address_of(server))
        client.topics()
        client.close()
        client.close()

        with pytest.raises(Closed):
            client.topics()
        with pytest.raises(Closed):
            client.subscribe("t")

    def test_a_broker_that_says_nothing_takes_too_long(self, shell: Shell, server: Serve) -> None:
        with Proxy(server.port) as proxy:
            client = shell.client(proxy.address, timeout=1)
            client.connect()
            proxy.mute()

            with pytest.raises(TimedOut, match=r"topics \(connected to 127.0.0.1.*1 s"):
                client.topics()
            client.close()

    def test_a_silent_connection_is_given_up(self, shell: Shell, tmp_path: Path) -> None:
        with Serve(tmp_path, server_heartbeat_s=1) as server, Proxy(server.port) as proxy:
            client = shell.client(proxy.address)
            client.connect()

            proxy.mute()
            wait_until(lambda: proxy.connections == 1)
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.topics)
                wait_until(lambda: proxy.connections > 1 or answer.done())
                proxy.cut()
                assert answer.result(PATIENCE_S) == []
            client.close()
