"""A mock cloud for testing a broker: a registry, and the parent that it names, on one HTTP port.

/registry/topology?nodeId=            every node is LOCAL and follows this port
/pipe/poll?offset=&limit=&topic=      the messages as JSON records, like a parent without batches; 204: no more
/health /status                       the number of messages, and their keys

It has five messages of price-topic, and stores nothing.
"""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.clock import Clock
from penstock.errors import BadRequest, PenstockError
from penstock.pipe.topology import Role, Topology, read_node_id
from penstock.registry.server import refuse, refuse_route
from penstock.times import iso_or_none

TOPIC: Final = "price-topic"
PRICES: Final = {"AAPL": 189.95, "GOOGL": 140.93, "MSFT": 378.91, "TSLA": 248.48, "AMZN": 153.42}
_PATHS: Final = "/registry/topology, /pipe/poll, /health and /status"
_LIMIT: Final = 100


def app(clock: Clock) -> Starlette:
    """Return the application; its messages have the current time."""
    records = _records(clock)

    async def topology(request: Request) -> JSONResponse:
        node_id = read_node_id("nodeId", request.query_params.get("nodeId"))
        here = str(request.base_url).rstrip("/")
        found = Topology(node_id=node_id, role=Role.LOCAL, parents=(here,), topics=(TOPIC,), version=1)
        return JSONResponse(found.to_json() | {"cloudDataUrl": here, "cloudDataUrlFallback": ""})

    async def poll(request: Request) -> Response:
        offset, limit = _number(request, "offset", 0), _number(request, "limit", _LIMIT)
        found = records[offset : offset + limit] if request.query_params.get("topic", TOPIC) == TOPIC else []
        return JSONResponse(found) if found else Response(status_code=204)

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "role": "CLOUD", "totalMessages": len(records)})

    async def status(_: Request) -> JSONResponse:
        messages = [{"offset": record["offset"], "key": record["msgKey"]} for record in records]
        found = {"role": "CLOUD", "topic": TOPIC, "totalMessages": len(records), "recentMessages": messages}
        return JSONResponse(found)

    return Starlette(
        routes=[
            Route("/registry/topology", topology),
            Route("/pipe/poll", poll),
            Route("/health", health),
            Route("/status", status),
        ],
        exception_handlers={PenstockError: refuse, HTTPException: refuse_route(_PATHS)},
    )


def _records(clock: Clock) -> list[dict[str, Any]]:
    created = iso_or_none(clock.now_us())
    return [
        {
            "offset": offset,
            "topic": TOPIC,
            "msgKey": symbol,
            "eventType": "MESSAGE",
            "data": json.dumps({"symbol": symbol, "price": price}),
            "createdAt": created,
        }
        for offset, (symbol, price) in enumerate(PRICES.items())
    ]


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadRequest(f"{name} is {text[:100]!r}: it must be a non-negative integer")
    return int(text)
