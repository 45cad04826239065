"""A data directory, and the commands that look at it."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import Final

from crc32c import crc32c

from penstock.model.batch import Batch, encode
from tests.support import forks

NOON: Final = 1_700_000_000_000_000
NOON_ISO: Final = "2023-11-14T22:13:20.000000Z"


def penstock(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = forks.run([*map(str, arguments)], environment=inherited | environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


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
