"""A data directory for the commands that look at one, and a server for those that talk to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.log.policy import Policy
from penstock.model.batch import Compression, encode
from penstock.store.store import Store
from tests.support.commands import client, penstock, server  # noqa: F401
from tests.support.data_directories import NOON, segments


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
