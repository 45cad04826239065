"""The admin API: topics, groups, dead letters, settings. Most endpoints are calls of the binary protocol, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request

from penstock.broker.broker import Broker
from penstock.errors import BadRequest
from penstock.schema import NonNegative, about
from penstock.server import requests
from penstock.server.calls import CALLS, Callee, Json
from penstock.web.endpoints import Endpoint, Nothing

# Rows of one answer: by default, and at most.
ROWS: Final = 100
ROWS_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    limit: Annotated[Annotated[int, Meta(ge=0, le=ROWS_MAX)], about(f"rows of one answer, at most {ROWS_MAX}")] = ROWS
    offset: Annotated[NonNegative, about("rows to skip")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _RefreshTopics:
    topic: Annotated[str | None, about("one topic")] = None
    topics: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=ROWS_MAX)] | None, about(f"or several, at most {ROWS_MAX}")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topic:
    topic: Annotated[str, about("the topic")]


def endpoints(callee: Callee, settings: Mapping[str, Any]) -> list[Endpoint]:
    """Return the table of all endpoints, which is why this is long. `settings` are the settings as people may see them,
    with their origins."""
    broker = callee.broker

    def listing(path: str, text: str, call: str) -> Endpoint:
        async def answer(asked: _Page, _request: Request) -> Json:
            return await CALLS[call].function(broker, requests.Page(limit=asked.limit, offset=asked.offset))

        return Endpoint(method="GET", path=path, about=text, answer=answer, parameters=_Page, guarded=True)

    async def refresh(asked: _RefreshTopics, _request: Request) -> Json:
        return await _refresh(broker, asked)

    async def refresh_status(asked: _Topic, _request: Request) -> Json:
        return await CALLS["refresh_status"].function(broker, requests.Named(name=asked.topic))

    async def config(_asked: object, _request: Request) -> Json:
        return {"settings": settings}

    async def statistics(_asked: object, _request: Request) -> Json:
        return callee.statistics()

    return [
        listing("/admin/topics", "The topics, with their policies and positions", "topics"),
        listing("/admin/groups", "The groups, with their members, positions and lag", "groups"),
        listing("/admin/pipelines", "The pipelines that report to this broker, with their state and lag", "pipelines"),
        *(_endpoint(broker, *each) for each in _CALLS),
        Endpoint(
            method="POST",
            path="/admin/refresh-topic",
            about="Send consumers of topics everything again: RESET, all messages, READY",
            answer=refresh,
            parameters=_RefreshTopics,
            status=202,
            guarded=True,
        ),
        Endpoint(
            method="GET",
            path="/admin/refresh-status",
            about="The progress of a refresh, and the consumers that it waits for",
            answer=refresh_status,
            parameters=_Topic,
            guarded=True,
        ),
        Endpoint(
            method="GET",
            path="/admin/config",
            about="Every setting, its value and its origin; secrets are hidden",
            answer=config,
            parameters=Nothing,
            guarded=True,
        ),
        Endpoint(
            method="GET",
            path="/admin/statistics",
            about="The server's figures, as in /varz",
            answer=statistics,
            guarded=True,
        ),
    ]


# Method, path, what it does, the call, and the status of success.
_CALLS: Final[tuple[tuple[Any, str, str, str, int], ...]] = (
    ("POST", "/admin/topics", "Create a topic", "create_topic", 201),
    ("POST", "/admin/topics/{name:path}/schema", "Register a schema, as its next version", "set_schema", 200),
    ("GET", "/admin/topics/{name:path}/schema", "The schema, or one of its versions", "schema", 200),
    ("GET", "/admin/topics/{name:path}/schemas", "The versions of the schema, without their texts", "schemas", 200),
    ("POST", "/admin/topics/{name:path}/schema/check", "Whether a schema could be registered", "check_schema", 200),
    ("GET", "/admin/topics/{name:path}", "One topic", "topic", 200),
    ("PATCH", "/admin/topics/{name:path}", "Change a topic's policy, or add partitions", "alter_topic", 200),
    ("POST", "/admin/topics/{name:path}/purge", "Drop messages before a time or an offset", "purge_topic", 200),
    ("DELETE", "/admin/topics/{name:path}", "Delete a topic and all its messages", "delete_topic", 204),
    ("POST", "/admin/groups", "Create a group", "create_group", 201),
    ("GET", "/admin/groups/{name:path}", "One group", "group", 200),
    ("DELETE", "/admin/groups/{name:path}", "Delete a group and its positions", "delete_group", 204),
    ("POST", "/admin/groups/{name:path}/reset", "Move a group to another position", "reset_group", 200),
    ("GET", "/admin/dead-letters", "Dead letters, oldest first; values in base64", "dead_letters", 200),
    ("POST", "/admin/dead-letters/redrive", "Publish dead letters to their subjects again", "redrive", 200),
    ("POST", "/admin/dead-letters/purge", "Delete dead letters", "purge_dead_letters", 200),
    ("GET", "/admin/delayed", "Delayed messages, in the order they are due; keys and values in base64", "delayed", 200),
    ("POST", "/admin/delayed/cancel", "Cancel delayed messages", "cancel_delayed", 200),
)


def _endpoint(broker: Broker, method: Any, path: str, text: str, call: str, status: int) -> Endpoint:
    async def answer(asked: object, _request: Request) -> Json:
        return await CALLS[call].function(broker, asked)

    arguments = CALLS[call].arguments
    return Endpoint(
        method=method, path=path, about=text, answer=answer, parameters=arguments, status=status, guarded=True
    )


async def _refresh(broker: Broker, asked: _RefreshTopics) -> Json:
    if (asked.topic is None) == (asked.topics is None):
        raise BadRequest("name either a topic, or topics")
    names = [requests.Named(name=name) for name in asked.topics or [asked.topic or ""]]
    # None is refreshed if one does not exist.
    for name in names:
        await CALLS["refresh_status"].function(broker, name)
    return {"refreshes": [await CALLS["refresh_topic"].function(broker, name) for name in names]}
