"""`penstock config`: show each setting, its value and its source."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.cli import output
from penstock.errors import BadConfig
from penstock.server.config import Loaded, load


def run(path: Path | None, *, as_json: bool) -> bool:
    """Print the settings; return whether they are valid."""
    try:
        loaded = load(path=path, environ=os.environ, flags={})
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return False
    if as_json:
        output.print_json(loaded.document())
    else:
        output.console().print(_table(loaded))
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return True


def _table(loaded: Loaded) -> Table:
    table = output.plain_table()
    for name in ("key", "value", "from"):
        table.add_column(name, overflow="fold")
    for key, value in loaded.shown().items():
        origin = loaded.origins[key]
        # As Text: a value must not be read as markup. Defaults are dimmed.
        table.add_row(Text(key), Text(_as_text(value)), Text(origin), style="dim" if origin == "default" else None)
    return table


def _as_text(value: Any) -> str:
    """Return the value as it is written in a configuration file."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
