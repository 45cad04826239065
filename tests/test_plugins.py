"""Parts of a broker that a setting chooses: another package can add one, and what nobody has added is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import BadConfig
from penstock.plugins import find
from tests.support.server import Flux, Serve

SOURCE = """
from pathlib import Path
from penstock.server import network
from penstock.log.files import OsFiles

SEEN = Path(__file__).with_name("seen")

async def listen(door, hosts, port):
    listener = await network.listen(door, hosts, port)
    with SEEN.open("a") as seen:
        print("listens", file=seen)
    return listener

def files():
    with SEEN.open("a") as seen:
        print("files", file=seen)
    return OsFiles()
"""


def test_a_package_can_add_a_network_and_what_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ST-33, WI-42"""
    site = tmp_path / "site"
    (site / "own-1.0.dist-info").mkdir(parents=True)
    (site / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    entries = "[penstock.networks]\nown = own:listen\n[penstock.files]\nown = own:files\n"
    (site / "own-1.0.dist-info" / "entry_points.txt").write_text(entries)
    (site / "own.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{Path(__file__).parent.parent / 'src'}")
    with Serve(tmp_path, server_network="own", storage_files="own") as server, Flux(server) as client:
        assert client.publish("orders", b"x") == "+OK"
    assert (site / "seen").read_text().split() == ["files", "listens", "listens"]
    assert [message["value"] for message in server.dump("orders")] == ["x"]


@pytest.mark.parametrize(
    ("group", "setting", "known"),
    [
        ("penstock.files", "storage.files", "os"),
        ("penstock.networks", "server.network", "tcp"),
        ("penstock.pipes", "pipe.type", "http"),
    ],
)
def test_what_nobody_has_added_is_refused(group: str, setting: str, known: str) -> None:
    with pytest.raises(BadConfig, match=f"{setting} is 'owl': it must be an installed one: {known}"):
        find(group, setting, "owl")
    assert find(group, setting, known).load()


def test_a_broker_does_not_start_with_a_part_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"server\.network is 'udp'"):
        Serve(tmp_path, server_network="udp")
    assert not (tmp_path / "data").exists()
