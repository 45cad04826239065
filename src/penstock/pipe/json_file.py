"""Read and atomically replace a small JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from penstock.log.files import Files, OsFiles

# Much larger than any document. A larger file is something else.
BYTES_MAX: Final = 4 << 20
_DISK: Final = OsFiles()
# The directory may be read-only.
_DISK_TO_READ: Final = OsFiles(read_only=True)


def save(path: Path, document: dict[str, Any], *, files: Files = _DISK) -> None:
    """Replace the file durably. Raise OSError if that fails."""
    aside = path.with_name(f"{path.name}.new")
    file = files.create(aside)
    try:
        file.write(json.dumps(document, indent=2).encode() + b"\n", 0)
        # Sync before the rename: otherwise a power cut could leave an empty file under the final name.
        file.sync()
    finally:
        file.close()
    files.rename(aside, path)
    files.sync_directory(path.parent)


def load(path: Path, *, files: Files = _DISK_TO_READ) -> dict[str, Any] | None:
    """Return the document; None if there is no file. Raise OSError or ValueError if it cannot be read."""
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
        raise ValueError(f"{path} is not a JSON object")
    return document
