"""How many files a store has open: few, however many partitions there are, and never at the price of a lost error."""

from __future__ import annotations

import errno
import json
import stat
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import AppendFailed, LogFailed, PenstockError, TooManyTopics
from penstock.log.appender import LogState
from penstock.log.policy import Durability, Policy
from penstock.model.batch import Batch, encode
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.replica.copies import Copies, OriginTopic
from penstock.store.meta import Meta
from penstock.store.store import Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, values
from tests.support.server import Flux, Serve

DATA = Path("/data")
FLUSH = Policy(durability=Durability.FLUSH)
# Besides segments: the lock, and what is opened for a moment.
SPARE = 4


def open_store(files: FaultyFiles, **settings: Any) -> Store:
    return Store(DATA, files=files, meta=Meta(None), clock=ManualClock(), settings=StoreSettings(**settings))


@pytest.mark.parametrize("policy", [Policy(), FLUSH])
def test_a_store_with_many_partitions_has_few_files_open(policy: Policy) -> None:
    disk = FaultyFiles(descriptors_max=4 + SPARE)
    with open_store(disk, open_segments_max=4, tail_bytes_max=0) as store:
        topics = [store.create_topic(f"topic {number}", partitions=2, policy=policy) for number in range(10)]
        for step in range(3):
            for topic in topics:
                for partition in range(2):
                    append(store.log(topic.id, partition), b"%d" % step)
            store.flush()
    with open_store(disk, open_segments_max=4, tail_bytes_max=0) as store:
        for topic in store.topics:
            for partition in range(2):
                assert values(store.log(topic.id, partition)) == [b"0", b"1", b"2"]
        assert disk.open_files <= 4 + SPARE
        used, limit = store.usage()["open_segments"]
        assert used <= limit == 4


def test_a_segment_with_unsynced_bytes_stays_open_so_that_its_fsync_error_is_told() -> None:
    disk = FaultyFiles()
    with open_store(disk, open_segments_max=2) as store:
        unsynced, *others = [store.log(store.create_topic(name, policy=FLUSH).id) for name in "abcde"]
        append(unsynced, b"x")
        written = store.rounds.take_written_round()
        assert written
        written.run()
        store.rounds.finish(written)
        file = unsynced.segments[-1].file
        for log in others:
            log.segments[-1].file.size()
        assert unsynced.segments[-1].file is file, "it was not closed"
        disk.fail("sync", errno.EIO, path_suffix=f"{unsynced.directory.parent.name}/0/{0:020d}.log")
        store.flush()
        assert unsynced.state is LogState.FAILED
        # Nobody waits for its sync any more, so it does not take a descriptor from the others.
        for log in others * 2:
            log.segments[-1].file.size()
        assert unsynced.segments[-1].is_closable
        assert store.usage()["open_segments"].used <= 2
        with pytest.raises(LogFailed):
            append(unsynced, b"y")


def test_without_descriptors_idle_segments_are_closed_and_appends_go_on() -> None:
    disk = FaultyFiles()
    with open_store(disk, open_segments_max=100, tail_bytes_max=0) as store:
        logs = [store.log(store.create_topic(f"topic {number}").id) for number in range(20)]
        disk.descriptors_max = disk.open_files  # somebody else has the rest
        store._open_segments.drop(logs[0].segments[-1])
        disk.descriptors_max -= 1
        outcomes: list[PenstockError | None] = []
        logs[0].append(_batch(b"x"), outcome=Outcome(outcomes.append))
        store.flush()
        assert outcomes == [None]


def test_an_append_that_finds_no_descriptor_is_refused_and_the_log_goes_on() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        log = store.log(store.create_topic("orders").id)
        store._open_segments.drop(log.segments[-1])
        disk.descriptors_max = 0
        outcomes: list[PenstockError | None] = []
        log.append(_batch(b"x"), outcome=Outcome(outcomes.append))
        store.flush()
        assert [type(error) for error in outcomes] == [AppendFailed]
        disk.descriptors_max = None
        append(log, b"y")
        store.flush()
        assert values(log) == [b"y"]


@pytest.mark.parametrize("free", range(1, 8))
def test_a_topic_that_finds_no_descriptors_leaves_nothing_and_is_made_later(free: int) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        before = disk.open_files
        # The lock and the state topic's segment cannot be closed for it.
        disk.fail("sync_directory", errno.EMFILE, after=free)
        disk.fail("open", errno.EMFILE, after=free)
        disk.descriptors_max = before + free
        try:
            store.create_topic("orders", partitions=6)
        except AppendFailed:
            assert [topic.name for topic in store.topics] == []
            assert disk.open_files <= before
        disk.heal()
        if not store.topics:
            store.create_topic("orders", partitions=6)
        append(store.log(store.topics[0].id, 5), b"x")
        store.flush()
    with open_store(disk) as store:
        assert values(store.log(store.topics[0].id, 5)) == [b"x"]


def test_partitions_are_limited_whoever_makes_them() -> None:
    disk = FaultyFiles()
    with open_store(disk, partitions_max=4) as store:
        topic = store.create_topic("orders", partitions=3)
        with pytest.raises(TooManyTopics, match="topic bills cannot get 2 more partitions: there are 3 of at most 4 "):
            store.create_topic("bills", partitions=2)
        with pytest.raises(TooManyTopics, match=r"storage\.partitions_max"):
            store.alter_topic(type(topic)(topic.id, topic.name, 5, topic.policy))
        store.alter_topic(type(topic)(topic.id, topic.name, 4, topic.policy))
        assert store.usage()["partitions"] == (4, 4)
        store.delete_topic(topic.id)
        store.create_topic("bills", partitions=2)


def _batch(value: bytes) -> Batch:
    return encode([value], timestamp=0)


# A real process


class _Few(Serve):
    """A server that may have few files open."""

    descriptors_max = 64


def _get(server: Serve, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}{path}") as answer:
        return json.load(answer)


def test_a_server_with_few_descriptors_makes_and_reopens_many_topics(tmp_path: Path) -> None:
    with _Few(tmp_path, topic_durability="flush") as server:
        with Flux(server) as flux:
            for number in range(60):
                assert flux.publish(f"topic{number}.x", b"%d" % number).startswith("+OK")
        assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) <= server.descriptors_max
        server.kill()
        server.restart()
        with Flux(server) as flux:
            for number in range(0, 60, 7):
                assert flux.publish(f"topic{number}.x", b"more").startswith("+OK")
        limits = _get(server, "/varz")["limits"]
        assert limits["partitions"]["used"] >= 60
        assert limits["open_segments"]["used"] <= limits["open_segments"]["limit"] == 32


def test_a_copy_is_private_whatever_the_umask(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "copy"
    copies = Copies(directory, "orders", segment_bytes_max=1 << 20)
    copies.append(OriginTopic("orders", 1), {0: Run([b"orders"], [b"x"])})
    paths = [directory.parent, *tmp_path.rglob("*")]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    copies.close()
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if not path.is_dir()} == {0o600}
    assert {"LOCK", "index-1.db", f"{0:020}.log"} <= {path.name for path in paths}


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as flux:
        assert flux.publish("orders.eu", b"x").startswith("+OK")
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [server.data, *server.data.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {"LOCK", "meta.db", f"{0:020d}.log"} <= {path.name for path in modes}
