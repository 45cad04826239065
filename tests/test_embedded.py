"""A broker in this process: no port, the client's API, and what is stored is stored."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock import AsyncClient, Broker, Client
from penstock.errors import BadConfig, Closed, DirectoryInUse, NoBroker, PenstockError, TimedOut
from tests.support.process import PATIENCE_S


def test_a_subscriber_gets_what_is_published() -> None:  # AP-11 … AP-16, AP-19
    with Broker() as broker, broker.subscribe("events") as events:
        broker.publish("events", b"first", headers={"From": "here"})
        broker.publish("events", b"second")
        first, second = events.get(PATIENCE_S), events.get(PATIENCE_S)
        assert (first.subject, first.value, first.headers) == ("events", b"first", {"From": "here"})
        assert (second.value, second.headers) == (b"second", {})


def test_every_subscriber_of_a_topic_gets_each_message_and_of_no_other() -> None:  # RT-09, RT-10, TE-02, TE-03
    with Broker() as broker:
        several = [broker.subscribe("events") for _ in range(3)]
        other = broker.subscribe("others")
        for value in (b"1", b"2"):
            broker.publish("events", value)
        broker.publish("others", b"3")
        for subscription in several:
            assert [subscription.get(PATIENCE_S).value for _ in range(2)] == [b"1", b"2"]
        assert other.get(PATIENCE_S).value == b"3"


def test_a_loop_over_a_subscription_ends_when_it_is_closed() -> None:  # DE-16, AP-14, TE-04
    got: list[bytes] = []
    first = threading.Event()
    with Broker() as broker:
        events = broker.subscribe("events")

        def consume() -> None:
            for message in events:
                got.append(message.value)
                first.set()

        reader = threading.Thread(target=consume)
        reader.start()
        broker.publish("events", b"1")
        assert first.wait(PATIENCE_S)
        events.close()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
        broker.publish("events", b"2")
        assert got == [b"1"]


def test_a_burst_waits_for_a_subscriber_that_does_not_read_and_holds_nobody_up() -> None:  # DE-15
    with Broker() as broker, broker.subscribe("events") as slow:
        with broker.producer() as producer:
            for number in range(1000):
                producer.publish("events", b"%d" % number)
        assert [slow.get(PATIENCE_S).value for _ in range(1000)] == [b"%d" % number for number in range(1000)]


def test_to_receive_may_take_only_so_long() -> None:  # AP-18
    with Broker() as broker, broker.subscribe("events") as events, pytest.raises(TimedOut):
        events.get(timeout=0.01)


def test_everything_may_be_called_from_many_threads() -> None:  # AP-17
    with Broker(settings={"topic.durability": "flush"}) as broker, ThreadPoolExecutor(8) as threads:

        def work(number: int) -> None:
            for turn in range(10):
                with broker.subscribe(f"events.{number}") as mine:
                    broker.publish(f"events.{number}", b"%d" % turn)
                    assert mine.get(PATIENCE_S).value == b"%d" % turn

        list(threads.map(work, range(8)))
        assert broker.topic("events").positions[0].committed == 80


def test_what_is_in_a_directory_is_there_the_next_time(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker:
        receipt = broker.publish("orders", b"kept")
    with Broker(tmp_path / "data") as broker:
        [message] = broker.fetch("orders")
        assert (message.offset, message.value) == (receipt.offset, b"kept")


def test_a_temporary_directory_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Broker() as broker:
        broker.publish("orders", b"first")
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_two_brokers_cannot_have_one_directory(tmp_path: Path) -> None:  # AP-20
    with Broker(tmp_path / "data") as broker:
        with pytest.raises(DirectoryInUse):
            Broker(tmp_path / "data")
        broker.publish("orders", b"the first one goes on")


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(BadConfig, match="durability"):
        Broker(settings={"topic.durability": "hope"})


def test_others_reach_it_at_its_address_if_it_listens() -> None:
    with Broker(listen="127.0.0.1:0") as broker:
        assert broker.address is not None
        with Client(broker.address) as client:
            client.publish("orders", b"from outside")
        assert [message.value for message in broker.fetch("orders")] == [b"from outside"]


def test_it_has_no_address_if_it_does_not() -> None:
    with Broker() as broker:
        assert broker.address is None


async def _publish(broker: Broker) -> int:
    async with AsyncClient(broker) as client:
        return (await client.publish("orders", b"from a loop")).offset


def test_clients_of_both_kinds_take_it_in_place_of_an_address() -> None:
    with Broker() as broker:
        with Client(broker) as client:
            client.publish("orders", b"from a thread")
        assert asyncio.run(_publish(broker)) == 1


def test_when_it_is_closed_it_says_so() -> None:
    broker = Broker()
    client = Client(broker, timeout=1)
    client.publish("orders", b"first")
    broker.close()
    broker.close()
    with pytest.raises(Closed):
        broker.publish("orders", b"second")
    with pytest.raises(PenstockError):
        client.publish("orders", b"second")
    client.close()


def _in_child(broker: Broker, results: multiprocessing.SimpleQueue[str]) -> None:
    try:
        broker.publish("orders", b"from the child", timeout=PATIENCE_S)
    except NoBroker as error:
        results.put(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_the_broker_is_not_in_it() -> None:
    forking = multiprocessing.get_context("fork")
    with Broker() as broker:
        broker.publish("orders", b"from the parent")
        results: multiprocessing.SimpleQueue[str] = forking.SimpleQueue()
        child = forking.Process(target=_in_child, args=(broker, results))
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
        assert "start it with listen=" in results.get()
        assert broker.publish("orders", b"from the parent").offset == 1


def test_a_program_that_just_ends_stops_it_cleanly(tmp_path: Path) -> None:
    program = "import sys; from penstock import Broker; Broker(sys.argv[1]).publish('orders', b'kept')"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Broker(tmp_path / "data") as broker:
        assert [message.value for message in broker.fetch("orders")] == [b"kept"]


def test_a_program_that_just_ends_stops_all_of_them(tmp_path: Path) -> None:
    """Also those that are left when one was closed."""
    program = (
        "import sys; from penstock import Broker\n"
        "left, closed = Broker(sys.argv[1]), Broker()\n"
        "left.publish('orders', b'kept'); closed.close()"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")], check=False, timeout=PATIENCE_S)
    assert done.returncode == 0
    # Head, message, and what only a clean stop writes.
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", "log", "verify", str(tmp_path / "data"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [log["batches"] for log in json.loads(shown.stdout)["logs"] if log["messages"] == 1] == [3]


def test_pytest_finds_the_fixture_by_itself(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "def test_orders(penstock_broker):\n"
        "    with penstock_broker.subscribe('orders') as orders:\n"
        "        penstock_broker.publish('orders', b'first')\n"
        "        assert orders.get(timeout=20).value == b'first'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
