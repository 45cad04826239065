"""Messages with a TTL: once it has ended no reader gets them, and groups treat their offsets as done."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as NatsClient

from penstock.broker.cursor import Cursor
from penstock.broker.history import History
from penstock.broker.member import Deliveries, Member
from penstock.broker.start import Start
from penstock.errors import BadHeader, BadRequest
from penstock.log.policy import Cleanup, Policy
from penstock.model import headers
from penstock.model.run import Run
from penstock.testing import FaultyFiles, ManualClock
from tests.support.brokers import SECOND, Life, Recorder, in_loop, run_of
from tests.support.ends import End, ends

TTL = b"Nats-TTL: 10\r\n"

# Each is accepted or refused by nats-server as by us; that is checked below.
VALID = {
    "1": 1.0,
    "60": 60.0,
    "00005": 5.0,
    "1s": 1.0,
    "1500ms": 1.5,
    "1h": 3600.0,
    "+1h30m": 5400.0,
    "1.5s": 1.5,
    ".5h": 1800.0,
    "1.s": 1.0,
    "0.5s0.5s": 1.0,
    "2000000us": 2.0,
    "3000000µs": 3.0,
    "3000000000ns": 3.0,
    "2562047h": 2562047 * 3600.0,
    "9223372036854775807": 9223372036854775807,
    "never": None,
    "NEVER": None,
    "": None,
}
INVALID = [
    *("0", "-1", "+5", "500ms", "999ms", "0s", "-1h", "1us", "1d", "5S", "1.5", "1h30", ".s", "1h 1m", "abc", "1e3"),
    *("1_000", "0x10", "１", "2562048h", "9223372036854775808", "99999999999999999999s", "0.9999999999s"),
]


def mixed(subject: bytes, **ttls: bytes | None) -> Run:
    """One run: the values are the names, and some have a TTL."""
    run = Run([subject] * len(ttls), [name.encode() for name in ttls])
    run.headers = {index: b"Nats-TTL: %b\r\n" % ttl for index, ttl in enumerate(ttls.values()) if ttl is not None}
    return run


async def replayed(life: Life, pattern: bytes = b">") -> list[bytes]:
    history = History(life.broker, pattern)
    found: list[bytes] = []
    while (part := await life.do(history.read(100))) is not None:
        found += part[1].values
    return found


async def keep_up(life: Life) -> None:
    """What happens after each upkeep."""
    life.broker._keep_up()
    await life.settle()


def on_disk(life: Life, topic: bytes) -> list[bytes]:
    """What is stored, and not what is still in memory."""
    log, offset, found = life.log(topic), 0, list[bytes]()
    while batches := log.read_disk(offset, 1 << 20):
        found += [value for batch in batches for value in batch.columns().values()]
        offset = batches[-1].end
    return found


# The header


@pytest.mark.parametrize(("text", "seconds"), VALID.items())
def test_a_ttl_is_seconds_or_a_duration_of_go(text: str, seconds: float | None) -> None:
    asked = headers.read(f"nats-ttl: {text} \r\n".encode(), 0).ttl_us
    assert asked == (None if seconds is None else seconds * SECOND)
    assert headers.ttl_us(f"A: b\r\nNATS-TTL:{text}\r\n".encode()) == asked


@pytest.mark.parametrize("text", INVALID)
@in_loop
async def test_an_invalid_ttl_is_refused_like_any_header(text: str) -> None:
    async with Life(FaultyFiles()) as life:
        receipt = await life.publish(b"orders", b"a", headers=f"Nats-TTL: {text}\r\n".encode())
        assert isinstance(receipt.error, BadHeader)
        assert text in str(receipt.error)
        assert life.in_log(b"orders") == []


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if program is None:
        pytest.skip("nats-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path_factory.mktemp("nats"))]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    yield f"nats://127.0.0.1:{port}"
    running.terminate()
    running.wait()


def test_nats_server_accepts_and_refuses_the_same(nats_server: str) -> None:
    async def ask() -> dict[str, bool]:
        client: NatsClient = await nats.connect(nats_server, max_reconnect_attempts=100, reconnect_time_wait=0.1)
        stream = {"name": "s", "subjects": ["s"], "allow_msg_ttl": True, "storage": "memory"}
        made = json.loads((await client.request("$JS.API.STREAM.CREATE.s", json.dumps(stream).encode())).data)
        assert "error" not in made, made
        found = {}
        for text in (*VALID, *INVALID):
            answer = await client.request("s", b"x", headers={"Nats-TTL": text})
            found[text] = "error" not in json.loads(answer.data)
        await client.close()
        return found

    found = asyncio.run(ask())
    assert [text for text, accepted in found.items() if accepted] == list(VALID)


# Readers


@in_loop
async def test_a_reader_that_keeps_up_gets_it_and_one_that_comes_late_does_not() -> None:
    async with Life(FaultyFiles()) as life:
        early, late = Recorder(), Recorder()
        life.subscribe(b"orders", early)
        await life.stored(b"orders", b"a", headers=TTL)
        await life.advance(10 * SECOND)
        await life.do(life.broker.subscriptions.subscribe_from(b"orders", Member(b"1", late), Start.EARLIEST))
        await life.stored(b"orders", b"b")
        assert early.values == [b"a", b"b"]
        assert late.values == [b"b"]
        assert life.broker.figures.expired == 1


@in_loop
async def test_it_is_delivered_until_its_ttl_has_ended() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a", headers=TTL)
        await life.advance(10 * SECOND - 1)
        assert await replayed(life) == [b"a"]
        await life.advance(1)
        assert await replayed(life) == []


@in_loop
async def test_of_a_batch_only_what_has_expired_is_left_out() -> None:
    async with Life(FaultyFiles()) as life:
        run = mixed(b"orders", a=b"10", b=None, c=b"20", d=b"10", e=b"never", f=b"1h")
        await life.do(life.publish_run(run))
        await life.advance(10 * SECOND)
        assert await replayed(life) == [b"b", b"c", b"e", b"f"]
        await life.advance(10 * SECOND)
        assert await replayed(life) == [b"b", b"e", b"f"]
        reader = Recorder()
        await life.do(life.broker.subscriptions.subscribe_from(b"orders", Member(b"1", reader), Start.EARLIEST))
        await life.settle()
        assert [(got.value, got.offset) for got in reader.got] == [(b"b", 1), (b"e", 4), (b"f", 5)]


@in_loop
async def test_a_reader_that_is_behind_gets_what_has_not_expired_when_it_reads_on() -> None:
    async with Life(FaultyFiles()) as life:
        slow = Recorder()
        life.subscribe(b"orders", slow)
        slow.is_open = False
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=None)))
        await life.do(life.publish_run(mixed(b"orders", c=b"20", d=b"10")))
        await life.advance(15 * SECOND)
        slow.is_open = True
        for subscription in life.broker.subscriptions.interest.match(b"orders"):
            subscription.wake()
        await life.settle()
        assert slow.values == [b"b", b"c"]
        assert life.broker.figures.expired == 2


@ends
@in_loop
async def test_it_counts_from_when_it_was_stored_also_after_a_restart(end: End) -> None:
    clock = ManualClock()
    life = Life(FaultyFiles(), clock=clock)
    async with life:
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=None, c=b"60")))
        await life.settle()
        disk = await end(life)
    clock.advance(10 * SECOND)
    async with Life(disk, clock=clock) as life:
        assert await replayed(life) == [b"b", b"c"]
        assert life.in_log(b"orders") == [b"a", b"b", b"c"]


@in_loop
async def test_a_large_batch_is_read_in_parts_without_what_has_expired() -> None:
    async with Life(FaultyFiles()) as life:
        count = 20_000
        run = run_of(b"orders", *(b"%d" % number for number in range(count)))
        run.headers = dict.fromkeys(range(0, count, 3), TTL)
        await life.do(life.publish_run(run))
        await life.advance(10 * SECOND)
        assert await replayed(life) == [b"%d" % number for number in range(count) if number % 3]
        assert life.broker.figures.expired == len(range(0, count, 3))


@in_loop
async def test_messages_without_a_ttl_are_not_marked_so_readers_do_not_look() -> None:
    async with Life(FaultyFiles()) as life:
        await life.stored(b"orders", b"a", headers=b"Colour: red\r\n")
        await life.stored(b"orders", b"b", headers=TTL)
        first, second = life.log(b"orders").read_disk(0, 1 << 20)
        assert (first.asks, second.asks) == (False, True)


# Groups


@in_loop
async def test_a_group_passes_over_what_has_expired_and_its_lag_falls() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.groups.create(b"g", b"orders", start=Start.EARLIEST))
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=None, c=b"10")))
        await life.advance(10 * SECOND)
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        assert sink.values == [b"b"]
        await life.ack(group, *sink.take())
        assert (group.lag(), group.expired, group.lost) == (0, 2, 0)
        assert await life.letters() == []


@in_loop
async def test_a_message_that_expires_before_its_next_delivery_is_done() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink, deliveries=Deliveries(3))
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=b"60", c=None)))
        await life.settle()
        for got in sink.take():
            assert group.nack(got.place, got.offset, 15 * SECOND)
        await life.advance(15 * SECOND)
        assert [(got.value, got.attempts) for got in sink.got] == [(b"b", 2), (b"c", 2)]
        await life.ack(group, *sink.take())
        assert (group.lag(), group.expired, group.state.dead_lettered) == (0, 1, 0)


@in_loop
async def test_what_a_member_has_can_be_acknowledged_after_it_expired() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        await life.stored(b"orders", b"a", headers=b"Nats-TTL: 1\r\n")
        await life.advance(SECOND)
        await life.ack(group, *sink.take())
        assert (group.lag(), group.expired) == (0, 0)


@in_loop
async def test_a_group_without_members_is_kept_up_with_what_expires() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        group, member = await life.join(b"g", b"orders.*", sink)
        await life.do(life.publish_run(mixed(b"orders.eu", back=b"10")))
        await life.settle()
        assert sink.values == [b"back"]
        life.broker.groups.leave(group, member)
        await life.do(life.publish_run(mixed(b"orders.eu", a=b"10", b=b"10")))
        await life.do(life.publish_run(mixed(b"orders.eu", c=b"10", d=b"30", e=b"10")))
        await keep_up(life)
        assert group.lag() == 6
        await life.advance(10 * SECOND)
        await keep_up(life)
        assert (group.lag(), group.expired) == (2, 4)
        await life.advance(20 * SECOND)
        await keep_up(life)
        assert (group.lag(), group.expired) == (0, 6)


@in_loop
async def test_upkeep_reads_a_message_that_does_not_expire_once_for_a_group_without_members() -> None:
    async with Life(FaultyFiles()) as life:
        group = await life.do(life.broker.groups.create(b"g", b"orders", start=Start.EARLIEST))
        await life.stored(b"orders", b"a")
        await keep_up(life)
        assert group.lag() == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cursor, "read", None)
            await keep_up(life)
        assert not life.store.health.faults


@ends
@in_loop
async def test_a_group_remembers_how_many_expired(end: End) -> None:
    clock = ManualClock()
    async with Life(FaultyFiles(), clock=clock) as life:
        await life.do(life.broker.groups.create(b"g", b"orders", start=Start.EARLIEST))
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=None)))
        await life.advance(10 * SECOND)
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        await life.ack(group, *sink.take())
        assert group.expired == 1
        disk = await end(life)
    async with Life(disk, clock=clock) as life:
        assert (life.broker.groups[b"g"].expired, life.broker.groups[b"g"].lag()) == (1, 0)


# Dead letters


async def dead(life: Life, ttl: bytes) -> None:
    """A message with a TTL becomes a dead letter at once."""
    sink = Recorder()
    group, _ = await life.join(b"g", b"orders", sink)
    await life.stored(b"orders", b"bad", headers=b"Colour: red\r\nNats-TTL: %b\r\n" % ttl)
    assert group.reject(sink.got[0].place, sink.got[0].offset, reason="no")
    await life.settle()


@in_loop
async def test_a_message_that_has_expired_does_not_become_a_dead_letter() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(deliveries_max=1, ack_deadline_ms=15_000)))
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        await life.do(life.publish_run(mixed(b"orders", a=b"10", b=b"60")))
        await life.advance(15 * SECOND + 1)
        assert [letter.value for letter in await life.letters()] == [b"b"]
        assert (group.lag(), group.expired, group.state.dead_lettered) == (0, 1, 1)


@in_loop
async def test_when_all_that_failed_has_expired_there_is_no_dead_letter_at_all() -> None:
    async with Life(FaultyFiles()) as life:
        await life.do(life.broker.changes.create(b"orders", policy=Policy(deliveries_max=1, ack_deadline_ms=15_000)))
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        await life.stored(b"orders", b"a", headers=TTL)
        await life.advance(15 * SECOND + 1)
        assert await life.letters() == []
        assert (group.lag(), group.expired, group.state.dead_lettered) == (0, 1, 0)
        await life.stored(b"orders", b"b")
        await life.advance(15 * SECOND + 1)
        assert [letter.value for letter in await life.letters()] == [b"b"]


@in_loop
async def test_a_dead_letter_does_not_expire_and_its_ttl_counts_anew_when_it_is_redriven() -> None:
    async with Life(FaultyFiles()) as life:
        await dead(life, b"10")
        await life.advance(100 * SECOND)
        (letter,) = await life.letters()
        assert letter.value == b"bad"
        assert await replayed(life, b"DLQ.>") == [b"bad"]
        assert await life.redrive() == 1
        await life.settle()
        assert await replayed(life, b"orders") == [b"bad"]
        run = await life.do(life.partition(b"orders").cursor(1).read_message())
        assert run is not None
        assert run.headers[0] == b"Colour: red\r\nNats-TTL: 10\r\n"
        await life.advance(10 * SECOND)
        assert await replayed(life, b"orders") == []


@in_loop
async def test_a_dead_letter_is_not_redriven_to_its_group_when_its_message_has_expired() -> None:
    async with Life(FaultyFiles()) as life:
        await dead(life, b"10")
        await life.advance(10 * SECOND)
        with pytest.raises(BadRequest, match="has expired"):
            await life.redrive(to_group=True)
        assert len(await life.letters()) == 1


@in_loop
async def test_letters_are_redriven_to_their_group_around_one_that_has_expired() -> None:
    async with Life(FaultyFiles()) as life:
        sink = Recorder()
        group, _ = await life.join(b"g", b"orders", sink)
        for index, ttl in enumerate((b"60", b"10", b"never")):
            await life.stored(b"orders", b"bad", headers=b"Nats-TTL: %b\r\n" % ttl)
            assert group.reject(sink.got[index].place, sink.got[index].offset, reason="no")
            await life.settle()
        await life.advance(10 * SECOND)
        done = await life.redrive_some(to_group=True)
        assert (done.count, done.skipped) == (2, 1)
        assert "dead letter 1 cannot be redriven to its group: its message has expired" in str(done.reason)
        assert [letter.offset for letter in await life.letters()] == [1]
        with pytest.raises(BadRequest, match="has expired"):
            await life.redrive(to_group=True)


# Delays, transactions, compaction


@ends
@in_loop
async def test_the_ttl_of_a_delayed_message_counts_from_when_it_is_due(end: End) -> None:
    clock = ManualClock()
    async with Life(FaultyFiles(), clock=clock) as life:
        await life.stored(b"orders", b"a", headers=b"Delay: 60s\r\n" + TTL)
        await life.advance(30 * SECOND)
        disk = await end(life)
    async with Life(disk, clock=clock) as life:
        await life.advance(30 * SECOND + 10_000)
        assert await replayed(life) == [b"a"]
        await life.advance(10 * SECOND)
        assert await replayed(life) == []


@pytest.mark.parametrize("ttl", [b"10", b"never"])
@in_loop
async def test_compaction_treats_the_latest_message_of_a_key_like_a_tombstone_once_it_has_expired(ttl: bytes) -> None:
    async with Life(FaultyFiles()) as life:
        policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096)
        await life.do(life.broker.changes.create(b"orders", policy=policy))
        for value in (b"old", b"new"):
            run = run_of(b"orders", value, headers=b"Nats-TTL: %b\r\n" % ttl if value == b"new" else b"")
            run.keys = {0: b"k"}
            await life.do(life.publish_run(run))
        await life.stored(b"orders", b"loose", headers=TTL)
        for number in range(3):
            await life.stored(b"orders", b"%d" % number + bytes(4000))
        await life.advance(10 * SECOND)
        life.store.upkeep()
        assert on_disk(life, b"orders")[:-3] == ([] if ttl == b"10" else [b"new"])
        # Nor does a reader get from memory what is gone from the disk.
        assert await replayed(life) == on_disk(life, b"orders")


@in_loop
async def test_compaction_keeps_the_mark_of_a_batch_that_it_makes_smaller() -> None:
    disk, clock = FaultyFiles(), ManualClock()
    async with Life(disk, clock=clock) as life:
        policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096)
        await life.do(life.broker.changes.create(b"orders", policy=policy))
        run = mixed(b"orders", old=None, new=None, short=b"10")
        run.keys = {0: b"k", 1: b"k"}
        await life.do(life.publish_run(run))
        for number in range(3):
            await life.stored(b"orders", b"%d" % number + bytes(4000))
        life.store.upkeep()
        assert on_disk(life, b"orders")[:2] == [b"new", b"short"]
        await life.stop()
    clock.advance(10 * SECOND)
    async with Life(disk, clock=clock) as life:
        assert (await replayed(life))[0] == b"new"
        assert b"short" not in await replayed(life)
