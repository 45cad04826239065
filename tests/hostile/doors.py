"""All doors, each with its table of attacks."""

from __future__ import annotations

from typing import Final

from tests.hostile.frames import BINARY, PROVIDER
from tests.hostile.http import HTTP
from tests.hostile.prefixed import CURSUS, QB
from tests.hostile.text import FLUX, NATS
from tests.hostile.websocket import WEBSOCKET

DOORS: Final = (NATS, FLUX, BINARY, PROVIDER, QB, CURSUS, HTTP, WEBSOCKET)
