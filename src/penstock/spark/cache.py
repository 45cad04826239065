"""What is kept between runs because it takes time to make. It can be made again, and may be removed at any time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    base = environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path there is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "penstock"


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Put a file there if it is not, whole or not at all: another process may be reading it right now."""
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
    """Let it point there, whatever it was before."""
    try:
        if os.readlink(path) == str(target):
            return
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as aside:
        os.symlink(target, Path(aside) / path.name)
        os.replace(Path(aside) / path.name, path)
