"""Stores of earlier versions open and show what they hold; those of newer ones are refused and left alone."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.errors import AppendFailed, BadDirectory, UnsupportedFormat
from penstock.store.format import FORMAT, check_format
from penstock.store.inspect import inspect
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.support.logs import append, memory_meta, values
from tests.support.old_stores import DELAYED, STORES, survey
from tests.support.server import Serve

DATA = Path("/data")


def unpack(name: str, directory: Path) -> dict[str, Any]:
    """Put a copy of an old store where a server will look for it; what its own version showed of it."""
    directory.mkdir(exist_ok=True)
    with tarfile.open(STORES / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    found: dict[str, Any] = json.loads((STORES / f"{name}.json").read_text())
    return found


def compare(seen: dict[str, Any], before: dict[str, Any]) -> None:
    """Except for messages that were delayed, and are due by now, both are the same."""
    arrived = 0
    assert seen["topics"].keys() == before["topics"].keys()
    for name, topic in before["topics"].items():
        found = seen["topics"][name]
        messages = [message for message in found["messages"] if message[4] not in DELAYED]
        arrived += len(found["messages"]) - len(messages)
        assert messages == topic["messages"]
        assert (found["id"], found["partitions"]) == (topic["id"], topic["partitions"])
        assert found["policy"].items() >= topic["policy"].items()
    assert seen["delayed"] + arrived == before["delayed"] == len(DELAYED)
    if not arrived:
        assert seen["groups"] == before["groups"]
    assert seen["dead_letters"] == before["dead_letters"]


@pytest.mark.parametrize("name", sorted(path.stem for path in STORES.glob("*.json")))
def test_a_store_of_an_earlier_version_opens_and_shows_the_same(tmp_path: Path, name: str) -> None:
    before = unpack(name, tmp_path)
    with Serve(tmp_path, storage_upkeep_ms=10**9) as server:
        compare(survey(server), before)
        assert int((server.data / "FORMAT").read_text()) == FORMAT
        server.stop()
        server.restart()
        compare(survey(server), before)
        go_on(server, before)
        server.kill()
        server.restart()


def go_on(server: Serve, before: dict[str, Any]) -> None:
    """Use what is there."""
    orders = {(each[0], each[1]): each[4] for each in before["topics"]["orders"]["messages"]}
    with Client(f"127.0.0.1:{server.port}") as client:
        with client.transaction("import", 7) as again:
            again.publish("clicks", b"not once more")
        assert again.is_duplicate
        with client.subscribe("orders.>", group="billing") as subscription:
            got = [subscription.get(timeout=20) for _ in range(before["groups"]["billing"]["lag"])]
            for message in got:
                message.ack()
            subscription.flush()
        assert len({(each.partition, each.offset) for each in got}) == len(got)
        assert all(
            orders.get((each.partition, each.offset), each.value.decode()) == each.value.decode() for each in got
        )
        assert client.redrive().count == len(before["dead_letters"])
        with client.subscribe("jobs", group="workers") as subscription:
            jobs = {subscription.get(timeout=20).value for _ in range(1 + len(before["dead_letters"]))}
        assert jobs == {b"job 5", *(letter[5].encode() for letter in before["dead_letters"])}
        receipt = client.publish("clicks", b"new")
        assert receipt.offset > max(each[1] for each in before["topics"]["clicks"]["messages"])


def test_the_tools_look_into_a_store_of_an_earlier_version(tmp_path: Path) -> None:
    unpack("format-1", tmp_path)
    command = [sys.executable, "-m", "penstock", "log", "verify", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Versions.


def open_store(disk: FaultyFiles) -> Store:
    return Store(DATA, files=disk, clock=ManualClock(), meta=memory_meta())


def put(disk: FaultyFiles, content: bytes) -> None:
    file = disk.create(DATA / "FORMAT")
    file.write(content, 0)
    file.sync()
    file.close()


def test_a_newer_format_is_refused_and_nothing_is_changed() -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        append(store.log(store.create_topic("orders").id), b"a")
    put(disk, b"%d\n" % (FORMAT + 1))
    names = disk.sizes(DATA)
    for _ in range(2):
        with pytest.raises(UnsupportedFormat, match=f"has format {FORMAT + 1}, and .* up to {FORMAT}: nothing was"):
            open_store(disk)
    assert disk.sizes(DATA) == names
    put(disk, b"%d\n" % FORMAT)
    with open_store(disk) as store:
        assert values(store.log(store.topics[0].id)) == [b"a"]


@pytest.mark.parametrize("content", [b"", b"one\n", b"-1\n", b"\xff" * 100])
def test_a_format_that_is_no_number_is_refused(content: bytes) -> None:
    disk = FaultyFiles()
    with open_store(disk) as store:
        append(store.log(store.create_topic("t").id), b"a")
    put(disk, content)
    with pytest.raises(BadDirectory, match=r"must be the number of a format: restore it from a copy; or remove it, if"):
        open_store(disk)
    disk.remove(DATA / "FORMAT")
    with open_store(disk) as store:
        assert values(store.log(store.topics[0].id)) == [b"a"]
    assert check_format(disk, DATA) == FORMAT


def test_the_server_and_the_tools_say_what_to_do_about_a_newer_format(tmp_path: Path) -> None:
    data = tmp_path / "data"
    Store(data).close()
    (data / "FORMAT").write_text("99\n")
    with pytest.raises(AssertionError, match=r"has format 99.*install the version that wrote it"):
        Serve(tmp_path)
    with pytest.raises(UnsupportedFormat), inspect(data):
        pass


def test_the_format_is_written_before_anything_else_wherever_the_power_is_cut() -> None:
    cuts = 0
    while True:
        disk = FaultyFiles(seed=cuts, cut_after=cuts)
        try:
            open_store(disk).close()
        except PowerCut:
            pass
        else:
            break
        disk = disk.power_cut()
        names = disk.sizes(DATA).keys()
        assert "FORMAT" in names or not names & {"topics", "reserve"}
        with open_store(disk) as store:
            assert store.topics == []
            assert disk.content(DATA / "FORMAT") == b"%d\n" % FORMAT
        cuts += 1
    assert cuts > 5


def test_an_upgrade_is_logged_and_a_new_directory_is_none(caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyFiles()
    open_store(disk).close()
    assert caplog.messages == []
    disk.remove(DATA / "FORMAT")
    open_store(disk).close()
    assert caplog.messages == [f"{DATA}: format 1 becomes {FORMAT}; earlier versions will refuse it"]


def test_a_disk_without_room_for_the_format_is_told_of() -> None:
    disk = FaultyFiles()
    disk.fail("create", errno.ENOSPC, path_suffix="FORMAT.aside")
    with pytest.raises(AppendFailed, match="FORMAT: cannot be written"):
        open_store(disk)
    open_store(disk).close()
