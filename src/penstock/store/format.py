"""The version of a data directory's format: `<data>/FORMAT`, a line with one number.

It grows when a broker begins to store what earlier ones would not understand, or would take for something else. A
broker opens its own format and all earlier ones; it writes its own number before it writes anything else, so that from
then on an earlier broker refuses the directory instead of misreading it. A directory without the file is of format 1.

A directory that is being restored holds another one, `<data>/restoring`, and is refused until that is gone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from penstock.errors import AppendFailed, BadDirectory, UnsupportedFormat
from penstock.log.files import Files

logger = logging.getLogger(__name__)

# 1: directories without the file. 2: a log may start within a segment, at an offset in the state topic. 3: a log has a
# `.start` file, which must move before a segment is dropped.
FORMAT: Final = 3
FORMAT_NAME: Final = "FORMAT"
RESTORING_NAME: Final = "restoring"
_ASIDE_NAME: Final = "FORMAT.aside"
_UNNAMED: Final = 1  # directories without the file
# A number and a newline. A longer file is invalid.
_BYTES_MAX: Final = 16


def check_format(files: Files, directory: Path) -> int:
    """Return the format of a data directory. Raises UnsupportedFormat if it is newer than this broker."""
    path = directory / FORMAT_NAME
    names = files.sizes(directory)
    if RESTORING_NAME in names:
        raise BadDirectory(
            f"a restore into {directory} was not finished: run penstock restore again, or remove "
            f"{directory / RESTORING_NAME} to begin without it"
        )
    if FORMAT_NAME not in names:
        return _UNNAMED
    file = files.open(path)
    try:
        text = file.read(_BYTES_MAX, 0)
    finally:
        file.close()
    if not text.strip().isdigit():
        # Not treated as missing: it may have been the number of a newer format.
        raise BadDirectory(
            f"{path} says {text!r}, it must be the number of a format: restore it from a copy; or remove it, if no "
            f"later version of penstock had the directory open, and it is written again"
        )
    found = int(text)
    if found > FORMAT:
        raise UnsupportedFormat(
            f"{directory} has format {found}, and this version of penstock opens formats up to {FORMAT}: nothing was "
            f"changed; install the version that wrote it or a later one, or restore a backup from before the upgrade"
        )
    return found


def claim_format(files: Files, directory: Path) -> None:
    """Give a data directory this format, durably. Raises UnsupportedFormat if its format is newer. It must be
    locked."""
    found, names = check_format(files, directory), files.sizes(directory)
    if found == FORMAT and FORMAT_NAME in names:
        return
    if found < FORMAT and "topics" in names:
        logger.warning("%s: format %d becomes %d; earlier versions will refuse it", directory, found, FORMAT)
    try:
        _write(files, directory)
    except OSError as error:
        raise AppendFailed(
            f"{directory / FORMAT_NAME}: cannot be written: {error.strerror}: look at the disk"
        ) from error


def _write(files: Files, directory: Path) -> None:
    aside = directory / _ASIDE_NAME
    file = files.create(aside)
    try:
        file.write(b"%d\n" % FORMAT, 0)
        file.sync()
    finally:
        file.close()
    files.rename(aside, directory / FORMAT_NAME)
    files.sync_directory(directory)
