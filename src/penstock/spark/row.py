"""The columns of the source, and their Spark types.

Spark starts several Python processes for a query, most of which only plan. So what they need imports nothing.
"""

from __future__ import annotations

from typing import Final

COLUMNS: Final = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "key": "binary",
    "value": "binary",
    "subject": "string",
}
HEADERS: Final = {"headers": "map<string,string>"}


def ddl(*, has_headers: bool) -> str:
    """Return the columns of the source as DDL for Spark."""
    columns = COLUMNS | HEADERS if has_headers else COLUMNS
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())
