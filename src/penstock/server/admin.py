"""The admin API: topics, groups, dead letters, settings. Each endpoint is a call of the binary door, said in HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal

from penstock.errors import BadRequest
from penstock.server import calls
from penstock.server.routes import Asked, Endpoint, Field, Json

# Rows of one answer: unless it says so, and at the most.
ROWS: Final = 100
ROWS_MAX: Final = 1000

_NAME: Final = Field(name="name", kind="text", about="its name", place="path", required=True)
_PAGE: Final = (
    Field(name="limit", kind="number", about=f"rows of one answer, at most {ROWS_MAX}", place="query", default=ROWS),
    Field(name="offset", kind="number", about="rows to pass over", place="query", default=0),
)
_PARTITIONS: Final = Field(name="partitions", kind="number", about="how many logs it has; never fewer than before")
_POLICY: Final = Field(
    name="policy", kind="object", about="what differs from the settings in `topic`, such as durability and retain_ms"
)
_START: Final = Field(
    name="start",
    kind="any",
    about='"earliest", "latest", {"offset": n}, {"time": "2030-01-31T12:00:00Z"} (or seconds since 1970, or "-5m"), '
    '{"time_us": n} or {"positions": [[topic id, partition, offset], ...]}',
    default="latest",
)

_BEFORE: Final = Field(
    name="before",
    kind="any",
    about='"latest" for all, {"offset": n} in one partition, {"time": "2030-01-31T12:00:00Z"} (or seconds since 1970, '
    'or "-5m") or {"time_us": n}',
    required=True,
)


def _conditions(place: Literal["body", "query"]) -> tuple[Field, ...]:
    """Return the conditions that dead letters meet."""
    return (
        Field(name="group", kind="text", about="of this group", place=place),
        Field(name="reason", kind="text", about="with this in their reason", place=place),
        Field(name="since_us", kind="number", about="died then or later, in µs since 1970", place=place),
        Field(name="until_us", kind="number", about="died before, in µs since 1970", place=place),
        Field(name="partition", kind="number", about="only those in this partition of theirs", place=place),
    )


_LETTERS: Final = (
    Field(name="pattern", kind="text", about="of their own subjects", required=True),
    *_conditions("body"),
    Field(name="offsets", kind="numbers", about="only those at these offsets"),
    Field(name="count", kind="number", about="at most so many; all, if it is not said"),
)


def _call(name: str) -> Callable[[Asked], Awaitable[Json]]:
    async def answer(asked: Asked) -> Json:
        return await calls.call(asked.server, {**asked.fields, "call": name})

    return answer


def _list(name: str) -> Callable[[Asked], Awaitable[Json]]:
    async def answer(asked: Asked) -> Json:
        limit = min(asked.number("limit", ROWS), ROWS_MAX)
        return await calls.call(asked.server, {**asked.fields, "limit": limit, "call": name})

    return answer


async def _settings(asked: Asked) -> Json:
    return {"settings": asked.server.settings}


async def _letters(asked: Asked) -> Json:
    return await calls.call(asked.server, {"pattern": ">", **asked.fields, "call": "dead_letters"})


async def _delayed(asked: Asked) -> Json:
    return await calls.call(asked.server, {"pattern": ">", **asked.fields, "call": "delayed"})


async def _refresh(asked: Asked) -> Json:
    fields = asked.fields
    names = [fields["topic"]] if "topic" in fields else fields.get("topics")
    if not isinstance(names, list) or not names or len(names) > ROWS_MAX or len(fields) != 1:
        raise BadRequest(f"name a topic, or 1 to {ROWS_MAX} topics")
    # First all of them are looked for: none is refreshed if one is not there.
    for name in names:
        await calls.call(asked.server, {"call": "refresh_status", "name": name})
    return {"refreshes": [await calls.call(asked.server, {"call": "refresh_topic", "name": name}) for name in names]}


async def _refresh_status(asked: Asked) -> Json:
    return await calls.call(asked.server, {"call": "refresh_status", "name": asked.text("topic")})


ENDPOINTS: Final = (
    Endpoint(
        method="GET",
        path="/admin/topics",
        about="The topics, with their policies and positions",
        answer=_list("topics"),
        fields=_PAGE,
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/topics",
        about="Create a topic",
        answer=_call("create_topic"),
        fields=(Field(name="name", kind="text", about="its name", required=True), _PARTITIONS, _POLICY),
        status=201,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/topics/{name:path}",
        about="One topic",
        answer=_call("topic"),
        fields=(_NAME,),
        guarded=True,
    ),
    Endpoint(
        method="PATCH",
        path="/admin/topics/{name:path}",
        about="Change a topic's policy, or give it more partitions",
        answer=_call("alter_topic"),
        fields=(_NAME, _PARTITIONS, _POLICY),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/topics/{name:path}/purge",
        about="Drop the messages of a topic before a time or an offset",
        answer=_call("purge_topic"),
        fields=(_NAME, _BEFORE, Field(name="partition", kind="number", about="only this one")),
        guarded=True,
    ),
    Endpoint(
        method="DELETE",
        path="/admin/topics/{name:path}",
        about="Delete a topic and all that is in it",
        answer=_call("delete_topic"),
        fields=(_NAME,),
        status=204,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/groups",
        about="The groups, with their members, positions and lag",
        answer=_list("groups"),
        fields=_PAGE,
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/groups",
        about="Create a group",
        answer=_call("create_group"),
        fields=(
            Field(name="name", kind="text", about="its name", required=True),
            Field(name="pattern", kind="text", about="the subjects that it reads; this, or topic"),
            Field(name="topic", kind="text", about="the topic that it reads, with all its subjects; this, or pattern"),
            Field(name="mode", kind="text", about="shared or partitioned", default="shared"),
            _START,
        ),
        status=201,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/groups/{name:path}",
        about="One group",
        answer=_call("group"),
        fields=(_NAME,),
        guarded=True,
    ),
    Endpoint(
        method="DELETE",
        path="/admin/groups/{name:path}",
        about="Forget a group and its positions",
        answer=_call("delete_group"),
        fields=(_NAME,),
        status=204,
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/groups/{name:path}/reset",
        about="Let a group go on from somewhere else",
        answer=_call("reset_group"),
        fields=(
            _NAME,
            _START,
            Field(name="topic", kind="text", about="only in this topic"),
            Field(name="partition", kind="number", about="only in this partition"),
        ),
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/dead-letters",
        about="Messages that groups could not handle, oldest first; values in base64",
        answer=_letters,
        fields=(
            Field(name="pattern", kind="text", about="of their own subjects", place="query", default=">"),
            *_conditions("query"),
            Field(
                name="limit",
                kind="number",
                about=f"rows of one answer, at most {calls.LETTERS_MAX}",
                place="query",
                default=100,
            ),
            Field(name="redriven", kind="flag", about="also those that were sent again", place="query", default=False),
        ),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/dead-letters/redrive",
        about="Publish dead letters to their subjects again",
        answer=_call("redrive"),
        fields=(
            *_LETTERS,
            Field(name="to_group", kind="flag", about="deliver each only to the group that failed", default=False),
        ),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/dead-letters/purge",
        about="Forget dead letters",
        answer=_call("purge_dead_letters"),
        fields=_LETTERS,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/delayed",
        about="Messages that are delayed, those first that are due first; keys and values in base64",
        answer=_delayed,
        fields=(
            Field(name="pattern", kind="text", about="of their subjects", place="query", default=">"),
            Field(name="message_id", kind="text", about="with this ID", place="query"),
            Field(
                name="limit",
                kind="number",
                about=f"rows of one answer, at most {calls.LETTERS_MAX}",
                place="query",
                default=100,
            ),
        ),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/delayed/cancel",
        about="Cancel delayed messages: they are never published",
        answer=_call("cancel_delayed"),
        fields=(
            Field(name="pattern", kind="text", about="of their subjects", required=True),
            Field(name="message_id", kind="text", about="with this ID"),
            Field(name="offsets", kind="numbers", about="only those at these offsets, as the list shows them"),
        ),
        guarded=True,
    ),
    Endpoint(
        method="POST",
        path="/admin/refresh-topic",
        about="Let all consumers of a topic, or of several, begin anew: RESET, all of it again, READY",
        answer=_refresh,
        fields=(
            Field(name="topic", kind="text", about="one topic"),
            Field(name="topics", kind="texts", about="or several"),
        ),
        status=202,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/refresh-status",
        about="How far the refresh of a topic is, and whom it waits for",
        answer=_refresh_status,
        fields=(Field(name="topic", kind="text", about="the topic", place="query", required=True),),
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/config",
        about="Every setting, its value and where that came from; secrets are hidden",
        answer=_settings,
        guarded=True,
    ),
    Endpoint(
        method="GET",
        path="/admin/statistics",
        about="The server's figures, as /varz has them",
        answer=_call("statistics"),
        guarded=True,
    ),
)
