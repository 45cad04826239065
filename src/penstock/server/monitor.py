"""Health, figures and metrics of the server, for people and for monitoring.

`/varz`, `/connz` and `/subsz` have the format of nats-server, so that its tools can read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.broker.broker import Broker
from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.subscription import Subscription
from penstock.log.damage import DAMAGE_REMEDY
from penstock.schema import NonNegative, about
from penstock.security.permissions import Action
from penstock.server.calls import Json
from penstock.server.metrics import Metrics
from penstock.server.rows import Answers, Rows
from penstock.store.catalogue import ORPHAN_REMEDY
from penstock.times import elapsed, iso
from penstock.tls.port import ServerTls
from penstock.web.endpoints import Endpoint, Nothing

if TYPE_CHECKING:
    from penstock.doors.session import Session
    from penstock.doors.sessions import Sessions

# Rows of one answer: by default, and at most. The answer says which limit was used.
ROWS: Final = 1024
ROWS_MAX: Final = 10_000


class Monitored(Protocol):
    """The server, as far as these endpoints need it."""

    id: str
    broker: Broker
    answers: Answers
    sessions: Sessions
    tls: ServerTls | None

    def unhealthy_reason(self) -> str | None: ...

    def statistics(self) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    limit: Annotated[NonNegative, about(f"rows of one answer, at most {ROWS_MAX}")] = ROWS
    offset: Annotated[NonNegative, about("rows to skip")] = 0

    @property
    def rows(self) -> int:
        return min(self.limit, ROWS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connections:
    page: _Page
    cid: Annotated[NonNegative | None, about("only the connection with this number")] = None
    subs: Annotated[
        Literal["true", "false", "detail"],
        about("with the subjects of its subscriptions, or with the details of each"),
    ] = "false"


def endpoints(server: Monitored, metrics: Metrics) -> list[Endpoint]:
    async def expose(_asked: object, request: Request) -> Response:
        encode, media = metrics.form(request.headers.get("accept", ""))
        return Response(await server.answers.make(metrics.expose(encode)), media_type=media)

    async def healthz(_asked: object, _request: Request) -> Response:
        return _healthz(server)

    async def health(_asked: object, request: Request) -> Response:
        return _health(server, request.headers.get("accept", ""))

    async def varz(_asked: object, _request: Request) -> Json:
        return server.statistics()

    async def connz(asked: _Connections, _request: Request) -> Json:
        return _connz(server, asked)

    async def subsz(asked: _Page, _request: Request) -> Json:
        return _subsz(server, asked)

    def get(path: str, about: str, answer: Any, parameters: type[Any] = Nothing, **more: Any) -> Endpoint:
        return Endpoint(
            method="GET", path=path, about=about, answer=answer, parameters=parameters, ignores_unknown=True, **more
        )

    # They tell who is connected, and the names of topics.
    metric: dict[str, Any] = {"guarded": True, "action": Action.METRICS}
    return [
        get("/healthz", "Health; 503 with the reason if the server is not healthy", healthz),
        get("/health", "OK as plain text, or 503 with the reason; JSON if it is accepted", health, media="text/plain"),
        get("/metrics", "Metrics for Prometheus", expose, media="text/plain; version=0.0.4", **metric),
        get("/varz", "The server's figures", varz, **metric),
        get("/connz", "A row for each connection", connz, _Connections, **metric),
        get("/subsz", "A row for each subscription", subsz, _Page, **metric),
    ]


def _healthz(server: Monitored) -> Response:
    reason, damage = server.unhealthy_reason(), _degraded(server)
    if reason is not None:
        return JSONResponse({"status": "unavailable", "error": reason, **damage}, status_code=503)
    return JSONResponse({"status": "degraded" if damage else "ok", **damage})


def _health(server: Monitored, accept: str) -> Response:
    """Answer Cursus' health checks, in its words. Clients that accept JSON get the reasons."""
    reason, damage = server.unhealthy_reason(), _degraded(server)
    if "json" in accept:
        if reason is None:
            return JSONResponse({"status": "DEGRADED" if damage else "OK", **damage})
        return JSONResponse({"status": "DOWN", "error": f"Broker not ready: {reason}"}, status_code=503)
    if reason is None:
        return PlainTextResponse("OK")
    reason = "Main listener not active" if server.sessions.is_leaving else reason
    return PlainTextResponse(f"Broker not ready: {reason}", status_code=503)


def _degraded(server: Monitored) -> Json:
    """Return what does not work as it should, while the broker serves the rest."""
    problem = None if server.tls is None else server.tls.problem
    return _damage(server.broker) | ({} if problem is None else {"tls": problem})


def _damage(broker: Broker) -> Json:
    """Return what cannot be read, and which groups it stops. The broker serves the rest, so it is not unavailable."""
    found, orphans = broker.damage(), broker.store.catalogue.orphans
    unknown = {"unknown": [f"{path}: {ORPHAN_REMEDY}" for path in orphans]} if orphans else {}
    if not found:
        return unknown
    stopped = [
        {
            "group": (group.name or b"").decode(),
            "topic": position.partition.name.decode(),
            "partition": position.partition.number,
        }
        for group in broker.groups
        for position in group.positions.values()
        if position.stopped is not None
    ]
    damaged = [
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
    ]
    return {"remedy": DAMAGE_REMEDY, "damage": damaged, "stopped": stopped, **unknown}


def _connz(server: Monitored, asked: _Connections) -> Json:
    limit, offset = asked.page.rows, asked.page.offset
    sessions = list(server.sessions)
    if asked.cid is not None:
        sessions = [session for session in sessions if session.id == asked.cid]
    page = sessions[offset : offset + limit]
    subscriptions_max = ROWS_MAX // max(1, len(page))
    rows = (
        {**row, **_subscription_lists(session, asked.subs, subscriptions_max)}
        for session in page
        if (row := _row(server, session)) is not None
    )
    return {
        "server_id": server.id,
        "now": iso(server.broker.clock.now_us()),
        "num_connections": len(page),
        "total": len(sessions),
        "offset": offset,
        "limit": limit,
        "connections": Rows(rows),
    }


def _row(server: Monitored, session: Session) -> Json | None:
    """Describe a connection; None if it was closed meanwhile."""
    if not session.is_connected:
        return None
    arrival = session.arrival
    return {
        **session.summary(),
        "kind": "Client",
        "type": session.type,
        "port": arrival.port,
        "start": iso(arrival.time_us),
        "uptime": elapsed(server.broker.clock.now_us() - arrival.time_us),
        "subscriptions": len(session.subscriptions),
    }


def _subscription_lists(session: Session, subs: str, rows_max: int) -> Json:
    found = _subscriptions(session)[:rows_max]
    match subs:
        case "true":
            return {"subscriptions_list": Rows(reader.pattern.decode(errors="replace") for _, _, reader in found)}
        case "detail":
            return {"subscriptions_list_detail": Rows(_subscription_row(*each) for each in found)}
    return {}


def _subsz(server: Monitored, asked: _Page) -> Json:
    limit, offset = asked.rows, asked.offset
    sessions = list(server.sessions)
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


def _subscriptions(session: Session) -> list[tuple[Session, Member, Subscription | Group]]:
    return [(session, member, reader) for member, reader in session.subscriptions.values()]


def _subscription_row(session: Session, member: Member, reader: Subscription | Group) -> Json:
    row: Json = {
        "subject": reader.pattern.decode(errors="replace"),
        "sid": member.sid.decode(errors="replace"),
        "msgs": member.delivered,
        "cid": session.id,
        "dropped": member.dropped,
        "buffered": reader.lag(),
    }
    if member.remaining is not None:
        row["max"] = member.delivered + member.remaining
    if isinstance(reader, Subscription) and reader.queue is not None:
        row["qgroup"] = reader.queue.name.decode(errors="replace")
    if isinstance(reader, Group):
        row |= {"group": (reader.name or b"").decode(errors="replace"), "unacknowledged": member.out}
    return row
