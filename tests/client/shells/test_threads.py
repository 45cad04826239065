"""Both clients in several threads, loops and processes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import uvloop

from penstock import AsyncClient, Client
from penstock.client import loop_thread
from penstock.client.blocking import BlockingMethods
from penstock.errors import (
    Closed,
)
from tests.support.client_calls import address_of, fetched, take, values
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment


class TestThreads:
    def test_everything_at_once(self, client: Client, topic: str) -> None:
        """Publish, subscribe, unsubscribe and ask, from many threads, on one connection."""
        client.create_topic(topic, partitions=2)
        reader = client.subscribe(topic, buffer=1000)
        rounds, workers = 15, 8

        def work(number: int) -> None:
            with client.producer(linger=0.001) as producer:
                for turn in range(rounds):
                    client.publish(topic, b"a%d/%d" % (number, turn))
                    producer.publish(topic, b"b%d/%d" % (number, turn))
                    with client.subscribe(f"{topic}-{number}") as subscription:
                        client.publish(f"{topic}-{number}", b"%d" % turn)
                        assert subscription.get(PATIENCE_S).value == b"%d" % turn
                    client.topic(topic)

        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(work, number) for number in range(workers)]:
                done.result(60)

        found = Counter(values(take(reader, 2 * rounds * workers)))
        assert found == Counter(
            b"%c%d/%d" % (kind, number, turn) for kind in b"ab" for number in range(workers) for turn in range(rounds)
        )

    def test_many_threads_read_one_subscription_and_acknowledge(self, client: Client, topic: str) -> None:
        client.create_group(topic, topic)
        member = client.subscribe(topic, group=topic, buffer=50)
        client.publish_many((topic, b"%d" % number) for number in range(1000))
        lock, found = threading.Lock(), set[bytes]()

        def work() -> None:
            for message in member:
                message.ack()
                with lock:
                    found.add(message.value)
                    if len(found) == 1000:
                        all_done.set()

        all_done = threading.Event()
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        assert all_done.wait(PATIENCE_S)
        member.flush()
        member.close()
        for worker in workers:
            worker.join(PATIENCE_S)

        assert client.lag(topic) == 0

    def test_many_threads_use_one_producer(self, client: Client, topic: str) -> None:
        with client.producer(batch_bytes=2000) as producer, ThreadPoolExecutor(8) as pool:

            def work(number: int) -> None:
                for turn in range(500):
                    producer.publish(topic, b"%d/%d" % (number, turn))

            for done in [pool.submit(work, number) for number in range(8)]:
                done.result(60)

        found = fetched(client, topic)
        assert len(found) == 4000
        for number in range(8):
            mine = [value for value in found if value.startswith(b"%d/" % number)]
            assert mine == [b"%d/%d" % (number, turn) for turn in range(500)]

    def test_within_a_running_loop(self, server: Serve, topic: str) -> None:
        """As in a notebook."""

        async def cell() -> bytes:
            with Client(address_of(server)) as client:
                subscription = client.subscribe(topic)
                client.publish(topic, b"x")
                return subscription.get(PATIENCE_S).value

        assert asyncio.run(cell()) == b"x"

    def test_acknowledging_from_another_thread_than_the_loops(self, server: Serve, topic: str) -> None:
        async def consume() -> int:
            async with AsyncClient(address_of(server)) as client:
                await client.publish(topic, b"x")
                member = await client.subscribe(topic, group=topic, start="earliest")
                message = await member.get(PATIENCE_S)
                await asyncio.to_thread(message.ack)
                await member.flush()
                return await client.lag(topic)

        assert asyncio.run(consume()) == 0

    def test_uvloop_does_as_well(self, server: Serve, topic: str) -> None:
        async def use() -> list[bytes]:
            async with AsyncClient(address_of(server)) as client:
                subscription = await client.subscribe(topic)
                await client.publish_many([(topic, b"0"), (topic, b"1")])
                return [(await subscription.get(PATIENCE_S)).value for _ in range(2)]

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(use()) == [b"0", b"1"]

    def test_cancelling_a_wait_leaves_the_rest_as_it_was(self, server: Serve, topic: str) -> None:
        async def use() -> bytes:
            async with AsyncClient(address_of(server)) as client:
                subscription = await client.subscribe(topic)
                waiting = asyncio.ensure_future(subscription.get())
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                await client.publish(topic, b"x")
                return (await subscription.get(PATIENCE_S)).value

        assert asyncio.run(use()) == b"x"


class TestProcesses:
    def test_a_forked_child_has_a_connection_of_its_own(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            subscription = client.subscribe(topic)
            producer = client.producer(linger=60)
            producer.publish(topic, b"parent")

            def child() -> None:
                producer.publish(topic, b"child's producer")
                producer.close()
                client.publish(topic, b"child")
                with client.subscribe(topic, start="earliest") as mine:
                    assert values(take(mine, 2)) == [b"child's producer", b"child"]
                with pytest.raises(Closed, match="subscribe again"):
                    subscription.get()
                with pytest.raises(Closed, match="subscribe again"):
                    next(subscription)
                client.close()

            assert _in_child(child) == 0
            producer.close()

            assert values(take(subscription, 3)) == [b"child's producer", b"child", b"parent"]
            assert client.publish(topic, b"still here").offset == 3
            assert subscription.get(PATIENCE_S).value == b"still here"

    def test_messages_of_the_parent_are_not_acknowledged_by_a_child(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            member = client.subscribe(topic, group=topic)
            client.publish(topic, b"x")
            message = member.get(PATIENCE_S)

            def child() -> None:
                for use in (message.ack, member.flush):
                    with pytest.raises(Closed, match="subscribe again"):
                        use()
                member.close()

            assert _in_child(child) == 0
            message.ack()
            member.flush()
            assert client.lag(topic) == 0

    def test_a_transaction_of_the_parent_is_refused_in_a_child(self, server: Serve, topic: str) -> None:
        with Client(address_of(server)) as client:
            transaction = client.transaction()
            transaction.publish(topic, b"parent")

            def child() -> None:
                with pytest.raises(Closed, match="parent process"):
                    transaction.commit()
                with client.transaction() as mine:
                    mine.publish(topic, b"child")

            assert _in_child(child) == 0
            assert transaction.commit()
            assert values(list(client.fetch(topic))) == [b"child", b"parent"]

    def test_a_child_does_not_close_a_client_that_the_parent_has_dropped(self, server: Serve, topic: str) -> None:
        Client(address_of(server)).publish(topic, b"x")
        gc.collect()

        assert _in_child(loop_thread._close_all) == 0
        assert _in_child(lambda: sys.exit(len(loop_thread._RUNNING))) == 0

    def test_a_client_that_was_never_used_is_used_by_many_children(self, server: Serve, topic: str) -> None:
        client = Client(address_of(server))

        def child() -> None:
            client.publish(topic, b"x")

        assert [_in_child(child) for _ in range(3)] == [0, 0, 0]
        assert fetched(client, topic) == [b"x"] * 3
        client.close()

    def test_a_program_that_just_ends_stores_what_it_has_and_does_not_hang(self, server: Serve, topic: str) -> None:
        code = f"""
import penstock
client = penstock.Client({address_of(server)!r})
subscription = client.subscribe("x")
client.producer(linger=60).publish({topic!r}, b"x")
"""
        done = _python(code)

        assert (done.returncode, done.stderr) == (0, "")
        with Client(address_of(server)) as client:
            assert fetched(client, topic) == [b"x"]

    def test_an_interrupt_at_any_call_leaves_no_coroutine_behind(self, server: Serve) -> None:
        files = {loop_thread.__file__, BlockingMethods.topics.__code__.co_filename}

        def interrupt_at(step: int) -> bool:
            """Raise when a function of the client is entered, where Python handles signals. Return whether there were
            fewer calls."""
            steps = itertools.count()

            def trace(frame: FrameType, event: str, _: object) -> None:
                if event == "call" and frame.f_code.co_filename in files and next(steps) == step:
                    raise KeyboardInterrupt

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                opened.topics()
            except KeyboardInterrupt:
                return False
            finally:
                sys.settrace(before)
            return True

        with Client(f"127.0.0.1:{server.port}") as opened, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            opened.connect()
            over = next(step for step in itertools.count() if interrupt_at(step))
            assert over > 2
            gc.collect()
            opened.topics()
        assert [str(each.message) for each in told] == []

    def test_a_key_that_interrupts_ends_a_wait(self, server: Serve) -> None:
        code = f"""
import penstock
client = penstock.Client({address_of(server)!r})
subscription = client.subscribe("nothing")
try:
    print("ready", flush=True)
    subscription.get()
except KeyboardInterrupt:
    print("interrupted")
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=clean_environment()
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.wait(PATIENCE_S) == 0

    def test_importing_it_loads_neither_the_server_nor_the_rest(self) -> None:
        code = """
import sys, penstock
assert not any(name.startswith("penstock.") for name in sys.modules), sys.modules
penstock.Client, penstock.AsyncClient, penstock.Outgoing, penstock.Receipt, penstock.Message
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("penstock.")}
assert not loaded & {"server", "broker", "storage", "cli", "app", "embedded", "arrow"}, loaded
assert "Client" in dir(penstock)
try:
    penstock.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
else:
    raise AssertionError
"""
        done = _python(code)

        assert (done.returncode, done.stderr) == (0, "")


def _in_child(work: Callable[[], None]) -> int | None:
    """The exit code of a forked child that does it."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environment(),
    )
