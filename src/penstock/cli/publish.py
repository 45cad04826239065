"""`penstock publish`: publish arguments, each with its receipt, or a stream of lines or rows through a producer."""

from __future__ import annotations

import json as json_text
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from penstock.cli.imports import Form, Import
from penstock.cli.options import ConnectionOptions, Json, complete_topic, options, read_delay, read_ttl
from penstock.cli.text import counted
from penstock.client.values import Outgoing, Receipt, arguments
from penstock.errors import BadRequest, PeerError, PenstockError

if TYPE_CHECKING:
    from penstock.client.sync import Client

app = typer.Typer(add_completion=False)

_FILE: Final = "File"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """The file to publish, and how to read it."""

    path: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Publish a file of JSON lines, CSV or Parquet; -: stdin.",
            rich_help_panel=_FILE,
        ),
    ] = None
    form: Annotated[
        Form,
        typer.Option("--format", help="Format of --file; auto: from its name and first row.", rich_help_panel=_FILE),
    ] = "auto"
    key_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Use this field or column as the key.", rich_help_panel=_FILE),
    ] = None
    subject_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Use this field or column as the subject.", rich_help_panel=_FILE),
    ] = None

    def check(self, subject: str | None, key: str | None) -> None:
        """Raise BadParameter if the options contradict each other, or the subject or key of all messages."""
        has_fields = self.key_field is not None or self.subject_field is not None
        if self.path is None and (self.form != "auto" or has_fields):
            raise typer.BadParameter("--format, --key-field and --subject-field need --file", param_hint="'--file'")
        if self.form == "lines" and (subject is None or has_fields):
            raise typer.BadParameter("lines have no fields: give a SUBJECT", param_hint="'--format'")
        if self.form == "messages" and has_fields:
            raise typer.BadParameter("messages have their own key and subject", param_hint="'--format'")
        if subject is not None and self.subject_field is not None:
            raise typer.BadParameter("give a SUBJECT or --subject-field, not both", param_hint="'--subject-field'")
        if key is not None and self.key_field is not None:
            raise typer.BadParameter("give --key or --key-field, not both", param_hint="'--key-field'")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """What all published messages have in common."""

    key: Annotated[
        str | None, typer.Option(help="Message key: selects the partition; compaction keeps the latest of each.")
    ] = None
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Add a header; repeatable.")] = None
    message_id: Annotated[str | None, typer.Option(help="Deduplicate by this ID.")] = None
    delay: Annotated[
        Any, typer.Option(parser=read_delay, metavar="5s|TIME", help="Deliver later: after a duration, or at a time.")
    ] = None
    ttl: Annotated[
        str | None,
        typer.Option(
            parser=read_ttl, metavar="SECONDS|1h30m|never", help="Stop delivering the message after this time."
        ),
    ] = None

    def outgoing(self, subject: str) -> Outgoing:
        headers = _read_headers(self.header or ())
        return Outgoing(subject, None, self.key, headers or None, self.message_id, self.delay, self.ttl)


# Long only by its options and its help.
@app.command()
@options
def publish(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[SUBJECT]",
            autocompletion=complete_topic,
            help="Subject to publish to; overrides subjects in --file.",
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VALUE]...", help="Messages to publish. Omit them, or use -, to read lines from stdin."
        ),
    ] = None,
    *,
    message: MessageOptions,
    file: FileOptions,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Publish messages, and wait until they are stored with the durability of their topic.

    Prints a receipt for each VALUE; with --json, one JSON document per line.

    Each object or row of --file becomes the value of a message, as JSON. If the
    first one has the format of `penstock fetch`, all are read as such messages:
    they have value, value_base64, json or tombstone, and optionally subject, key,
    headers, message_id, delay and ttl.
    """
    values = None if values == ["-"] else values
    _check(subject, values, message, file)
    common = message.outgoing(subject or "")
    with at.client() as client:
        if values:
            for value in values:
                _, payload, given = arguments(_with_value(common, os.fsencode(value)))
                receipt = client.publish(common.subject, payload, **given)
                print(json_text.dumps(asdict(receipt)) if json else _as_line(receipt), flush=True)
        else:
            form: Form = "lines" if file.path is None else file.form
            rows = Import(form=form, common=common, key_field=file.key_field, subject_field=file.subject_field)
            _publish_many(client, rows, file.path, as_json=json)


def _check(subject: str | None, values: list[str] | None, message: MessageOptions, file: FileOptions) -> None:
    if subject is None and file.path is None:
        raise typer.BadParameter("give a subject, or a --file of messages with subjects", param_hint="'SUBJECT'")
    if file.path is not None and values:
        raise typer.BadParameter("give VALUE or --file, not both", param_hint="'VALUE'")
    file.check(subject, message.key)
    if message.message_id is not None and len(values or ()) != 1:
        raise typer.BadParameter("it needs exactly one VALUE", param_hint="'--message-id'")


def _read_headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"invalid header {text!r}: use NAME=VALUE", param_hint="'--header'")
        headers[name] = value
    return headers


def _with_value(common: Outgoing, value: bytes) -> Outgoing:
    return replace(common, value=value)


def _as_line(receipt: Receipt) -> str:
    if receipt.duplicate:
        return f"duplicate of {receipt.topic} {receipt.partition}:{receipt.offset}"
    if receipt.topic.startswith("_"):
        return "published to current subscribers, not stored"
    if receipt.offset < 0:
        return f"stored, will be published to {receipt.topic} when due"
    return f"stored in {receipt.topic} at {receipt.partition}:{receipt.offset}"


def _publish_many(client: Client, file: Import, path: Path | None, *, as_json: bool) -> None:
    """Publish until the end, an invalid row, or Ctrl-C; the rows before it are stored and counted."""
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
    """Return a progress bar; at a terminal, print instructions instead."""
    from penstock.cli import output

    if stream.isatty():
        print("Each line is a message. Ctrl-D ends the input.", file=sys.stderr)
        return nullcontext(lambda count: None)
    status = os.fstat(stream.fileno())
    # The size of a pipe's data is unknown.
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return output.moving("publishing", size, in_bytes=True)
