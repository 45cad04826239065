"""Endpoints of an HTTP port. The declaration of their parameters decides how a request is read and described.

A parameter is in the path if the path names it, else in the JSON body of a request that has one, else in the query.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock import schema
from penstock.errors import (
    AppendFailed,
    BadRequest,
    BatchTooLarge,
    BrokerError,
    DiskError,
    Forbidden,
    GroupConflict,
    OffsetOutOfRange,
    OriginConflict,
    OutOfSequence,
    PeerError,
    PenstockError,
    PermissionDenied,
    PipeLoop,
    QuotaExceeded,
    ReadOnlyTopic,
    RefreshConflict,
    RequestTooLarge,
    SchemaConflict,
    StageLost,
    StaleCommit,
    StaleLayout,
    TooManyGroups,
    TooManySchemas,
    TooManyTopics,
    TopicConflict,
    Unauthorized,
    UnknownGroup,
    UnknownNode,
    UnknownSchema,
    UnknownTopic,
)
from penstock.schema import Field
from penstock.web.guard import Describe, unexpected

BODY_BYTES_MAX: Final = 1 << 20
JSON: Final = "application/json"

# The nearest ancestor of an error decides.
STATUSES: Final[Mapping[type[PenstockError], int]] = {
    PeerError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    PermissionDenied: 403,
    QuotaExceeded: 429,
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
    UnknownSchema: 404,
    SchemaConflict: 409,
    TooManySchemas: 409,
    OutOfSequence: 409,
    OffsetOutOfRange: 410,
    BatchTooLarge: 413,
    RequestTooLarge: 413,
    BrokerError: 503,
    DiskError: 500,
    AppendFailed: 507,
    PenstockError: 500,
}
_FLAGS: Final = {"": "true", "1": "true", "0": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """The declaration of an endpoint without parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    # As Starlette has it: "/admin/topics/{name:path}".
    path: str
    about: str
    # Called with an instance of `parameters` and the request. Returns a document, or a whole response.
    answer: Callable[[Any, Request], Awaitable[object]]
    parameters: type[Any] = Nothing
    # The content type of the body; empty: there is none.
    accepts: str = JSON
    # Of a successful answer; 204 has no body.
    status: int = 200
    media: str = JSON
    # The type of its answer, if it is described.
    returns: Any = None
    # What other statuses mean.
    errors: Mapping[int, str] | None = None
    # Whether it needs credentials, if the server requires any; and what the client must be allowed to do.
    guarded: bool = False
    action: str = "connect"
    # Whether unknown parameters in the query are ignored: clients of other servers, or of newer ones, send more.
    ignores_unknown: bool = False

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT", "PATCH") and bool(self.accepts)

    @property
    def fields(self) -> list[tuple[Field, Literal["path", "query", "body"]]]:
        """Return the parameters, and where each of them is."""
        return [(field, self._place(field.name)) for field in schema.declared(self.parameters).values()]

    def _place(self, name: str) -> Literal["path", "query", "body"]:
        if f"{{{name}}}" in self.path or f"{{{name}:" in self.path:
            return "path"
        return "body" if self.has_body and self.accepts == JSON else "query"


def application(
    endpoints: Iterable[Endpoint],
    *,
    authorize: Callable[[Request, str], Awaitable[None]],
    read_json: Callable[[bytes], dict[str, Any]],
    encode: Callable[[object], Awaitable[bytes]],
    describe: Describe,
    more: Iterable[Route] = (),
) -> Starlette:
    """Serve endpoints. `authorize` raises Unauthorized or PermissionDenied, `encode` makes JSON of an answer, and
    `describe` makes the document of an error."""

    def serve(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def served(request: Request) -> Response:
            try:
                if endpoint.guarded:
                    await authorize(request, endpoint.action)
                asked = await _read(endpoint, request, read_json)
                answer = await endpoint.answer(asked, request)
                if isinstance(answer, Response):
                    return answer
                data = b"" if endpoint.status == 204 else await encode(answer)
            except PenstockError as error:
                return refusal(error, describe)
            except ClientDisconnect:
                return Response(status_code=400)
            return Response(data or None, endpoint.status, media_type=JSON if data else None)

        return served

    async def missing(_request: Request, error: Exception) -> Response:
        """Answer a request to an unknown path, or with a wrong method; and the endpoints' own HTTPExceptions."""
        assert isinstance(error, HTTPException)
        is_unknown = error.status_code == 405 or error.detail == "Not Found"
        text = "unknown path or method: /openapi.json lists them" if is_unknown else error.detail
        return JSONResponse(describe(BadRequest(text)), error.status_code, error.headers)

    async def failed(_request: Request, _error: Exception) -> Response:
        """Answer after an unexpected exception. Starlette raises it again, and the port's `Guard` counts it."""
        return refusal(unexpected(), describe)

    # `{name:path}` takes everything that follows, so more specific paths are first.
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.path.endswith(":path}"))
    return Starlette(
        routes=[*more, *(Route(each.path, serve(each), methods=[each.method]) for each in ordered)],
        exception_handlers={HTTPException: missing, Exception: failed},
    )


def status_of(error: PenstockError) -> int:
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def described(error: PenstockError) -> dict[str, object]:
    """Return an error as a broker shows it."""
    more: dict[str, object] = {}
    if isinstance(error, OffsetOutOfRange):
        more = {"offset": error.offset, "start": error.start, "end": error.end}
    return {"code": error.code, "text": str(error), **more}


def refusal(error: PenstockError, describe: Describe = described) -> JSONResponse:
    headers = {"WWW-Authenticate": 'Basic realm="penstock", Bearer'} if isinstance(error, Unauthorized) else None
    return JSONResponse(describe(error), status_code=status_of(error), headers=headers)


async def _read(endpoint: Endpoint, request: Request, read_json: Callable[[bytes], dict[str, Any]]) -> Any:
    """Read the parameters of a request."""
    fields = endpoint.fields
    texts = {field.name: field for field, place in fields if place != "body"}
    values: dict[str, Any] = dict(request.path_params)
    query = request.query_params
    for name in dict.fromkeys(query.keys()):
        if name not in texts:
            if not endpoint.ignores_unknown:
                _refuse_unknown(name, [field.name for field, place in fields if place == "query"])
        elif len(query.getlist(name)) > 1:
            raise BadRequest(f"{name} is repeated: give one value")
        else:
            is_flag = {"true", "false"} <= {str(choice).lower() for choice in texts[name].choices}
            values[name] = _FLAGS.get(query[name], query[name]) if is_flag else query[name]
    if endpoint.has_body and endpoint.accepts == JSON:
        body = await _body(request, read_json)
        for name in body:
            if name in texts or all(name != field.name for field, _ in fields):
                _refuse_unknown(name, [field.name for field, place in fields if place == "body"])
        values |= body
    try:
        return schema.build(endpoint.parameters, values, parse=texts)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _refuse_unknown(name: str, known: list[str]) -> None:
    try:
        schema.refuse_unknown([name], known)
    except ValueError as error:
        raise BadRequest(str(error)) from None


async def _body(request: Request, read_json: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
    # A page in a browser can send other types without asking us first, but none of JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BadRequest(f"the body must be JSON, with the header Content-Type: {JSON}")
    # A length that is announced is checked before anything is read, and the rest while it arrives.
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced[:20]) > BODY_BYTES_MAX:
        raise RequestTooLarge(f"the body has {announced[:20]} bytes: {BODY_BYTES_MAX} are allowed")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise RequestTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return read_json(b"".join(parts))
