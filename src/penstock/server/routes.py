"""What the HTTP port answers: a table of endpoints, and how one is asked, allowed and answered.

The table is the one list of what there is. The port serves it, `openapi` describes it. An error is told as
`{"code", "text"}` with a status that fits; `STATUSES` is where that is decided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import (
    AppendFailed,
    BadRequest,
    BatchTooLarge,
    BrokerError,
    DiskError,
    Forbidden,
    GroupConflict,
    OriginConflict,
    OutOfSequence,
    PeerError,
    PenstockError,
    PipeLoop,
    ReadOnlyTopic,
    RefreshConflict,
    RequestTooLarge,
    StageLost,
    StaleCommit,
    StaleLayout,
    TooManyGroups,
    TooManyTopics,
    TopicConflict,
    Unauthorized,
    UnknownGroup,
    UnknownNode,
    UnknownTopic,
)
from penstock.server.rows import encode
from penstock.web import unexpected
from penstock.wire.binary import read_request

if TYPE_CHECKING:
    from penstock.server.server import Server

Json = dict[str, Any]
Kind = Literal["text", "texts", "number", "flag", "numbers", "object", "any"]

# What a request may bring.
BODY_BYTES_MAX: Final = 1 << 20

# The nearest of its kinds decides.
STATUSES: Final[Mapping[type[PenstockError], int]] = {
    PeerError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    UnknownTopic: 404,
    UnknownGroup: 404,
    UnknownNode: 404,
    TopicConflict: 409,
    ReadOnlyTopic: 409,
    OriginConflict: 409,
    PipeLoop: 409,
    RefreshConflict: 409,
    GroupConflict: 409,
    TooManyTopics: 409,
    TooManyGroups: 409,
    StaleLayout: 409,
    StaleCommit: 409,
    StageLost: 409,
    OutOfSequence: 409,
    BatchTooLarge: 413,
    RequestTooLarge: 413,
    BrokerError: 503,
    DiskError: 500,
    AppendFailed: 507,
    PenstockError: 500,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Something that can be said with a request: in its path or its query, else in its body."""

    name: str
    kind: Kind
    about: str
    place: Literal["path", "query", "body"] = "body"
    required: bool = False
    # Of what is not given, for people: who answers has its own.
    default: Any = None


class Asked:
    """A request whose fields have the types that the endpoint names."""

    def __init__(self, server: Server, fields: Json, request: Request) -> None:
        self.server = server
        self.fields = fields
        self.request = request

    def number(self, name: str, default: int) -> int:
        value = self.fields.get(name, default)
        if type(value) is not int or value < 0:
            raise BadRequest(f"{name} is {value!r}, it must be a whole number from 0 on")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(name, default)
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{name} is {value!r}, it must be a text")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    # As Starlette has it: "/admin/topics/{name:path}".
    path: str
    about: str
    answer: Callable[[Asked], Awaitable[Json | Response]]
    fields: tuple[Field, ...] = ()
    # Of an answer that is no error; 204 has no body.
    status: int = 200
    media: str = "application/json"
    # Whether it needs a user or a token, where the server has one.
    guarded: bool = False

    def of(self, place: str) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.place == place)


def application(server: Server, endpoints: Iterable[Endpoint], more: Iterable[Route] = ()) -> Starlette:
    """`more`: what answers with a stream, and is for brokers."""
    # `{name:path}` takes all that follows: what says more is looked at first.
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.path.endswith(":path}"))
    return Starlette(
        routes=[*more, *(Route(each.path, _served(server, each), methods=[each.method]) for each in ordered)],
        exception_handlers={HTTPException: _missed, Exception: _failed},
    )


def status_of(error: PenstockError) -> int:
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def refusal(error: PenstockError) -> JSONResponse:
    headers = {"WWW-Authenticate": 'Basic realm="penstock", Bearer'} if isinstance(error, Unauthorized) else None
    return JSONResponse(described(error), status_code=status_of(error), headers=headers)


def described(error: PenstockError) -> dict[str, str]:
    return {"code": error.code, "text": str(error)}


def _served(server: Server, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        try:
            if endpoint.guarded:
                authorize(server, request)
            given = await endpoint.answer(Asked(server, await _fields(endpoint, request), request))
            if isinstance(given, Response):
                return given
            if endpoint.status == 204:
                return Response(status_code=204)
            data = await server.answers.make(encode(given))
        except PenstockError as error:
            return refusal(error)
        return Response(data, endpoint.status, media_type="application/json")

    return serve


async def _missed(_request: Request, error: Exception) -> Response:
    """No endpoint, or one that has no such method."""
    assert isinstance(error, HTTPException)
    text = "there is nothing here that does this: /openapi.json lists what there is"
    return JSONResponse({"code": BadRequest.code, "text": text}, error.status_code, error.headers)


async def _failed(_request: Request, _error: Exception) -> Response:
    """An unexpected exception, which Starlette raises again: the port's `Guard` counts it."""
    return refusal(unexpected())


def authorize(server: Server, request: Request) -> None:
    """Raise unless it may ask."""
    if server.needs_auth and not server.credentials.accepts_header(request.headers.get("authorization", "")):
        server.counters.unauthorized += 1
        client = request.client
        server.journal.failed_login("HTTP", "" if client is None else f"{client.host}:{client.port}")
        raise Unauthorized("credentials required: a user and a password (Basic), or a token (Bearer)")


# What is asked.


async def _fields(endpoint: Endpoint, request: Request) -> Json:
    fields: Json = dict(request.path_params)
    for field in endpoint.of("query"):
        if field.name in request.query_params:
            fields[field.name] = _from_query(field, request.query_params[field.name])
    if endpoint.method not in ("GET", "DELETE"):
        fields |= await _body(endpoint, request)
    for field in endpoint.fields:
        if field.required and fields.get(field.name) is None:
            raise BadRequest(f"{field.name} is missing: {field.about}")
    return fields


def _from_query(field: Field, value: str) -> Any:
    match field.kind:
        case "number":
            if not (value.isascii() and value.isdigit() and len(value) <= 18):
                raise BadRequest(f"{field.name} is {value[:100]!r}, it must be a whole number from 0 on")
            return int(value)
        case "flag":
            flags = {"true": True, "1": True, "": True, "false": False, "0": False}
            if value.lower() not in flags:
                raise BadRequest(f"{field.name} is {value[:100]!r}, it must be true or false")
            return flags[value.lower()]
        case _:
            return value


async def _body(endpoint: Endpoint, request: Request) -> Json:
    # A page in somebody's browser can send anything but this without asking us first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the body must be JSON, and say so: Content-Type: application/json")
    value = read_request(await _read(request, BODY_BYTES_MAX))
    known = {field.name for field in endpoint.of("body")}
    unknown = sorted(set(value) - known)
    if unknown:
        raise BadRequest(f"{unknown[0][:100]!r} is not known here: {', '.join(sorted(known)) or 'nothing'} is")
    return value


async def _read(request: Request, bytes_max: int) -> bytes:
    """All of it, unless it is too large: what is announced is looked at before it is read, the rest while it comes."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced[:20]) > bytes_max:
        raise RequestTooLarge(f"a body of {announced[:20]} bytes, {bytes_max} are allowed")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise RequestTooLarge(f"a body of more than {bytes_max} bytes, which are allowed")
        parts.append(part)
    return b"".join(parts)
