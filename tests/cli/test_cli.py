"""The `penstock` command, run as its users run it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from crc32c import crc32c
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import LogDamaged
from penstock.log import recovery
from penstock.log.files import OsFiles
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy
from penstock.log.scan import Found
from penstock.model.batch import Batch, Compression, encode
from penstock.store import inspect
from penstock.store.store import Store
from tests.support import forks

NOON: Final = 1_700_000_000_000_000
NOON_ISO: Final = "2023-11-14T22:13:20.000000Z"


def penstock(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = forks.run([*map(str, arguments)], environment=inherited | environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def verify_json(directory: Path) -> tuple[int, dict[str, Any]]:
    result = penstock("log", "verify", directory, "--json")
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def log_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    log: dict[str, Any]
    [log] = [log for log in document["logs"] if (log["name"], log["partition"]) == (name, 0)]
    return log


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Topic 1, orders: three segments of two batches of three messages; topic 2, blobs: whatever is hard to print."""
    directory = tmp_path / "data"
    with Store(directory) as store:
        orders = store.log(store.create_topic("orders", policy=Policy(segment_bytes=4096)).id)
        for first in range(0, 18, 3):
            values = [b"%02d " % number * 180 for number in range(first, first + 3)]
            orders.append(encode(values, keys=[b"a", b"b", None], timestamp=NOON))
            store.flush()
        blobs = store.log(store.create_topic("blobs").id)
        blobs.append(
            encode(
                [b"\xff\x00", b"two\nlines", "\x1b[31mé".encode(), b"", b"plain text"],
                keys=[b"k", b"", b"a b", b"gone", None],
                subjects=[b"s.1", None, None, None, None],
                headers=[None, None, None, None, b"Name: x\r\n"],
                tombstones=[False, False, False, True, False],
                timestamps=[NOON, NOON + 1, 1 << 62, NOON, NOON],
                timestamp=0,
                producer=7,
                compression=Compression.ZSTD,
            )
        )
    assert [path.name for path in segments(directory)] == [f"{base:020d}.log" for base in (0, 6, 12)]
    return directory


def segments(data: Path, topic_id: int = 1) -> list[Path]:
    return sorted((data / "topics" / str(topic_id) / "0").glob("*.log"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def positions(path: Path) -> list[int]:
    """Where batches begin, the head among them."""
    content = path.read_bytes()
    found = [0]
    while found[-1] < len(content):
        found.append(found[-1] + 8 + int.from_bytes(content[found[-1] + 4 : found[-1] + 8], "little"))
    return found[:-1]


def newer(offset: int, path: Path) -> bytes:
    """A batch of a version to come, as the log of that segment would have stored it."""
    content = bytearray(encode([b"from the future"], timestamp=NOON).data)
    struct.pack_into("<H", content, 64, 2)
    struct.pack_into("<I", content, 56, crc32c(content[60:]))
    batch = Batch(content)
    batch.stamp(offset, append_time=1 << 60, log=Batch(path.read_bytes()).log)
    return bytes(batch.data)


# ---- verify


def test_verify_shows_every_log_of_a_sound_directory(data: Path) -> None:
    result = penstock("log", "verify", data)
    assert result.returncode == 0
    assert result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["orders", "1", "0", "3", "12", "18"] in [row[:6] for row in rows]
    assert ["0", "to", "18", "ok"] in [row[-4:] for row in rows]
    assert [row[0] for row in rows if row[-1:] == ["ok"]] == ["(state)", "orders", "blobs"]


def test_verify_in_a_narrow_terminal_keeps_numbers_whole(data: Path) -> None:
    result = penstock("log", "verify", data, COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "0 to 18" in result.stdout


def test_verify_tells_programs_the_same(data: Path) -> None:
    code, document = verify_json(data)
    assert (code, document["sound"], document["problems"]) == (0, True, [])
    assert document["directory"] == str(data)
    orders = log_of(document, "orders")
    assert orders == {
        "topic": 1,
        "name": "orders",
        "partition": 0,
        "directory": str(data / "topics" / "1" / "0"),
        "state": "ok",
        "segments": 3,
        "batches": 12,  # six of messages, three heads, two feet, and the note of the clean stop
        "messages": 18,
        "bytes": sum(path.stat().st_size for path in segments(data)),
        "start": 0,
        "end": 18,
        "torn_bytes": 0,
        "damage": [],
        "problems": [],
    }


def test_verify_takes_the_directory_of_one_log_and_knows_whose_it_is(data: Path) -> None:
    code, document = verify_json(data / "topics" / "1" / "0")
    assert code == 0
    assert [log["name"] for log in document["logs"]] == ["orders"]


def test_verify_takes_a_log_that_stands_alone(data: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(data / "topics" / "1" / "0", alone)
    code, document = verify_json(alone)
    assert code == 0
    assert [(log["topic"], log["messages"]) for log in document["logs"]] == [(None, 18)]
    result = penstock("log", "dump", alone, "--from", "17")
    assert result.stdout.startswith(f"17  {NOON_ISO}  value=17 17 ")


def test_verify_prints_names_as_they_are(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.create_topic("[red]:smile:[/]")
    result = penstock("log", "verify", tmp_path)
    assert "[red]:smile:[/]" in result.stdout


def test_verify_shows_where_damage_is_and_goes_on_with_the_other_logs(data: Path) -> None:
    path = segments(data)[1]
    position = positions(path)[2]
    flip(path, position + 200)
    result = penstock("log", "verify", data)
    assert result.returncode == 1
    assert f"{path}: damaged at byte {position}, offsets 9 to 12: " in result.stdout
    assert "Restore that file from a copy" in result.stdout
    code, document = verify_json(data)
    assert (code, document["sound"]) == (1, False)
    orders = log_of(document, "orders")
    assert (orders["state"], orders["messages"]) == ("damaged", 15)
    [damage] = orders["damage"]
    assert damage.pop("reason")
    assert damage == {"path": str(path), "position": position, "first": 9, "last": 12}
    assert log_of(document, "blobs")["state"] == "ok"


def test_verify_takes_a_torn_tail_for_what_it_is(data: Path) -> None:
    path = segments(data)[-1]
    *_, last, _ = positions(path)
    os.truncate(path, last + 100)
    (data / "meta.db").unlink()  # it knows that more was on the disk
    code, document = verify_json(data)
    orders = log_of(document, "orders")
    assert (code, orders["state"], orders["torn_bytes"], orders["end"]) == (0, "torn", 100, 15)
    result = penstock("log", "verify", data)
    assert result.returncode == 0
    assert "torn tail of 100 bytes" in result.stdout
    assert "never acknowledged" in result.stdout


def test_verify_changes_nothing(data: Path) -> None:
    flip(segments(data)[1], 300)
    os.truncate(segments(data)[-1], 500)
    (data / "LOCK").unlink()
    (data / "meta.db").unlink()

    def everything() -> dict[Path, tuple[bytes, int]]:
        files = [path for path in data.rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = everything()
    assert penstock("log", "verify", data).returncode == 1
    assert penstock("log", "dump", data, "--topic", "orders").returncode == 1
    assert everything() == before


def test_verify_reports_a_newer_version(data: Path) -> None:
    last = segments(data)[-1]
    future = newer(18, last)
    with last.open("ab") as file:
        file.write(future)
    code, document = verify_json(data)
    orders = log_of(document, "orders")
    assert (code, orders["state"]) == (1, "refused")
    [problem] = orders["problems"]
    assert "version 2 is not supported" in problem
    assert log_of(document, "blobs")["state"] == "ok"


def test_verify_reports_segments_that_overlap(data: Path) -> None:
    first, second, _ = segments(data)
    shutil.copy(second, first.with_name(f"{3:020d}.log"))
    code, document = verify_json(data)
    orders = log_of(document, "orders")
    assert code == 1
    assert "overlaps" in orders["damage"][0]["reason"]
    assert log_of(document, "blobs")["state"] == "ok"


def test_verify_reports_a_missing_segment(data: Path) -> None:
    _, second, _ = segments(data)
    second.unlink()
    code, document = verify_json(data)
    [damage] = log_of(document, "orders")["damage"]
    assert code == 1
    assert (damage["path"], damage["last"]) == (str(second), 12)
    assert "missing" in damage["reason"]


def test_verify_reports_an_empty_segment_and_reads_the_others(data: Path) -> None:
    segments(data)[1].write_bytes(b"")
    code, document = verify_json(data)
    orders = log_of(document, "orders")
    assert (code, orders["state"]) == (1, "damaged")
    assert (orders["damage"][0]["path"], orders["damage"][0]["reason"]) == (str(segments(data)[1]), "the file is empty")
    assert orders["messages"] == 12
    assert log_of(document, "blobs")["state"] == "ok"


def test_verify_knows_a_segment_that_was_being_created(data: Path) -> None:
    segments(data)[-1].write_bytes(b"")
    code, document = verify_json(data)
    assert (code, log_of(document, "orders")["damage"][0]["last"]) == (1, 18)
    (data / "meta.db").unlink()  # nobody knows any more that something was in it
    code, document = verify_json(data)
    assert (code, log_of(document, "orders")["messages"]) == (0, 12)


def test_verify_reports_a_wrong_name_and_reads_the_segments(data: Path) -> None:
    stray = data / "topics" / "1" / "0" / "notes.txt"
    stray.write_text("not a segment")
    code, document = verify_json(data)
    orders = log_of(document, "orders")
    assert (code, orders["state"], orders["messages"]) == (1, "refused", 18)
    assert orders["problems"] == [f"{stray} is not a file of a log: move it elsewhere"]
    assert log_of(document, "blobs")["state"] == "ok"


@pytest.mark.parametrize("name", ["topics/7", "topics/1/9", "topics/junk", "topics/01"])
def test_verify_reports_directories_of_nobody(data: Path, name: str) -> None:
    (data / name).mkdir()
    code, document = verify_json(data)
    assert code == 1
    assert str(data / name) in document["problems"][0]
    assert log_of(document, "orders")["state"] == "ok"


def test_verify_shows_ids_if_the_state_topic_is_damaged(data: Path) -> None:
    flip(segments(data, topic_id=0)[0], 300)
    result = penstock("log", "verify", data)
    assert result.returncode == 1
    assert "orders" not in result.stdout
    code, document = verify_json(data)
    assert code == 1
    assert [(log["topic"], log["name"], log["state"]) for log in document["logs"]] == [
        (0, None, "damaged"),
        (1, None, "ok"),
        (2, None, "ok"),
    ]
    assert penstock("log", "dump", data, "--topic", "1", "--from", "17").returncode == 0


def test_verify_leaves_out_a_topic_that_is_being_deleted(data: Path) -> None:
    copy = data.with_name("copy")
    shutil.copytree(data / "topics" / "1", copy)
    with Store(data) as store:
        store.delete_topic(1)
    _, document = verify_json(data)
    assert [log["name"] for log in document["logs"]] == [None, "blobs"]
    shutil.copytree(copy, data / "topics" / "1")
    code, document = verify_json(data)
    assert (code, len(document["problems"])) == (1, 1)


@contextmanager
def held(data: Path) -> Iterator[int]:
    """Another process that has the directory open: its pid."""
    code = (
        "import sys; from pathlib import Path; from penstock.store.store import Store\n"
        "with Store(Path(sys.argv[1])): print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        yield holder.pid
        holder.stdin.close()
        assert holder.wait() == 0


@pytest.mark.parametrize("arguments", [("verify",), ("verify", "--json"), ("dump", "--topic", "orders")])
@pytest.mark.parametrize("inside", [".", "topics/1/0"])
def test_a_directory_in_use_can_be_looked_at(data: Path, arguments: tuple[str, ...], inside: str) -> None:
    command, *options = arguments
    before = penstock("log", command, data / inside, *options)
    with held(data):
        result = penstock("log", command, data / inside, *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == before.stdout


def test_a_directory_in_use_is_not_repaired(data: Path) -> None:
    with held(data) as pid:
        result = penstock("log", "repair", data)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"error: {data} is in use by process {pid}: stop it first, or choose another directory\n"


def test_repair_tells_what_was_lost_and_where_it_is_kept(data: Path) -> None:
    assert penstock("log", "repair", data).stdout == "nothing is damaged\n"
    damaged = segments(data)[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert "penstock log repair" in penstock("log", "verify", data).stdout

    result = penstock("log", "repair", data)

    assert result.returncode == 0, result.stderr
    assert "orders" in result.stdout
    assert f"report: {data}/quarantine/report.json" in result.stdout
    assert penstock("log", "verify", data).returncode == 0
    document = json.loads(penstock("log", "repair", data, "--json").stdout)
    assert (document["sound"], document["quarantined"], document["problems"]) == (True, [], [])


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_what_is_no_directory_of_ours_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "empty").mkdir()
    for name, reason in (("none", "does not exist"), ("file", "is not a directory"), ("empty", "is neither a data")):
        result = penstock("log", command, tmp_path / name)
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"error: {tmp_path / name} {reason}")
        assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def every_damage(content: bytes) -> Iterator[bytes]:
    """Cut off here and there, then with a byte changed here and there: at every place in a word of 8 bytes."""
    yield from (content[:size] for size in range(0, len(content), 3))
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1
        yield bytes(changed)


def recover(directory: Path) -> recovery.Recovered | LogDamaged:
    try:
        return recovery.recover(OsFiles(), OpenSegments(), directory, "pread", strict=True)
    except LogDamaged as error:
        return error


def test_verify_and_walk_agree_with_recovery_whatever_happens_to_the_last_segment(tmp_path: Path) -> None:
    with Store(tmp_path / "data") as store:
        log = store.log(store.create_topic("small", policy=Policy(segment_bytes=4096)).id)
        for value in (bytes(3900), b"one", b"two"):
            log.append(encode([value], timestamp=NOON))
            store.flush()
    sealed, active = segments(tmp_path / "data")
    copy = tmp_path / "log"
    for content in every_damage(active.read_bytes()):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copy(sealed, copy)
        (copy / active.name).write_bytes(content)
        with inspect.inspect(copy) as inspection:
            [seen] = inspection.logs
            verdict = inspect.verify(seen)
            offsets = [item.batch.base_offset for _, item in inspect.walk(seen) if isinstance(item, Found)]
        report = verdict.report
        assert report is not None
        recovered = recover(copy)
        if isinstance(recovered, LogDamaged):
            assert not verdict.sound
            assert str(recovered) in map(str, report.damage)
        else:
            assert verdict.sound, report
            assert sum(segment.size for segment in recovered.segments) == seen.size - report.torn_bytes
            kept = [item for segment in recovered.segments for item in segment.scan()]
            assert offsets == [item.batch.base_offset for item in kept if isinstance(item, Found)]


# ---- dump


def test_dump_prints_a_message_in_each_line(data: Path) -> None:
    result = penstock("log", "dump", data, "--topic", "blobs")
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        rf"0  {NOON_ISO}  key=k  subject=s.1  value=b'\xff\x00'",
        r"1  2023-11-14T22:13:20.000001Z  key=''  value='two\nlines'",
        r"2  4611686018427387904µs  key='a b'  value='\x1b[31mé'",
        rf"3  {NOON_ISO}  key=gone  tombstone",
        rf"4  {NOON_ISO}  headers='Name: x\r\n'  value=plain text",
    ]


def test_dump_prints_json_that_keeps_every_byte(data: Path) -> None:
    result = penstock("log", "dump", data, "--topic", "blobs", "--json")
    first, second, third, fourth, fifth = map(json.loads, result.stdout.splitlines())
    assert first == {
        "partition": 0,
        "offset": 0,
        "timestamp": NOON_ISO,
        "timestamp_us": NOON,
        "key": "k",
        "subject": "s.1",
        "value_base64": base64.b64encode(b"\xff\x00").decode(),
    }
    assert (second["key"], second["value"]) == ("", "two\nlines")
    assert (third["timestamp"], third["timestamp_us"], third["value"]) == (None, 1 << 62, "\x1b[31mé")
    assert (fourth["tombstone"], fourth["value"]) == (True, "")
    assert "key" not in fifth
    assert "tombstone" not in fifth


def test_dump_prints_what_a_terminal_cannot_show_as_escapes(data: Path) -> None:
    result = penstock("log", "dump", data, "--topic", "blobs", "--from", "2", "--count", "1", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert result.stdout == "2  4611686018427387904\\xb5s  key='a b'  value='\\x1b[31m\\xe9'\n"


def test_dump_prints_batches(data: Path) -> None:
    result = penstock("log", "dump", data, "--topic", "2", "--batches")
    assert result.returncode == 0
    head, batch, closed = result.stdout.splitlines()
    path = segments(data, topic_id=2)[0]
    size = positions(path)[2] - positions(path)[1]
    assert head.startswith(f"{path.name}:0  control  base_offset=0  span=0  count=0  bytes=")
    assert head.endswith("crc=ok  reserved=0  previous=none")
    assert batch.startswith(
        f"{path.name}:{positions(path)[1]}  messages  base_offset=0  span=5  count=5  bytes={size}  "
    )
    assert batch.endswith("crc=ok  compression=zstd  producer=7  sequence=0")
    assert closed.endswith(f"durable_bytes={positions(path)[2]}  crc=ok  reserved=5  previous=none")


def test_dump_prints_batches_as_json(data: Path) -> None:
    result = penstock("log", "dump", data, "--topic", "orders", "--batches", "--json", "--from", "12")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(document["position"], document["kind"], document["base_offset"]) for document in documents] == [
        (position, kind, offset)
        for position, kind, offset in zip(
            positions(segments(data)[2]),
            ["control", "messages", "messages", "control"],
            [12, 12, 15, 18],
            strict=True,
        )
    ]
    assert documents[0]["previous"] == 6


def test_dump_shows_damage_in_its_place_and_goes_on(data: Path) -> None:
    path = segments(data)[1]
    position = positions(path)[1]
    flip(path, position + 200)
    message = f"{path}: damaged at byte {position}, offsets 6 to 9: checksum of the batch is wrong"
    result = penstock("log", "dump", data, "--topic", "orders", "--from", "5", "--count", "2")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["5", "***", "9"]
    assert lines[1] == f"*** {message}"

    result = penstock("log", "dump", data, "--topic", "orders", "--json")
    assert result.returncode == 1
    assert result.stderr == f"{message}\n"
    offsets = [json.loads(line)["offset"] for line in result.stdout.splitlines()]
    assert offsets == [*range(6), *range(9, 18)]

    result = penstock("log", "dump", data, "--topic", "orders", "--batches")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    place = lines.index(f"*** {message}")
    assert lines[place - 1].startswith(f"{path.name}:{position}  messages  base_offset=6  span=3  count=3")
    assert lines[place - 1].endswith("crc=wrong")
    assert f"{path.name}:{positions(path)[2]}  messages  base_offset=9" in lines[place + 1]


def test_dump_passes_over_a_newer_version(data: Path) -> None:
    path = segments(data)[1]
    content = path.read_bytes()
    position = positions(path)[1]
    batch = Batch(bytearray(newer(6, path)))
    batch.stamp(6, append_time=Batch(content).append_time, log=Batch(content).log)
    path.write_bytes(content[:position] + bytes(batch.data) + content[positions(path)[2] :])
    result = penstock("log", "dump", data, "--topic", "orders")
    assert result.returncode == 1
    lines = [line.split()[0] for line in result.stdout.splitlines()]
    assert lines == [*map(str, range(6)), "***", *map(str, range(9, 18))]
    assert "version 2 is not supported" in result.stdout


def test_dump_shows_a_torn_tail_and_is_content(data: Path) -> None:
    path = segments(data)[-1]
    *_, last, _ = positions(path)
    os.truncate(path, last + 100)
    (data / "meta.db").unlink()  # it knows that more was on the disk
    result = penstock("log", "dump", data, "--topic", "orders", "--from", "14")
    assert result.returncode == 0
    message, torn = result.stdout.splitlines()
    assert message.startswith("14  ")
    assert torn.startswith(f"*** {path}: torn tail of 100 bytes at byte {last}, offset 15: never acknowledged")


def test_dump_shows_a_missing_segment_in_its_place(data: Path) -> None:
    second = segments(data)[1]
    second.unlink()
    result = penstock("log", "dump", data, "--topic", "orders")
    assert result.returncode == 1
    lines = [line.split()[0] for line in result.stdout.splitlines()]
    assert lines == [*map(str, range(6)), "***", *map(str, range(12, 18))]


def test_dump_ends_quietly_when_nobody_reads_on(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        log = store.log(store.create_topic("long").id)
        for _ in range(100):
            log.append(encode([b"x" * 1000] * 100, timestamp=NOON))
    for option in ("--topic=long", "--json", "--batches"):
        command = [sys.executable, "-m", "penstock", "log", "dump", str(tmp_path), option]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(20)
            process.stdout.close()
            assert process.stderr.read() == b""
    Store(tmp_path).close()  # it let go of the directory


def test_dump_asks_for_a_topic_and_lists_them(data: Path) -> None:
    titles = "the state topic (id 0), orders (id 1), blobs (id 2)"
    result = penstock("log", "dump", data)
    assert result.returncode == 1
    assert result.stderr == (f"error: {data} has several topics: choose one by name or ID with --topic: {titles}\n")
    result = penstock("log", "dump", data, "--topic", "order")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: unknown topic order in {data}: ")
    result = penstock("log", "dump", data, "--topic", "orders", "--partition", "4")
    assert result.returncode == 1
    assert result.stderr == "error: orders (id 1) has no partition 4: use --partition with one of 0\n"


def invoke(*arguments: str | Path) -> list[str]:
    result = CliRunner().invoke(app, ["log", "dump", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_dump_begins_and_ends_where_it_is_told(data: Path) -> None:
    def offsets(*arguments: str) -> list[int]:
        return [int(line.split()[0]) for line in invoke(data, "--topic", "orders", *arguments)]

    assert offsets() == list(range(18))
    for start in range(20):
        assert offsets("--from", str(start)) == list(range(start, 18))
        assert offsets("--from", str(start), "--count", "4") == list(range(start, 18))[:4]


def test_dump_needs_no_topic_where_there_is_one_and_prints_all_its_partitions(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        topic = store.create_topic("only", partitions=2)
        for partition in range(2):
            store.log(topic.id, partition).append(encode([b"in %d" % partition], timestamp=NOON))
    zero, one = f"0  {NOON_ISO}  value=in 0", f"0  {NOON_ISO}  value=in 1"
    assert invoke(tmp_path) == ["# only (id 1), partition 0", zero, "# only (id 1), partition 1", one]
    assert invoke(tmp_path, "--partition", "1") == [one]
    assert invoke(tmp_path, "--count", "1") == ["# only (id 1), partition 0", zero]
    assert [json.loads(line)["partition"] for line in invoke(tmp_path, "--json")] == [0, 1]


def test_dump_knows_the_offsets_that_compaction_left(tmp_path: Path) -> None:
    from penstock.log.policy import Cleanup

    with Store(tmp_path) as store:
        policy = Policy(cleanup=Cleanup.COMPACT, segment_bytes=4096)
        log = store.log(store.create_topic("table", policy=policy).id)
        for number in range(4):
            log.append(encode([b"%d" % number * 1500, b"%d" % number], keys=[b"same", b"%d" % number], timestamp=NOON))
            store.flush()
        assert log.upkeep.compact()
    documents = [json.loads(line) for line in invoke(tmp_path, "--json")]
    kept = [(document["offset"], document["key"]) for document in documents]
    assert (1, "0") in kept
    assert (0, "same") not in kept
    assert kept[-2:] == [(6, "same"), (7, "3")]


# ---- the command itself


def test_the_command_starts_without_what_only_some_of_it_needs() -> None:
    heavy = ["asyncio", "lz4", "penstock.model.batch", "penstock.store", "pyarrow", "rich.table", "uvloop", "zstandard"]
    code = f"import sys, penstock.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_version_and_help() -> None:
    assert penstock("--version").stdout.startswith("penstock ")
    listed = penstock("--help").stdout
    assert "demo" in listed
    assert "log" in listed
    assert penstock("log", "verify").returncode == 2


@pytest.mark.parametrize(
    ("command", "default"),
    [("serve", "[default: 4222]"), ("topology", "127.0.0.1:8222]"), ("replica", "[default: 8082]")],
)
def test_help_shows_defaults_that_are_not_in_the_signature(command: str, default: str) -> None:
    # Rich takes unescaped square brackets for markup, and drops them.
    assert default in penstock(command, "--help").stdout
