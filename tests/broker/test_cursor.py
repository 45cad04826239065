"""Cursors: where they stand, what they read at once, and what of it they keep."""

from __future__ import annotations

from typing import Any, Final

import pytest

from penstock.broker.cursor import AHEAD_BYTES, ReadAhead
from penstock.broker.start import Start
from penstock.log.log_reader import LogReader
from penstock.log.policy import Cleanup, Policy
from penstock.model.batch import Batch
from penstock.testing import FaultyFiles
from tests.support.brokers import Life, in_loop, run_of

ORDERS: Final = b"orders"


class Reads:
    """Counts what is read from the disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        read_disk = LogReader.read_disk

        def counted(reader: LogReader, offset: int, bytes_max: int, *others: Any) -> list[Batch]:
            self.sizes.append(bytes_max)
            return read_disk(reader, offset, bytes_max, *others)

        patch.setattr(LogReader, "read_disk", counted)


async def fill(life: Life, count: int, *, size: int = 10) -> None:
    """One batch for each message."""
    for number in range(count):
        await life.publish_run(run_of(ORDERS, b"%d" % number + bytes(size)))


@in_loop
async def test_a_cursor_that_goes_on_reads_many_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    async with Life(FaultyFiles(), tail_bytes_max=0) as life:
        await fill(life, 100)
        reads.sizes.clear()
        cursor = life.partition(ORDERS).cursor(0)
        offsets: list[int] = []
        while (part := await life.do(cursor.read())) is not None:
            offsets += part.run.all_offsets()
            cursor.offset = part.following
        assert offsets == list(range(100))
        assert reads.sizes == [1, AHEAD_BYTES]


@in_loop
async def test_to_look_at_a_batch_and_read_it_in_parts_reads_the_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    async with Life(FaultyFiles(), tail_bytes_max=0) as life:
        await life.publish_run(run_of(ORDERS, *(b"%d" % number for number in range(10))))
        reads.sizes.clear()
        cursor = life.partition(ORDERS).cursor(0)
        assert await life.do(cursor.append_time()) == life.clock.now_us()
        for offset in range(10):
            cursor.offset = offset
            part = await life.do(cursor.read())
            assert part is not None
            assert part.first(1).run.values == [b"%d" % offset]
            assert part.first(1).following == offset + 1
        assert len(reads.sizes) == 1


@in_loop
async def test_a_cursor_that_jumps_reads_where_it_stands() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=0) as life:
        await fill(life, 20)
        cursor = life.partition(ORDERS).cursor(0)
        for offset in (0, 1, 2, 19, 3, 4, 1, 18, 0):
            cursor.offset = offset
            part = await life.do(cursor.read())
            assert part is not None
            assert (part.run.all_offsets()[0], part.following) == (offset, offset + 1)


@in_loop
async def test_what_was_read_ahead_is_not_used_after_a_compaction() -> None:
    policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096)
    async with Life(FaultyFiles(), tail_bytes_max=0) as life:
        await life.do(life.broker.changes.create(ORDERS, policy=policy))
        for number in range(200):
            run = run_of(ORDERS, b"%d" % number + bytes(100))
            run.keys = {0: b"%d" % (number % 3)}
            await life.publish_run(run)
        cursor = life.partition(ORDERS).cursor(0)
        for _ in range(2):
            part = await life.do(cursor.read())
            assert part is not None
            cursor.offset = part.following
        assert life.store.usage()["tail_bytes"].used == 0
        life.store.upkeep()
        part = await life.do(cursor.read())
        assert part is not None
        assert not part.run.values or part.run.offset(0) > 100, "the segments that were read ahead are rewritten"


@in_loop
async def test_an_end_and_a_pattern_limit_what_is_read() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders.eu", b"0", b"1")
        await life.stored(b"orders.us", b"2", b"3")
        await life.stored(b"orders.eu", b"4", b"5")
        cursor = life.partition(ORDERS).cursor(1, pattern=b"orders.eu", end=5)
        values = []
        while (part := await life.do(cursor.read())) is not None:
            values += part.run.values
            cursor.offset = part.following
        assert (values, cursor.offset) == ([b"1", b"4"], 5)


@in_loop
async def test_a_message_is_read_at_its_offset_only() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(ORDERS, b"a", b"b")
        partition = life.partition(ORDERS)
        found = [await life.do(partition.cursor(offset).read_message()) for offset in range(3)]
        assert [run and run.values for run in found] == [[b"a"], [b"b"], None]


@in_loop
async def test_all_cursors_together_keep_as_much_as_the_budget_allows() -> None:
    async with Life(FaultyFiles(), tail_bytes_max=0) as life:
        await fill(life, 30, size=1000)
        partition = life.partition(ORDERS)
        partition.read_ahead = ReadAhead(bytes_max=50_000)
        cursors = [partition.cursor(0) for _ in range(5)]
        for expected in range(30):
            for cursor in cursors:
                part = await life.do(cursor.read())
                assert part is not None
                assert part.run.all_offsets()[0] == expected
                cursor.offset = part.following
            assert partition.read_ahead.usage.used <= 50_000


@in_loop
async def test_to_seek_a_time_in_an_empty_log_waits_for_no_other_thread() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(ORDERS))
        cursor = life.partition(ORDERS).cursor(0)
        with pytest.raises(StopIteration):
            cursor.seek_time(0).send(None)
        assert cursor.offset == 0
        # Nor in one whose messages are gone.
        await fill(life, 3)
        await life.do(life.broker.changes.purge(ORDERS, Start.LATEST))
        with pytest.raises(StopIteration):
            cursor.seek_time(0).send(None)
        assert cursor.offset == 3
