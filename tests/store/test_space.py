"""A full disk: what frees it can still be stored, and everybody is told."""

from __future__ import annotations

import contextlib
import errno
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AppendFailed, PenstockError
from penstock.log.policy import Policy
from penstock.model.batch import encode
from penstock.outcome import Outcome
from penstock.store.meta import Change
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import memory_meta, values
from tests.support.registries import until
from tests.support.server import Flux, Serve
from tests.support.small_disks import small_file_system

DATA = Path("/data")
RESERVE = 20_000


def open_store(disk: FaultyFiles) -> Store:
    settings = StoreSettings(disk_reserve_bytes=RESERVE)
    return Store(DATA, files=disk, clock=ManualClock(), meta=memory_meta(), settings=settings)


def publish(store: Store, topic_id: int, value: bytes) -> PenstockError | None:
    outcomes: list[PenstockError | None] = []
    try:
        store.log(topic_id).append(encode([value], timestamp=0), outcome=Outcome(outcomes.append))
    except PenstockError as error:
        return error
    store.flush()
    return outcomes[0]


def fill(store: Store, topic_id: int) -> int:
    """Publish until that is refused; how many were taken."""
    count = 0
    while publish(store, topic_id, bytes(1000)) is None:
        count += 1
    return count


def test_a_full_disk_takes_what_frees_it_and_then_messages_again() -> None:
    disk = FaultyFiles(capacity=200_000)
    with open_store(disk) as store:
        topic = store.create_topic("orders", policy=Policy(segment_bytes=10_000))
        taken = fill(store, topic.id)
        assert taken > 50
        assert disk.sizes(DATA)["reserve"] == RESERVE
        [problem] = store.health.problems.values()
        assert "the disk is full" in problem
        assert "storage.disk_reserve_bytes" in problem
        with pytest.raises(AppendFailed, match=r"the disk is full: \d+ of 200000 bytes are free"):
            store.log(topic.id).append(encode([b"x"], timestamp=0))
        with pytest.raises(AppendFailed, match="the disk is full"):
            store.create_topic("more")
        # The state topic goes on, as far as the reserve reaches.
        for number in range(20):
            store._write_state([Change("position", "a", [number, "x" * 100])])
        assert "reserve" not in disk.sizes(DATA)
        assert isinstance(publish(store, topic.id, b"x"), AppendFailed), "it is not for messages"
        store.alter_topic(replace(topic, policy=replace(topic.policy, retain_bytes=50_000)))
        store.upkeep()
        assert store.health.problems == {}
        assert disk.sizes(DATA)["reserve"] == RESERVE
        assert publish(store, topic.id, b"again") is None
        assert values(store.log(topic.id))[-1] == b"again"
    with open_store(disk) as store:
        assert store.topics[0].policy.retain_bytes == 50_000
        assert store.state.get("position", "a")[0] == 19


def test_a_start_on_a_full_disk_keeps_the_reserve_and_serves() -> None:
    disk = FaultyFiles(capacity=200_000)
    with open_store(disk) as store:
        topic = store.create_topic("orders", policy=Policy(segment_bytes=10_000))
        taken = fill(store, topic.id)
    disk.set_content(DATA / "ballast", bytes(disk.space(DATA)[0]))  # somebody else takes the rest
    disk.kill()
    with open_store(disk) as store:
        assert "the disk is full" in store.health.problems["disk"]
        assert len(values(store.log(topic.id))) == taken
        store.delete_topic(topic.id)
        store.space.check()
        assert store.health.problems == {}
        store.create_topic("more")


def test_without_a_reserve_a_full_disk_is_reported_when_a_write_fails() -> None:
    disk = FaultyFiles()
    with Store(DATA, files=disk, clock=ManualClock(), meta=memory_meta()) as store:
        topic = store.create_topic("orders")
        disk.fail("write", errno.ENOSPC)
        assert isinstance(publish(store, topic.id, b"x"), AppendFailed)
        assert "the disk is full" in store.health.problems["disk"]
        assert publish(store, topic.id, b"y") is None
        store.space.check()
        assert store.health.problems == {}
        assert "reserve" not in disk.sizes(DATA)


def test_usage_tells_how_full_the_disk_is() -> None:
    disk = FaultyFiles(capacity=200_000)
    with open_store(disk) as store:
        store.space.check()
        used, limit = store.usage()["disk_bytes"]
        assert limit == 200_000
        assert RESERVE < used < 2 * RESERVE


# A real process on a disk that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", mebibytes=8) as directory:
        yield directory


def take_all(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def ask(server: Serve, method: str, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.ports['http']}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_server_on_a_full_disk_lets_its_operator_make_room(small_disk: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "storage_data_dir": small_disk / "data",
        "storage_disk_reserve_bytes": 1 << 20,
        "storage_upkeep_ms": 100,
        "topic_segment_bytes": 200_000,
    }
    with Serve(tmp_path, **settings) as server, Flux(server) as flux:
        while (answer := flux.publish("orders.eu", bytes(20_000))).startswith("+OK"):
            pass
        assert "APPEND_FAILED" in answer
        # Whatever else is on this disk takes the rest.
        take_all(small_disk / "ballast")
        status, answer = ask(server, "GET", "/healthz")
        assert (status, "the disk is full" in str(answer)) == (503, True)
        assert "the disk is full" in flux.publish("orders.eu", b"x")
        status, topic = ask(server, "PATCH", "/admin/topics/orders", policy={"retain_bytes": 1_000_000})
        assert (status, topic["policy"]["retain_bytes"]) == (200, 1_000_000)
        until(lambda: ask(server, "GET", "/healthz")[0] == 200)
        assert flux.publish("orders.eu", b"x").startswith("+OK")
        used = ask(server, "GET", "/varz")[1]["limits"]["disk_bytes"]
        assert 0 < used["used"] < used["limit"] == 8 << 20
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}/metrics") as metrics:
            text = metrics.read().decode()
        assert "broker_disk_total_bytes 8.388608e+06" in text
        assert "broker_disk_free_bytes" in text
