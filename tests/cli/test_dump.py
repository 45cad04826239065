"""`penstock dump`, run as its users run it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import app
from penstock.log.policy import Policy
from penstock.model.batch import Batch, encode
from penstock.store.store import Store
from tests.support.data_directories import NOON, NOON_ISO, flip, newer, penstock, positions, segments


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
