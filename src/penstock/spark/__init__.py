"""Penstock in Spark: the log as a source and a sink, and a session that finds them. It reaches the broker as a client.

Exports are imported on first use: executors load only what reads and writes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.json_topics import from_json_topic
    from penstock.spark.sessions import register, session

__all__ = ["from_json_topic", "register", "session"]

_MODULES: Final = {
    "from_json_topic": "penstock.spark.json_topics",
    "register": "penstock.spark.sessions",
    "session": "penstock.spark.sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
