"""A small JSON document in a file of its own: there whole, or as it was before, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from penstock.storage.files import Files, OsFiles

# None is nearly so large. What is larger is something else under our name.
BYTES_MAX: Final = 4 << 20
_DISK: Final = OsFiles()
# It may be where nobody may write.
_DISK_TO_READ: Final = OsFiles(read_only=True)


def save(path: Path, document: dict[str, Any], *, files: Files = _DISK) -> None:
    """Durable when it returns. OSError if that cannot be."""
    aside = path.with_name(f"{path.name}.new")
    file = files.create(aside)
    try:
        file.write(json.dumps(document, indent=2).encode() + b"\n", 0)
        # Before it has the name: or after a power cut there may be the name, and nothing in it.
        file.sync()
    finally:
        file.close()
    files.rename(aside, path)
    files.sync_directory(path.parent)


def load(path: Path, *, files: Files = _DISK_TO_READ) -> dict[str, Any] | None:
    """None if there is none. OSError if it cannot be read, ValueError if it is no such document."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(BYTES_MAX + 1, 0)
    finally:
        file.close()
    try:
        document = json.loads(data) if len(data) <= BYTES_MAX else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no JSON object")
    return document
