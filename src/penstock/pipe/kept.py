"""A small JSON document in a file of its own: there whole, or as it was before, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from penstock.storage.files import OsFiles

# None is nearly so large. What is larger is something else under our name.
BYTES_MAX: Final = 4 << 20


def save(path: Path, document: dict[str, Any]) -> None:
    """Durable when it returns. OSError if that cannot be."""
    files = OsFiles()
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


def load(path: Path) -> dict[str, Any] | None:
    """None if there is none. OSError if it cannot be read, ValueError if it is no such document."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data) if len(data) <= BYTES_MAX else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no JSON object")
    return document
