"""`penstock restore`: restore a backup into a new data directory."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import Json
from penstock.cli.text import counted
from penstock.clock import SystemClock
from penstock.times import MOMENT_FORMS, iso, read_moment

if TYPE_CHECKING:
    from penstock.backup.cut import ToOffsets, ToTime
    from penstock.backup.manifest import BackupManifest
    from penstock.backup.restore import Restored
    from penstock.backup.target import Target

app = typer.Typer(add_completion=False)

_STREAM: Final = "-"
_OFFSET: Final = re.compile(r"(.+)/([0-9]{1,9}):([0-9]{1,19})")


@app.command()
def restore(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Target of `penstock backup`, or - for a tar stream."),
    ],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="New data directory; it must be empty or not exist.")
    ] = None,
    *,
    backup: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Restore this backup, see penstock backup --list. \\[default: the newest]"),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Restore the state at this time, from the first backup after it."),
    ] = None,
    offset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC/PARTITION:OFFSET", help="Restore the partition up to this offset, exclusive; repeatable."
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Do not skip offsets. Safe only if nothing was stored after the backup."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only verify all checksums of the backup.")] = False,
    json: Json = False,
) -> None:
    """Restore a backup into a new data directory, and verify all checksums.

    Then start a broker on it. New messages get offsets far above those of the
    backup, so that consumers that had read further continue with new messages.
    """
    to = _read_cut(time, offset)
    if check:
        if directory is not None or to is not None:
            raise typer.BadParameter("it excludes DIR, --time and --offset", param_hint="'--check'")
        _check(source, backup, as_json=json)
        return
    if directory is None:
        raise typer.BadParameter("give the directory to restore into, or --check", param_hint="'DIR'")
    restored = _restore(source, directory, backup, to, exact=exact)
    if json:
        _print_json(restored)
    else:
        _show(restored, directory)


def _read_cut(time: str | None, offsets: list[str] | None) -> ToTime | ToOffsets | None:
    from penstock.backup.cut import PartitionName, ToOffsets, ToTime

    if time is not None and offsets:
        raise typer.BadParameter("give --time or --offset, not both", param_hint="'--time'")
    if time is not None:
        try:
            return ToTime(read_moment(time, SystemClock().now_us()))
        except ValueError as error:
            raise typer.BadParameter(f"{error}: it must be {MOMENT_FORMS}", param_hint="'--time'") from None
    if not offsets:
        return None
    found = {}
    for text in offsets:
        match = _OFFSET.fullmatch(text)
        if match is None:
            raise typer.BadParameter(
                f"invalid offset {text!r}: use TOPIC/PARTITION:OFFSET, such as orders/0:1500", param_hint="'--offset'"
            )
        found[PartitionName(match[1], int(match[2]))] = int(match[3])
    return ToOffsets(found)


def _check(source: str, backup: str | None, *, as_json: bool) -> None:
    manifest, problems = _read_all(source, backup)
    _show_check(manifest, problems, as_json=as_json)
    if problems:
        raise typer.Exit(1)


def _read_all(source: str, backup: str | None) -> tuple[BackupManifest, list[str]]:
    from penstock.backup import restore
    from penstock.backup.target import open_target
    from penstock.cli import output

    if source == _STREAM:
        return restore.check_tar(sys.stdin.buffer)
    target = open_target(source)
    manifest = restore.choose(restore.manifests(target), backup, None)
    with output.moving("reading", manifest.total_bytes, in_bytes=True) as advance:
        return manifest, restore.check(target, manifest, advance)


def _restore(
    source: str, directory: Path, backup: str | None, to: ToTime | ToOffsets | None, *, exact: bool
) -> Restored:
    from penstock.backup import restore
    from penstock.backup.target import open_target
    from penstock.cli import output

    opened = None if source == _STREAM else open_target(source)
    with restore.Restore(directory) as work:
        target: Target = opened or work.unpack(sys.stdin.buffer)
        manifest = restore.choose(restore.manifests(target), backup, to)
        with output.moving("restoring", manifest.total_bytes, in_bytes=True) as advance:
            ahead = 0 if exact else restore.OFFSETS_AHEAD
            return work.run(target, manifest, to, advance, offsets_ahead=ahead)


def _show_check(manifest: BackupManifest, problems: list[str], *, as_json: bool) -> None:
    from penstock.cli import backup, output

    if as_json:
        output.print_json({**backup.describe(manifest), "sound": not problems, "damaged": problems})
        return
    for problem in problems:
        print(problem)
    if not problems:
        print(f"backup {manifest.id} is sound: {len(manifest.segments)} segments, {output.size(manifest.total_bytes)}")
    _warn(manifest)


def _print_json(restored: Restored) -> None:
    from penstock.cli import backup, output

    cuts: list[dict[str, Any]] = [
        {
            "topic": each.place.topic,
            "partition": each.place.partition,
            "offset": each.offset,
            "messages": each.messages,
            "moved": each.moved,
        }
        for each in restored.cuts
    ]
    output.print_json({**backup.describe(restored.manifest), "cuts": cuts})


def _show(restored: Restored, directory: Path) -> None:
    manifest = restored.manifest
    print(f"restored backup {manifest.id} of {iso(manifest.time_us, 'seconds')} to {directory}")
    for each in restored.cuts:
        print(f"{each.place}: dropped {counted(each.messages, 'message')} from offset {each.offset} on")
    if moved := sum(each.moved for each in restored.cuts):
        print(
            f"warning: {moved} of them were dead letters, redriven or delayed messages that the broker stored there "
            "after that point: most of them will not be stored again",
            file=sys.stderr,
        )
    _warn(manifest)


def _warn(manifest: BackupManifest) -> None:
    for problem in manifest.problems:
        print(f"warning: damaged before the backup was made: {problem}", file=sys.stderr)
