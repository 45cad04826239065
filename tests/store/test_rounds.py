"""The rounds that write and sync all logs of a store together."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.awaiting import settled
from penstock.errors import (
    AppendFailed,
    LogFailed,
    PenstockError,
)
from penstock.log.appender import LogState
from penstock.log.files import SYNC_EACH_MAX, OsFiles
from penstock.log.policy import Durability, Policy, Topic
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.store.store import READERS, Store, StoreSettings
from penstock.testing import FaultyFiles, ManualClock
from tests.support.logs import append, values
from tests.support.stores import FLUSH, LARGE, SMALL, batch, drive, hold, open_store, running
from tests.support.watched import Call, WatchedFiles


def test_concurrent_appends_are_all_committed_and_share_their_syncs(tmp_path: Path) -> None:
    """ST-02, ST-03, ST-06: group commit."""
    files = WatchedFiles(OsFiles())
    store = Store(tmp_path, files=files)
    synced, flushed = store.create_topic("synced"), store.create_topic("flushed", policy=FLUSH)
    appended: dict[int, dict[int, bytes]] = {synced.id: {}, flushed.id: {}}

    async def produce(topic: Topic, producer: int) -> None:
        for number in range(5):
            value = b"%d.%d" % (producer, number)
            offset = await store.append(store.log(topic.id), batch(value))
            assert store.log(topic.id).committed > offset
            assert offset not in appended[topic.id]
            appended[topic.id][offset] = value

    async def main() -> None:
        async with running(store), asyncio.TaskGroup() as group:
            for topic in (synced, flushed):
                for producer in range(50):
                    group.create_task(produce(topic, producer))

    files.calls.clear()
    drive(main)
    syncs = files.count("sync", ".log")
    for topic in (synced, flushed):
        assert values(store.log(topic.id)) == [appended[topic.id][offset] for offset in range(250)]
    assert 0 < syncs < 100, "500 appends"
    assert store.rounds.unflushed.used == 0
    store.close()
    with Store(tmp_path) as store:
        for topic in (synced, flushed):
            assert len(values(store.log(topic.id))) == 250


def test_what_arrives_while_a_round_runs_goes_into_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store), asyncio.TaskGroup() as group:
                gate = hold(files, "sync", log)
                first = group.create_task(store.append(log, batch(b"first")))
                await gate.reached.wait()
                files.calls.clear()
                others = [group.create_task(store.append(log, batch(b"%d" % number))) for number in range(20)]
                await asyncio.sleep(0)
                assert (first.done(), log.end, log.committed) == (False, 21, 0)
                assert files.calls == []
                gate.open()
                assert await first == 0
                assert [await other for other in others] == list(range(1, 21))
                assert [call.name for call in files.calls] == ["write", "sync"]

    drive(main)


def test_readers_of_a_flush_topic_do_not_wait_for_the_sync_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            synced = store.log(store.create_topic("synced").id)
            flushed = store.log(store.create_topic("flushed", policy=FLUSH).id)
            async with running(store), asyncio.TaskGroup() as group:
                await store.append(flushed, batch(b"reserves offsets"))
                gate = hold(files, "sync", synced)
                slow = group.create_task(store.append(synced, batch(b"a")))
                await gate.reached.wait()
                assert await store.append(flushed, batch(b"b")) == 1
                assert [found.columns().values() for found in await store.read(flushed, 1, 1)] == [[b"b"]]
                assert not slow.done()
                gate.open()

    drive(main)


@pytest.mark.parametrize("before", [0, 1])
def test_messages_enough_for_a_sync_do_not_wait_for_the_interval_of_earlier_ones(tmp_path: Path, before: int) -> None:
    """ST-04, ST-05: whichever is first."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files, settings=StoreSettings(flush_ms=10**9, flush_messages=500)) as store:
            log = store.log(store.create_topic("orders", policy=FLUSH).id)
            async with running(store):
                await store.append(log, batch(b"reserves offsets"))
                for _ in range(before):
                    await store.append(log, batch(b"waits for its interval"))
                gate = hold(files, "sync", log)
                await store.append(log, batch(*[b"a"] * 500))
                await gate.reached.wait()
                gate.open()

    drive(main)


def test_the_first_append_to_a_flush_topic_does_not_wait_for_the_interval_of_another(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path, settings=StoreSettings(flush_ms=10**9)) as store:
            one, other = (store.log(store.create_topic(name, policy=FLUSH).id) for name in ("one", "other"))
            async with running(store):
                await store.append(one, batch(b"reserves offsets"))
                await store.append(one, batch(b"waits for its interval"))
                assert await store.append(other, batch(b"reserves offsets")) == 0

    drive(main)


def test_a_flush_topic_is_synced_in_time_though_its_timer_was_early(tmp_path: Path) -> None:
    """Timers of the loop are rounded; the clock decides."""

    async def main() -> None:
        clock = ManualClock()
        with Store(tmp_path, clock=clock, settings=StoreSettings(flush_ms=1)) as store:
            log = store.log(store.create_topic("orders", policy=FLUSH).id)
            async with running(store):
                await store.append(log, batch(b"reserves offsets"))
                await store.append(log, batch(b"a"))
                await asyncio.sleep(0.02)  # the timer fires, and for the clock no time has passed
                assert log.marks.durable == 1
                clock.advance(1000)
                while log.marks.durable < log.end:
                    await asyncio.sleep(0.001)

    drive(main)


def test_a_flush_topic_is_synced_after_its_interval_and_after_so_many_messages(tmp_path: Path) -> None:
    """ST-04, ST-05"""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        for settings, messages in (
            (StoreSettings(flush_ms=1), 1),
            (StoreSettings(flush_ms=10**9, flush_messages=500), 500),
        ):
            with Store(tmp_path / str(messages), files=files, settings=settings) as store:
                log = store.log(store.create_topic("orders", policy=FLUSH).id)
                async with running(store):
                    await store.append(log, batch(b"reserves offsets"))
                    gate = hold(files, "sync", log)
                    await store.append(log, batch(*[b"a"] * messages))
                    assert log.marks.durable == 1
                    await gate.reached.wait()
                    gate.open()
                assert log.marks.durable == log.end == 1 + messages

    drive(main)


@pytest.mark.parametrize("policy", [Policy(), FLUSH], ids=["fsync", "flush"])
def test_what_fails_in_a_round_is_told_to_those_who_wait(policy: Policy) -> None:
    async def main() -> None:
        disk = FaultyFiles()
        with open_store(disk) as store:
            bad, good = (store.log(store.create_topic(name, policy=policy).id) for name in ("bad", "good"))
            async with running(store):
                await asyncio.gather(store.append(bad, batch(b"a")), store.append(good, batch(b"a")))
                disk.fail("write", errno.ENOSPC, path_suffix=str(bad.segments[0].path))
                answers = await asyncio.gather(
                    store.append(bad, batch(b"b")),
                    store.append(good, batch(b"b")),
                    store.append(bad, batch(b"c")),
                    return_exceptions=True,
                )
                assert [type(answer) for answer in answers] == [AppendFailed, int, AppendFailed]
                assert await store.append(bad, batch(b"d")) == 1
            assert (values(bad), values(good)) == ([b"a", b"d"], [b"a", b"b"])

    drive(main)


def test_a_log_that_failed_refuses_those_who_append_and_serves_those_who_read() -> None:
    async def main() -> None:
        disk = FaultyFiles()
        with open_store(disk, tail_bytes_max=0) as store:
            bad, good = (store.log(store.create_topic(name).id) for name in ("bad", "good"))
            async with running(store):
                await store.append(bad, batch(b"a"))
                disk.fail("sync", errno.EIO, path_suffix=str(bad.segments[0].path))
                answers = await asyncio.gather(
                    *(store.append(log, batch(b"b")) for log in (bad, good, bad)), return_exceptions=True
                )
                assert [type(answer) for answer in answers] == [LogFailed, int, LogFailed]
                with pytest.raises(LogFailed):
                    await store.append(bad, batch(b"c"))
                [found] = await store.read(bad, 0, 1000)
                assert found.columns().values() == [b"a"]
                assert await store.append(good, batch(b"c")) == 1

    drive(main)


def test_cancel_waits_for_the_round_that_runs_and_close_makes_the_rest_durable(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        store = Store(tmp_path, files=files)
        log = store.log(store.create_topic("orders").id)
        rounds = asyncio.create_task(store.run())
        gate = hold(files, "sync", log)
        under_way = asyncio.create_task(store.append(log, batch(b"under way")))
        await gate.reached.wait()
        waiting = asyncio.create_task(store.append(log, batch(b"waiting")))
        await asyncio.sleep(0)
        rounds.cancel()
        await asyncio.wait([rounds, under_way], timeout=0)
        assert (rounds.done(), under_way.done()) == (False, False)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await rounds
        assert await under_way == 0
        late = asyncio.create_task(store.append(log, batch(b"late")))
        await asyncio.sleep(0)
        store.close()
        assert (await waiting, await late) == (1, 2)

    drive(main)
    with Store(tmp_path) as store:
        assert values(store.log(1)) == [b"under way", b"waiting", b"late"]


def test_cancel_and_close_leave_nothing_half_done_whichever_lane_waits_for_the_other(tmp_path: Path) -> None:
    """A flush topic that must roll waits for its sync in the other lane, and the store is stopped meanwhile."""

    async def main() -> None:
        files = WatchedFiles(OsFiles())
        store = Store(tmp_path, files=files)
        topic = store.create_topic("orders", policy=Policy(segment_bytes=4096, durability=Durability.FLUSH))
        log = store.log(topic.id)
        rounds = asyncio.create_task(store.run())
        gate = hold(files, "sync", log)
        first = asyncio.create_task(store.append(log, batch(b"0:" + LARGE)))
        await gate.reached.wait()
        second = asyncio.create_task(store.append(log, batch(b"1:" + LARGE)))
        await asyncio.sleep(0)
        rounds.cancel()
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await rounds
        store.close()
        assert (await first, await second) == (0, 1)

    drive(main)
    with Store(tmp_path) as store:
        log = store.log(1)
        assert (values(log), log.end) == ([b"0:" + LARGE, b"1:" + LARGE], 2)
        assert not log.verify().damage


def test_what_waits_when_run_begins_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            logs = [
                store.log(store.create_topic(name, policy=policy).id) for name, policy in (("a", SMALL), ("b", FLUSH))
            ]
            appends = [asyncio.create_task(store.append(log, batch(b"early"))) for log in logs]
            await asyncio.sleep(0)
            async with running(store):
                assert [await task for task in appends] == [0, 0]

    drive(main)


@pytest.mark.parametrize("call_name", ["write", "sync"])
def test_an_unexpected_error_in_a_round_fails_its_log_and_no_other(tmp_path: Path, call_name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            log = store.log(store.create_topic("orders").id)
            other = store.log(store.create_topic("other").id)
            async with running(store):
                assert await store.append(log, batch(b"a")) == 0

                def before(call: Call) -> None:
                    if call.name == call_name and call.path.parent == log.directory:
                        raise RuntimeError("a bug")

                files.before = before
                with pytest.raises(LogFailed, match="a bug"):
                    await store.append(log, batch(b"b"))
                assert await store.append(other, batch(b"c")) == 0
                assert log in store.rounds.failed
                assert other not in store.rounds.failed
                assert sum(store.health.faults.values()) == 1
                with pytest.raises(LogFailed):
                    await store.append(log, batch(b"d"))
                assert [found.count for found in log.read(0, 1)] == [1]
            files.before = None

    drive(main)
    with Store(tmp_path) as store:
        assert store.log(store.topics[0].id).end >= 1


def test_a_run_that_cannot_be_encoded_is_taken_back_and_the_log_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store):
                outcome = Outcome()
                log.gather(Run([b"orders"], [None]), outcome)  # type: ignore[list-item]
                with pytest.raises(AppendFailed, match="encoding"):
                    await settled(outcome)
                outcome = Outcome()
                assert log.gather(Run([b"orders"], [b"sound"]), outcome) == 0
                await settled(outcome)
                assert store.health.faults == {"write": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.log.appender.batch_bytes", lambda _run: 100)
        drive(main)


def test_one_who_waits_and_raises_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)

            def raises(_error: PenstockError | None) -> None:
                raise RuntimeError("a bug")

            async with running(store):
                log.append(batch(b"a"), outcome=Outcome(raises))
                assert await store.append(log, batch(b"b")) == 1
                assert store.health.faults == {"finish": 1}
                assert log not in store.rounds.failed

    drive(main)


def test_an_append_whose_caller_went_away_is_stored_all_the_same(tmp_path: Path) -> None:
    async def main() -> None:
        with Store(tmp_path) as store:
            log = store.log(store.create_topic("orders").id)
            async with running(store):
                gone = asyncio.create_task(store.append(log, batch(b"a")))
                await asyncio.sleep(0)
                gone.cancel()
                assert await store.append(log, batch(b"b")) == 1
            assert values(log) == [b"a", b"b"]

    drive(main)


def test_cold_data_is_read_off_the_loop_and_hot_data_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        readers: list[threading.Thread] = []

        def before(call: Call) -> None:
            if call.name in ("read", "view", "open"):
                readers.append(threading.current_thread())

        with Store(tmp_path, files=files, settings=StoreSettings(tail_bytes_max=10_000)) as store:
            log = store.log(store.create_topic("orders", policy=SMALL).id)
            async with running(store):
                for number in range(10):
                    await store.append(log, batch(b"%d:" % number + LARGE))
                files.before = before
                [hot] = await store.read(log, 9, 1)
                assert readers == []
                cold = await asyncio.gather(*(store.read(log, number, 1) for number in range(5)))
                files.before = None
            assert hot.columns().values() == [b"9:" + LARGE]
            assert [found[0].columns().values()[0][:2] for found in cold] == [b"%d:" % number for number in range(5)]
            assert readers
            assert threading.main_thread() not in readers

    drive(main)


def test_the_readers_do_not_run_ahead_of_a_busy_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have read, and nobody has taken yet, is limited."""

    async def main() -> None:
        with Store(tmp_path, settings=StoreSettings(tail_bytes_max=0)) as store:
            log = store.log(store.create_topic("orders", policy=SMALL).id)
            async with running(store):
                for number in range(3 * READERS):
                    await store.append(log, batch(b"%d" % number))
                begun: list[int] = []
                read_disk = log.read_disk

                def count(offset: int, *args: Any) -> Any:
                    begun.append(offset)
                    return read_disk(offset, *args)

                monkeypatch.setattr(log, "read_disk", count)
                reads = [asyncio.create_task(store.read(log, number, 1)) for number in range(3 * READERS)]
                while not begun:
                    await asyncio.sleep(0)
                threading.Event().wait(0.2)  # the loop is busy, and the readers could read on
                assert len(begun) <= 2 * READERS, "those that are read, and those whose result the loop has just taken"
                assert [len(found) for found in await asyncio.gather(*reads)] == [1] * len(reads)

    drive(main)


@pytest.mark.parametrize("name", ["write", "sync"])
def test_a_topic_that_is_deleted_while_a_round_writes_it_does_not_stop_the_others(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        files = WatchedFiles(OsFiles())
        with Store(tmp_path, files=files) as store:
            gone, kept = store.create_topic("gone"), store.create_topic("kept")
            log = store.log(gone.id)
            async with running(store) as rounds:
                gate = hold(files, name, log)
                refused = asyncio.create_task(store.append(log, batch(b"a")))
                await gate.reached.wait()
                store.delete_topic(gone.id)
                gate.open()
                await asyncio.wait([refused])
                assert isinstance(refused.exception(), PenstockError)
                append_kept = asyncio.create_task(store.append(store.log(kept.id), batch(b"b")))
                await asyncio.wait([rounds, append_kept], return_when=asyncio.FIRST_COMPLETED)
                assert not rounds.done()
                assert await append_kept == 0
            assert store.rounds.unflushed.used == 0

    drive(main)
    with Store(tmp_path) as store:
        assert [topic.name for topic in store.topics] == ["kept"]


def test_many_dirty_logs_are_synced_by_one_sync_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_files = OsFiles()
    if os_files._syncfs is None:
        pytest.skip("this system has no syncfs that tells of failures")
    partitions = 40
    assert partitions > SYNC_EACH_MAX
    syncfs = os_files._syncfs
    synced: list[int] = []

    def count(files: Any) -> list[OSError | None]:
        synced.append(len(files))
        return syncfs(files)

    monkeypatch.setattr(os_files, "_syncfs", count)

    async def main() -> None:
        with Store(tmp_path, files=WatchedFiles(os_files)) as store:
            topic = store.create_topic("orders", partitions=partitions)
            async with running(store):
                offsets = await asyncio.gather(
                    *(store.append(store.log(topic.id, number), batch(b"%d" % number)) for number in range(partitions))
                )
                assert offsets == [0] * partitions
                assert synced == [partitions]

    drive(main)
    with Store(tmp_path) as store:
        assert [values(store.log(1, number)) for number in range(partitions)] == [
            [b"%d" % number] for number in range(partitions)
        ]


def test_a_failed_sync_of_the_file_system_fails_every_log_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_files = OsFiles()
    with Store(tmp_path, files=os_files) as store:
        topic = store.create_topic("orders", partitions=20)
        logs = [store.log(topic.id, number) for number in range(20)]
        answers: list[PenstockError | None] = []
        for log in logs:
            log.append(batch(b"a"), outcome=Outcome(answers.append))

        def fail(files: list[Any]) -> list[OSError | None]:
            return [OSError(errno.EIO, "syncfs: Input/output error") for _ in files]

        monkeypatch.setattr(os_files, "_syncfs", fail)
        store.flush()
        assert [type(error) for error in answers] == [LogFailed] * 20
        assert {log.state for log in logs} == {LogState.FAILED}


def test_a_few_dirty_logs_are_synced_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os_files = OsFiles()
    monkeypatch.setattr(os_files, "_syncfs", None)
    with Store(tmp_path, files=os_files) as store:
        topic = store.create_topic("orders", partitions=SYNC_EACH_MAX)
        for number in range(SYNC_EACH_MAX):
            append(store.log(topic.id, number), b"%d" % number)
        store.flush()
        assert [store.log(topic.id, number).marks.durable for number in range(SYNC_EACH_MAX)] == [1] * SYNC_EACH_MAX
