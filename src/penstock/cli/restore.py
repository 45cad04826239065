"""`penstock restore`: make a data directory of a backup."""

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
    from penstock.backup.manifest import Manifest
    from penstock.backup.restore import Restored
    from penstock.backup.target import Target

app = typer.Typer(add_completion=False)

_STREAM: Final = "-"
_OFFSET: Final = re.compile(r"(.+)/([0-9]{1,9}):([0-9]{1,19})")


@app.command()
def restore(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Where the backups are, as for penstock backup; - for a tar stream."),
    ],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The new data directory. It must be empty, or not exist.")
    ] = None,
    *,
    backup: Annotated[
        str | None, typer.Option(metavar="ID", help="Which one: see penstock backup --list.  [default: the newest]")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Restore what was stored at that time, from the first backup after it."),
    ] = None,
    offset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC/PARTITION:OFFSET", help="Restore that partition up to before an offset; may be repeated."
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Go on with the next offset. Only if nothing was stored after the backup."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only read the backup, and verify every checksum.")] = False,
    json: Json = False,
) -> None:
    """Make a data directory of a backup, and verify every checksum on the way.

    Start a broker on it when it is done. New messages get offsets far behind those of
    the backup, so consumers that had read further go on with the next new message.
    """
    to = _read_cut(time, offset)
    if check:
        if directory is not None or to is not None:
            raise typer.BadParameter("it restores nothing: leave out DIR, --time and --offset", param_hint="'--check'")
        manifest, problems = _check(source, backup)
        _show_check(manifest, problems, as_json=json)
        if problems:
            raise typer.Exit(1)
        return
    if directory is None:
        raise typer.BadParameter("name the directory to restore into, or --check", param_hint="'DIR'")
    restored = _restore(source, directory, backup, to, exact=exact)
    if json:
        _print_json(restored)
    else:
        _show(restored, directory)


def _read_cut(time: str | None, offsets: list[str] | None) -> ToTime | ToOffsets | None:
    from penstock.backup.cut import Place, ToOffsets, ToTime

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
            raise typer.BadParameter(f"{text!r}: it must be like orders/0:1500", param_hint="'--offset'")
        found[Place(match[1], int(match[2]))] = int(match[3])
    return ToOffsets(found)


def _check(source: str, backup: str | None) -> tuple[Manifest, list[str]]:
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


def _show_check(manifest: Manifest, problems: list[str], *, as_json: bool) -> None:
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
    print(f"restored backup {manifest.id}, made at {iso(manifest.time_us, 'seconds')}, to {directory}")
    for each in restored.cuts:
        print(f"{each.place}: left out {counted(each.messages, 'message')} from offset {each.offset} on")
    if moved := sum(each.moved for each in restored.cuts):
        print(
            f"warning: {moved} of them were dead letters, redriven or delayed messages that the broker had stored "
            "there after that: most of them do not come again",
            file=sys.stderr,
        )
    _warn(manifest)


def _warn(manifest: Manifest) -> None:
    for problem in manifest.problems:
        print(f"warning: damaged before the backup was made: {problem}", file=sys.stderr)
