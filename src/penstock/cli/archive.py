"""`penstock archive`: what an archive holds, and compaction of its files."""

from __future__ import annotations

import datetime
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Json, options, parse
from penstock.cli.text import counted
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.spark.archive import Archive

app = typer.Typer(no_args_is_help=True, add_completion=False)

Place = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="A directory, or the URL of an object store (s3://…, gs://…, az://…).")
]


@app.command("describe")
@options
def describe(place: Place, *, json: Json = False) -> None:
    """Show the offsets, files and bytes of each archived partition."""
    archive = _open(place)
    found: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    for file in archive.archived_files():
        found[file.topic, file.partition].append(file)
    ranges = {topic: archive.ranges(topic) for topic in archive.topics()}
    rows = [
        {
            "topic": topic,
            "partition": partition,
            "start": ranges[topic][partition][0],
            "end": ranges[topic][partition][1],
            "rows": sum(file.rows for file in files),
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
        }
        for (topic, partition), files in sorted(found.items())
    ]
    from penstock.cli import output

    if json:
        output.print_json(rows)
        return
    names = ("topic", "partition", "start", "end", "rows", "files", "bytes")
    shown = [[*(row[name] for name in names[:-1]), output.size(row["bytes"])] for row in rows]
    output.console().print(output.table(names, shown, numbers=names[1:]))


@app.command("compact")
@options
def compact(
    place: Place,
    *,
    file_size: Annotated[
        str, typer.Option(metavar="BYTES", help="Merge smaller files to files of about this size.")
    ] = "128MiB",
    keep: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Keep replaced files for this long, for readers that use them; up to 7d."
        ),
    ] = "7d",
    json: Json = False,
) -> None:
    """Merge the small files of an archive: those of the same partition and hour.

    Writers and readers may run meanwhile. Readers see the small files or the
    merged one, also if the command is killed. Replaced files, and files that
    failed writers left behind, are removed when they are older than --keep.
    """
    archive = _open(place)
    from penstock import schema

    size: int = parse(schema.field("file_bytes", schema.Positive), file_size, "--file-size")
    keep_ms: int = parse(schema.field("keep_ms", schema.NonNegative), keep, "--keep")
    from penstock.spark.archive import KEEP

    if (kept := datetime.timedelta(milliseconds=keep_ms)) > KEEP:
        raise typer.BadParameter(f"invalid value {keep!r}: it must be at most 7d", param_hint="'--keep'")
    try:
        merged = list(archive.compact(size))
        removed = archive.sweep(kept)
    except ValueError as error:
        raise PenstockError(str(error)) from error
    replaced = sum(len(each.replaced) for each in merged)
    written = sum(each.file.bytes for each in merged)
    from penstock.cli import output

    if json:
        output.print_json({"replaced": replaced, "merged": len(merged), "bytes": written, "removed": len(removed)})
        return
    print(
        f"merged {counted(replaced, 'file')} into {len(merged)}, {output.size(written)}; "
        f"removed {counted(len(removed), 'file')}"
    )


def _open(place: str) -> Archive:
    try:
        from penstock.spark.archive import Archive
    except ImportError as error:
        raise PenstockError(f"archives need {error.name}: pip install 'penstock[connector]'") from error
    try:
        return Archive(place)
    except ValueError as error:
        raise PenstockError(str(error)) from error
