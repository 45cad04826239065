"""Runs that a log gathers into batches, and who is given them when they are committed."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

from penstock.errors import AppendFailed, PenstockError
from penstock.log.appender import GATHER_BYTES
from penstock.log.log import Log
from penstock.log.policy import Durability, Policy
from penstock.model.batch import Batch, encode
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles
from tests.support.logs import messages, open_log

DIRECTORY = Path("/log")


def run(*values: bytes, subject: bytes = b"orders") -> Run:
    return Run([subject] * len(values), list(values))


def watch(log: Log) -> list[tuple[int, list[bytes]]]:
    """What `on_commit` is given, as (base offset, values)."""
    seen: list[tuple[int, list[bytes]]] = []

    def on_commit(fresh: list[Batch | Run]) -> None:
        for item in fresh:
            values = item.values if isinstance(item, Run) else item.columns().values()
            seen.append((item.base_offset, values))
        log.confirm(log.committed)

    log.attach(b"", on_commit, lambda _: None)
    return seen


def test_runs_share_a_batch_until_it_is_written() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    assert [log.gather(run(b"a", b"b")), log.gather(run(b"c"))] == [0, 2]
    log.flush()
    assert log.gather(run(b"d")) == 3
    log.flush()
    batches = log.read(0, 1 << 20)
    assert [batch.columns().values() for batch in batches] == [[b"a", b"b", b"c"], [b"d"]]


def test_a_batch_between_two_runs_keeps_its_place() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    log.gather(run(b"a"))
    log.append(encode([b"b"], timestamp=0))
    log.gather(run(b"c"))
    log.flush()
    assert messages(log) == {0: b"a", 1: b"b", 2: b"c"}


def test_a_batch_of_runs_is_bounded() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    value = bytes(GATHER_BYTES // 4)
    for _ in range(10):
        log.gather(run(value))
    log.flush()
    batches = log.read(0, 1 << 30)
    assert sum(batch.count for batch in batches) == 10
    assert max(batch.size for batch in batches) <= GATHER_BYTES


def test_a_run_that_is_larger_than_a_batch_should_be_is_a_batch_of_its_own() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    log.gather(run(b"small"))
    log.gather(run(bytes(2 * GATHER_BYTES)))
    log.flush()
    assert [batch.count for batch in log.read(0, 1 << 30)] == [1, 1]


def test_keys_replies_and_headers_stay_with_their_messages() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    log.attach(b"orders", lambda _: None, lambda _: None)
    first, second = run(b"a"), run(b"b", b"c", subject=b"orders.eu")
    second.keys[1], second.replies[0], second.headers[1] = b"key", b"reply", b"A: b\r\n"
    log.gather(first)
    log.gather(second)
    log.flush()
    columns = log.read(0, 1 << 20)[0].columns()
    assert columns.subjects() == [None, b"orders.eu", b"orders.eu"]
    assert columns.keys() == [None, None, b"key"]
    assert columns.replies() == [None, b"reply", None]
    assert columns.headers() == [None, None, b"A: b\r\n"]


def test_whoever_serves_the_log_is_given_each_message_once_and_before_its_publisher_is_told() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    seen = watch(log)
    told: list[str] = []

    def done(name: str, error: PenstockError | None) -> None:
        assert error is None
        assert seen == [(0, [b"a", b"b"]), (2, [b"c"])]
        told.append(name)

    log.gather(run(b"a", b"b"), Outcome(partial(done, "gathered")))
    log.append(encode([b"c"], timestamp=0), outcome=Outcome(partial(done, "appended")))
    assert not seen
    log.flush()
    assert told == ["gathered", "appended"]
    assert seen == [(0, [b"a", b"b"]), (2, [b"c"])]
    log.flush()
    assert len(seen) == 2


def test_under_flush_it_is_given_what_is_written_though_not_synced() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles(), policy=Policy(durability=Durability.FLUSH))
    log.gather(run(b"first"))
    log.flush()  # from here on offsets are reserved
    seen = watch(log)
    log.gather(run(b"second"))
    write = log.flusher.begin_write()
    assert write is not None
    write.run()
    log.flusher.finish_write(write)
    assert seen == [(1, [b"second"])]


def test_a_run_that_was_chosen_from_another_gets_offsets_of_its_own() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    seen = watch(log)
    log.gather(run(b"a", b"b", b"c").select([0, 2]))
    log.flush()
    assert seen == [(0, [b"a", b"c"])]
    assert messages(log) == {0: b"a", 1: b"c"}


def test_what_the_disk_refuses_is_given_to_nobody() -> None:
    files = FaultyFiles()
    log = open_log(DIRECTORY, files=files)
    seen = watch(log)
    errors: list[PenstockError | None] = []
    log.gather(run(b"a"))
    log.flush()
    files.fail("write", errno.ENOSPC)
    log.gather(run(b"lost"), Outcome(errors.append))
    log.flush()
    assert [type(error).__name__ for error in errors] == ["AppendFailed"]
    assert log.gather(run(b"b")) == 1
    log.flush()
    assert seen == [(0, [b"a"]), (1, [b"b"])]
    assert messages(log) == {0: b"a", 1: b"b"}


def test_what_was_gathered_is_there_after_a_restart() -> None:
    files = FaultyFiles()
    log = open_log(DIRECTORY, files=files)
    log.gather(run(b"a", b"b"))
    log.flush()
    assert messages(open_log(DIRECTORY, files=files.power_cut())) == {0: b"a", 1: b"b"}


def test_a_segment_is_not_larger_than_its_policy_says_by_more_than_a_run() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles(), policy=Policy(segment_bytes=4096))
    for number in range(100):
        log.gather(run(b"%d" % number * 100))
        log.flush()
    assert len(log.segments) > 5
    assert max(segment.size for segment in log.segments) <= 4096 + 1024
    assert len(messages(log)) == 100


# A log that is held


def test_what_is_appended_to_a_held_log_is_durable_and_not_read() -> None:
    log = open_log(DIRECTORY, files=FaultyFiles())
    seen = watch(log)
    log.gather(run(b"a"))
    log.hold()
    told: list[PenstockError | None] = []
    log.gather(run(b"b"), Outcome(told.append))
    log.when_durable(Outcome(told.append))
    log.flush()
    assert (log.marks.durable, log.committed, messages(log), seen) == (2, 1, {0: b"a"}, [(0, [b"a"])])
    assert told == [None]
    log.release()
    assert (log.committed, messages(log), seen) == (2, {0: b"a", 1: b"b"}, [(0, [b"a"]), (1, [b"b"])])
    assert told == [None, None]


def test_a_log_that_is_held_stays_so_when_what_came_before_is_taken_back() -> None:
    disk = FaultyFiles()
    log = open_log(DIRECTORY, files=disk)
    log.gather(run(b"a"))
    log.hold()
    told: list[PenstockError | None] = []
    log.append(encode([b"b"], timestamp=0))
    log.when_durable(Outcome(told.append))
    disk.fail("write", errno.ENOSPC)
    log.flush()
    assert isinstance(told[0], AppendFailed)
    log.gather(run(b"c"))
    log.append(encode([b"d"], timestamp=0))
    log.flush()
    assert (log.committed, messages(log)) == (0, {})
    log.release()
    assert messages(log) == {0: b"c", 1: b"d"}
