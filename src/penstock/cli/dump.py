"""`penstock log dump`: print the messages or batches of a log, one per line, as `name=value` or as JSON.

Damage is printed at its position.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from penstock.cli.text import Document, iso, put, shown
from penstock.errors import CorruptBatch, LogDamaged, PenstockError, UnknownTopic
from penstock.log.examine import TornTail
from penstock.log.scan import Found
from penstock.log.segment import Segment
from penstock.model.batch import HEADER_BYTES, NO_SEGMENT, Batch, parse, size_at
from penstock.store.inspect import InspectedLog, Inspection, inspect, walk
from penstock.store.state import STATE_TOPIC


class DumpedMessage(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    subject: bytes | None
    reply: bytes | None
    headers: bytes | None
    tombstone: bool
    value: bytes


def run(
    directory: Path,
    topic: str | None,
    partition: int | None,
    *,
    start: int,
    count: int | None,
    batches: bool,
    as_json: bool,
) -> bool:
    """Print the log; return whether everything read is sound."""
    with inspect(directory) as inspection:
        logs = _choose(inspection, topic, partition)
        output = _DumpOutput(count, as_json)
        for log in logs:
            if output.full:
                break
            if len(logs) > 1 and not as_json:
                print(f"# {_title(log)}, partition {log.partition}")
            for problem in log.problems:
                output.damage(problem)
            _dump(log, start, output, batches=batches)
        sys.stdout.flush()
    return output.sound


class _DumpOutput:
    def __init__(self, count: int | None, as_json: bool) -> None:
        self._left = sys.maxsize if count is None else count
        self._as_json = as_json
        self.sound = True

    @property
    def full(self) -> bool:
        return self._left <= 0

    def messages(self, log: InspectedLog, messages: list[DumpedMessage]) -> None:
        messages = messages[: self._left]
        self._left -= len(messages)
        if self._as_json:
            lines = [json.dumps({"partition": log.partition, **_message_document(message)}) for message in messages]
        else:
            lines = [_message_line(message) for message in messages]
        sys.stdout.write("".join([f"{line}\n" for line in lines]))

    def batch(self, log: InspectedLog, document: Document) -> None:
        self._left -= 1
        if self._as_json:
            print(json.dumps({"partition": log.partition, **document}))
        else:
            print(_batch_line(document))

    def note(self, text: str) -> None:
        if not self._as_json:
            print(f"*** {text}")
            return
        # Programs read only JSON documents from stdout.
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)

    def damage(self, text: str) -> None:
        self.sound = False
        self.note(text)


def _choose(inspection: Inspection, topic: str | None, partition: int | None) -> list[InspectedLog]:
    topics: dict[int | None, list[InspectedLog]] = {}
    for log in inspection.logs:
        topics.setdefault(log.topic_id, []).append(log)
    titles = ", ".join(_title(logs[0]) for logs in topics.values())
    if topic is not None:
        chosen = [logs for logs in topics.values() if logs[0].topic_name == topic]
        chosen = chosen or [logs for number, logs in topics.items() if str(number) == topic]
        problem = f"unknown topic {topic} in {inspection.directory}"
    else:
        chosen = [logs for number, logs in topics.items() if number != STATE_TOPIC or len(inspection.logs) == 1]
        problem = f"{inspection.directory} has several topics"
    if len(chosen) != 1:
        raise UnknownTopic(f"{problem}: choose one by name or ID with --topic: {titles}")
    logs = [log for log in chosen[0] if partition in (None, log.partition)]
    if not logs:
        numbers = ", ".join(str(log.partition) for log in chosen[0])
        raise UnknownTopic(
            f"{_title(chosen[0][0])} has no partition {partition}: use --partition with one of {numbers}"
        )
    return logs


def _title(log: InspectedLog) -> str:
    if log.topic_id is None:
        return str(log.directory)
    return "the state topic (id 0)" if log.topic_id == STATE_TOPIC else f"{log.topic_name or '?'} (id {log.topic_id})"


def _dump(log: InspectedLog, start: int, output: _DumpOutput, *, batches: bool) -> None:
    for segment, item in walk(log, start):
        if output.full:
            return
        match item:
            case Found(position=position, batch=batch):
                try:
                    if batches:
                        output.batch(log, _batch_document(segment, position, batch, "ok"))
                    elif batch.count:
                        output.messages(log, [message for message in _messages(batch) if message.offset >= start])
                except CorruptBatch as error:
                    # The checksum is right, so the batch was encoded like this.
                    output.damage(str(LogDamaged(segment.path, position, batch.base_offset, batch.end, str(error))))
            case TornTail():
                output.note(
                    f"{item.path}: torn tail of {item.size} bytes at byte {item.position}, offset {item.first}: "
                    "never acknowledged, will be truncated at the next start"
                )
            case PenstockError():
                if batches and isinstance(item, LogDamaged) and (unsound := _unsound_batch(segment, item.position)):
                    output.batch(log, _batch_document(segment, item.position, unsound, "wrong"))
                output.damage(str(item))


def _messages(batch: Batch) -> Iterator[DumpedMessage]:
    columns = batch.columns()
    return map(
        DumpedMessage,
        columns.offsets(),
        columns.timestamps(),
        columns.keys() or repeat(None),
        columns.subjects() or repeat(None),
        columns.replies() or repeat(None),
        columns.headers() or repeat(None),
        columns.tombstones() or repeat(False),
        columns.values(),
    )


def _message_line(message: DumpedMessage) -> str:
    parts = [str(message.offset), iso(message.timestamp) or f"{message.timestamp}µs"]
    for name in ("key", "subject", "reply", "headers"):
        data = getattr(message, name)
        if data is not None:
            parts.append(f"{name}={shown(data, alone=False)}")
    if message.tombstone:
        parts.append("tombstone")
    if message.value or not message.tombstone:
        parts.append(f"value={shown(message.value, alone=True)}")
    return "  ".join(parts)


def _message_document(message: DumpedMessage) -> Document:
    document: Document = {
        "offset": message.offset,
        "timestamp": iso(message.timestamp),
        "timestamp_us": message.timestamp,
    }
    for name in ("key", "subject", "reply", "headers"):
        data = getattr(message, name)
        if data is not None:
            put(document, name, data)
    if message.tombstone:
        document["tombstone"] = True
    put(document, "value", message.value)
    return document


def _batch_document(segment: Segment, position: int, batch: Batch, crc: str) -> Document:
    document: Document = {
        "segment": segment.path.name,
        "position": position,
        "kind": "messages" if batch.count else "control",
        "base_offset": batch.base_offset,
        "span": batch.span,
        "count": batch.count,
        "bytes": len(batch.data),
        "append_time": iso(batch.append_time),
        "durable_bytes": batch.durable_bytes,
        "crc": crc,
    }
    if crc != "ok":
        return document
    if not batch.count:
        control = batch.control()
        previous = None if control.previous == NO_SEGMENT else control.previous
        document |= {"reserved": control.reserved, "previous": previous}
        return document | ({"dropped": control.dropped} if control.dropped != NO_SEGMENT else {})
    document["compression"] = batch.compression.name.lower()
    if batch.producer:
        document |= {"producer": batch.producer, "sequence": batch.sequence}
    if batch.source:
        document |= {"source": batch.source, "source_position": batch.position}
    return document


def _batch_line(document: Document) -> str:
    segment, position, kind, *rest = document.values()
    names = list(document)[-len(rest) :]
    pairs = [f"{name}={'none' if value is None else value}" for name, value in zip(names, rest, strict=True)]
    return "  ".join([f"{segment}:{position}", kind, *pairs])


def _unsound_batch(segment: Segment, position: int) -> Batch | None:
    """Return the batch at `position` if at least its header is sound."""
    try:
        size = size_at(segment.content(position, HEADER_BYTES))
        return parse(segment.content(position, size)) if size else None
    except CorruptBatch:
        return None
