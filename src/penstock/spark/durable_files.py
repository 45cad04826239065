"""Files that survive a power cut: written aside, synced, renamed, and their directory synced."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically and durably. The name of the temporary file begins with a dot, which Spark ignores."""
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names that were added to a directory or removed from it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
