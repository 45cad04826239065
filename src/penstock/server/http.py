"""The HTTP port: health, metrics, the admin API and pipes, in the loop of the broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.routing import Route

from penstock.doors.journal import Journal
from penstock.pipe.pipes import Pipes
from penstock.security.security import Security
from penstock.server import admin, monitor, pipe_http, schema_registry, test_endpoints
from penstock.server.http_identity import Authorizer
from penstock.server.metrics import Measured, Metrics, pipe_metrics
from penstock.server.monitor import Monitored
from penstock.server.rows import encode
from penstock.tls.port import ServerTls
from penstock.web.endpoints import Endpoint, application, described
from penstock.web.guard import Guard, local_names
from penstock.web.openapi import with_description
from penstock.web.port import WebPort
from penstock.wire.binary import read_request


class HttpServer(Monitored, Measured, Protocol):
    """The server, as far as its HTTP port needs it."""

    security: Security
    journal: Journal
    pipes: Pipes
    settings: Mapping[str, Any]
    tls: ServerTls | None


class Error(msgspec.Struct):
    """An error, with its code."""

    code: str
    text: str


def http_port(server: HttpServer, more: Iterable[Route]) -> WebPort:
    config = server.config.server

    def invalid(address: str) -> None:
        server.counters.protocol_errors += 1
        server.journal.invalid_http(address)

    return WebPort(
        guarded(server, more),
        config.host,
        config.http_port,
        idle_s=config.handshake_s,
        tls=server.tls,
        connections_max=config.http_connections_max,
        on_invalid=invalid,
    )


def guarded(server: HttpServer, more: Iterable[Route] = ()) -> Guard:
    """`more` are routes that are not described."""
    config, health = server.config.server, server.broker.store.health

    async def encoded(document: object) -> bytes:
        return await server.answers.make(encode(document))

    app = application(
        endpoints(server),
        authorize=Authorizer(server.security, server.counters, server.journal).authorize,
        read_json=read_request,
        encode=encoded,
        describe=described,
        more=more,
    )
    return Guard(
        app,
        hosts=local_names(config.host, config.http_hosts),
        setting="server.http_hosts",
        describe=described,
        fault=lambda path, error: health.fault("http", path, error),
    )


def endpoints(server: HttpServer) -> tuple[Endpoint, ...]:
    """Return all endpoints, with those that describe the others."""

    def failed(messages: int) -> None:
        server.counters.failed_publishes += messages

    metrics = Metrics(server, [lambda: pipe_metrics(server.pipes.status())])
    every = [
        *monitor.endpoints(server, metrics),
        *admin.endpoints(server, server.settings),
        *schema_registry.endpoints(server.broker),
        *pipe_http.endpoints(server.broker, server.pipes, server.version),
    ]
    if server.config.server.test_endpoints:
        every += test_endpoints.endpoints(server, server.config.server, failed)
    about = "The HTTP port of a Penstock broker."
    return with_description(every, title="Penstock", about=about, version=server.version, error=Error)
