"""The cache directory of the user. Its contents are created again when they are missing, so it may be deleted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "penstock"


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file atomically, unless it is up to date: another process may be reading it."""
    try:
        if path.read_text() == text and path.stat().st_mode & 0o777 == mode:
            return
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(aside, mode)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def link(path: Path, target: Path) -> None:
    """Create or replace a symbolic link atomically."""
    try:
        if os.readlink(path) == str(target):
            return
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as aside:
        os.symlink(target, Path(aside) / path.name)
        os.replace(Path(aside) / path.name, path)
