"""The HTTP port described: for programs in OpenAPI 3.1, for people as a page that needs nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from starlette.responses import HTMLResponse, Response

from penstock.server.routes import Asked, Endpoint, Field, Json, Kind

_CONVERTER: Final = re.compile(r":\w+\}")
_SCHEMAS: Final[Mapping[Kind, Json]] = {
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "number": {"type": "integer", "minimum": 0},
    "flag": {"type": "boolean"},
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "object": {"type": "object"},
    "any": {},
}
_ERROR: Final[Json] = {
    "type": "object",
    "required": ["code", "text"],
    "properties": {"code": {"type": "string"}, "text": {"type": "string"}},
}


def with_description(endpoints: Sequence[Endpoint], version: str) -> tuple[Endpoint, ...]:
    """All of them, and two more that tell of all of them."""

    async def describe_all(_asked: Asked) -> Json:
        return description

    async def show_all(_asked: Asked) -> Response:
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(page, headers=policy)

    every = (
        *endpoints,
        Endpoint(method="GET", path="/openapi.json", about="This description", answer=describe_all),
        Endpoint(method="GET", path="/docs", about="The same, to read", answer=show_all, media="text/html"),
    )
    description, page = describe(every, version), _page(every, version)
    return every


def describe(endpoints: Sequence[Endpoint], version: str) -> Json:
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(shown_path(endpoint), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": "The HTTP port of a Penstock broker."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def shown_path(endpoint: Endpoint) -> str:
    return _CONVERTER.sub("}", endpoint.path)


def _operation(endpoint: Endpoint) -> Json:
    operation: Json = {
        "summary": endpoint.about,
        "tags": [endpoint.path.split("/")[1].partition(".")[0]],
        "responses": _responses(endpoint),
    }
    if parameters := [_parameter(field) for field in endpoint.fields if field.place != "body"]:
        operation["parameters"] = parameters
    if endpoint.method not in ("GET", "DELETE"):
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _body(endpoint)}}}
    if endpoint.guarded:
        operation["security"] = [{"basic": []}, {"bearer": []}]
    return operation


def _responses(endpoint: Endpoint) -> Json:
    told: Json = {"description": "Done"}
    if endpoint.status != 204:
        told["content"] = {endpoint.media: {}}
    error = {
        "description": "It was not done: the text says why",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {str(endpoint.status): told, "default": error}


def _parameter(field: Field) -> Json:
    return {
        "name": field.name,
        "in": field.place,
        "required": field.required,
        "description": field.about,
        "schema": _schema(field),
    }


def _body(endpoint: Endpoint) -> Json:
    fields = endpoint.of("body")
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in fields if field.required],
        "properties": {field.name: {**_schema(field), "description": field.about} for field in fields},
    }


def _schema(field: Field) -> dict[str, Any]:
    default = {} if field.default is None else {"default": field.default}
    return {**_SCHEMAS[field.kind], **default}


# The page.

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { font: 600 15px ui-monospace, monospace; margin: 2em 0 0 } h2 b { color: #06c }
table { border-collapse: collapse; margin: .5em 0 } td { padding: .1em 1em .1em 0; vertical-align: top }
code { font: 13px ui-monospace, monospace } small { color: #777 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } h2 b { color: #6af } }
"""


def _page(endpoints: Sequence[Endpoint], version: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Penstock {escape(version)}</title>'
        f"<style>{_STYLE}</style><h1>Penstock {escape(version)}</h1>"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. Bodies are JSON objects, and need '
        "<code>Content-Type: application/json</code>. An error is <code>{code, text}</code>.</p>"
        f"{''.join(map(_section, endpoints))}</html>"
    )


def _section(endpoint: Endpoint) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(field.name)}</code><td>{field.place}{', required' if field.required else ''}"
        f"<td>{escape(field.about)}{_default(field)}"
        for field in endpoint.fields
    )
    guarded = " <small>needs a user or a token, where there is one</small>" if endpoint.guarded else ""
    return (
        f"<h2><b>{endpoint.method}</b> {escape(shown_path(endpoint))}</h2>{escape(endpoint.about)}{guarded}"
        f"{f'<table>{rows}</table>' if rows else ''}"
    )


def _default(field: Field) -> str:
    return "" if field.default is None else f" <small>default {escape(str(field.default))}</small>"
