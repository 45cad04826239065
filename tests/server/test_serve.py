"""The life of a server: how it starts, what it refuses, and how it stops."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client.qb import BrokerClient
from penstock.server.config import load
from penstock.server.server import Server
from tests.support.process import PATIENCE_S, Ended
from tests.support.server import Flux, Nats, Raw, Serve, clean_environment, pub, reserve_port


def refused(*arguments: object, **settings: object) -> Ended:
    """A start that must fail by itself."""
    ports = {"server_port": 0, "server_quiet_port": 0, "server_http_port": 0, "server_qb_port": "none"}
    environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in (ports | settings).items()}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", *map(str, arguments)],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stdout == ""
    return Ended(done.returncode, done.stderr)


# ---- start


def test_the_python_brokers_clients_have_a_port_of_their_own(tmp_path: Path) -> None:
    ports: set[int] = set()
    ports.add(port := reserve_port(ports))
    with Serve(tmp_path, server_qb_port=port) as server:
        assert server.ports["qb"] == port
        with BrokerClient(port=port) as client:
            client.create_topic("events")
            client.publish_text("events", "hello")


def test_a_default_port_that_is_in_use_is_told_and_one_that_was_asked_for_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = refused("--data", tmp_path / "data", server_qb_port=port)
        assert ended.code == 1
        assert str(port) in ended.stderr

        flags = {f"server.{name}port": 0 for name in ("", "quiet_", "http_")} | {"server.qb_port": port}
        loaded = load(path=None, environ={}, flags=flags | {"storage.data_dir": str(tmp_path / "other")})
        server = Server(loaded.config, settings={"server.qb_port": {"from": "default"}})

        async def run() -> None:
            stop = asyncio.Event()
            await server.run(stop, lambda _: stop.set())

        asyncio.run(run())
        assert set(server.ports) == {"text", "quiet", "http"}
        assert "the default server.qb_port is not opened" in caplog.text


def test_it_says_when_it_is_ready_and_where(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        assert re.match(
            rf"penstock \S+ ready: text on 127\.0\.0\.1:\d+, quiet on 127\.0\.0\.1:\d+.*, data in {server.data}$",
            server.ready,
        )
        for port in server.ports.values():
            Raw(port).close()
        assert server.stop() == (0, "")


def test_flags_are_stronger_than_the_environment_and_that_than_the_file(tmp_path: Path) -> None:
    config = '[server]\nnode_id = "file"\npayload_bytes_max = 1000\n[storage]\ndata_dir = "elsewhere"\n'
    with (
        Serve(
            tmp_path, config=config, flags=("--data", str(tmp_path / "data")), server_node_id="environment"
        ) as server,
        Flux(server) as flux,
    ):
        assert flux.info["node_id"] == "environment"
        assert flux.info["max_payload"] == 1000
        assert (tmp_path / "data" / "LOCK").exists()


def test_topics_of_the_configuration_exist_with_their_partitions(tmp_path: Path) -> None:
    config = """
    [topic]
    auto_create = false
    [topics.orders]
    partitions = 4
    [topics."clicks.eu"]
    durability = "flush"
    """
    with Serve(tmp_path, config=config) as server:
        with Flux(server) as flux:
            for number in range(100):
                assert flux.publish(f"orders.{number}", b"x") == "+OK"
            assert flux.publish("clicks.eu.new", b"x") == "+OK"
            assert flux.publish("clicks.us.new", b"x").startswith("-ERR ")
        assert server.stop().code == 0
        assert {message["partition"] for message in server.dump("orders")} == {0, 1, 2, 3}
        assert len(server.dump("clicks.eu")) == 1


def test_a_topic_gets_more_partitions_when_the_configuration_says_so(tmp_path: Path) -> None:
    with Serve(tmp_path, config="[topics.orders]\npartitions = 2\n") as server:
        with Flux(server) as flux:
            flux.publish("orders.a", b"before")
        server.stop()
        (tmp_path / "config.toml").write_text("[topics.orders]\npartitions = 5\n")
        server.restart()
        with Flux(server) as flux:
            flux.subscribe("orders.>", "1")
            with Flux(server) as other:
                for number in range(100):
                    assert other.publish(f"orders.{number}", b"%d" % number) == "+OK"
            assert {int(message.payload) for message in flux.messages(100)} == set(range(100))
        server.stop()
        assert {message["partition"] for message in server.dump("orders")} == set(range(5))


# ---- what is refused


def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as flux:
        ended = refused(storage_data_dir=server.data)
        assert ended.code == 1
        assert ended.stderr == (
            f"error: {server.data} is in use by process {server.process.pid}: "
            "stop it first, or choose another directory\n"
        )
        # The first one is none the worse for it.
        assert flux.publish("orders.a", b"x") == "+OK"


def test_a_killed_server_does_not_keep_its_data(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        for _ in range(2):
            server.kill()
            server.restart()


@pytest.mark.parametrize("door", ["server_port", "server_quiet_port"])
def test_a_port_that_is_in_use_is_refused(tmp_path: Path, door: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = refused(storage_data_dir=tmp_path / "data", **{door: port})
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")
    assert str(port) in ended.stderr
    assert "in use" in ended.stderr


def test_fewer_partitions_than_a_topic_has_are_refused(tmp_path: Path) -> None:
    with Serve(tmp_path, config="[topics.orders]\npartitions = 3\n") as server:
        server.stop()
    (tmp_path / "config.toml").write_text("[topics.orders]\npartitions = 2\n")
    ended = refused("--config", tmp_path / "config.toml", storage_data_dir=server.data)
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    assert re.match("error: .*orders.*partitions", ended.stderr)


@pytest.mark.parametrize("name", ["$mine", "_inbox", "a..b", "a.*", "a b"])
def test_a_topic_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.toml").write_text(f'[topics."{name}"]\n')
    ended = refused("--config", tmp_path / "config.toml", storage_data_dir=tmp_path / "data")
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")
    assert name in ended.stderr


@pytest.mark.parametrize("names", [("orders", "orders.eu"), ("orders.eu", "orders")])
def test_a_topic_within_another_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "config.toml").write_text("".join(f'[topics."{name}"]\n' for name in names))
    ended = refused("--config", tmp_path / "config.toml", storage_data_dir=tmp_path / "data")
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")


def test_a_wrong_setting_is_refused(tmp_path: Path) -> None:
    ended = refused(storage_data_dir=tmp_path / "data", server_heartbeat_s="never", topic_partitions=0)
    assert ended.code == 1
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: server.heartbeat_s (environment PENSTOCK_SERVER_HEARTBEAT_S) is 'never'")
    assert lines[1].startswith("error: topic.partitions (environment PENSTOCK_TOPIC_PARTITIONS) is '0'")
    assert not (tmp_path / "data").exists()


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    ended = refused(storage_data_dir=tmp_path / "data", server_hartbeat_s=5)
    assert ended.code == 1
    assert "did you mean PENSTOCK_SERVER_HEARTBEAT_S?" in ended.stderr


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert "No such file" in refused("--config", path, storage_data_dir=tmp_path / "data").stderr
    path.write_text("[server]\nport = 70000\n")
    ended = refused("--config", path, storage_data_dir=tmp_path / "data")
    assert ended.code == 1
    assert f"server.port (file {path}:2) is 70000" in ended.stderr


def test_a_wrong_flag_is_refused(tmp_path: Path) -> None:
    assert refused("--no-such-flag", storage_data_dir=tmp_path / "data").code == 2
    assert refused("--port", "many", storage_data_dir=tmp_path / "data").code == 2
    ended = refused("--quiet-port", "70000", storage_data_dir=tmp_path / "data")
    assert ended.code == 1
    assert "flag --quiet-port" in ended.stderr


def test_data_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = refused(storage_data_dir=tmp_path / "file" / "data")
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")


# ---- stop


def test_sigint_stops_it_though_it_was_ignored_at_the_start(tmp_path: Path) -> None:
    """As for the background jobs of a shell script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = Serve(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with server:
        assert server.stop(signal.SIGINT) == (0, "")


def test_what_a_test_starts_can_be_interrupted_though_the_tests_ignore_it() -> None:
    code = (
        "import os, signal, subprocess, sys, tests\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('alive', flush=True)\n"
        "child = 'import signal; print(signal.getsignal(signal.SIGINT).__name__)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("alive\ndefault_int_handler\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly_and_keeps_what_it_acknowledged(tmp_path: Path, number: signal.Signals) -> None:
    with Serve(tmp_path) as server:
        with Flux(server) as flux, Flux(server) as idle, Nats(server) as nats, Raw(server.port):
            idle.subscribe("orders.>", "DURABLE:billing", "1")
            nats.send("SUB orders.> 1\r\n")
            assert nats.ask("PING") == "PONG"
            # It is stopped in the middle of this.
            total = 2000
            flux.send(b"".join(pub("orders.a", b"%d" % each) for each in range(total // 2)))
            assert flux.line() == "+OK"
            flux.send(b"".join(pub("orders.a", b"%d" % each) for each in range(total // 2, total)))
            ended = server.stop(number)
            assert ended == (0, "")
            acknowledged = 1 + flux.rest().count("+OK\r\n")
            # A NATS client is told to go elsewhere, and not that anything is wrong.
            assert "-ERR" not in nats.rest()
        stored = [int(message["value"]) for message in server.dump("orders")]
        assert stored == list(range(len(stored)))
        assert acknowledged <= len(stored) <= total
        server.restart()
        with Flux(server) as flux:
            assert flux.publish("orders.a", b"after") == "+OK"
            flux.send(f"REPLAY FIRST {2 * total}\r\n")
            messages, _ = flux.until_ok()
            assert [message.payload for message in messages] == [b"%d" % each for each in stored] + [b"after"]


def test_it_stops_though_a_client_does_not_read(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_durability="flush", server_stop_s=1) as server:
        with Nats(server, receive_bytes=4096) as stuck, Flux(server) as replaying, Flux(server) as flux:
            stuck.send("SUB flood.> 1\r\n")
            assert stuck.ask("PING") == "PONG"
            for _ in range(100):
                flux.send(pub("flood.x", b"x" * 100_000))
            assert [flux.line() for _ in range(100)] == ["+OK"] * 100
            replaying.send("REPLAY FIRST\r\n")
            assert replaying.line().startswith("MSG flood.x replay ")
            assert server.stop().code == 0
        assert len(server.dump("flood")) == 100


def test_it_takes_no_connections_while_it_stops(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        assert server.stop().code == 0
        with pytest.raises(ConnectionRefusedError):
            Raw(server.port)


def test_what_groups_have_done_is_known_after_a_clean_stop(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=3_600_000) as server:
        with Flux(server) as flux, Flux(server) as other:
            flux.subscribe("orders.>", "DURABLE:billing", "1")
            for number in range(10):
                other.publish("orders.a", b"%d" % number)
            messages = flux.messages(10)
            for message in messages[::2]:
                flux.ack(message)
            assert server.stop() == (0, "")
        server.restart()
        with Flux(server) as flux:
            flux.subscribe("orders.>", "DURABLE:billing", "1")
            assert [message.payload for message in flux.messages(5)] == [b"1", b"3", b"5", b"7", b"9"]


def test_the_limit_of_connections_holds(tmp_path: Path) -> None:
    with Serve(tmp_path, server_connections_max=3) as server:
        clients = [Flux(server) for _ in range(3)]
        with Raw(server.port) as refused_one:
            assert refused_one.rest() == "-ERR 'maximum connections exceeded'\r\n"
        clients[0].send("SHOUT\r\n")
        clients[0].rest()
        with Flux(server) as welcome:
            assert welcome.ask("PING") == "PONG"
        for client in clients:
            client.close()


def test_the_limit_of_topics_holds(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_topics_max=2) as server, Flux(server) as flux:
        assert [flux.publish(subject, b"x") for subject in ("a.1", "b.1", "a.2")] == ["+OK"] * 3
        assert "TOO_MANY_TOPICS" in flux.publish("c.1", b"x")
