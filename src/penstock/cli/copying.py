"""Copy a topic: each message unchanged and exactly once, even if the copy is interrupted and resumed.

Each part of a partition is one transaction at the target. Its name identifies the source log and the target topic; its
number is the source offset after the part. So the target itself records the progress of the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.model.headers import ttl_us
from penstock.model.run import MESSAGE_BYTES, Run, read_ttls

if TYPE_CHECKING:
    from penstock.client.message import Message
    from penstock.client.sync import Client
    from penstock.client.values import PartitionPosition, Topic

# Limits of a part; a single larger message is a part by itself.
_PART_MESSAGES: Final = 4096
_PART_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Copied:
    """Messages that this run copied, that earlier runs copied, and that the source dropped before their copy."""

    copied: int = 0
    resumed: int = 0
    lost: int = 0
    # Partitions that may have foreign messages in the target: the message copied last is gone at the source.
    unchecked: list[int] = field(default_factory=list)


def prepare(source: Topic, target: Client, name: str) -> Topic:
    """Return the topic to copy to; create it like the source if it does not exist. It does not enforce a schema, which
    older messages may not match."""
    found = next((topic for topic in target.topics() if topic.name == name), None)
    if found is None:
        # The group in retain_for does not read the copy.
        policy = source.policy | {"retain_for": None, "schema_enforced": False}
        return target.create_topic(name, partitions=source.partitions, **policy)
    if found.partitions != source.partitions:
        raise PenstockError(
            f"{name} has {found.partitions} partitions and {source.name} has {source.partitions}: a copy needs the "
            "same number; copy to a topic that does not exist yet, or use a replay pipeline, which distributes by key"
        )
    return found


def copy(
    client: Client, source: Topic, to: Client, target: Topic, done: Copied, advance: Callable[[int], None]
) -> None:
    """Copy the messages that the source holds now; count them in `done`."""
    found = {each.partition: _name(client, source, each, target) for each in source.positions if _size(each)}
    names = {partition: name for partition, name in found.items() if name is not None}
    reached = {partition: to.last_transaction(name) for partition, name in names.items()}
    if all(number is None for number in reached.values()) and any(map(_size, target.positions)):
        raise PenstockError(f"{target.name} has messages that are not of this copy: use a new or empty topic")
    for partition, number in reached.items():
        _check_target(client, source, to, target, partition, number, done)
    for position in source.positions:
        number = reached.get(position.partition)
        begin = position.start if number is None else max(number, position.start)
        done.resumed += begin - position.start
        done.lost += 0 if number is None else max(0, position.start - number)
        advance(begin - position.start)
        if begin < position.committed and position.partition in names:
            name, place = names[position.partition], position.partition
            messages = client.fetch(source.name, place, begin, end=position.committed)
            for run, end in _parts(messages, source.name, target.name):
                stage = to.stage(name, end)
                stage.append(target.name, place, run.encode(target.name.encode(), run.timestamp))
                to.commit_transaction(name, end, stage.close())
                done.copied += len(run)
                advance(len(run))


def _check_target(
    client: Client, source: Topic, to: Client, target: Topic, partition: int, number: int | None, done: Copied
) -> None:
    """Raise if a partition of the target has foreign messages: its last message must be the one copied last."""
    last = _last(to, target, target.positions[partition])
    if last is None:
        return
    copied = None
    if number is not None and number > source.positions[partition].start:
        copied = next(iter(client.fetch(source.name, partition, number - 1, end=number, expired=True)), None)
    if copied is not None and _identity(copied, source) == _identity(last, target):
        return
    if number is not None and (copied is None or _may_be_compacted(copied, target)):
        done.unchecked.append(partition)
        return
    raise PenstockError(
        f"{target.name} has messages that are not of this copy, such as offset {last.offset} of partition {partition}: "
        "use a new or empty topic"
    )


def _may_be_compacted(copied: Message, target: Topic) -> bool:
    """Return whether compaction may have removed the copy of a message even if it was the last of the target."""
    has_ttl = copied.header_block is not None and ttl_us(copied.header_block) is not None
    return target.policy["cleanup"] == "compact" and (copied.deleted or has_ttl)


def _last(client: Client, topic: Topic, position: PartitionPosition) -> Message | None:
    """Return the last message of a partition, searching backwards over empty offsets."""
    begin, step = position.committed, 1
    while begin > position.start:
        end, begin = begin, max(position.start, begin - step)
        step *= 16
        found = deque(client.fetch(topic.name, position.partition, begin, end=end, expired=True), maxlen=1)
        if found:
            return found[0]
    return None


def _identity(message: Message, topic: Topic) -> object:
    """Return the parts that a message and its copy have in common."""
    below = message.subject[len(topic.name) :]
    return below, message.key, message.value, message.header_block, message.timestamp_us, message.deleted


def _name(client: Client, source: Topic, position: PartitionPosition, target: Topic) -> str | None:
    """Return the name of the transactions, from the number of the source log and the ID of the target topic. None if
    compaction left no message."""
    first = next(iter(client.fetch(source.name, position.partition, position.start, count=1, expired=True)), None)
    return None if first is None else f"copy-{first.log:x}-{source.id}-{position.partition}-{target.id}"


def _size(position: PartitionPosition) -> int:
    return position.committed - position.start


def _parts(messages: Iterator[Message], source: str, target: str) -> Iterator[tuple[Run, int]]:
    """Yield runs for the target, each with the source offset after it."""
    run, times, size, end = Run([], []), [], 0, 0
    for message in messages:
        index = len(run)
        # Tokens after the source topic's name follow the target topic's name.
        run.subjects.append((target + message.subject[len(source) :]).encode())
        run.values.append(message.value)
        times.append(message.timestamp_us)
        key, block, reply = message.key, message.header_block, message.reply
        if key is not None:
            run.keys[index] = key
        if block is not None:
            run.headers[index] = block
        if reply is not None:
            run.replies[index] = reply.encode()
        if message.deleted:
            run.tombstones.add(index)
        size += MESSAGE_BYTES + len(message.value) + len(block or b"") + len(key or b"")
        end = message.offset + 1
        if len(run) >= _PART_MESSAGES or size >= _PART_BYTES:
            yield _timed(run, times), end
            run, times, size = Run([], []), [], 0
    if run.values:
        yield _timed(run, times), end


def _timed(run: Run, times: list[int]) -> Run:
    run.timestamp, run.timestamps = times[0], times
    run.ttls = read_ttls(run.headers)
    return run
