"""`penstock log verify`: read every byte of every log, and report its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.cli import output
from penstock.store.inspect import Inspection, LogHealth, Verdict, inspect, verify
from penstock.store.state import STATE_TOPIC


def run(directory: Path, *, as_json: bool) -> bool:
    """Verify the logs; return whether all are sound."""
    bar = output.progress(TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    task = bar.add_task("", total=None)
    with inspect(directory) as inspection, bar:
        bar.reset(task, total=sum(log.size for log in inspection.logs))
        verdicts = [verify(log, lambda size: bar.advance(task, size)) for log in inspection.logs]
    if as_json:
        output.print_json(_document(inspection, verdicts))
    else:
        show(inspection, verdicts)
    return is_sound(inspection, verdicts)


def is_sound(inspection: Inspection, verdicts: Sequence[Verdict]) -> bool:
    return not inspection.problems and all(verdict.sound for verdict in verdicts)


def show(inspection: Inspection, verdicts: Sequence[Verdict], console: Console | None = None) -> None:
    """Print a table of the logs, then a line for each problem and its remedy."""
    console = console or output.console()
    console.print(_table(verdicts))
    for number, line in enumerate(_findings(inspection, verdicts)):
        if not number:
            console.print()
        # Do not wrap: users copy the paths.
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _document(inspection: Inspection, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "directory": str(inspection.directory),
        "sound": is_sound(inspection, verdicts),
        "problems": inspection.problems,
        "logs": [_log_document(verdict) for verdict in verdicts],
    }


def _log_name(verdict: Verdict) -> str:
    log = verdict.log
    if log.topic_id is None:
        return str(log.directory)
    return f"{_topic_name(verdict)} partition {log.partition}"


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = output.plain_table()
    table.add_column("topic", overflow="fold")
    for name in ("id", "part", "segs", "batches", "messages", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("offsets", no_wrap=True)
    table.add_column("state", overflow="fold")
    for verdict in verdicts:
        # As Text: a name must not be read as markup.
        table.add_row(*map(Text, _row(verdict)), style=None if verdict.sound else "red")
    return table


def _row(verdict: Verdict) -> list[str]:
    log, report = verdict.log, verdict.report
    place = [
        _topic_name(verdict),
        *("?" if number is None else str(number) for number in (log.topic_id, log.partition)),
    ]
    size = output.size(log.size)
    if report is None:
        return [*place, str(len(log.segments)), "?", "?", size, f"{log.start} to ?", _state(verdict)]
    counts = [f"{number:,}" for number in (report.segments, report.batches, report.messages)]
    return [*place, *counts, size, f"{log.start} to {max(log.start, report.end)}", _state(verdict)]


def _topic_name(verdict: Verdict) -> str:
    if verdict.log.topic_id == STATE_TOPIC:
        return "(state)"
    return verdict.log.topic_name or "?"


def _state(verdict: Verdict) -> str:
    if verdict.state is LogHealth.TORN and verdict.report:
        return f"torn tail of {verdict.report.torn_bytes} bytes"
    return verdict.state.value


def _findings(inspection: Inspection, verdicts: Sequence[Verdict]) -> Iterator[str]:
    if any(verdict.log.topic_id and verdict.log.topic_name is None for verdict in verdicts):
        yield "? is a topic of unknown name: the state topic lacks it, or cannot be read."
    yield from inspection.problems
    for verdict in verdicts:
        log, report = verdict.log, verdict.report
        name = _log_name(verdict)
        directory = quote(str(log.directory))
        for problem in (*verdict.problems, *(report.unsupported if report else ())):
            yield f"{name}: {problem}"
        for damage in report.damage if report else ():
            yield f"{name}: {damage}"
            yield (
                "  Restore that file from a copy, or move the damaged bytes to quarantine: penstock log repair. "
                f"To see the readable messages: penstock log dump {directory}"
            )
        if report and verdict.state is LogHealth.TORN:
            yield (
                f"{name}: the last {report.torn_bytes} bytes were being written when the process or the machine "
                "stopped: they were never acknowledged, and will be truncated at the next start"
            )


def _log_document(verdict: Verdict) -> dict[str, Any]:
    log, report = verdict.log, verdict.report
    return {
        "topic": log.topic_id,
        "name": log.topic_name,
        "partition": log.partition,
        "directory": str(log.directory),
        "state": verdict.state.value,
        "segments": len(log.segments),
        "batches": report and report.batches,
        "messages": report and report.messages,
        "bytes": log.size,
        "start": log.start,
        "end": report and max(log.start, report.end),
        "torn_bytes": report and report.torn_bytes,
        "damage": [
            {
                "path": str(damage.path),
                "position": damage.position,
                "first": damage.first,
                "last": damage.last,
                "reason": damage.reason,
            }
            for damage in (report.damage if report else ())
        ],
        "problems": [*verdict.problems, *map(str, report.unsupported if report else ())],
    }
