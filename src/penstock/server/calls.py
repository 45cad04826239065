"""What can be asked about topics, groups and dead letters, and done to them: each call is a function to JSON.

A list that may have many rows is an iterator in the answer: `rows.encode` writes it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from penstock.awaiting import settled
from penstock.broker.broker import Broker
from penstock.broker.deadletters import DeadLetter, Redriven
from penstock.broker.delay import Delayed
from penstock.broker.group import Group
from penstock.broker.partition import Partition
from penstock.broker.pipeline_reports import Heard, PipelineReport
from penstock.broker.refresh import RefreshState, TopicRefresh
from penstock.broker.schemas import SchemaVersion
from penstock.broker.topic import ServedTopic, visible_topics
from penstock.doors.requests import begin, read
from penstock.errors import BadRequest, PenstockError, UnknownTopic
from penstock.log.policy import Policy
from penstock.model.subject import is_subject
from penstock.outcome import Outcome
from penstock.schema import did_you_mean, shown
from penstock.security.identity import Identity, audited, authorize
from penstock.security.permissions import Action
from penstock.server import requests, rules, user_calls
from penstock.server.rows import Rows
from penstock.server.rules import Rule
from penstock.topic_schema.tree import is_json
from penstock.web.endpoints import Nothing

Json = dict[str, Any]
M = TypeVar("M", DeadLetter, Delayed)

# Bytes of messages in one answer.
LETTERS_BYTES_MAX: Final = 16 << 20
# Dead letters and delayed messages that are described before others may use the loop, and bytes of their values.
LETTERS_SLICE: Final = 100
LETTERS_SLICE_BYTES: Final = 256 << 10
# The longest time that one request waits.
WAIT_MS_MAX: Final = 10_000


class Callee(Protocol):
    """The server, as far as calls need it."""

    @property
    def broker(self) -> Broker: ...

    def statistics(self) -> Json: ...


class Call(NamedTuple):
    # The declaration of its arguments.
    arguments: type[Any]
    function: Callable[[Broker, Any], Awaitable[Json]]
    # Raises PermissionDenied unless the client may call it with these arguments.
    rule: Rule
    # Whether it changes something that the audit trail records.
    is_audited: bool = False


async def call(callee: Callee, fields: Json, identity: Identity | None) -> Json:
    """Run the call that a request names, for a client. The other fields are its arguments."""
    name = fields.get("call")
    arguments = {field: value for field, value in fields.items() if field != "call"}
    if name == "statistics":
        read(Nothing, arguments)
        authorize(identity, Action.METRICS)
        return callee.statistics()
    if not isinstance(name, str) or name not in CALLS:
        known = [*CALLS, "statistics"]
        raise BadRequest(f"{shown(name)} is not a call{did_you_mean(str(name), known)}: there are {', '.join(known)}")
    return await run(callee.broker, name, read(CALLS[name].arguments, arguments), identity)


async def run(broker: Broker, name: str, asked: Any, identity: Identity | None) -> Json:
    """Run a call for a client, if it may."""
    found = CALLS[name]
    if identity is None:
        return await found.function(broker, asked)
    found.rule(broker, asked, identity)
    if name in _LISTS:
        return await _LISTS[name](broker, asked, identity)
    if not found.is_audited:
        return await found.function(broker, asked)
    error: PenstockError | None = None
    try:
        return await found.function(broker, asked)
    except PenstockError as failed:
        error = failed
        raise
    finally:
        audited(identity, name, rules.resource(asked), error)


# Topics.


async def _resolve(broker: Broker, asked: requests.Resolve) -> Json:
    subject = asked.subject.encode()
    if not is_subject(subject):
        raise BadRequest(f"{asked.subject!r} is not a subject")
    topic = (await broker.changes.owner(subject)).topic
    return {"topic": topic.name, "id": topic.id, "partitions": topic.partitions}


async def _topics(broker: Broker, asked: requests.Page, identity: Identity | None = None) -> Json:
    topics = visible_topics(broker.topics, identity)
    return {"topics": Rows(map(_describe_topic, topics[asked.rows])), "total": len(topics)}


async def _topic(broker: Broker, asked: requests.Named) -> Json:
    return {**_describe_topic(broker.topics.named(asked.name.encode())), "now_us": broker.clock.now_us()}


async def _create_topic(broker: Broker, asked: requests.CreateTopic) -> Json:
    name, policy = asked.name.encode(), _policy(asked.policy, broker.settings.policy)
    await _checked(broker.changes.create(name, partitions=asked.partitions, policy=policy))
    return _describe_topic(broker.topics.named(name))


async def _alter_topic(broker: Broker, asked: requests.AlterTopic) -> Json:
    name = asked.name.encode()
    policy = _policy(asked.policy, broker.topics.named(name).topic.policy)
    warning = broker.changes.warning(name, asked.partitions)
    await _checked(broker.changes.alter(name, partitions=asked.partitions, policy=policy))
    return {**_describe_topic(broker.topics.named(name)), "warning": warning}


async def _purge_topic(broker: Broker, asked: requests.PurgeTopic) -> Json:
    name, before = asked.name.encode(), begin("before", asked.before, broker.clock.now_us())
    await broker.changes.purge(name, before, partition=asked.partition)
    return _describe_topic(broker.topics.named(name))


async def _delete_topic(broker: Broker, asked: requests.Named) -> Json:
    await broker.changes.delete(asked.name.encode())
    return {}


async def _refresh_topic(broker: Broker, asked: requests.Named) -> Json:
    name = asked.name.encode()
    return _describe_refresh(name, await broker.refresh_topic(name))


async def _refresh_status(broker: Broker, asked: requests.Named) -> Json:
    name = asked.name.encode()
    return _describe_refresh(name, broker.refreshes.of(broker.topics.named(name)))


async def _set_schema(broker: Broker, asked: requests.SetSchema) -> Json:
    topic = broker.topics.named(asked.name.encode())
    made = await broker.to_its_end(broker.schemas.register(topic, asked.schema))
    return _describe_schema(topic, made)


async def _schema(broker: Broker, asked: requests.Schema) -> Json:
    topic = broker.topics.named(asked.name.encode())
    return _describe_schema(topic, broker.schemas.version(topic, asked.version))


async def _schemas(broker: Broker, asked: requests.Named) -> Json:
    topic = broker.topics.named(asked.name.encode())
    versions = broker.schemas.versions(topic)
    # Without their texts, which may have megabytes.
    rows = [
        {name: each for name, each in _describe_schema(topic, made).items() if name != "schema"} for made in versions
    ]
    return {"schemas": rows}


async def _check_schema(broker: Broker, asked: requests.SetSchema) -> Json:
    topic = broker.topics.named(asked.name.encode())
    found = await broker.schemas.verdict(topic, asked.schema)
    return {
        "compatible": found.reason is None,
        "reason": found.reason,
        "version": found.version,
        "compatibility": topic.topic.policy.schema_compatibility,
    }


async def _offset_at(broker: Broker, asked: requests.OffsetAt) -> Json:
    log = _partition(broker.topics.named(asked.name.encode()), asked.partition).log
    return {"offset": await _in_thread(lambda: log.offset_at(asked.time_us))}


async def _offset_after(broker: Broker, asked: requests.OffsetAfter) -> Json:
    log = _partition(broker.topics.named(asked.name.encode()), asked.partition).log
    return {"offset": await _in_thread(lambda: log.offset_after(asked.offset, asked.bytes))}


async def _wait(broker: Broker, asked: requests.Wait) -> Json:
    """Wait until one of these partitions holds a message at its offset, or is gone; at most for `wait_ms`."""
    places = [
        (_partition(broker.topics.public(topic_id), number), offset) for topic_id, number, offset in asked.positions
    ]
    return {"grown": await broker.waiting.any_grown(places, min(asked.wait_ms, WAIT_MS_MAX) / 1000)}


# Groups.


async def _groups(broker: Broker, asked: requests.Page, identity: Identity | None = None) -> Json:
    groups = [
        group for group in broker.groups if identity is None or identity.shows_group(group.name or b"", group.pattern)
    ]
    return {"groups": Rows(map(_describe_group, groups[asked.rows])), "total": len(groups)}


async def _group(broker: Broker, asked: requests.Named) -> Json:
    group = broker.groups[asked.name.encode()]
    return {**_describe_group(group), "hint": await broker.subscriptions.hint(group.pattern)}


async def _create_group(broker: Broker, asked: requests.CreateGroup) -> Json:
    pattern, start = asked.selection, begin("start", asked.start, broker.clock.now_us())
    group = await broker.groups.create(asked.name.encode(), pattern, asked.mode, start=start)
    return {**_describe_group(group), "hint": await broker.subscriptions.hint(pattern)}


async def _reset_group(broker: Broker, asked: requests.ResetGroup) -> Json:
    name, topic = asked.name.encode(), None if asked.topic is None else asked.topic.encode()
    start = begin("start", asked.start, broker.clock.now_us())
    await broker.groups.reset(name, start, topic=topic, partition=asked.partition)
    return _describe_group(broker.groups[name])


async def _delete_group(broker: Broker, asked: requests.Named) -> Json:
    await broker.groups.delete(asked.name.encode())
    return {}


async def _commit(broker: Broker, asked: requests.Commit) -> Json:
    """Store a position of a consumer that keeps its own elsewhere, so that its lag is visible here."""
    group = broker.groups[asked.group.encode()]
    partition = _partition(broker.topics.named(asked.topic.encode()), asked.partition)
    place = (partition.topic_id, partition.number)
    outcome = Outcome()
    group.commit(place, asked.offset, group.state.generation, outcome)
    await settled(outcome)
    return {}


# Transactions.


async def _transaction(broker: Broker, asked: requests.Named) -> Json:
    return {"number": None if broker.transactions is None else broker.transactions.last(asked.name.encode())}


async def _commit_transaction(broker: Broker, asked: requests.CommitTransaction) -> Json:
    transactions = await broker.open_transactions()
    is_new = await transactions.commit(asked.name.encode(), asked.number, asked.offsets, once=asked.once)
    return {"committed": is_new}


async def _abort_transaction(broker: Broker, asked: requests.AbortTransaction) -> Json:
    (await broker.open_transactions()).abort(asked.name.encode(), asked.number)
    return {}


# Dead letters.


async def _dead_letters(broker: Broker, asked: requests.DeadLetters) -> Json:
    wanted = asked.which.wanted(asked.pattern)
    letters = await broker.dead_letters()
    if letters is None:
        return {"letters": []}
    found = letters.list(wanted, redriven=asked.redriven)
    return {"letters": await _describe_each(found, _describe_letter, asked.limit)}


async def _redrive(broker: Broker, asked: requests.Redrive) -> Json:
    wanted, letters = asked.which.wanted(asked.pattern), await broker.dead_letters()
    found = Redriven(0) if letters is None else await letters.redrive(wanted, asked.count, to_group=asked.to_group)
    return {"redriven": found.count, "skipped": found.skipped, "reason": found.reason}


async def _purge_dead_letters(broker: Broker, asked: requests.PurgeDeadLetters) -> Json:
    wanted, letters = asked.which.wanted(asked.pattern), await broker.dead_letters()
    return {"purged": 0 if letters is None else await letters.purge(wanted, asked.count)}


# Delayed messages.


async def _delayed(broker: Broker, asked: requests.DelayedMessages) -> Json:
    if broker.delays is None:
        return {"messages": [], "total": 0}
    found = broker.delays.find(asked.which.wanted(asked.pattern))
    return {"messages": await _describe_each(found, _describe_delayed, asked.limit), "total": len(broker.delays)}


async def _cancel_delayed(broker: Broker, asked: requests.CancelDelayed) -> Json:
    wanted = asked.which.wanted(asked.pattern)
    return {"cancelled": 0 if broker.delays is None else await broker.delays.cancel(wanted)}


# Pipelines.


async def _report_pipeline(broker: Broker, asked: PipelineReport) -> Json:
    broker.pipeline_reports.add(asked)
    return {}


async def _pipelines(broker: Broker, asked: requests.Page) -> Json:
    def describe(heard: Heard) -> Json:
        return asdict(heard.report) | {"state": reports.state(heard), "heard_us": heard.time_us}

    reports = broker.pipeline_reports
    return {"pipelines": Rows(map(describe, list(reports)[asked.rows])), "total": len(reports)}


CALLS: Final[dict[str, Call]] = {
    "resolve": Call(requests.Resolve, _resolve, rules.resolve),
    "topics": Call(requests.Page, _topics, rules.anyone),
    "topic": Call(requests.Named, _topic, rules.shown_topic),
    "create_topic": Call(requests.CreateTopic, _create_topic, rules.topic(Action.TOPIC_CREATE), is_audited=True),
    "alter_topic": Call(requests.AlterTopic, _alter_topic, rules.topic(Action.TOPIC_ALTER), is_audited=True),
    "purge_topic": Call(requests.PurgeTopic, _purge_topic, rules.topic(Action.TOPIC_PURGE), is_audited=True),
    "delete_topic": Call(requests.Named, _delete_topic, rules.topic(Action.TOPIC_DELETE), is_audited=True),
    "refresh_topic": Call(requests.Named, _refresh_topic, rules.topic(Action.TOPIC_ALTER), is_audited=True),
    "refresh_status": Call(requests.Named, _refresh_status, rules.shown_topic),
    "set_schema": Call(requests.SetSchema, _set_schema, rules.topic(Action.TOPIC_ALTER), is_audited=True),
    "schema": Call(requests.Schema, _schema, rules.shown_topic),
    "schemas": Call(requests.Named, _schemas, rules.shown_topic),
    "check_schema": Call(requests.SetSchema, _check_schema, rules.shown_topic),
    "offset_at": Call(requests.OffsetAt, _offset_at, rules.shown_topic),
    "offset_after": Call(requests.OffsetAfter, _offset_after, rules.shown_topic),
    "wait": Call(requests.Wait, _wait, rules.shown_places),
    "groups": Call(requests.Page, _groups, rules.anyone),
    "group": Call(requests.Named, _group, rules.shown_group),
    "create_group": Call(requests.CreateGroup, _create_group, rules.create_group, is_audited=True),
    "reset_group": Call(requests.ResetGroup, _reset_group, rules.reset_group, is_audited=True),
    "delete_group": Call(requests.Named, _delete_group, rules.group(Action.GROUP_DELETE), is_audited=True),
    "commit": Call(requests.Commit, _commit, rules.commit),
    "transaction": Call(requests.Named, _transaction, rules.transaction),
    "commit_transaction": Call(requests.CommitTransaction, _commit_transaction, rules.transaction),
    "abort_transaction": Call(requests.AbortTransaction, _abort_transaction, rules.transaction),
    "dead_letters": Call(requests.DeadLetters, _dead_letters, rules.read_pattern),
    "redrive": Call(requests.Redrive, _redrive, rules.pattern(Action.DEAD_LETTERS), is_audited=True),
    "purge_dead_letters": Call(
        requests.PurgeDeadLetters, _purge_dead_letters, rules.pattern(Action.DEAD_LETTERS), is_audited=True
    ),
    "delayed": Call(requests.DelayedMessages, _delayed, rules.read_pattern),
    "cancel_delayed": Call(requests.CancelDelayed, _cancel_delayed, rules.pattern(Action.PUBLISH), is_audited=True),
    "report_pipeline": Call(PipelineReport, _report_pipeline, rules.pipeline),
    "pipelines": Call(requests.Page, _pipelines, rules.switch(Action.METRICS)),
    "users": Call(requests.Page, user_calls.users, rules.switch(Action.ADMIN)),
    "add_user": Call(user_calls.ChangeUser, user_calls.add_user, rules.switch(Action.ADMIN), is_audited=True),
    "change_user": Call(user_calls.ChangeUser, user_calls.change_user, rules.switch(Action.ADMIN), is_audited=True),
    "remove_user": Call(requests.Named, user_calls.remove_user, rules.switch(Action.ADMIN), is_audited=True),
    "create_token": Call(user_calls.CreateToken, user_calls.create_token, rules.switch(Action.ADMIN), is_audited=True),
    "revoke_token": Call(user_calls.RevokeToken, user_calls.revoke_token, rules.switch(Action.ADMIN), is_audited=True),
}

# Those that show a client only what it may know of.
_LISTS: Final = {"topics": _topics, "groups": _groups}


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
                "held_bytes": partition.log.upkeep.held_bytes,
            }
            for partition in list(topic.partitions)
        ),
    }


def _describe_schema(topic: ServedTopic, version: SchemaVersion) -> Json:
    return {
        "topic": topic.topic.name,
        "version": version.number,
        "format": "json" if is_json(version.text) else "ddl",
        "schema": version.text,
        "registered_us": version.time_us,
    }


def _describe_refresh(topic: bytes, refresh: TopicRefresh | None) -> Json:
    return {
        "topic": topic.decode(),
        "state": RefreshState.IDLE if refresh is None else refresh.state,
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
            for name, course in (refresh.groups if refresh is not None else {}).items()
        ],
    }


def _describe_group(group: Group) -> Json:
    return {
        "name": (group.name or b"").decode(),
        "pattern": group.pattern.decode(),
        "mode": group.mode,
        "generation": group.state.generation,
        "lag": group.lag(),
        "pending": sum(len(position.inflight) for position in group.positions.values()),
        "redelivered": group.state.redelivered,
        "dead_lettered": group.state.dead_lettered,
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


async def _describe_each(messages: AsyncIterator[M], describe: Callable[[M], Json], limit: int) -> list[Json]:
    """Describe messages in slices: others may use the loop between them."""
    found: list[Json] = []
    size = sliced = 0
    async for message in messages:
        if len(found) >= limit or size >= LETTERS_BYTES_MAX:
            break
        found.append(describe(message))
        size += len(message.value)
        if len(found) % LETTERS_SLICE == 0 or size - sliced >= LETTERS_SLICE_BYTES:
            sliced = size
            await asyncio.sleep(0)
    return found


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


def _partition(topic: ServedTopic, number: int) -> Partition:
    if number >= len(topic.partitions):
        raise UnknownTopic(f"{topic.topic.name} has {len(topic.partitions)} partitions, none with number {number}")
    return topic.partitions[number]


def _policy(changes: Json | None, base: Policy) -> Policy:
    """Return `base` with the changes of a request."""
    try:
        return Policy.from_json({**base.to_json(), **(changes or {})})
    except ValueError as error:
        raise BadRequest(f"policy: {error}") from None


async def _checked(change: Awaitable[object]) -> None:
    """Report an impossible topic as an error of the request."""
    try:
        await change
    except ValueError as error:
        raise BadRequest(str(error)) from None


async def _in_thread(work: Callable[[], int]) -> int:
    return await asyncio.get_running_loop().run_in_executor(None, work)
