"""What the HTTP port answers, as OpenAPI tells it, and a page for people. Nothing is loaded from elsewhere."""

from __future__ import annotations

from typing import Any, Final

OFFSET_MAX: Final = (1 << 63) - 1
LIMIT: Final = 100
LIMIT_MAX: Final = 1000
PARTITION_MAX: Final = 65_535


def _integer(high: int, default: int | None = None, low: int = 0) -> dict[str, Any]:
    schema = {"type": "integer", "format": "int64", "minimum": low, "maximum": high}
    return schema if default is None else schema | {"default": default}


def _query(name: str, schema: dict[str, Any], meaning: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": meaning}


def _path(name: str, schema: dict[str, Any], meaning: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": meaning}


_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_COUNT: Final = _integer(OFFSET_MAX)
_MAYBE_OFFSET: Final = {"type": ["integer", "null"], "format": "int64"}
_PARTITION: Final = _query("partition", _integer(PARTITION_MAX, 0), "Offsets are counted in each partition by itself.")
_LIMIT: Final = _query("limit", _integer(LIMIT_MAX, LIMIT, 1), "So many at the most.")
_BASE64: Final = _query("base64", _FLAG | {"default": False}, "The key is given as base64 with - and _.")


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(of: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(of)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_RANGE: Final = _object({"min": _MAYBE_OFFSET, "max": _MAYBE_OFFSET})
_SCHEMAS: Final = {
    "Record": _object(
        {
            "partition": _COUNT,
            "offset": _COUNT,
            "msgKey": {"type": ["string", "null"]},
            "msgKeyBase64": _TEXT | {"description": "Where the key is no UTF-8."},
            "eventType": {"type": "string", "enum": ["MESSAGE", "DELETE"]},
            "data": _TEXT,
            "dataBase64": _TEXT | {"description": "Where the value is no UTF-8."},
            "createdAt": {"type": ["string", "null"], "format": "date-time"},
            "subject": _TEXT,
            "headers": {"type": "object", "additionalProperties": _TEXT},
        },
        ("msgKeyBase64", "dataBase64"),
    ),
    "Range": _object(
        {"partition": _COUNT, "count": _COUNT, "records": _list("Record"), "next": _MAYBE_OFFSET},
    ),
    "Key": _object({"key": _TEXT, "keyBase64": _TEXT}, ("keyBase64",)),
    "Keys": _object({"count": _COUNT, "keys": _list("Key"), "next": {"type": ["string", "null"]}}),
    "PartitionStats": _object(
        {
            "partition": _COUNT,
            "segmentCount": _COUNT,
            "totalRecords": _COUNT,
            "offsetRange": _RANGE,
            "nextOffset": _COUNT,
        }
    ),
    "Stats": _object(
        {
            "type": _TEXT,
            "topic": _TEXT,
            "group": _TEXT,
            "segmentCount": _COUNT,
            "totalRecords": _COUNT,
            "offsetRange": _RANGE,
            "sqliteDbSize": _COUNT,
            "skipped": _COUNT,
            "partitions": _list("PartitionStats"),
        }
    ),
    "Segment": _object(
        {
            "segmentId": _COUNT,
            "file": _TEXT,
            "partition": _COUNT,
            "startOffset": _COUNT,
            "endOffset": _COUNT,
            "range": _TEXT,
            "records": _COUNT,
            "bytes": _COUNT,
            "capacity": _COUNT,
            "createdAt": _TEXT,
        }
    ),
    "Segments": _object({"count": _COUNT, "segments": _list("Segment")}),
    "Broker": _object(
        {"address": _TEXT, "connected": _FLAG, "lag": _MAYBE_OFFSET, "error": {"type": ["string", "null"]}}
    ),
    "Health": _object(
        {
            "status": {"type": "string", "enum": ["UP", "DOWN"]},
            "segments": _COUNT,
            "records": _COUNT,
            "refreshing": _FLAG,
            "paused": _FLAG,
            "broker": _ref("Broker"),
            "error": _TEXT,
        },
        ("error",),
    ),
    "Resumed": _object({"resumed": _FLAG}),
    "Error": _object({"error": _TEXT}),
}


def _answer(schema: str, meaning: str) -> dict[str, Any]:
    return {"description": meaning, "content": {"application/json": {"schema": _ref(schema)}}}


def _operation(
    summary: str, schema: str, parameters: list[dict[str, Any]], refusals: dict[int, str] | None = None
) -> dict[str, Any]:
    answers = {"200": _answer(schema, "That is it.")}
    for code, meaning in (refusals or {}).items():
        answers[str(code)] = _answer("Health" if code == 503 else "Error", meaning)
    return {"summary": summary, "parameters": parameters, "responses": answers}


_WRONG: Final = {400: "A parameter is wrong: it says which."}
_NONE: Final = {404: "There is none."}
PATHS: Final[dict[str, dict[str, Any]]] = {
    "/api/query/offset/{offset}": {
        "get": _operation(
            "The record at an offset.",
            "Record",
            [_path("offset", _COUNT, "Where it is."), _PARTITION],
            _WRONG | _NONE,
        )
    },
    "/api/query/key/{key}": {
        "get": _operation(
            "The latest record of a key; none if that deleted it.",
            "Record",
            [_path("key", _TEXT, "May have slashes."), _BASE64],
            _WRONG | _NONE,
        )
    },
    "/api/query/range": {
        "get": _operation(
            "Records from one offset to another, both included. `next` is where the rest begins.",
            "Range",
            [
                _query("from", _integer(OFFSET_MAX, 0), "The first offset."),
                _query("to", _integer(OFFSET_MAX, OFFSET_MAX), "The last offset."),
                _LIMIT,
                _PARTITION,
            ],
            _WRONG,
        )
    },
    "/api/query/keys": {
        "get": _operation(
            "Keys that have a value, in the order of their bytes. `next` goes into `after`, as base64.",
            "Keys",
            [
                _query("prefix", _TEXT, "Only those that begin so."),
                _query("after", _TEXT, "Only those behind it; as base64 with - and _."),
                _LIMIT,
            ],
            _WRONG,
        )
    },
    "/api/query/stats": {"get": _operation("How much is here.", "Stats", [])},
    "/api/query/segments": {
        "get": _operation(
            "The segments: `count` of them, the first of which are told.",
            "Segments",
            [_query("partition", _integer(PARTITION_MAX), "Only its segments."), _LIMIT],
            _WRONG,
        )
    },
    "/api/query/health": {
        "get": _operation(
            "UP while messages can be stored and read, whether or not the broker is there.",
            "Health",
            [],
            {503: "DOWN: `error` says why."},
        )
    },
    "/api/consumer/resume": {
        "post": _operation("Go on after a pause (PAUSE_ON_ERROR).", "Resumed", []),
    },
}


def document(version: str) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock replica", "version": version, "description": "A copy of a topic, to be queried."},
        "paths": PATHS,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
        # Where the replica has credentials, all but its health requires them.
        "security": [{}, {"basic": []}, {"bearer": []}],
    }


def page() -> str:
    """All there is to ask, with links where nothing must be filled in."""
    rows = []
    for path, methods in PATHS.items():
        for method, operation in methods.items():
            asked = ", ".join(each["name"] for each in operation["parameters"])
            shown = f'<a href="{path}"><code>{path}</code></a>' if _is_plain(path, method) else f"<code>{path}</code>"
            rows.append(
                f"<tr><td>{method.upper()}</td><td>{shown}</td><td>{operation['summary']}</td><td>{asked}</td></tr>"
            )
    return _PAGE.replace("ROWS", "\n".join(rows))


def _is_plain(path: str, method: str) -> bool:
    return method == "get" and "{" not in path


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Penstock replica</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse }
td, th { border-bottom: 1px solid #ccc; padding: .4rem .8rem; text-align: left; vertical-align: top }
</style>
</head>
<body>
<h1>Penstock replica</h1>
<p>A copy of a topic, to be queried. For programs: <a href="/openapi.json">openapi.json</a>.</p>
<table>
<tr><th></th><th>path</th><th>what it answers</th><th>parameters</th></tr>
ROWS
</table>
</body>
</html>
"""
