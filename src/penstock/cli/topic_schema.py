"""`penstock topic schema`: the schemas of a topic's values."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import ConnectionOptions, Json, TopicName, options
from penstock.cli.text import counted, iso, safe

app = typer.Typer(no_args_is_help=True, add_completion=False)

SchemaFile = Annotated[
    str, typer.Argument(metavar="FILE", help="File with JSON Schema (draft 2020-12) or Spark DDL; - reads stdin.")
]


@app.command("set")
@options
def set_schema(name: TopicName, file: SchemaFile, *, json: Json = False, at: ConnectionOptions) -> None:
    """Register a schema as the next version. It must be compatible with the newest (--schema-compatibility)."""
    text = _read(file)
    with at.client() as client:
        found = client.set_schema(name, text)
    if json:
        from penstock.cli import output

        output.print_json(asdict(found))
    else:
        print(safe(f"{found.topic}: schema version {found.version} ({found.format})"))


@app.command("show")
@options
def show(
    name: TopicName,
    *,
    version: Annotated[int | None, typer.Option(min=1, help="Show this version. \\[default: the newest]")] = None,
    as_: Annotated[
        Literal["json", "ddl"] | None,
        typer.Option("--as", help="Convert it to JSON Schema or Spark DDL. \\[default: as it was registered]"),
    ] = None,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Print the schema of a topic."""
    with at.client() as client:
        found = client.schema(name, version)
    text = {None: lambda: found.text, "json": found.to_json_schema, "ddl": found.to_ddl}[as_]()
    if json:
        from penstock.cli import output

        output.print_json({**asdict(found), "format": as_ or found.format, "text": text})
    else:
        print("\n".join(map(safe, text.splitlines())))


@app.command("list")
@options
def list_versions(name: TopicName, *, json: Json = False, at: ConnectionOptions) -> None:
    """List the versions of the schema of a topic."""
    with at.client() as client:
        versions = client.schemas(name)
    from penstock.cli import output

    if json:
        output.print_json([asdict(each) for each in versions])
        return
    rows = [(each.version, each.format, iso(each.registered_us)) for each in versions]
    output.console().print(output.table(("version", "format", "registered"), rows, numbers=("version",)))


@app.command("check")
@options
def check(name: TopicName, file: SchemaFile, *, json: Json = False, at: ConnectionOptions) -> None:
    """Check whether a schema could be registered, without registering it. Exit code 1 if not."""
    text = _read(file)
    with at.client() as client:
        found = client.check_schema(name, text)
    if json:
        from penstock.cli import output

        output.print_json(asdict(found))
    elif found.version is None:
        print(safe(f"{name} has no schema yet: this would be version 1"))
    else:
        verdict = "compatible" if found.compatible else "not compatible"
        reason = "" if found.reason is None else f": {found.reason}"
        print(safe(f"{verdict} with version {found.version} of {name} ({found.compatibility}){reason}"))
    if not found.compatible:
        raise typer.Exit(1)


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="'FILE'") from None
    except UnicodeDecodeError as error:
        what = f"{file} is not UTF-8 text: byte {error.start} of {counted(len(error.object), 'byte')}"
        raise typer.BadParameter(what, param_hint="'FILE'") from None
