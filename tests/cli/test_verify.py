"""`penstock verify`, run as its users run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LogDamaged
from penstock.log import recovery
from penstock.log.files import OsFiles
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy
from penstock.log.scan import Found
from penstock.model.batch import encode
from penstock.store import inspect
from penstock.store.store import Store
from tests.support.data_directories import NOON, NOON_ISO, flip, newer, penstock, positions, segments


def verify_json(directory: Path) -> tuple[int, dict[str, Any]]:
    result = penstock("log", "verify", directory, "--json")
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def log_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    log: dict[str, Any]
    [log] = [log for log in document["logs"] if (log["name"], log["partition"]) == (name, 0)]
    return log


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
