"""The methods of `AsyncClient` that make one call to the broker: topics, groups, dead letters, delayed messages."""

# Both clients take timeouts as parameters.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Unpack

from penstock.client.calls import Calls
from penstock.client.feed import SHARED, Start
from penstock.client.values import (
    DeadLetter,
    DelayedMessage,
    Group,
    LetterFilter,
    Moment,
    PipelineStatus,
    Place,
    Redriven,
    Refresh,
    SchemaVerdict,
    SchemaVersion,
    SubjectOwner,
    Topic,
    TopicSchema,
)
from penstock.clock import Clock
from penstock.model.subject import selection
from penstock.times import read_moment, read_place


class AsyncAdmin:
    """A base of `AsyncClient`, so that users call these methods on the client. One method for each call: hence many."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock

    async def last_transaction(self, name: str) -> int | None:
        """Return the number of the last committed transaction of this name, or None if there is none."""
        number: int | None = (await self._calls.read("transaction", name=name))["number"]
        return number

    async def commit_transaction(self, name: str, number: int, offsets: Sequence[int], *, once: bool = False) -> bool:
        """Make staged batches readable, all at once. Return False if the transaction was already committed.

        Raise StageLost, and store nothing, if a staged batch is missing. `once`: the name is not used again.
        """
        fields = {"name": name, "number": number, "offsets": list(offsets), "once": once}
        return bool((await self._calls.read("commit_transaction", **fields))["committed"])

    async def abort_transaction(self, name: str, number: int) -> None:
        """Discard staged batches."""
        await self._calls.read("abort_transaction", name=name, number=number)

    async def resolve(self, subject: str) -> SubjectOwner:
        """Return the topic that stores a subject: its name, ID and number of partitions. Create it if it is missing."""
        layout = await self._calls.layout(subject)
        return SubjectOwner(layout.name.decode(), layout.id, layout.partitions)

    async def topics(self) -> list[Topic]:
        """Return all topics, with the positions of their partitions."""
        return [Topic.from_json(each) for each in await self._calls.read_rows("topics")]

    async def topic(self, name: str) -> Topic:
        """Return a topic, with the positions of its partitions. Raise UnknownTopic if it does not exist."""
        return Topic.from_json(await self._calls.read("topic", name=name))

    async def create_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Create a topic. `policy`: settings that differ from the broker's defaults, such as `durability="flush"`."""
        created = await self._calls.change("create_topic", name=name, partitions=partitions, policy=policy)
        return Topic.from_json(created)

    async def alter_topic(self, name: str, *, partitions: int | None = None, **policy: Any) -> Topic:
        """Change the policy of a topic, or add partitions.

        More partitions move keys. `warning` of the returned topic says what this means for stored messages.
        """
        altered = await self._calls.change("alter_topic", name=name, partitions=partitions, policy=policy)
        return Topic.from_json(altered)

    async def purge_topic(self, name: str, before: Place, *, partition: int | None = None) -> Topic:
        """Delete the messages of a topic that were stored before a time, before an offset of one partition, or all
        (`"latest"`). Return when the purge is durable.

        Groups continue after the purged messages. The disk space is freed by whole segments.
        """
        fields = {"name": name, "before": self._start(before), "partition": partition}
        return Topic.from_json(await self._calls.change("purge_topic", **fields))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and its messages."""
        await self._calls.change("delete_topic", name=name)

    async def set_schema(self, topic: str, schema: str) -> TopicSchema:
        """Register a schema of a topic's values, JSON Schema or Spark DDL, as its next version, and return it.

        If the newest version has the same text, return that. Raise SchemaConflict if it is not compatible with the
        newest version, as `schema_compatibility` of the topic asks.
        """
        return TopicSchema.from_json(await self._calls.change("set_schema", name=topic, schema=schema))

    async def schema(self, topic: str, version: int | None = None) -> TopicSchema:
        """Return the newest schema of a topic, or one of its versions. Raise UnknownSchema if there is none."""
        return TopicSchema.from_json(await self._calls.read("schema", name=topic, version=version))

    async def schemas(self, topic: str) -> list[SchemaVersion]:
        """Return the versions of a topic's schema, oldest first."""
        found = await self._calls.read("schemas", name=topic)
        return [SchemaVersion.from_json(each) for each in found["schemas"]]

    async def check_schema(self, topic: str, schema: str) -> SchemaVerdict:
        """Return whether a schema could be registered as the next version. Raise BadSchema if it is invalid."""
        return SchemaVerdict.from_json(await self._calls.read("check_schema", name=topic, schema=schema))

    async def refresh_topic(self, topic: str) -> Refresh:
        """Start a refresh: groups that support it (`on_reset`) discard their copies and receive the whole topic again.

        Return when the refresh has started. If one is already running, return that one. Raise RefreshConflict if only
        some members of a group support it.
        """
        return Refresh.from_json(await self._calls.change("refresh_topic", name=topic))

    async def refresh_status(self, topic: str) -> Refresh:
        """Return the state of the last refresh of a topic."""
        return Refresh.from_json(await self._calls.read("refresh_status", name=topic))

    async def offset_at(self, topic: str, partition: int, moment: Moment) -> int:
        """Return the first offset that was stored at or after a time."""
        time_us = max(0, read_moment(moment, self._clock.now_us()))
        found = await self._calls.read("offset_at", name=topic, partition=partition, time_us=time_us)
        return int(found["offset"])

    async def offset_after(self, topic: str, partition: int, offset: int, bytes: int) -> int:
        """Return the offset of the first batch that begins at least `bytes` bytes after `offset`, or the end."""
        found = await self._calls.read("offset_after", name=topic, partition=partition, offset=offset, bytes=bytes)
        return int(found["offset"])

    async def wait(self, positions: Iterable[tuple[int, int, int]], timeout: float) -> bool:
        """Wait until one of the positions (topic ID, partition, offset) has a message. Return False if none has one
        within `timeout` seconds. The broker waits 10 s at most."""
        fields = {"positions": [list(each) for each in positions], "wait_ms": round(timeout * 1000)}
        return bool((await self._calls.read("wait", **fields))["grown"])

    async def groups(self) -> list[Group]:
        """Return all groups, with their members and positions."""
        return [Group.from_json(each) for each in await self._calls.read_rows("groups")]

    async def group(self, name: str) -> Group:
        """Return a group, with its members and positions. Raise UnknownGroup if it does not exist."""
        return Group.from_json(await self._calls.read("group", name=name))

    async def create_group(
        self,
        name: str,
        pattern: str | None = None,
        *,
        topic: str | None = None,
        mode: str = SHARED,
        start: Place = "latest",
    ) -> Group:
        """Create a group of a pattern or a whole topic before its first member joins, so that it misses nothing."""
        fields = {"name": name, "pattern": selection(pattern, topic), "mode": mode, "start": self._start(start)}
        return Group.from_json(await self._calls.change("create_group", **fields))

    async def reset_group(
        self, name: str, start: Place, *, topic: str | None = None, partition: int | None = None
    ) -> Group:
        """Move the position of a group: in everything that it reads, or in one topic or partition."""
        fields = {"name": name, "start": self._start(start), "topic": topic, "partition": partition}
        return Group.from_json(await self._calls.change("reset_group", **fields))

    async def delete_group(self, name: str) -> None:
        """Delete a group and its positions."""
        await self._calls.change("delete_group", name=name)

    async def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Set the position of a group that stores its positions outside the broker."""
        await self._calls.change("commit", group=group, topic=topic, partition=partition, offset=offset)

    async def lag(self, group: str) -> int:
        """Return the number of messages that a group has not completed."""
        return (await self.group(group)).lag

    async def dead_letters(
        self, pattern: str = ">", *, limit: int = 100, redriven: bool = False, **wanted: Unpack[LetterFilter]
    ) -> list[DeadLetter]:
        """Return dead letters, oldest first; with `redriven`, also those that were redriven. Filter by `group`,
        `reason`, `since`, `until`, `partition` and `offsets`."""
        fields = self._letter_fields(wanted)
        found = await self._calls.read("dead_letters", pattern=pattern, limit=limit, redriven=redriven, **fields)
        return [DeadLetter.from_json(each) for each in found["letters"]]

    async def redrive(
        self, pattern: str = ">", *, count: int | None = None, to_group: bool = False, **wanted: Unpack[LetterFilter]
    ) -> Redriven:
        """Publish dead letters to their subjects again, each once, and return how many. `to_group`: deliver each only
        to the group that failed. Filter by `group`, `reason`, `since`, `until`, `partition` and `offsets`.

        Letters that cannot be redriven are skipped and stay in the list. Raise an error if none can be redriven."""
        fields = self._letter_fields(wanted)
        found = await self._calls.change("redrive", pattern=pattern, count=count, to_group=to_group, **fields)
        return Redriven(found["redriven"], found["skipped"], found["reason"])

    async def purge_dead_letters(
        self, pattern: str = ">", *, count: int | None = None, **wanted: Unpack[LetterFilter]
    ) -> int:
        """Delete dead letters, and return how many. Filter by `group`, `reason`, `since`, `until`, `partition` and
        `offsets`."""
        fields = self._letter_fields(wanted)
        return int((await self._calls.change("purge_dead_letters", pattern=pattern, count=count, **fields))["purged"])

    async def delayed(
        self, pattern: str = ">", *, limit: int = 100, message_id: str | None = None
    ) -> list[DelayedMessage]:
        """Return the delayed messages that are not due yet, in the order in which they will be."""
        found = await self._calls.read("delayed", pattern=pattern, limit=limit, message_id=message_id)
        return [DelayedMessage.from_json(each) for each in found["messages"]]

    async def cancel_delayed(
        self, pattern: str, *, message_id: str | None = None, offsets: Sequence[int] | None = None
    ) -> int:
        """Cancel delayed messages, so that they are never published, and return how many. `offsets`: as `delayed`
        returns them."""
        chosen = None if offsets is None else list(offsets)
        found = await self._calls.change("cancel_delayed", pattern=pattern, message_id=message_id, offsets=chosen)
        return int(found["cancelled"])

    async def pipelines(self) -> list[PipelineStatus]:
        """Return the pipelines that report to this broker, with their state and progress."""
        return [PipelineStatus.from_json(each) for each in await self._calls.read_rows("pipelines")]

    async def report_pipeline(self, **report: Any) -> None:
        """Report the state of a pipeline, as its runner does every few seconds: fields of PipelineStatus."""
        await self._calls.read("report_pipeline", **report)

    async def statistics(self) -> dict[str, Any]:
        """Return the statistics of the broker."""
        return await self._calls.read("statistics")

    def _start(self, start: Place) -> Start:
        match read_place(start, self._clock.now_us()):
            case datetime() as moment:
                return {"time_us": read_moment(moment, 0)}
            case int(offset):
                return {"offset": offset}
            case edge:
                return edge

    def _letter_fields(self, wanted: LetterFilter) -> dict[str, Any]:
        """Return the fields of a call. Times become µs since 1970."""
        known = {*LetterFilter.__annotations__}
        if unknown := wanted.keys() - known:
            raise TypeError(f"unknown filter {', '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}")
        fields: dict[str, Any] = {**wanted}
        for name in ("since", "until"):
            if (moment := fields.pop(name, None)) is not None:
                fields[f"{name}_us"] = max(0, read_moment(moment, self._clock.now_us()))
        if fields.get("offsets") is not None:
            fields["offsets"] = list(fields["offsets"])
        return fields
