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
from penstock.security.identity import Identity
from penstock.security.permissions import Action
from penstock.server import requests
from penstock.server.calls import CALLS, Callee, Json, run
from penstock.server.http_identity import identity_of
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
        async def answer(asked: _Page, request: Request) -> Json:
            page = requests.Page(limit=asked.limit, offset=asked.offset)
            return await run(broker, call, page, identity_of(request))

        return Endpoint(method="GET", path=path, about=text, answer=answer, parameters=_Page, guarded=True)

    async def refresh(asked: _RefreshTopics, request: Request) -> Json:
        return await _refresh(broker, asked, identity_of(request))

    async def refresh_status(asked: _Topic, request: Request) -> Json:
        return await run(broker, "refresh_status", requests.Named(name=asked.topic), identity_of(request))

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
            action=Action.ADMIN,
        ),
        Endpoint(
            method="GET",
            path="/admin/statistics",
            about="The server's figures, as in /varz",
            answer=statistics,
            guarded=True,
            action=Action.METRICS,
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
    ("GET", "/admin/users", "The users, with their permissions and usage; without secrets", "users", 200),
    ("POST", "/admin/users", "Add a user", "add_user", 201),
    ("PATCH", "/admin/users/{name}", "Change a user: its password, or other fields", "change_user", 200),
    ("DELETE", "/admin/users/{name}", "Remove a user", "remove_user", 204),
    ("POST", "/admin/users/{name}/tokens", "Give a user a token, which is shown once", "create_token", 201),
    ("POST", "/admin/users/{name}/revoke", "Revoke a token of a user, or all", "revoke_token", 200),
    ("POST", "/admin/delayed/cancel", "Cancel delayed messages", "cancel_delayed", 200),
)


def _endpoint(broker: Broker, method: Any, path: str, text: str, call: str, status: int) -> Endpoint:
    async def answer(asked: object, request: Request) -> Json:
        return await run(broker, call, asked, identity_of(request))

    arguments = CALLS[call].arguments
    return Endpoint(
        method=method, path=path, about=text, answer=answer, parameters=arguments, status=status, guarded=True
    )


async def _refresh(broker: Broker, asked: _RefreshTopics, identity: Identity | None) -> Json:
    if (asked.topic is None) == (asked.topics is None):
        raise BadRequest("name either a topic, or topics")
    names = [requests.Named(name=name) for name in asked.topics or [asked.topic or ""]]
    # None is refreshed if one does not exist.
    for name in names:
        await run(broker, "refresh_status", name, identity)
    return {"refreshes": [await run(broker, "refresh_topic", name, identity) for name in names]}
