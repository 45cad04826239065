"""`penstock log`: inspect the logs of a data directory. Only `repair` changes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A data directory, or the directory of one log.")]


@app.command("verify")
def run_verify(
    directory: Directory,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Read every byte and verify all checksums. Exit code 1 if anything is damaged."""
    from penstock.cli import verify

    if not verify.run(directory, as_json=json):
        raise typer.Exit(1)


@app.command("repair")
def run_repair(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A data directory that no broker has open.")],
    adopt: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=NAME", help="Restore the name of a topic directory that has lost it; repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Move damaged bytes to DIR/quarantine, so that the rest can be read. Exit code 1 if problems remain."""
    from penstock.cli import repair

    if not repair.run(directory, adopt or [], as_json=json):
        raise typer.Exit(1)


@app.command("dump")
def run_dump(
    directory: Directory,
    topic: Annotated[str | None, typer.Option(help="Name or ID of the topic; needed if there are several.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    start: Annotated[int, typer.Option("--from", min=0, metavar="OFFSET", help="Start at this offset.")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many messages or batches.")] = None,
    batches: Annotated[bool, typer.Option("--batches", help="Print batches instead of messages.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Print messages or batches. Damage is shown at its position; exit code 1 if there is any."""
    from penstock.cli import dump

    if not dump.run(directory, topic, partition, start=start, count=count, batches=batches, as_json=json):
        raise typer.Exit(1)
