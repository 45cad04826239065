"""A refresh of a topic that a real replica has a copy of: readers have the old one until the new one is complete,
whoever is killed, and whatever becomes of the refresh."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest

from penstock.client.sync import Client
from penstock.errors import Closed, RefreshAborted, TimedOut
from tests.support.data_directories import segments
from tests.support.process import PATIENCE_S
from tests.support.replicas import ReplicaProcess, check_copy, publishing, quiet, wait_some_more
from tests.support.server import Serve

_numbers = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def topic() -> str:
    return f"t{next(_numbers)}"


def wait_refreshed(replica: ReplicaProcess, client: Client, topic: str, state: str = "COMPLETED") -> None:
    replica.wait_for(lambda: client.refresh_status(topic).state == state)


def copies_of(replica: ReplicaProcess) -> list[str]:
    """The topics of its store, but for the state topic."""
    return sorted(path.name for path in (replica.data / "topics").iterdir() if path.name != "0")


def test_a_refresh_makes_a_new_copy_of_all(server: Serve, client: Client, topic: str, tmp_path: Path) -> None:
    client.create_topic(topic, partitions=2)
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        with publishing(server.port, topic, 1000):
            wait_some_more(replica, 500)
            for segment in (replica.data / "topics" / "1").glob("*/*.log"):
                with segment.open("r+b") as file:  # in place: the replica writes to it meanwhile
                    file.write(b"x")
            client.refresh_topic(topic)
        wait_refreshed(replica, client, topic)
        check_copy(replica, client, topic, 1000)
        assert copies_of(replica) == ["2"]
        assert not replica.get("health")["refreshing"]


@pytest.mark.parametrize("policy", ["EXPONENTIAL_THEN_FIXED", "PAUSE_ON_ERROR"])
def test_a_refresh_replaces_a_copy_that_cannot_be_written(
    server: Serve, client: Client, topic: str, tmp_path: Path, policy: str
) -> None:
    client.publish_many((topic, b"%d" % number * 500_000) for number in range(10))
    with ReplicaProcess(tmp_path, quiet(server), topic, CONSUMER_RETRY_POLICY=policy) as replica:
        check_copy(replica, client, topic, 10)
        [segment] = segments(replica.data)
        # There is no more room in this copy, but in a new one without the messages that are purged.
        limit = segment.stat().st_size
        resource.prlimit(replica.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        client.purge_topic(topic, "latest")
        client.publish_many((topic, b"%d" % number) for number in range(10))
        replica.wait_for(lambda: replica.ask("/api/query/health")[0] == 503)
        client.refresh_topic(topic)
        wait_refreshed(replica, client, topic)
        check_copy(replica, client, topic, 10)
        assert replica.get("health")["status"] == "UP"


def test_readers_have_the_old_copy_while_a_refresh_waits(
    server: Serve, client: Client, topic: str, tmp_path: Path
) -> None:
    """Until all members of the group have heard RESET nothing is replayed, and one of them takes its time."""
    client.publish_many((topic, b"%d" % number) for number in range(10))
    answer = threading.Event()
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        check_copy(replica, client, topic, 10)
        with slow_member(server, topic, answer):
            client.refresh_topic(topic)
            replica.wait_for(lambda: replica.get("health")["refreshing"])
            assert len(replica.records()) == 10
            assert copies_of(replica) == ["1", "2"]
            answer.set()
            wait_refreshed(replica, client, topic)
        check_copy(replica, client, topic, 10)
        assert copies_of(replica) == ["2"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_refresh_that_is_given_up_leaves_the_old_copy(
    server: Serve, client: Client, topic: str, tmp_path: Path, is_there: bool
) -> None:
    client.create_topic(topic, refresh_wait_ms=1000)
    client.publish_many((topic, b"%d" % number) for number in range(10))
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        check_copy(replica, client, topic, 10)
        with slow_member(server, topic, threading.Event()):
            client.refresh_topic(topic)
            replica.wait_for(lambda: replica.get("health")["refreshing"])
            if not is_there:
                replica.kill()
            until(lambda: client.refresh_status(topic).state == "ABORTED")
        if not is_there:
            replica.restart()
        client.publish(topic, b"10")
        check_copy(replica, client, topic, 11)
        assert copies_of(replica) == ["1"]
        assert "abandoning the new copy" in replica.stderr


def test_a_new_copy_that_nobody_will_complete_is_given_up(
    server: Serve, client: Client, topic: str, tmp_path: Path
) -> None:
    client.publish_many((topic, b"%d" % number) for number in range(10))
    with ReplicaProcess(tmp_path, quiet(server), topic) as replica:
        check_copy(replica, client, topic, 10)
        with slow_member(server, topic, threading.Event()):
            client.refresh_topic(topic)
            replica.wait_for(lambda: replica.get("health")["refreshing"])
        client.delete_group(f"{topic}-group")
        client.publish(topic, b"10")
        check_copy(replica, client, topic, 11)
        replica.wait_for(lambda: not replica.get("health")["refreshing"])
        check_copy(replica, client, topic, 11)


def test_whoever_is_killed_in_a_refresh_it_is_completed(topic: str, tmp_path: Path) -> None:
    seed = 9
    print("seed", seed)
    random = Random(seed)
    with Serve(tmp_path / "broker") as server, Client(f"127.0.0.1:{server.port}") as client:
        client.create_topic(topic, partitions=2)
        with ReplicaProcess(tmp_path / "replica", quiet(server), topic, STORAGE_SEGMENT_SIZE="20kB") as replica:
            for victim in (replica, server, replica, server):
                with publishing(server.port, topic, 1000):
                    wait_some_more(replica, 100)
                    client.refresh_topic(topic)
                    for _ in range(random.randint(0, 5)):
                        replica.get("stats")
                    victim.kill()
                    victim.restart()
                    wait_refreshed(replica, client, topic)
            check_copy(replica, client, topic, 4000)
            assert len(copies_of(replica)) == 1


@contextmanager
def slow_member(server: Serve, topic: str, answer: threading.Event) -> Iterator[None]:
    """Another member of the group, which answers RESET when it is let, or leaves."""
    told, left = threading.Event(), threading.Event()

    def hear(_: str) -> None:
        told.set()
        while not answer.wait(0.05) and not left.is_set():
            pass

    def read() -> None:
        with (
            Client(f"127.0.0.1:{server.port}", name="slow") as client,
            client.subscribe(
                topic, group=f"{topic}-group", mode="partitioned", on_reset=hear, on_ready=lambda _: None
            ) as subscription,
        ):
            joined.set()
            while not left.is_set():
                with suppress(TimedOut, RefreshAborted, Closed):
                    subscription.get(timeout=0.1)

    joined = threading.Event()
    thread = threading.Thread(target=read)
    thread.start()
    assert joined.wait(PATIENCE_S)
    try:
        yield
    finally:
        left.set()
        thread.join()


def until(is_so: Callable[[], bool]) -> None:
    """For what only the broker tells."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.01)
