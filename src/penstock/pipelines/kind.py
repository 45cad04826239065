"""The names of the kinds of pipelines, for whoever needs nothing else of them."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "archive",
    "transform",
    "aggregate",
    "deduplicate",
    "replay",
    "dead_letters",
    "join",
    "sql",
    "enrich",
    "sessionize",
    "upsert",
    "python",
    "bridge",
]
