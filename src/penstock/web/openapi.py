"""The description of endpoints: for programs in OpenAPI 3.1, for people as a page that loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.schema import Field
from penstock.web.endpoints import JSON, Endpoint

Json = dict[str, Any]

_CONVERTER: Final = re.compile(r":\w+\}")
_REFERENCE: Final = "#/components/schemas/{name}"


def with_description(
    endpoints: Sequence[Endpoint], *, title: str, about: str, version: str, error: type[Any]
) -> tuple[Endpoint, ...]:
    """Return the endpoints, and two more that describe them all. `error` is the type of a refusal."""

    async def describe_all(_asked: object, _request: Request) -> Json:
        return description

    async def show_all(_asked: object, _request: Request) -> Response:
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(page, headers=policy)

    every = (
        *endpoints,
        Endpoint(method="GET", path="/openapi.json", about="This description", answer=describe_all),
        Endpoint(method="GET", path="/docs", about="This description, as a page", answer=show_all, media="text/html"),
    )
    description = _Description(every, error).document({"title": title, "version": version, "description": about})
    page = _page(every, f"{title} {version}")
    return every


def shown_path(endpoint: Endpoint) -> str:
    return _CONVERTER.sub("}", endpoint.path)


class _Description:
    def __init__(self, endpoints: Sequence[Endpoint], error: type[Any]) -> None:
        self._endpoints = endpoints
        self._error = error
        types = [each for endpoint in endpoints for each in (*_types(endpoint), endpoint.returns) if each is not None]
        schemas, self._components = msgspec.json.schema_components([*types, error], ref_template=_REFERENCE)
        # Types with annotations have no hash.
        self._schemas = dict(zip(map(id, [*types, error]), schemas, strict=True))

    def document(self, info: Json) -> Json:
        paths: dict[str, Json] = {}
        for endpoint in self._endpoints:
            paths.setdefault(shown_path(endpoint), {})[endpoint.method.lower()] = self._operation(endpoint)
        security = {
            "basic": {"type": "http", "scheme": "basic"},
            "bearer": {"type": "http", "scheme": "bearer"},
        }
        components = {"schemas": self._components, "securitySchemes": security}
        return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}

    def _operation(self, endpoint: Endpoint) -> Json:
        operation: Json = {
            "summary": endpoint.about,
            "tags": [endpoint.path.split("/")[1].partition(".")[0]],
            "responses": self._responses(endpoint),
        }
        if parameters := [self._parameter(field, place) for field, place in endpoint.fields if place != "body"]:
            operation["parameters"] = parameters
        if endpoint.has_body:
            body = self._body(endpoint) if endpoint.accepts == JSON else {"type": "string", "format": "binary"}
            operation["requestBody"] = {"required": True, "content": {endpoint.accepts: {"schema": body}}}
        if endpoint.guarded:
            operation["security"] = [{"basic": []}, {"bearer": []}]
        return operation

    def _responses(self, endpoint: Endpoint) -> Json:
        done: Json = {"description": "Success"}
        if endpoint.status != 204:
            schema = {} if endpoint.returns is None else {"schema": self._schemas[id(endpoint.returns)]}
            done["content"] = {endpoint.media: schema}
        error = {JSON: {"schema": self._schemas[id(self._error)]}}
        others = {str(code): {"description": text, "content": error} for code, text in (endpoint.errors or {}).items()}
        default = {"description": "An error, with the reason", "content": error}
        return {str(endpoint.status): done, **others, "default": default}

    def _parameter(self, field: Field, place: str) -> Json:
        schema = self._schema(field)
        # A list is written with commas.
        style = {"style": "form", "explode": False} if schema.get("type") == "array" else {}
        about = schema.pop("description", "")
        required = place == "path" or field.is_required
        return {"name": field.name, "in": place, "required": required, "description": about, "schema": schema, **style}

    def _body(self, endpoint: Endpoint) -> Json:
        fields = [field for field, place in endpoint.fields if place == "body"]
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [field.name for field in fields if field.is_required],
            "properties": {field.name: self._schema(field) for field in fields},
        }

    def _schema(self, field: Field) -> Json:
        if field.form.json_type is not None:
            return {**self._schemas[id(field.form.json_type)], "description": field.about}
        default = {} if field.is_required or field.default is None else {"default": field.default}
        return {**self._schemas[id(field.type)], **default}


def _types(endpoint: Endpoint) -> list[Any]:
    return [field.type if field.form.json_type is None else field.form.json_type for field, _ in endpoint.fields]


# The page.

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { font: 600 15px ui-monospace, monospace; margin: 2em 0 0 } h2 b { color: #06c }
table { border-collapse: collapse; margin: .5em 0 } td { padding: .1em 1em .1em 0; vertical-align: top }
code { font: 13px ui-monospace, monospace } small { color: #777 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } h2 b { color: #6af } }
"""


def _page(endpoints: Sequence[Endpoint], title: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a>. Bodies are JSON objects, and need '
        "<code>Content-Type: application/json</code>.</p>"
        f"{''.join(map(_section, endpoints))}</html>"
    )


def _section(endpoint: Endpoint) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(field.name)}</code><td>{place}{', required' if field.is_required else ''}"
        f"<td>{escape(field.about)}{_default(field)}"
        for field, place in endpoint.fields
    )
    guarded = " <small>needs credentials, if the server requires any</small>" if endpoint.guarded else ""
    return (
        f"<h2><b>{endpoint.method}</b> {escape(shown_path(endpoint))}</h2>{escape(endpoint.about)}{guarded}"
        f"{f'<table>{rows}</table>' if rows else ''}"
    )


def _default(field: Field) -> str:
    shown = not field.is_required and field.default is not None
    return f" <small>default {escape(str(field.default))}</small>" if shown else ""
