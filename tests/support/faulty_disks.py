"""Simulated disks with a log file, and what they hold after a power cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.log.files import File
from penstock.testing import FaultyFiles

SEEDS = range(300)
DATA = Path("/data")
LOG = DATA / "a.log"


def disk_with_log(content: bytes = b"", *, seed: int = 0) -> tuple[FaultyFiles, File]:
    """A disk with one file, of which name and content are durable."""
    disk = FaultyFiles(seed=seed)
    disk.make_directory(DATA)
    disk.set_content(LOG, content)
    return disk, disk.open(LOG)


def outcomes(run: Callable[[int], object]) -> set[object]:
    """What happens over many seeds. A test that names the whole set shows that each of them really does."""
    return {run(seed) for seed in SEEDS}


def files_of(disk: FaultyFiles, directory: Path = Path("/")) -> Iterator[tuple[Path, bytes | None]]:
    """All there is on a disk; None for a directory."""
    for name in sorted(disk.sizes(directory)):
        path = directory / name
        try:
            yield path, disk.content(path)
        except IsADirectoryError:
            yield path, None
            yield from files_of(disk, path)
