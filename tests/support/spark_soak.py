"""A Spark driver that is killed again and again, after its sink has committed a batch and before Spark has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import penstock

FILES: Final = 12
LINES: Final = 200


def kill_drivers(directory: Path, seed: int, count: int) -> Iterator[int]:
    """Kill a driver so often, at random batches, and let it come to its end then; the rows that are stored so far.

    Each row must be there once in the end.
    """
    chance = random.Random(seed)
    lines = [f"{number} {line}" for number in range(FILES) for line in range(LINES)]
    (directory / "in").mkdir()
    for number in range(FILES):
        path = directory / "in" / f"{number}.txt"
        path.write_text("".join(f"{number} {line}\n" for line in range(LINES)))
        os.utime(path, (number, number))
    with penstock.Broker(directory / "data", listen="127.0.0.1:0") as broker:
        assert broker.address is not None
        batch = -1
        for _ in range(count):
            batch = min(batch + chance.randint(1, 3), FILES - 2)
            assert _drive(broker.address, directory, batch) == -9, f"seed {seed}: the driver was not killed at {batch}"
            yield len(list(broker.fetch("lines")))
        assert _drive(broker.address, directory, -1) == 0
        stored = [message.value.decode() for message in broker.fetch("lines")]
        assert sorted(stored) == sorted(lines), f"seed {seed}: {len(stored)} rows are stored of {len(lines)}"
        assert len(list(broker.fetch("numbers"))) == 1000
        yield len(stored)


def _drive(servers: str, directory: Path, last: int) -> int:
    command = [sys.executable, "-m", "tests.support.spark_driver", servers, str(directory), str(last)]
    with (directory / "driver.txt").open("ab") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=600, check=False).returncode
