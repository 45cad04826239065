"""`python -m bench`: run the sections, print the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from bench import append, batch, clients, doors, pipe, promised, read, spark, spark_pipeline, spark_start, upkeep
from bench.measure import MORE_IS_BETTER, Bench, Line

SECTIONS: Final[dict[str, Callable[[Bench], Iterator[Line]]]] = {
    "append": append.measure,
    "loop": append.measure_loop,
    "batch": batch.measure,
    "read": read.measure,
    "open": upkeep.measure_open,
    "compact": upkeep.measure_compact,
    "live": doors.measure_live,
    "acked": doors.measure_acked,
    "one in flight": doors.measure_one_in_flight,
    "latency": doors.measure_latency,
    "request": doors.measure_request,
    "idle": doors.measure_idle,
    "many": doors.measure_many,
    "promised": promised.measure,
    "producer": clients.measure_producer,
    "consumer": clients.measure_consumer,
    "fetch": clients.measure_fetch,
    "pipe": pipe.measure,
    "spark read": spark.measure_read,
    "spark fetch": spark.measure_fetch,
    "spark write": spark.measure_write,
    "spark archive": spark.measure_archive,
    "spark pipeline": spark_pipeline.measure,
    "spark trigger": spark.measure_trigger,
    "spark start": spark_start.measure,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="where the files go, and are removed after")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section, and others that are named")
    parser.add_argument("--quick", action="store_true", help="so little of everything that the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"--directory: {options.directory} is not a directory")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.directory) as directory:
        lines, notes = _run(options.only or list(SECTIONS), Path(directory), quick=options.quick)
    console = Console()
    if not console.is_terminal:
        console = Console(width=144)
    console.print(_table(lines, wide=console.width >= 140))
    console.print(
        "The rounds of both sides alternate. Each figure is of a side's best round; where every round waits for the "
        "disk (append, event loop, acknowledged) of the one that a tenth of its rounds beat; p50 and p99 are of every "
        "message of every round.",
        style="dim",
    )
    for note in notes:
        console.print(note)
    if options.json:
        options.json.write_text(json.dumps(_figures(lines, quick=options.quick), indent=2) + "\n")


def _run(sections: list[str], directory: Path, *, quick: bool) -> tuple[list[Line], list[str]]:
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    lines: list[Line] = []
    notes: dict[str, None] = {}  # each once, in their order
    # It is drawn between two rounds only: a thread that draws would be measured too.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=len(sections))

        def tell(what: str) -> None:
            if progress.tasks[0].description != what:
                progress.update(task, description=what, refresh=console.is_terminal)

        for section in sections:
            with tempfile.TemporaryDirectory(dir=directory) as own:
                lines += SECTIONS[section](Bench(Path(own), quick, tell, notes.setdefault))
            progress.advance(task)
    return lines, list(notes)


def _table(lines: list[Line], *, wide: bool) -> Table:
    table = Table(title=f"Penstock on {os.cpu_count()} cores, Python {platform.python_version()}", title_justify="left")
    table.add_column("what", no_wrap=wide)
    table.add_column("Penstock", justify="right", no_wrap=True)
    table.add_column("against", justify="right", no_wrap=True)
    if wide:
        table.add_column("which is")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("met?")
    for number, line in enumerate(lines):
        table.add_row(
            line.what,
            _figure(line.penstock, line.unit),
            _figure(line.limit, line.unit),
            *([line.against] if wide else []),
            f"{line.ratio:.2f} × {line.ratio_of}",
            _target(line),
            {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[line.met],
            end_section=number + 1 < len(lines) and lines[number + 1].section != line.section,
        )
    return table


def _figure(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _target(line: Line) -> str:
    if line.target is None:
        return "n/a"
    unit = f" {line.unit}" if line.target_of == "figure" else ""
    return f"{'≥' if line.ratio_of in MORE_IS_BETTER else '≤'} {line.target}{unit}"


def _figures(lines: list[Line], *, quick: bool) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "quick": quick,
        "lines": [{**asdict(line), "ratio": line.ratio, "met": line.met} for line in lines],
    }


if __name__ == "__main__":
    main()
