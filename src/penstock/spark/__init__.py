"""Penstock in Spark: the log as a source and a sink, and pipelines made of both. Through the client only.

What is exported here is imported when it is first used: the executors load only what reads and writes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark import pipeline
    from penstock.spark.json_topics import from_json_topic
    from penstock.spark.sessions import register, session

__all__ = ["from_json_topic", "pipeline", "register", "session"]

_HOMES: Final = {
    "from_json_topic": "penstock.spark.json_topics",
    "register": "penstock.spark.sessions",
    "session": "penstock.spark.sessions",
}


def __getattr__(name: str) -> Any:
    if name == "pipeline":
        return importlib.import_module("penstock.spark.pipeline")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "pipeline"})
