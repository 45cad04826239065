"""The shared log on memory, on a directory, and on a real S3 server."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.cluster.actions import Reading, Stored, Surveyed, Taken, Unknown
from penstock.cluster.checkpoint import UNTRIMMED, Mark
from penstock.cluster.record import Kind
from penstock.cluster.shared_log import FORMAT, READ_BYTES, SharedLog
from penstock.errors import BadConfig, BadDirectory, CorruptRecord, ReadFailed, UnsupportedFormat
from penstock.object_store import ObjectStore
from tests.cluster.running import IN_FLIGHT, Running
from tests.support.s3_server import BUCKET

pytest.importorskip("obstore")

_numbers = itertools.count()


@pytest.fixture
def in_memory() -> ObjectStore:
    import obstore.store

    return ObjectStore(obstore.store.MemoryStore(), "memory://", ReadFailed)


@pytest.fixture(params=["memory", "directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, in_memory: ObjectStore) -> ObjectStore:
    match request.param:
        case "memory":
            return in_memory
        case "directory":
            (tmp_path / "shared").mkdir()
            return ObjectStore.open(f"file://{tmp_path}/shared", ReadFailed)
        case _:
            request.getfixturevalue("s3_environment")
            return ObjectStore.open(f"s3://{BUCKET}/cluster{next(_numbers)}", ReadFailed)


def test_of_two_records_at_one_position_the_first_stays(store: ObjectStore) -> None:
    log = SharedLog.begin(store)

    assert log.append(0, b"first") == Stored()
    assert log.append(0, b"second") == Taken(b"first")
    assert log.append(0, b"first") == Taken(b"first")
    assert log.read(0, 8) == Reading(0, (b"first",), True, UNTRIMMED)


def test_of_many_writers_one_succeeds(store: ObjectStore) -> None:
    log = SharedLog.begin(store)
    for position in range(3):
        bodies = [b"%d" % number for number in range(8)]
        with ThreadPoolExecutor(8) as workers:
            answers = [*workers.map(lambda body, at=position: log.append(at, body), bodies)]
        (there,) = log.read(position, 1).records

        assert answers.count(Stored()) == 1
        assert answers[bodies.index(there)] == Stored()
        assert answers.count(Taken(there)) == 7


def test_records_are_read_in_order_up_to_a_limit_or_the_first_missing_one(store: ObjectStore) -> None:
    log = SharedLog.begin(store)
    for position in (0, 1, 2, 4):
        log.append(position, b"%d" % position)

    assert log.read(0, 2) == Reading(0, (b"0", b"1"), False, UNTRIMMED)
    assert log.read(1, 9) == Reading(1, (b"1", b"2"), True, UNTRIMMED)
    assert log.read(3, 9) == Reading(3, (), True, UNTRIMMED)
    assert log.read(4, 0) == Reading(4, (), False, UNTRIMMED)
    assert log.last() == 4
    assert log.last(4) == 4
    assert log.last(5) is None


def test_a_survey_finds_the_last_record_beyond_a_missing_one(store: ObjectStore) -> None:
    log = SharedLog.begin(store)
    for position in (0, 1, 3, 4):
        log.append(position, b"%d" % position)

    assert log.survey(2) == Surveyed(2, 4, b"4", UNTRIMMED)
    assert log.survey(5) == Surveyed(5)
    assert log.survey(3) == Surveyed(3)  # it came meanwhile


def test_large_records_are_returned_in_several_readings(in_memory: ObjectStore) -> None:
    log = SharedLog.begin(in_memory)
    large = bytes(READ_BYTES // 2)
    for position in range(3):
        log.append(position, large)

    assert log.read(0, 9) == Reading(0, (large, large), False, UNTRIMMED)
    assert log.read(2, 9) == Reading(2, (large,), True, UNTRIMMED)


def test_what_is_trimmed_is_missing_and_the_mark_says_so(store: ObjectStore) -> None:
    log = SharedLog.begin(store)
    for position in range(5):
        log.append(position, b"%d" % position)
    mark = Mark(1, 4, 4)

    assert log.store_mark(mark) == Stored()
    assert log.store_mark(Mark(1, 3, 3)) == Taken(mark.encode())
    log.delete(((1, 3), (3, 4)))
    log.delete(((1, 3), (3, 4)))

    assert log.read(0, 9) == Reading(0, (b"0",), True, mark)
    assert log.read(4, 9) == Reading(4, (b"4",), True, mark)


def test_the_newest_mark_is_found_by_everyone(store: ObjectStore) -> None:
    log, other = SharedLog.begin(store), SharedLog.begin(store)
    assert other.mark() == UNTRIMMED
    for number in range(1, 4):
        log.store_mark(Mark(number, number * 10, number * 10))

    assert log.mark() == other.mark() == SharedLog.begin(store).mark() == Mark(3, 30, 30)


class Lagging(ObjectStore):
    """A store whose lists show nothing new."""

    def last_name(self, prefix: str, after: str) -> str | None:
        return f"{prefix}{1:020}"


def test_a_list_that_lags_hides_no_mark(in_memory: ObjectStore) -> None:
    log = SharedLog.begin(in_memory)
    lagging = SharedLog(Lagging(in_memory._store, "memory://", ReadFailed))
    for number in range(1, 4):
        log.store_mark(Mark(number, number * 10, number * 10))
        assert SharedLog(lagging._store).mark() == log.mark() == Mark(number, number * 10, number * 10)


# Nodes on it


def test_what_killed_leaders_acknowledged_is_at_their_successors(store: ObjectStore) -> None:
    SharedLog.begin(store)

    async def run() -> None:
        nodes = [Running(f"node{number}", store) for number in range(4)]
        for node in nodes[:3]:
            await node.lead()
            await node.publish(20)
            for number in range(IN_FLIGHT):  # their outcome is nobody's business any more
                node.runner.append(Kind.ROUND, b"late:%d" % number)
            await node.kill()
        await nodes[3].lead()
        await nodes[3].publish(5)
        await nodes[3].kill()

        final = nodes[3].ledger.rounds
        for node in nodes:
            assert len(node.ledger.acknowledged) >= 5
            assert node.ledger.rounds == final[: len(node.ledger.rounds)]
        assert len([body for body in final if b"late" not in body]) == 65
        assert nodes[3].ledger.epochs == [4]

    asyncio.run(run())


# What fails


class Failing(ObjectStore):
    """A store that executes the next request and loses its answer, or does not even execute it."""

    executes = True

    def create(self, name: str, data: bytes) -> None:
        if self.executes:
            super().create(name, data)
        raise ReadFailed(f"{self.url_of(name)}: connection reset")


@pytest.mark.parametrize("executes", [True, False])
def test_a_lost_answer_is_unknown(in_memory: ObjectStore, executes: bool) -> None:
    log = SharedLog.begin(in_memory)
    failing = Failing(in_memory._store, "memory://", ReadFailed)
    failing.executes = executes

    answer = SharedLog(failing).append(0, b"x")

    assert answer == Unknown("memory:/log/00000000000000000000: connection reset")
    assert log.append(0, b"x") == (Taken(b"x") if executes else Stored())


def test_a_record_that_may_not_be_missing_is_named(in_memory: ObjectStore) -> None:
    log = SharedLog.begin(in_memory)
    log.append(3, b"checkpoint")

    assert log.record(3) == b"checkpoint"
    with pytest.raises(CorruptRecord, match=r"memory:/log/00000000000000000004 is missing: restore it"):
        log.record(4)


def test_a_damaged_mark_is_named(in_memory: ObjectStore) -> None:
    log = SharedLog.begin(in_memory)
    in_memory.create(f"trim/{1:020}", b"junk")

    with pytest.raises(CorruptRecord, match="trim mark 1 of the shared log is damaged"):
        log.mark()


def test_an_object_that_is_too_large_is_not_read(in_memory: ObjectStore) -> None:
    log = SharedLog.begin(in_memory)
    in_memory.create(f"trim/{1:020}", bytes(5000))

    with pytest.raises(ReadFailed, match="5000 bytes, at most 4096 are expected"):
        log.mark()


# What is refused at the start


class Replacing(ObjectStore):
    """A store that ignores the condition."""

    def create(self, name: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, name, data)


class Forking(ObjectStore):
    """A store that honours the condition, but not among those who come at once: each believes to have succeeded."""

    def create(self, name: str, data: bytes) -> None:
        try:
            super().create(name, data)
        except FileExistsError:
            if not name.endswith("-race"):
                raise


def test_a_store_without_conditional_creation_is_refused(in_memory: ObjectStore) -> None:
    for kind, reason in ((Replacing, "replaces objects that exist"), (Forking, "lets several writers create")):
        store = kind(in_memory._store, "s3://careless", ReadFailed)
        with pytest.raises(BadConfig, match=f"s3://careless: this object store {reason}.*If-None-Match"):
            SharedLog.begin(store)
        assert store.top_names() == []


def test_a_store_of_something_else_is_refused(in_memory: ObjectStore) -> None:
    in_memory.create("orders.parquet", b"")

    with pytest.raises(BadDirectory, match=r"has 'orders.parquet', so it is not a cluster's: use an empty path"):
        SharedLog.begin(in_memory)


def test_a_newer_format_is_refused(in_memory: ObjectStore) -> None:
    in_memory.create("FORMAT", b"penstock cluster 2\n")

    with pytest.raises(UnsupportedFormat, match="FORMAT is b'penstock cluster 2"):
        SharedLog.begin(in_memory)


def test_a_store_is_tried_once_and_left_clean(store: ObjectStore) -> None:
    SharedLog.begin(store)
    SharedLog.begin(store)

    assert store.read_whole("FORMAT", 100) == FORMAT
    assert store.names("probe/") == {}


@pytest.mark.usefixtures("s3_environment")
def test_a_bucket_that_does_not_exist_is_named() -> None:
    with pytest.raises((ReadFailed, BadConfig), match="s3://nowhere/cluster"):
        SharedLog.open("s3://nowhere/cluster")
