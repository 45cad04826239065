"""`penstock backup`: copy the data of a broker to a directory, a tar stream or an object store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import ConnectionOptions, Json, options, parse

if TYPE_CHECKING:
    from penstock.backup.create import BackupSource, Done
    from penstock.backup.manifest import BackupManifest
    from penstock.backup.target import Target

app = typer.Typer(add_completion=False)

STREAM = "-"
TARGET = "A directory, the URL of an object store (s3://…, gs://…, az://…, file://…), or - for a tar stream."


@app.command()
@options
def backup(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET)],
    *,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Back up this data directory instead of a running broker.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Copy at most this many bytes per second, such as 50MiB.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Then remove all but the newest N backups in the target.")
    ] = None,
    lists: Annotated[
        bool, typer.Option("--list", help="List the backups in the target instead of making one.")
    ] = False,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Back up a running broker: all topics, groups and positions at one point in time.

    Backups are incremental: only segments missing in the target are copied. Run
    the command again to resume an interrupted backup. Exit code 1 if the source is
    damaged: the backup is still made, and lists the damage.
    """
    from penstock.backup.target import open_target

    if target == STREAM:
        if lists or keep is not None or json or sys.stdout.isatty():
            raise typer.BadParameter("a tar stream goes to a pipe or a file, and excludes --list, --keep and --json")
        _to_stream(data, at, _rate(rate))
        return
    place = open_target(target, is_new=not lists)
    if lists:
        _list(place, as_json=json)
        return
    from penstock.backup import prune

    rate_bytes = _rate(rate)
    # The source first: a backup that cannot begin must not create the target.
    with _source(data, at) as source, prune.running(place) as flag:
        done = _copy(source, place, rate_bytes, flag.refresh)
    removed = [] if keep is None else prune.prune(place, keep)
    if json:
        _print_json(done, removed)
    else:
        _show(done, removed)
    _warn_of_damage(done.manifest)


def _to_stream(data: Path | None, at: ConnectionOptions, rate: int | None) -> None:
    from penstock.backup.target import TarTarget

    tar = TarTarget(sys.stdout.buffer)
    with _source(data, at) as source:
        done = _copy(source, tar, rate, lambda: None)
    tar.close()
    print(f"backup {done.manifest.id}: {_size(done.copied_bytes)}", file=sys.stderr)
    _warn_of_damage(done.manifest)


def _copy(source: BackupSource, target: Target, rate: int | None, refresh: Any) -> Done:
    from penstock.backup.create import Throttle, create, plan
    from penstock.cli import output, version

    planned = plan(source, target)
    with output.moving("copying", planned.bytes, in_bytes=True) as advance:

        def progress(count: int) -> None:
            refresh()
            advance(count)

        return create(source, target, planned, penstock=version(), throttle=Throttle(rate), progress=progress)


@contextmanager
def _source(data: Path | None, at: ConnectionOptions) -> Iterator[BackupSource]:
    if data is None:
        from penstock.client.snapshot import RemoteSnapshot

        with at.client() as client, RemoteSnapshot(client) as snapshot:
            yield snapshot
        return
    from penstock.errors import BadDirectory
    from penstock.store.store import Store, StoreSettings

    if not (data / "LOCK").exists():
        raise BadDirectory(f"{data} is not a data directory: a data directory has a LOCK file and topics/")
    with Store(data, settings=StoreSettings(partitions_max=1 << 31)) as store:
        yield store.snapshot_now()


def _rate(text: str | None) -> int | None:
    if text is None:
        return None
    from penstock import schema

    found: int = parse(schema.field("rate_bytes", schema.Positive), text, "--rate")
    return found


def _list(target: Target, *, as_json: bool) -> None:
    from penstock.backup.restore import manifests
    from penstock.cli import output

    found = manifests(target)
    if as_json:
        output.print_json({"backups": [describe(manifest) for manifest in found]})
        return
    rows = [
        (each.id, len({log.topic_id for log in each.logs if log.topic}), _size(each.total_bytes), len(each.problems))
        for each in found
    ]
    output.console().print(output.table(("backup", "topics", "bytes", "problems"), rows, numbers=("topics", "bytes")))


def describe(manifest: BackupManifest) -> dict[str, Any]:
    from penstock.times import iso

    return {
        "id": manifest.id,
        "time": iso(manifest.time_us),
        "penstock": manifest.penstock,
        "bytes": manifest.total_bytes,
        "segments": len(manifest.segments),
        "logs": [
            {
                "topic": log.topic,
                "topic_id": log.topic_id,
                "partition": log.partition,
                "start": log.start,
                "end": log.committed,
            }
            for log in manifest.logs
        ],
        "problems": manifest.problems,
    }


def _print_json(done: Done, removed: list[str]) -> None:
    from penstock.cli import output

    counts = {"copied_segments": done.copied_segments, "copied_bytes": done.copied_bytes, "removed": removed}
    output.print_json({**describe(done.manifest), **counts})


def _show(done: Done, removed: list[str]) -> None:
    manifest = done.manifest
    topics = len({log.topic_id for log in manifest.logs if log.topic})
    print(
        f"backup {manifest.id}: {topics} topics, {len(manifest.segments)} segments, {_size(manifest.total_bytes)}; "
        f"copied {done.copied_segments} segments, {_size(done.copied_bytes)}"
    )
    for name in removed:
        print(f"removed {name}")


def _warn_of_damage(manifest: BackupManifest) -> None:
    for problem in manifest.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if manifest.problems:
        raise typer.Exit(1)


def _size(count: int) -> str:
    from penstock.cli import output

    return output.size(count)
