"""The figures of `/varz`, of STATS, and of the call `statistics`: under nats-server's names where it has the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from penstock.address import join
from penstock.doors.shared import Node, Shared
from penstock.health import Usage
from penstock.server.memory import resident_bytes
from penstock.server.stalls import Stalls
from penstock.times import elapsed, iso


class Statistics:
    def __init__(
        self, shared: Shared, connections_max: int, stalls: Stalls, usage: Callable[[], dict[str, Usage]]
    ) -> None:
        self._shared = shared
        self._connections_max = connections_max
        self._stalls = stalls
        self._usage = usage
        self._start_us = shared.broker.clock.now_us()

    def __call__(self) -> dict[str, Any]:
        return {
            **self._about_server(),
            **self._about_broker(),
            **self._shared.sessions.traffic._asdict(),
            "since_start": asdict(self._shared.counters),
            "limits": {name: usage._asdict() for name, usage in self._usage().items()},
            "faults": dict(self._shared.broker.health.faults),
            "loop_stalls": self._stalls.figures(),
        }

    def _about_server(self) -> dict[str, Any]:
        shared, node, now_us = self._shared, self._shared.node, self._shared.broker.clock.now_us()
        http_port = node.ports.get("http", 0)
        return {
            "server_id": node.id,
            "server_name": node.node_id,
            "version": node.version,
            "host": node.hosts[0],
            "port": node.ports.get("text", 0),
            "addresses": addresses(node),
            "quiet_port": node.ports.get("quiet", 0),
            "http_port": http_port,
            "websocket": {"host": node.hosts[0], "port": http_port, "no_tls": node.tls is None, "compression": True},
            "max_connections": self._connections_max,
            "max_payload": shared.settings.payload_bytes_max,
            "auth_required": shared.gate.needs_auth,
            **({} if node.tls is None else node.tls.figures()),
            "start": iso(self._start_us),
            "now": iso(now_us),
            "uptime": elapsed(now_us - self._start_us),
            "mem": resident_bytes(),
            "cores": os.cpu_count() or 1,
            "connections": len(shared.sessions),
            "total_connections": shared.counters.connections,
            "subscriptions": sum(len(session.subscriptions) for session in shared.sessions),
        }

    def _about_broker(self) -> dict[str, Any]:
        broker = self._shared.broker
        dedups = [topic.dedup for topic in broker.topics if topic.dedup is not None]
        groups = broker.groups
        return {
            "slow_consumers": broker.subscriptions.slow_count,
            "dropped": broker.figures.dropped,
            "expired": broker.figures.expired,
            "topics": len(broker.topics),
            "groups": len(groups),
            "delayed": len(broker.delays) if broker.delays is not None else 0,
            "store_bytes": broker.store.maintenance.store_bytes,
            "unflushed_bytes": broker.store.rounds.unflushed.used,
            "ids_checked": sum(dedup.checked for dedup in dedups),
            "ids_known": sum(len(dedup) for dedup in dedups),
            "duplicates": sum(dedup.found for dedup in dedups),
            "redelivered": sum(group.state.redelivered for group in groups),
            "dead_lettered": sum(group.state.dead_lettered for group in groups),
            "lost_to_retention": sum(group.lost for group in groups),
        }


def addresses(node: Node) -> dict[str, list[str]]:
    """Return where each port can be reached."""
    return {name: [join(host, port) for host in node.hosts] for name, port in node.ports.items()}
