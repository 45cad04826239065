"""Logging of long-running commands: to stderr, one line per record, in one format for the whole process.

Only commands configure logging. The library (`Client`, `Broker`, `App`) logs to loggers below `penstock`; the program
that uses it configures them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

FORMATS: Final = ("text", "json")
# The format for commands without a configuration file; `penstock serve` also has the setting log.format.
VARIABLE: Final = "PENSTOCK_LOG_FORMAT"

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """Time, level and message. Control characters are escaped, so clients cannot forge lines; a traceback has lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (ISO 8601, UTC), level, logger, message, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(level: str = "info", form: str | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
    """Configure the logging of this process, unless it is configured already. `form`: one of FORMATS; None: from the
    environment, or text."""
    chosen = environ.get(VARIABLE, "text").lower() if form is None else form
    if chosen not in FORMATS:
        sys.exit(f"error: invalid {VARIABLE} {chosen!r}: it must be {' or '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if chosen == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # httpx would log a line for each poll of a registry or a parent.
    logging.getLogger("httpx").setLevel(logging.WARNING)
