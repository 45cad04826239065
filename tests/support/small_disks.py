"""A file system that is really small, where one can be mounted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(directory: Path, mebibytes: int) -> Iterator[Path]:
    """Mount one in a new directory, or skip the test."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    try:
        yield directory
    finally:
        # Detached at once, and gone with the last open file, should the test have left one.
        subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True)
