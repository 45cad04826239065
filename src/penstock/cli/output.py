"""The output of commands: tables for people, JSON for programs, progress bars on a terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.text import safe

_MOVE_S: Final = 0.1
_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


def console() -> Console:
    # rich assumes 80 columns for a pipe, and would break names.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=200 if piped else None, highlight=False)


def plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def table(names: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[str] = ()) -> Table:
    """Return a table; the columns `numbers` are right-aligned. Pass a number as text to show it without commas, for
    users to type again."""
    made = plain_table()
    for name in names:
        if name in numbers:
            made.add_column(name, justify="right", no_wrap=True)
        else:
            made.add_column(name, overflow="fold")
    for row in rows:
        # As Text: a name must not be read as markup.
        made.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else safe(str(cell))) for cell in row))
    return made


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2), flush=True)


def progress(*columns: str | ProgressColumn) -> Progress:
    """Return a progress bar, which disappears at the end and is shown only on a terminal."""
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def moving(what: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield its advance function. It redraws rarely, as that costs more than a publish."""
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    with progress(what, BarColumn(), count, TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=total)
        waiting, due = 0, 0.0

        def advance(count: int) -> None:
            nonlocal waiting, due
            waiting += count
            now = time.monotonic()
            if now >= due:
                bar.advance(task, waiting)
                waiting, due = 0, now + _MOVE_S

        yield advance if not bar.disable else lambda count: None


def size(count: int) -> str:
    return decimal(count).replace("bytes", "B").replace("byte", "B")


def duration(ms: int) -> str:
    """Return a duration in the largest unit that divides it."""
    unit = next(unit for unit, factor in _MS.items() if ms % factor == 0)
    return f"{ms // _MS[unit]}{unit}"


def rate(count: int, seconds: float) -> str:
    return f"{seconds:.2f} s, {count / max(seconds, 1e-9):,.0f} messages/s"
