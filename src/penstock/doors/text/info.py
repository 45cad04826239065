"""The fields of INFO, which the server sends to NATS and Flux clients."""

from __future__ import annotations

import platform
from typing import Any

from penstock.doors.session import WEBSOCKET, Session


def fields(session: Session) -> dict[str, Any]:
    """Return the fields of INFO. As in nats-server, those that are not configured are absent: `nonce`, `cluster`,
    `connect_urls`, `domain`."""
    shared = session.shared
    node, needs_auth, tls = shared.node, shared.gate.needs_auth, shared.node.tls
    return {
        "server_id": node.id,
        "server_name": node.node_id,
        "version": f"2.10.0-penstock-{node.version}",
        "proto": 1,
        # Clients read these two as text.
        "git_commit": "",
        "go": f"python{platform.python_version()}",
        "host": node.hosts[0],
        "port": node.ports.get("http" if session.type == WEBSOCKET else "text", 0),
        "headers": True,
        "max_payload": shared.settings.payload_bytes_max,
        "client_id": session.id,
        "client_ip": session.address,
        "auth_required": needs_auth,
        "tls_required": tls is not None and tls.required,
        "tls_available": tls is not None and not tls.required,
        "tls_verify": tls is not None and tls.verifies,
        "jetstream": False,
        # The level of JetStream's API.
        "api_lvl": 0,
        # As in Flux: a cluster of one.
        "cluster_id": "",
        "node_id": node.node_id,
        "leader": node.node_id,
        "is_leader": True,
        "raft_stats": {"state": "alone"},
        **({"nonce": session.nonce} if session.nonce else {}),
        **({"ldm": True} if shared.sessions.is_leaving else {}),
    }
