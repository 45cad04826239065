"""A store on a disk that is really full: a small file system, where one can be mounted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from penstock.errors import AppendFailed, PenstockError
from penstock.log.policy import Durability, Policy
from penstock.outcome import Outcome
from penstock.store.store import Store, StoreSettings
from tests.support.logs import values
from tests.support.server import Nats, Serve
from tests.support.small_disks import small_file_system
from tests.support.stores import append_flushed, batch, drive, running
from tests.support.web import get


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", mebibytes=4) as directory:
        yield directory


def test_a_full_disk_refuses_appends_loses_nothing_and_works_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    policies = [Policy(segment_bytes=100_000), Policy(segment_bytes=100_000, durability=Durability.FLUSH)]
    acknowledged: list[list[bytes]] = [[], []]
    refusals: list[PenstockError] = []

    async def produce(store: Store, place: int, count: int) -> None:
        log = store.log(1 + place)
        for number in range(count):
            value = b"%d:" % (len(acknowledged[place]) * 1000 + number) + Random(number).randbytes(5000)
            try:
                await store.append(log, batch(value))
                acknowledged[place].append(value)
            except PenstockError as error:
                refusals.append(error)

    async def main() -> None:
        with Store(small_disk / "data", settings=StoreSettings(upkeep_ms=1)) as store:
            for place, policy in enumerate(policies):
                store.create_topic(f"topic {place}", policy=policy)
            async with running(store):
                await asyncio.gather(produce(store, 0, 400), produce(store, 1, 400))
                assert len(refusals) > 100
                assert {type(error) for error in refusals} == {AppendFailed}
                assert "No space left on device" in str(refusals[0])
                assert [values(store.log(1 + place)) for place in range(2)] == acknowledged
                ballast.unlink()
                refusals.clear()
                await asyncio.gather(produce(store, 0, 20), produce(store, 1, 20))
                assert refusals == []
            assert [values(store.log(1 + place)) for place in range(2)] == acknowledged

    drive(main)
    with Store(small_disk / "data") as store:
        assert [values(store.log(1 + place)) for place in range(2)] == acknowledged
        assert not any(store.log(1 + place).verify().damage for place in range(2))


def test_a_store_that_was_killed_on_a_full_disk_opens_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    store = Store(small_disk / "data")
    log = store.log(store.create_topic("orders", policy=Policy(segment_bytes=100_000)).id)
    acknowledged = 0
    full = False

    def done(error: PenstockError | None) -> None:
        nonlocal acknowledged, full
        acknowledged += error is None
        full |= error is not None

    while not full:
        log.append(batch(Random(acknowledged).randbytes(5000)), outcome=Outcome(done))
        store.flush()
    shutil.copytree(small_disk / "data", tmp_path / "killed")
    with Store(tmp_path / "killed") as found:
        assert values(found.log(1)) == [Random(number).randbytes(5000) for number in range(acknowledged)]
        append_flushed(found, found.topics[0], b"more")
    store.close()
    with Store(small_disk / "data") as store:
        assert len(values(store.log(1))) == acknowledged


def test_a_server_starts_on_a_full_disk_without_the_topics_that_it_cannot_make(
    small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(small_disk)
    with Serve(tmp_path) as server, Nats(server) as client:
        client.send("PUB orders 1\r\nx\r\nPING\r\n")
        assert client.line() == "PONG"
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with Serve(tmp_path, config="[topics.payments]\npartitions = 1\n") as server:
        answer = get(server, "/healthz")
        assert answer.status == 503
        assert "payments" in answer.body.decode()
