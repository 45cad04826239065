"""Each broker has an audit trail of its own: that of its parent does not come down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock import Client
from tests.support import web
from tests.support.pipes import broker
from tests.support.server import Serve
from tests.support.trees import eventually, healthy, reason_of

_TOKEN: dict[str, Any] = {"auth_token": "t0ken", "auth_audit": True}


def _origins(server: Serve) -> dict[str, str]:
    """Return where each topic of a broker comes from."""
    topics = web.get(server, "/pipe/topics", Authorization="Bearer t0ken").json["topics"]
    return {topic["name"]: topic["origin"] for topic in topics}


def test_an_audit_trail_stays_where_it_is(tmp_path: Path) -> None:
    with broker(tmp_path, "root", **_TOKEN) as root:
        with Client(f"127.0.0.1:{root.port}", token="t0ken") as client:
            client.create_topic("prices")
        eventually("the trail has begun", lambda: "$audit" in _origins(root))
        theirs = _origins(root)
        with broker(tmp_path, "shop", root, pipe_token="t0ken", **_TOKEN) as shop:
            eventually("topics come down", lambda: _origins(shop).get("prices") == theirs["prices"])
            healthy(shop)
            assert _origins(shop).get("$audit") != theirs["$audit"]
            shop.stop()
            shop.restart(pipe_topics="$audit")
            reason_of(shop, "a topic cannot be named '$audit'")
