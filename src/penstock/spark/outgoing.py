"""The rows of a task as batches for partitions.

    value       binary or string; null for a tombstone, which deletes its key
    key         binary or string
    subject     string: the topic, or a subject in it
    topic       string: the subject of a row without one
    headers     map<string, string>
    partition   int: the partition, regardless of the key

Each row goes where the client would send it. Nothing here works row by row in Python: subjects and keys are processed
once for each distinct value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow
from pyarrow import compute

from penstock.errors import BadHeader, BadSubject, UnknownTopic
from penstock.model import arrow
from penstock.model.batch import Batch, Compression
from penstock.model.headers import hash_key
from penstock.model.subject import is_subject

# The size of a batch: large enough that its header and its request cost nothing, and with all columns smaller than the
# default limit of a payload (1 MiB), because in a larger one the broker must check the size of every message, which is
# a good part of the time of staging.
BATCH_BYTES: Final = 768 << 10
BATCH_ROWS: Final = 1 << 15

# A subject -> the name of its topic, the ID of the topic, and its number of partitions.
Resolve = Callable[[str], tuple[str, int, int]]


class PartitionBatch(NamedTuple):
    topic: str
    partition: int
    batch: Batch


class Router:
    """Finds the partition of every row. Each task has its own, which caches the topics."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        topic: str | None = None,
        compression: Compression = Compression.NONE,
        turn: int = 0,
    ) -> None:
        """`topic` replaces the column of that name.

        Rows without a key or a subject go to the partitions in turn, the rows of one call together, beginning with
        `turn`, which differs between tasks.
        """
        self._resolve = resolve
        self._topic = topic
        self._compression = compression
        self._topics: list[_TargetTopic] = []
        self._by_name: dict[str, _TargetTopic] = {}
        self._turn = turn

    def parts(self, rows: pyarrow.RecordBatch, *, timestamp: int) -> Iterator[PartitionBatch]:
        """Yield the rows by topic and partition. Within a partition they keep their order."""
        if not rows.num_rows:
            return
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        headers = _read_headers(columns.get("headers"))
        key = _first_of(_as_binary(columns.get("key")), headers.keys)
        value, tombstone = _value(_as_binary(columns["value"]), key)
        topic = self._topic or _as_text(columns.get("topic"))
        subjects = _subjects(_as_text(columns.get("subject")), topic, rows.num_rows)
        topics = [self._find(subject) for subject in subjects.distinct]
        places = self._places(subjects, topics, key, columns.get("partition"))
        found = {
            "value": value,
            "key": key,
            "subject": subjects.stored(topics),
            "headers": headers.blocks,
            "tombstone": tombstone,
        }
        messages = pyarrow.RecordBatch.from_pydict({name: each for name, each in found.items() if each is not None})
        for place, group in _groups(messages, places):
            for part in _split(group):
                batch = arrow.encode(part, timestamp=timestamp, compression=self._compression, asks=headers.asks)
                yield PartitionBatch(self._topics[place >> 32].name, place & 0xFFFFFFFF, batch)

    def _find(self, subject: str) -> _TargetTopic:
        """Return the topic that stores a subject. Topics do not nest, so the first match is the only one."""
        if not is_subject(subject.encode()):
            raise BadSubject(f"invalid subject {subject!r}: it must be tokens separated by dots, such as orders.eu")
        name = subject
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.rpartition(".")[0]
        name, _, partitions = self._resolve(subject)
        topic = _TargetTopic(len(self._topics), name, partitions)
        self._topics.append(topic)
        self._by_name[name] = topic
        return topic

    def _places(
        self,
        subjects: _Subjects,
        topics: Sequence[_TargetTopic],
        key: pyarrow.Array | None,
        partition: pyarrow.Array | None,
    ) -> _Datum:
        """Return for each row the number of its topic, shifted by 32 bits, plus its partition."""
        base = subjects.spread([topic.number << 32 for topic in topics], pyarrow.int64())
        partitions = subjects.spread([topic.partitions for topic in topics], pyarrow.uint64())
        chosen: _Datum = pyarrow.scalar(0, pyarrow.int64())
        if any(topic.partitions > 1 for topic in topics) and (partition is None or partition.null_count):
            hashes = _first_of(
                None if key is None or key.null_count == len(key) else hash_keys(key),
                subjects.hashes(topics) if key is None or key.null_count else None,
            )
            number = _first_of(hashes, pyarrow.scalar(self._turn, pyarrow.uint64()))
            chosen = _remainder(number, partitions).cast(pyarrow.int64())
            self._turn += 1
        if partition is not None:
            given = partition.cast(pyarrow.int64())
            _check_partitions(given, partitions, subjects, topics)
            chosen = compute.coalesce(given, chosen)
        return compute.add(base, chosen)


class _TargetTopic(NamedTuple):
    number: int
    name: str
    partitions: int


# An array with an item per row, or a scalar for all rows.
_Datum = Any


@dataclass(frozen=True, slots=True)
class _Subjects:
    """The distinct subjects, and the index of each row's subject; None if all are the same."""

    distinct: Sequence[str]
    codes: pyarrow.Array | None
    count: int

    def spread(self, items: Sequence[Any], kind: pyarrow.DataType) -> _Datum:
        """Return for each row the item of its subject."""
        if len(set(items)) == 1:
            return pyarrow.scalar(items[0], kind)
        return pyarrow.array(items, kind).take(self.codes)

    def stored(self, topics: Sequence[_TargetTopic]) -> pyarrow.Array | None:
        """Return the column as batches store it: null where the subject is the name of the topic."""
        below = self._below(topics)
        if below.null_count == len(below):
            return None
        return pyarrow.repeat(below[0], self.count) if self.codes is None else below.take(self.codes)

    def hashes(self, topics: Sequence[_TargetTopic]) -> _Datum | None:
        """Return the hashes of subjects below the topic: they choose the partition of messages without a key."""
        below = self._below(topics)
        if below.null_count == len(below):
            return None
        hashes = hash_keys(below)
        return hashes[0] if self.codes is None else hashes.take(self.codes)

    def _below(self, topics: Sequence[_TargetTopic]) -> pyarrow.Array:
        pairs = zip(self.distinct, topics, strict=True)
        found = [None if subject == topic.name else subject.encode() for subject, topic in pairs]
        return pyarrow.array(found, pyarrow.binary())


def _subjects(subject: pyarrow.Array | None, topic: pyarrow.Array | str | None, count: int) -> _Subjects:
    if isinstance(topic, str) and (subject is None or subject.null_count == count):
        return _Subjects([topic], None, count)
    if subject is not None and topic is not None:
        _check_inside(subject, topic)
    found = _first_of(subject, topic)
    if found is None or found.null_count:
        raise ValueError("a row has neither a subject nor a topic: fill the column, or set the option topic")
    encoded = found.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    return _Subjects(distinct, encoded.indices if len(distinct) > 1 else None, count)


def _check_inside(subject: pyarrow.Array, topic: pyarrow.Array | str) -> None:
    """Refuse a row whose subject belongs to a topic other than the one in its column."""
    if isinstance(topic, str):
        pairs = [(topic, each) for each in subject.unique().to_pylist()]
    else:
        # Subjects have no line breaks, so the pair can be split again. It is null if one of the two is.
        joined = compute.binary_join_element_wise(topic, subject, "\n").unique().to_pylist()
        pairs = [tuple(pair.split("\n", 1)) for pair in joined if pair is not None]
    for name, each in pairs:
        if each is not None and each != name and not each.startswith(f"{name}."):
            raise BadSubject(f"subject {each!r} is not in topic {name!r}: omit one of the two")


def hash_keys(keys: pyarrow.Array) -> pyarrow.Array:
    """Return `headers.hash_key` of each key, null for null."""
    encoded = keys.dictionary_encode()
    return _hash_distinct(encoded.dictionary).take(encoded.indices)


# Up to this many keys it is faster to hash one by one than byte by byte: 0.06 µs a byte, against 10 µs a step.
_FEW: Final = 128
_BASIS: Final = pyarrow.scalar(14695981039346656037, pyarrow.uint64())
_PRIME: Final = pyarrow.scalar(1099511628211, pyarrow.uint64())


def _hash_distinct(keys: pyarrow.Array) -> pyarrow.Array:
    """Compute FNV-1a of all keys at once: their first bytes, then their second, …. Short keys are done first."""
    order = compute.sort_indices(compute.binary_length(keys))
    keys = keys.take(order)
    lengths = memoryview(compute.binary_length(keys).buffers()[1]).cast("i")
    _, offsets, data = keys.buffers()
    starts = pyarrow.Array.from_buffers(pyarrow.int32(), len(keys), [None, offsets], offset=keys.offset)
    characters = pyarrow.Array.from_buffers(pyarrow.uint8(), data.size if data else 0, [None, data])
    hashes = pyarrow.repeat(_BASIS, len(keys))
    done = []
    ready = position = 0
    while len(keys) - ready > _FEW:
        shorter = bisect_right(lengths, position, ready, len(keys))
        done.append(hashes.slice(0, shorter - ready))
        hashes, starts = hashes.slice(shorter - ready), starts.slice(shorter - ready)
        ready = shorter
        each = characters.take(compute.add(starts, pyarrow.scalar(position, pyarrow.int32()))).cast(pyarrow.uint64())
        hashes = compute.multiply(compute.bit_wise_xor(hashes, each), _PRIME)
        position += 1
    rest = [hash_key(key) for key in keys.slice(ready).to_pylist()]
    done.append(pyarrow.array(rest, pyarrow.uint64()))
    return pyarrow.concat_arrays(done).take(compute.sort_indices(order))


def _remainder(number: _Datum, divisor: _Datum) -> _Datum:
    return compute.subtract(number, compute.multiply(compute.divide(number, divisor), divisor))


def _check_partitions(
    given: pyarrow.Array, partitions: _Datum, subjects: _Subjects, topics: Sequence[_TargetTopic]
) -> None:
    count = partitions.cast(pyarrow.int64())
    wrong = compute.or_(compute.less(given, pyarrow.scalar(0, pyarrow.int64())), compute.greater_equal(given, count))
    row = compute.index(wrong, pyarrow.scalar(True)).as_py()
    if row >= 0:
        topic = topics[0 if subjects.codes is None else subjects.codes[row].as_py()]
        raise UnknownTopic(
            f"invalid partition {given[row]}: topic {topic.name} has {topic.partitions} (0-{topic.partitions - 1}). "
            "Change the column partition, or drop it to use the key"
        )


def _value(value: pyarrow.Array, key: pyarrow.Array | None) -> tuple[pyarrow.Array, pyarrow.Array | None]:
    """Return the payloads, and which messages are tombstones."""
    if not value.null_count:
        return value, None
    tombstone = compute.is_null(value)
    if key is None or compute.any(compute.and_(tombstone, compute.is_null(key))).as_py():
        raise ValueError(
            "a message with a null value is a tombstone and needs a key: add a key, or a value (which may be empty)"
        )
    return compute.fill_null(value, b""), tombstone


_NAME: Final = r"\A[!#$%&'*+.^_`|~0-9A-Za-z-]+\z"
_BROKEN: Final = r"[\r\n\x00]|\A[ \t]|[ \t]\z"
_ASKING: Final = pyarrow.array(["msg-id", "nats-msg-id", "nats-ttl"])
_DELAYS: Final = pyarrow.array(["delay", "deliver-at"])


class _Headers(NamedTuple):
    """Headers as batches store them, the keys in them, and whether a message has an ID or a TTL."""

    blocks: pyarrow.Array | None = None
    keys: pyarrow.Array | None = None
    asks: bool = False


def _read_headers(headers: pyarrow.Array | None) -> _Headers:
    if headers is None or headers.null_count == len(headers):
        return _Headers()
    if headers.offset:
        # A slice still has the names and values of the whole array.
        headers = pyarrow.concat_arrays([headers.slice(0, 0), headers])
    names, values = headers.keys.cast(pyarrow.string()), headers.items.cast(pyarrow.string())
    _check_headers(names, values)
    lines = compute.binary_join_element_wise(names, ": ", values, "\r\n", "")
    by_row = pyarrow.ListArray.from_arrays(headers.offsets, lines, mask=compute.is_null(headers))
    blocks = compute.binary_join(by_row, "").cast(pyarrow.binary())
    known = compute.utf8_lower(names)
    asks = compute.any(compute.is_in(known, value_set=_ASKING)).as_py() or False
    is_empty = compute.equal(compute.binary_length(blocks), 0)
    blocks = compute.if_else(is_empty, pyarrow.scalar(None, pyarrow.binary()), blocks)
    return _Headers(blocks, _header_keys(headers, names, known), asks)


def _check_headers(names: pyarrow.Array, values: pyarrow.Array) -> None:
    """Refuse the headers that the client refuses."""
    wrong = compute.invert(compute.match_substring_regex(names, _NAME))
    if (row := _first(wrong)) is not None:
        raise BadHeader(f"{names[row].as_py()!r} is not a valid header name: use letters, digits and hyphens")
    if values.null_count:
        raise BadHeader(f"header {names[_first(compute.is_null(values))]} is null: omit it, or set a text")
    if (row := _first(compute.match_substring_regex(values, _BROKEN))) is not None:
        text = values[row].as_py()
        raise BadHeader(f"header {names[row]}: {text!r} has a line break, or begins or ends with a blank")
    if (row := _first(compute.is_in(compute.utf8_lower(names), value_set=_DELAYS))) is not None:
        raise BadHeader(f"header {names[row]}: Spark batches cannot have delayed messages")


def _header_keys(headers: pyarrow.Array, names: pyarrow.Array, known: pyarrow.Array) -> pyarrow.Array | None:
    """Return for each row the key in its headers; None if no row has one."""
    found = None
    for name in names.filter(compute.equal(known, "penstock-key")).unique().to_pylist():
        found = _first_of(found, compute.map_lookup(headers, name, "first"))
    return _as_binary(found)


def _first(bits: pyarrow.Array) -> int | None:
    """Return the index of the first true value; None if there is none."""
    row: int = compute.index(bits, pyarrow.scalar(True)).as_py()
    return None if row < 0 else row


def _as_binary(column: pyarrow.Array | None) -> pyarrow.Array | None:
    """Cast to binary. Strings keep their buffers."""
    return None if column is None else column.cast(pyarrow.binary())


def _as_text(column: pyarrow.Array | None) -> pyarrow.Array | None:
    return None if column is None else column.cast(pyarrow.string())


def _first_of(one: _Datum | None, other: _Datum | None) -> _Datum | None:
    """Return for each row `one`, or `other` where that is null."""
    if one is None or other is None:
        return other if one is None else one
    return compute.coalesce(one, other)


def _groups(messages: pyarrow.RecordBatch, places: _Datum) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Yield the messages of each place."""
    if isinstance(places, pyarrow.Scalar):
        yield places.as_py(), messages
        return
    # The sort is stable.
    order = compute.sort_indices(places)
    runs = compute.run_end_encode(places.take(order), run_end_type=pyarrow.int32())
    if len(runs.values) > 1:
        messages = messages.take(order)
    start = 0
    for place, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield place, messages.slice(start, end - start)
        start = end


def _split(messages: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Split messages into parts of the size of a batch."""
    count = messages.num_rows
    sizes: _Datum = pyarrow.scalar(0, pyarrow.int64())
    for column in messages.columns:
        if column.type == pyarrow.binary():
            offsets = column.buffers()[1]
            ends = pyarrow.Array.from_buffers(pyarrow.int32(), count + 1, [None, offsets], offset=column.offset)
            sizes = compute.add(sizes, ends.cast(pyarrow.int64()))
    # The sum of sizes up to each row, plus a constant.
    bytes_to = memoryview(sizes.buffers()[1]).cast("q")
    start = 0
    while start < count:
        fits = bisect_right(bytes_to, bytes_to[start] + BATCH_BYTES, start, count + 1) - 1
        end = min(max(fits, start + 1), start + BATCH_ROWS)
        yield messages.slice(start, end - start)
        start = end
