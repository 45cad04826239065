"""Clients of a topic that is refreshed, at a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Final

from tests.support.process import PATIENCE_S
from tests.support.server import Serve

VALUES: Final = [b"0", b"1", b"2", b"3"]


_NUMBERS: Final = itertools.count()


def new_topic() -> str:
    return f"prices-{next(_NUMBERS)}"


def address_of(server: Serve) -> str:
    return f"127.0.0.1:{server.port}"


def wait_for(is_so: Callable[[], object], what: object = "") -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.01)
