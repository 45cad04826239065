"""What can be asked about topics, groups and dead letters, and done to them: each call is a function, JSON to JSON.

What may have many rows is an iterator in the answer: `rows.encode` writes it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.broker import Broker
from penstock.broker.deadletters import DeadLetter, Redriven, Wanted
from penstock.broker.delay import Delayed, DelayedWanted
from penstock.broker.group import Group, Mode
from penstock.broker.partition import Partition
from penstock.broker.refresh import Refresh, State
from penstock.broker.start import AtOffset, AtPositions, AtTime, Begin, Start
from penstock.broker.topic import ServedTopic
from penstock.errors import BadRequest, UnknownTopic
from penstock.server.rows import Rows
from penstock.storage.policy import Policy
from penstock.storage.store import outcome
from penstock.subject import is_subject, whole_topic
from penstock.times import read_moment

if TYPE_CHECKING:
    from penstock.server.server import Server

Json = dict[str, Any]

# Of dead letters, in one answer.
LETTERS_MAX: Final = 10_000
LETTERS_BYTES_MAX: Final = 16 << 20
LETTERS_SLICE: Final = 100
# How long one request waits, and for how many partitions.
WAIT_MS_MAX: Final = 10_000
PLACES_MAX: Final = 10_000


class Request:
    """The fields of a call, each of the type that it must have."""

    def __init__(self, fields: Json) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise BadRequest(f"{name} is {value!r}, it must be a text")
        return value

    def name(self, name: str) -> bytes:
        return self.text(name).encode()

    def name_or_none(self, name: str) -> bytes | None:
        return None if self._fields.get(name) is None else self.name(name)

    def selection(self) -> bytes:
        """What a group reads: a `pattern`, or all of a `topic`."""
        topic = self.name_or_none("topic")
        if topic is None:
            return self.name("pattern")
        if self._fields.get("pattern") is not None:
            raise BadRequest("name either a pattern or a topic, not both")
        return whole_topic(topic)

    def number(self, name: str, *, default: int | None = None) -> int:
        value = self._fields.get(name, default)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise BadRequest(f"{name} is {value!r}, it must be a whole number from 0 on")
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self._fields.get(name) is None else self.number(name)

    def numbers(self, name: str) -> list[int]:
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
            raise BadRequest(f"{name} must be a list of whole numbers from 0 on")
        return value

    def numbers_or_none(self, name: str) -> list[int] | None:
        return None if self._fields.get(name) is None else self.numbers(name)

    def flag(self, name: str) -> bool:
        return self._fields.get(name) is True

    def page(self) -> slice:
        """Which rows of a list are asked for; all, unless it says otherwise."""
        first, limit = self.number("offset", default=0), self.number_or_none("limit")
        return slice(first, None if limit is None else first + limit)

    def mode(self) -> Mode:
        value = self._fields.get("mode", Mode.SHARED)
        if value not in list(Mode):
            raise BadRequest(f"mode is {value!r}, it must be one of {', '.join(Mode)}")
        return Mode(value)

    def start(self, now_us: int) -> Begin:
        return self._begin("start", self._fields.get("start", Start.LATEST), now_us)

    def before(self, now_us: int) -> Begin:
        return self._begin("before", self._fields.get("before"), now_us)

    @staticmethod
    def _begin(name: str, value: Any, now_us: int) -> Begin:
        match value:
            case "earliest" | "latest":
                return Start(value)
            case {"offset": int(offset)} if offset >= 0:
                return AtOffset(offset)
            case {"time_us": int(time_us)}:
                return AtTime(time_us)
            case {"time": time}:
                try:
                    return AtTime(read_moment(time, now_us))
                except ValueError as error:
                    raise BadRequest(f"{name}.time is {error}") from None
            case {"positions": list(positions)} if all(map(_is_position, positions)):
                return AtPositions({(topic_id, number): offset for topic_id, number, offset in positions})
        raise BadRequest(f"{name} is {value!r}, it must be earliest, latest, an offset, a time or positions")

    def places(self, broker: Broker) -> list[tuple[Partition, int]]:
        value = self._fields.get("positions")
        if not isinstance(value, list) or not 0 < len(value) <= PLACES_MAX or not all(map(_is_position, value)):
            raise BadRequest(f"positions must be 1 to {PLACES_MAX} of topic id, partition and offset")
        found = []
        for topic_id, number, offset in value:
            topic = broker.public_topic(topic_id)
            if number >= len(topic.partitions):
                raise UnknownTopic(
                    f"{topic.topic.name} has {len(topic.partitions)} partitions, none with number {number}"
                )
            found.append((topic.partitions[number], offset))
        return found

    def wanted(self) -> Wanted:
        """Which dead letters."""
        offsets = self.numbers_or_none("offsets")
        return Wanted(
            self.name("pattern"),
            self.name_or_none("group"),
            None if self._fields.get("reason") is None else self.text("reason"),
            self.number_or_none("since_us"),
            self.number_or_none("until_us"),
            self.number_or_none("partition"),
            None if offsets is None else frozenset(offsets),
        )

    def delayed(self) -> DelayedWanted:
        """Which delayed messages."""
        offsets = self.numbers_or_none("offsets")
        return DelayedWanted(
            self.name("pattern"), self.name_or_none("message_id"), None if offsets is None else frozenset(offsets)
        )

    def policy(self, base: Policy) -> Policy:
        """`base`, with what is given."""
        given = self._fields.get("policy") or {}
        if not isinstance(given, dict):
            raise BadRequest(f"policy is {given!r}, it must be an object")
        try:
            return Policy.from_json({**base.to_json(), **given})
        except ValueError as error:
            raise BadRequest(str(error)) from None


async def call(server: Server, fields: Json) -> Json:
    request = Request(fields)
    if request.text("call") == "statistics":
        return server.statistics()
    function = _CALLS.get(request.text("call"))
    if function is None:
        known = ", ".join((*_CALLS, "statistics"))
        raise BadRequest(f"there is no call {request.text('call')!r}: there are {known}")
    return await function(server.broker, request)


# Topics.


async def _resolve(broker: Broker, request: Request) -> Json:
    subject = request.name("subject")
    if not is_subject(subject):
        raise BadRequest(f"{request.text('subject')!r} is not a subject")
    topic = (await broker.owner(subject)).topic
    return {"topic": topic.name, "id": topic.id, "partitions": topic.partitions}


async def _topics(broker: Broker, request: Request) -> Json:
    topics = [topic for topic in broker.topics if not topic.is_internal]
    return {"topics": Rows(map(_describe_topic, topics[request.page()])), "total": len(topics)}


async def _topic(broker: Broker, request: Request) -> Json:
    return {**_describe_topic(broker.topic(request.name("name"))), "now_us": broker.clock.now_us()}


async def _create_topic(broker: Broker, request: Request) -> Json:
    name, policy = request.name("name"), request.policy(broker.settings.policy)
    await _checked(broker.create_topic(name, partitions=request.number_or_none("partitions"), policy=policy))
    return _describe_topic(broker.topic(name))


async def _alter_topic(broker: Broker, request: Request) -> Json:
    name = request.name("name")
    policy, partitions = request.policy(broker.topic(name).topic.policy), request.number_or_none("partitions")
    warning = broker.warning(name, partitions)
    await _checked(broker.alter_topic(name, partitions=partitions, policy=policy))
    return {**_describe_topic(broker.topic(name)), "warning": warning}


async def _purge_topic(broker: Broker, request: Request) -> Json:
    name, before = request.name("name"), request.before(broker.clock.now_us())
    await broker.purge_topic(name, before, partition=request.number_or_none("partition"))
    return _describe_topic(broker.topic(name))


async def _delete_topic(broker: Broker, request: Request) -> Json:
    await broker.delete_topic(request.name("name"))
    return {}


async def _refresh_topic(broker: Broker, request: Request) -> Json:
    name = request.name("name")
    return _describe_refresh(name, await broker.refresh_topic(name))


async def _refresh_status(broker: Broker, request: Request) -> Json:
    name = request.name("name")
    return _describe_refresh(name, broker.refresh(name))


async def _offset_at(broker: Broker, request: Request) -> Json:
    log = _partition(broker, request).log
    return {"offset": await _in_thread(lambda: log.offset_at(request.number("time_us")))}


async def _offset_after(broker: Broker, request: Request) -> Json:
    log = _partition(broker, request).log
    offset, size = request.number("offset"), request.number("bytes")
    return {"offset": await _in_thread(lambda: log.offset_after(offset, size))}


async def _wait(broker: Broker, request: Request) -> Json:
    """Until one of these partitions holds something at its offset, or is gone; or for so long."""
    waits = [asyncio.ensure_future(partition.grown(offset)) for partition, offset in request.places(broker)]
    try:
        done, _ = await asyncio.wait(
            waits, timeout=min(request.number("wait_ms"), WAIT_MS_MAX) / 1000, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return {"grown": bool(done)}


# Groups.


async def _groups(broker: Broker, request: Request) -> Json:
    groups = list(broker.groups.values())
    return {"groups": Rows(map(_describe_group, groups[request.page()])), "total": len(groups)}


async def _group(broker: Broker, request: Request) -> Json:
    group = broker.group(request.name("name"))
    return {**_describe_group(group), "hint": await broker.hint(group.pattern)}


async def _create_group(broker: Broker, request: Request) -> Json:
    name, pattern, start = request.name("name"), request.selection(), request.start(broker.clock.now_us())
    group = await broker.create_group(name, pattern, request.mode(), start=start)
    return {**_describe_group(group), "hint": await broker.hint(pattern)}


async def _reset_group(broker: Broker, request: Request) -> Json:
    name, topic, partition = request.name("name"), request.name_or_none("topic"), request.number_or_none("partition")
    await broker.reset_group(name, request.start(broker.clock.now_us()), topic=topic, partition=partition)
    return _describe_group(broker.group(name))


async def _delete_group(broker: Broker, request: Request) -> Json:
    await broker.delete_group(request.name("name"))
    return {}


async def _commit(broker: Broker, request: Request) -> Json:
    """For who keeps positions elsewhere, and wants them to be seen here."""
    group = broker.group(request.name("group"))
    partition = _partition(broker, request, "topic")
    offset = request.number("offset")
    settled, done = outcome()
    place = (partition.topic_id, partition.number)
    group.commit(place, offset, group.generation, lambda error: done(offset, error))
    await settled
    return {}


# Transactions.


async def _transaction(broker: Broker, request: Request) -> Json:
    name = request.name("name")
    return {"number": None if broker.transactions is None else broker.transactions.last(name)}


async def _commit_transaction(broker: Broker, request: Request) -> Json:
    name, number, offsets = request.name("name"), request.number("number"), request.numbers("offsets")
    transactions = await broker.open_transactions()
    is_new = await transactions.commit(name, number, offsets, once=request.flag("once"))
    return {"committed": is_new}


async def _abort_transaction(broker: Broker, request: Request) -> Json:
    (await broker.open_transactions()).abort(request.name("name"), request.number("number"))
    return {}


# Dead letters.


async def _dead_letters(broker: Broker, request: Request) -> Json:
    wanted, limit = request.wanted(), min(request.number("limit", default=100), LETTERS_MAX)
    found: list[Json] = []
    size = 0
    if (letters := await broker.dead_letters()) is not None:
        async for letter in letters.list(wanted, redriven=request.flag("redriven")):
            if len(found) >= limit or size >= LETTERS_BYTES_MAX:
                break
            found.append(_describe_letter(letter))
            size += len(letter.value)
            if len(found) % LETTERS_SLICE == 0:
                await asyncio.sleep(0)
    return {"letters": found}


async def _redrive(broker: Broker, request: Request) -> Json:
    wanted, count, to_group = request.wanted(), request.number_or_none("count"), request.flag("to_group")
    letters = await broker.dead_letters()
    found = Redriven(0) if letters is None else await letters.redrive(wanted, count, to_group=to_group)
    return {"redriven": found.count, "skipped": found.skipped, "reason": found.reason}


async def _purge_dead_letters(broker: Broker, request: Request) -> Json:
    wanted, count = request.wanted(), request.number_or_none("count")
    letters = await broker.dead_letters()
    return {"purged": 0 if letters is None else await letters.purge(wanted, count)}


# Delayed messages.


async def _delayed(broker: Broker, request: Request) -> Json:
    wanted, limit = request.delayed(), min(request.number("limit", default=100), LETTERS_MAX)
    found: list[Json] = []
    size = 0
    if broker.delays is None:
        return {"messages": found, "total": 0}
    async for message in broker.delays.find(wanted):
        if len(found) >= limit or size >= LETTERS_BYTES_MAX:
            break
        found.append(_describe_delayed(message))
        size += len(message.value)
    return {"messages": found, "total": len(broker.delays)}


async def _cancel_delayed(broker: Broker, request: Request) -> Json:
    wanted = request.delayed()
    return {"cancelled": 0 if broker.delays is None else await broker.delays.cancel(wanted)}


_CALLS: Final[dict[str, Callable[[Broker, Request], Awaitable[Json]]]] = {
    "resolve": _resolve,
    "topics": _topics,
    "topic": _topic,
    "create_topic": _create_topic,
    "alter_topic": _alter_topic,
    "purge_topic": _purge_topic,
    "delete_topic": _delete_topic,
    "refresh_topic": _refresh_topic,
    "refresh_status": _refresh_status,
    "offset_at": _offset_at,
    "offset_after": _offset_after,
    "wait": _wait,
    "groups": _groups,
    "group": _group,
    "create_group": _create_group,
    "reset_group": _reset_group,
    "delete_group": _delete_group,
    "commit": _commit,
    "transaction": _transaction,
    "commit_transaction": _commit_transaction,
    "abort_transaction": _abort_transaction,
    "dead_letters": _dead_letters,
    "redrive": _redrive,
    "purge_dead_letters": _purge_dead_letters,
    "delayed": _delayed,
    "cancel_delayed": _cancel_delayed,
}


def _describe_topic(topic: ServedTopic) -> Json:
    return {
        "name": topic.topic.name,
        "id": topic.topic.id,
        "partitions": topic.topic.partitions,
        "policy": topic.topic.policy.to_json(),
        "refused": None if topic.refusal is None else str(topic.refusal),
        "positions": (
            {
                "partition": partition.number,
                "start": partition.start,
                "committed": partition.log.committed,
                "end": partition.end,
                "bytes": sum(segment.size for segment in partition.log.segments),
            }
            for partition in list(topic.partitions)
        ),
    }


def _describe_refresh(topic: bytes, refresh: Refresh | None) -> Json:
    return {
        "topic": topic.decode(),
        "state": State.IDLE if refresh is None else refresh.state,
        "reason": None if refresh is None else refresh.reason or None,
        "started_us": None if refresh is None else refresh.started_us,
        "groups": [
            {
                "group": name.decode(),
                "state": course.state,
                "reason": course.reason or None,
                "waits_for": course.waits_for(),
                "left": course.left,
            }
            for name, course in (refresh.courses if refresh is not None else {}).items()
        ],
    }


def _describe_group(group: Group) -> Json:
    return {
        "name": (group.name or b"").decode(),
        "pattern": group.pattern.decode(),
        "mode": group.mode,
        "generation": group.generation,
        "lag": group.lag(),
        "pending": sum(len(position.inflight) for position in group.positions.values()),
        "redelivered": group.redelivered,
        "dead_lettered": group.dead_lettered,
        "lost": group.lost,
        "expired": group.expired,
        "members": (
            {"name": member.sink.name, "address": member.sink.address, "unacknowledged": member.out}
            for member in list(group.members)
        ),
        "positions": (
            {
                "topic": position.partition.name.decode(),
                "topic_id": position.partition.topic_id,
                "partition": position.partition.number,
                "committed": position.inflight.floor,
                "next": position.inflight.next,
                "end": position.partition.served,
                "pending": len(position.inflight),
                "lag": position.lag(),
            }
            for position in list(group.positions.values())
        ),
    }


def _describe_letter(letter: DeadLetter) -> Json:
    described = {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value
        for name, value in letter._asdict().items()
    }
    described["value"] = base64.b64encode(letter.value).decode()
    described["timestamp_us"] = described.pop("time_us")
    described["redriven"] = described.pop("is_redriven")
    return described


def _describe_delayed(message: Delayed) -> Json:
    return {
        "offset": message.offset,
        "due_us": message.due_us,
        "subject": message.subject.decode(errors="replace"),
        "key": None if message.key is None else base64.b64encode(message.key).decode(),
        "message_id": None if message.message_id is None else message.message_id.decode(errors="replace"),
        "headers": message.headers.decode(errors="replace"),
        "value": base64.b64encode(message.value).decode(),
    }


def _is_position(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(type(part) is int and part >= 0 for part in entry)


def _partition(broker: Broker, request: Request, field: str = "name") -> Partition:
    topic, number = broker.topic(request.name(field)), request.number("partition")
    if number >= len(topic.partitions):
        raise UnknownTopic(f"{topic.topic.name} has {len(topic.partitions)} partitions, none with number {number}")
    return topic.partitions[number]


async def _checked(change: Awaitable[object]) -> None:
    """What a topic cannot be is told as the fault of who asks for it."""
    try:
        await change
    except ValueError as error:
        raise BadRequest(str(error)) from None


async def _in_thread(work: Callable[[], int]) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, work)
