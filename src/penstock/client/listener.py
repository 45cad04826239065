"""What listens at an address where no broker is, by what it says."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

# How Redis answers what it does not understand, or a client that it does not let in.
_REDIS: Final = (b"-ERR ", b"-NOAUTH ", b"-DENIED ", b"-NOPERM ", b"-WRONGPASS ")


class Listener(Enum):
    BROKER = auto()  # the text port of a Penstock broker
    NATS = auto()
    HTTP = auto()
    REDIS = auto()
    OTHER = auto()


def recognise(said: bytes) -> Listener:
    """Return what says this first, or in answer to something that it does not understand."""
    if said.startswith(b"INFO {"):
        return Listener.BROKER if b"penstock" in said else Listener.NATS
    if said.startswith(b"HTTP/"):
        return Listener.HTTP
    if said.startswith(_REDIS):
        return Listener.REDIS
    return Listener.OTHER
