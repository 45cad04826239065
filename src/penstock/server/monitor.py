"""How the server is, for people and for machines that watch it: health, figures, metrics.

`/varz`, `/connz` and `/subsz` have the shape that nats-server gives them, so what reads those reads these.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.subscription import Subscription
from penstock.server.metrics import Metrics
from penstock.server.routes import Asked, Endpoint, Field, Json
from penstock.server.rows import Rows
from penstock.storage.catalogue import ORPHAN_REMEDY
from penstock.storage.log import DAMAGE_REMEDY
from penstock.times import elapsed, iso

if TYPE_CHECKING:
    from penstock.server.connection import Connection
    from penstock.server.server import Server

# Rows of one answer: unless it says so, and at the most.
ROWS: Final = 1024
ROWS_MAX: Final = 10_000

_PAGE: Final = (
    Field(name="limit", kind="number", about=f"rows of one answer, at most {ROWS_MAX}", place="query", default=ROWS),
    Field(name="offset", kind="number", about="rows to pass over", place="query", default=0),
)


def endpoints(metrics: Metrics) -> tuple[Endpoint, ...]:
    async def expose(asked: Asked) -> Response:
        encode, media = metrics.form(asked.request.headers.get("accept", ""))
        return Response(await asked.server.answers.make(metrics.expose(encode)), media_type=media)

    return (
        Endpoint(
            method="GET", path="/healthz", about="Whether it is well; 503 with the reason if not", answer=_healthz
        ),
        Endpoint(
            method="GET",
            path="/health",
            about="OK as plain text, or 503 with the reason; JSON for whoever accepts it",
            answer=_health,
            media="text/plain",
        ),
        Endpoint(
            method="GET",
            path="/metrics",
            about="Figures for Prometheus",
            answer=expose,
            media="text/plain; version=0.0.4",
        ),
        Endpoint(method="GET", path="/varz", about="The server's figures", answer=_varz),
        Endpoint(
            method="GET",
            path="/connz",
            about="A row for each connection",
            answer=_connz,
            fields=(
                *_PAGE,
                Field(name="cid", kind="number", about="only the connection with this number", place="query"),
                Field(name="subs", kind="flag", about="with the subjects of its subscriptions", place="query"),
            ),
        ),
        Endpoint(method="GET", path="/subsz", about="A row for each subscription", answer=_subsz, fields=_PAGE),
    )


async def _healthz(asked: Asked) -> Response:
    reason, damage = asked.server.ill(), _damage(asked.server)
    if reason is not None:
        return JSONResponse({"status": "unavailable", "error": reason, **damage}, status_code=503)
    return JSONResponse({"status": "degraded" if damage else "ok", **damage})


async def _health(asked: Asked) -> Response:
    """For Cursus' checks, in its words. Whoever accepts JSON gets the reasons."""
    server = asked.server
    reason, damage = server.ill(), _damage(server)
    if "json" in asked.request.headers.get("accept", ""):
        if reason is None:
            return JSONResponse({"status": "DEGRADED" if damage else "OK", **damage})
        return JSONResponse({"status": "DOWN", "error": f"Broker not ready: {reason}"}, status_code=503)
    if reason is None:
        return PlainTextResponse("OK")
    reason = "Main listener not active" if server.is_leaving else reason
    return PlainTextResponse(f"Broker not ready: {reason}", status_code=503)


def _damage(server: Server) -> dict[str, Any]:
    """What cannot be read, and who waits because of it. The broker serves all around it, so it is not unavailable."""
    found, orphans = server.broker.damage(), server.broker.store.catalogue.orphans
    unknown = {"unknown": [f"{path}: {ORPHAN_REMEDY}" for path in orphans]} if orphans else {}
    if not found:
        return unknown
    waiting = [
        {
            "group": (group.name or b"").decode(),
            "topic": position.partition.name.decode(),
            "partition": position.partition.number,
        }
        for group in server.broker.groups.values()
        for position in group.positions.values()
        if position.stopped is not None
    ]
    return {
        "remedy": DAMAGE_REMEDY,
        "damage": [
            {
                "topic": topic,
                "partition": partition,
                "file": str(damage.path),
                "position": damage.position,
                "first": damage.first,
                "next": damage.last,
                "reason": damage.reason,
            }
            for topic, partition, damage in found
        ],
        "stopped": waiting,
        **unknown,
    }


async def _varz(asked: Asked) -> Json:
    return asked.server.statistics()


async def _connz(asked: Asked) -> Json:
    server = asked.server
    limit, offset = _page(asked)
    sessions = server.sessions
    if "cid" in asked.fields:
        sessions = [session for session in sessions if session.id == asked.fields["cid"]]
    page = sessions[offset : offset + limit]
    subjects_max = ROWS_MAX // max(1, len(page)) if asked.fields.get("subs") else None
    rows = (row for session in page if (row := _row(server, session, subjects_max)) is not None)
    return {
        "server_id": server.id,
        "now": iso(server.broker.clock.now_us()),
        "num_connections": len(page),
        "total": len(sessions),
        "offset": offset,
        "limit": limit,
        "connections": Rows(rows),
    }


def _row(server: Server, session: Connection, subjects_max: int | None) -> Json | None:
    """None: it is gone meanwhile."""
    came = server.came(session)
    if came is None:
        return None
    row = {
        **session.summary(),
        "kind": "Client",
        "type": session.type,
        "port": came.port,
        "start": iso(came.time_us),
        "uptime": elapsed(server.broker.clock.now_us() - came.time_us),
        "subscriptions": len(session.subscriptions),
    }
    if subjects_max is not None:
        readers = islice(session.subscriptions.values(), subjects_max)
        row["subscriptions_list"] = [reader.pattern.decode(errors="replace") for _, reader in readers]
    return row


async def _subsz(asked: Asked) -> Json:
    server = asked.server
    limit, offset = _page(asked)
    sessions = server.sessions
    every = chain.from_iterable(map(_subscriptions, sessions))
    rows = (_subscription_row(*each) for each in islice(every, offset, offset + limit))
    total = sum(len(session.subscriptions) for session in sessions)
    return {
        "server_id": server.id,
        "now": iso(server.broker.clock.now_us()),
        "num_subscriptions": total,
        "total": total,
        "offset": offset,
        "limit": limit,
        "subscriptions_list": Rows(rows),
    }


def _subscriptions(session: Connection) -> list[tuple[Connection, Member, Subscription | Group]]:
    return [(session, member, reader) for member, reader in session.subscriptions.values()]


def _subscription_row(session: Connection, member: Member, reader: Subscription | Group) -> Json:
    row: Json = {
        "subject": reader.pattern.decode(errors="replace"),
        "sid": member.sid.decode(errors="replace"),
        "msgs": member.delivered,
        "cid": session.id,
        "dropped": member.dropped,
        "buffered": reader.lag(),
    }
    if isinstance(reader, Group):
        row |= {"group": (reader.name or b"").decode(errors="replace"), "unacknowledged": member.out}
    return row


def _page(asked: Asked) -> tuple[int, int]:
    return min(asked.number("limit", ROWS), ROWS_MAX), asked.number("offset", 0)
