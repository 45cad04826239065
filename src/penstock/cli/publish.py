"""`penstock publish`: some messages, each with its receipt; or many, of lines or of JSON, through a producer."""

from __future__ import annotations

import json as json_text
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from penstock.cli.imports import Form, Import
from penstock.cli.options import Address, Json, complete_topic, options, read_delay, read_ttl
from penstock.cli.text import counted
from penstock.client.values import Outgoing, Receipt, arguments
from penstock.errors import BadRequest, PeerError, PenstockError

if TYPE_CHECKING:
    from penstock.client.sync import Client

app = typer.Typer(add_completion=False)


@app.command()
@options
def publish(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[SUBJECT]", autocompletion=complete_topic, help="Replaces the subjects in --file."),
    ] = None,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[VALUE]...", help="A message each. None, or -: lines of stdin.")
    ] = None,
    *,
    path: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="JSON lines, CSV or Parquet; -: stdin."),
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", help="What --file holds.  [default: by its name, and its first row]")
    ] = "auto",
    key_field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field of an object, or column, that is its key.")
    ] = None,
    subject_field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field of an object, or column, that is its subject.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Decides the partition, and what compaction keeps.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be repeated.")] = None,
    message_id: Annotated[str | None, typer.Option(help="Of messages with one id the first is stored.")] = None,
    delay: Annotated[
        Any, typer.Option(parser=read_delay, metavar="5s|TIME", help="Stored now, published then.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(parser=read_ttl, metavar="SECONDS|1h30m|never", help="For how long it is delivered."),
    ] = None,
    json: Json = False,
    at: Address,
) -> None:
    """Publish messages. It returns when they are as durable as their topic promises.

    Each value that is an argument has a receipt; with --json they are JSON lines.

    Each object or row of --file is the value of a message, as JSON. If the first
    one has the form that `penstock fetch` writes, all are such messages: they have
    value, value_base64, json or tombstone, and may have subject, key, headers,
    message_id, delay and ttl. If SUBJECT is given, all go there.
    """
    if values == ["-"]:
        values = None
    if subject is None and path is None:
        raise typer.BadParameter("name a subject, or a --file of messages that have one", param_hint="'SUBJECT'")
    if path is not None and values:
        raise typer.BadParameter("give values or a --file, not both", param_hint="'VALUE'")
    if path is None and (form != "auto" or key_field is not None or subject_field is not None):
        raise typer.BadParameter("--format, --key-field and --subject-field are for a --file", param_hint="'--file'")
    if form == "lines" and (subject is None or key_field is not None or subject_field is not None):
        raise typer.BadParameter("lines have no fields: they need a SUBJECT", param_hint="'--format'")
    if form == "messages" and (key_field is not None or subject_field is not None):
        raise typer.BadParameter("messages have a key and a subject of their own", param_hint="'--format'")
    if subject is not None and subject_field is not None:
        raise typer.BadParameter("give a SUBJECT or --subject-field, not both", param_hint="'--subject-field'")
    if key is not None and key_field is not None:
        raise typer.BadParameter("give --key or --key-field, not both", param_hint="'--key-field'")
    if message_id is not None and len(values or ()) != 1:
        raise typer.BadParameter("it is for one message, given as a VALUE", param_hint="'--message-id'")

    common = Outgoing(subject or "", None, key, _read_headers(header or ()) or None, message_id, delay, ttl)
    with at.client() as client:
        if values:
            for value in values:
                _, payload, given = arguments(_with_value(common, os.fsencode(value)))
                receipt = client.publish(common.subject, payload, **given)
                print(json_text.dumps(asdict(receipt)) if json else _as_line(receipt), flush=True)
        else:
            chosen: Form = "lines" if path is None else form
            file = Import(form=chosen, common=common, key_field=key_field, subject_field=subject_field)
            _publish_many(client, file, path, as_json=json)


def _read_headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r}: write it as NAME=VALUE", param_hint="'--header'")
        headers[name] = value
    return headers


def _with_value(common: Outgoing, value: bytes) -> Outgoing:
    return replace(common, value=value)


def _as_line(receipt: Receipt) -> str:
    if receipt.duplicate:
        return f"duplicate of {receipt.topic} {receipt.partition}:{receipt.offset}"
    if receipt.offset < 0:
        return f"stored, and published to {receipt.topic} when it is due"
    if receipt.topic.startswith("_"):
        return "published to who listens, and not stored"
    return f"stored in {receipt.topic} at {receipt.partition}:{receipt.offset}"


def _publish_many(client: Client, file: Import, path: Path | None, *, as_json: bool) -> None:
    """Up to a line that is wrong, or Ctrl-C: what came before is stored, and counted."""
    from penstock.cli import output

    where, problem, is_interrupted = "", None, False
    started = time.perf_counter()
    with _opened(path) as stream, _watched(stream) as advance, client.producer() as producer:
        try:
            for message, where in file.messages(stream, advance):
                subject, value, options = arguments(message)
                try:
                    producer.publish(subject, value, **options)
                except PeerError as error:
                    raise BadRequest(f"{where}: {error}") from None
        except PeerError as error:
            problem = f"{stream.name} {error}"
        except KeyboardInterrupt:
            is_interrupted = True
    seconds, duplicates = time.perf_counter() - started, producer.duplicates
    count = producer.stored - duplicates
    if as_json:
        output.print_json({"published": count, "duplicates": duplicates, "seconds": seconds, "form": file.found})
    else:
        not_stored = f", and {counted(duplicates, 'duplicate')} not stored again" if duplicates else ""
        noun = "object" if file.found == "objects" else "message"
        print(f"published {counted(count, noun)}{not_stored}: {output.rate(count, seconds)}", flush=True)
    if problem:
        raise PenstockError(problem)
    if is_interrupted:
        raise typer.Exit(130)


def _opened(path: Path | None) -> AbstractContextManager[BinaryIO]:
    return nullcontext(sys.stdin.buffer) if path in (None, Path("-")) else path.open("rb")


def _watched(stream: BinaryIO) -> AbstractContextManager[Callable[[int], None]]:
    """A bar, by what moves it on; for who types, what to do."""
    from penstock.cli import output

    if stream.isatty():
        print("A line is a message. Ctrl-D ends it.", file=sys.stderr)
        return nullcontext(lambda count: None)
    status = os.fstat(stream.fileno())
    # Nobody knows how much comes through a pipe.
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return output.moving("publishing", size, in_bytes=True)
