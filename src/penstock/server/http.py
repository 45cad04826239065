"""The HTTP port: health, metrics and the admin API, in the loop of the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server import admin, monitor, openapi, pipe_http, routes, test_endpoints, websocket
from penstock.server.metrics import Metrics, pipe_metrics
from penstock.server.routes import Endpoint
from penstock.web import Guard, WebPort, local_names

if TYPE_CHECKING:
    from penstock.server.server import Server


def http_port(server: Server) -> WebPort:
    config = server.config.server
    return WebPort(
        application(server),
        config.host,
        config.http_port,
        idle_s=config.handshake_s,
        connections_max=config.http_connections_max,
    )


def application(server: Server) -> Guard:
    config, health = server.config.server, server.broker.store.health
    return Guard(
        routes.application(server, endpoints(server), [*pipe_http.routes(server), websocket.route(server)]),
        hosts=local_names(config.host, config.http_hosts),
        setting="server.http_hosts",
        describe=routes.described,
        fault=lambda path, error: health.fault("http", path, error),
    )


def endpoints(server: Server) -> tuple[Endpoint, ...]:
    """All there are: what describes them is one of them."""
    metrics = Metrics(server, [lambda: pipe_metrics(server.pipes.status())])
    trials = test_endpoints.ENDPOINTS if server.config.server.test_endpoints else ()
    every = (*monitor.endpoints(metrics), *admin.ENDPOINTS, *trials)
    return openapi.with_description(every, server.version)
