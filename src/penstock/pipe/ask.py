"""One question over HTTP, and its answer in JSON: bounded in time and in size, whoever answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Final

import httpx

from penstock.errors import BadTopology, ConnectionLost, NoBroker, TimedOut, from_wire

ANSWER_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 1 << 20
_LINE_CHARACTERS: Final = 300
# As they are: a packed answer is small until it is opened.
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}


def http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(headers=_HEADERS, timeout=ANSWER_S)


async def ask(
    client: httpx.AsyncClient,
    url: str,
    *,
    params: Mapping[str, str] | None = None,
    bytes_max: int = ANSWER_BYTES_MAX,
    answer_s: float = ANSWER_S,
) -> object:
    """What is answered with 200. NoBroker, ConnectionLost, TimedOut or BadTopology if there is no such answer; if the
    other side says what is wrong as Penstock does, that error."""
    try:
        # Each read has its time with httpx, and who sends a byte now and then is never late.
        async with asyncio.timeout(answer_s), client.stream("GET", url, params=params) as response:
            data = await _body(response, url, bytes_max)
    except (TimeoutError, httpx.TimeoutException):
        raise TimedOut(f"{url} has not answered within {answer_s:g} s") from None
    except (httpx.ConnectError, httpx.InvalidURL) as error:
        raise NoBroker(f"nobody answers at {url}: {error}") from None
    except AttributeError:
        # What anyio raises under uvloop, if a connection ends in the moment in which it was made.
        raise ConnectionLost(f"the connection to {url} was lost at once") from None
    except httpx.HTTPError as error:
        # Its text tells how many bytes came, which is another number each time.
        raise ConnectionLost(f"{url} has not answered to the end: {type(error).__name__}") from None
    document = _document(data)
    if response.status_code == httpx.codes.OK:
        if document is None:
            raise BadTopology(f"{url} answers with something that is no JSON")
        return document
    if isinstance(document, dict) and isinstance(document.get("code"), str) and isinstance(document.get("text"), str):
        raise from_wire(_line(document["code"]), _line(document["text"]))
    raise BadTopology(f"{url} answers with status {response.status_code}")


async def _body(response: httpx.Response, url: str, bytes_max: int) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > bytes_max:
            raise BadTopology(f"{url} answers with more than {bytes_max} bytes")
    return bytes(data)


def _line(text: str) -> str:
    """Of what a stranger says, as much as fits into a line of a log."""
    return text[:_LINE_CHARACTERS] if text.isprintable() else repr(text[:_LINE_CHARACTERS])


def _document(data: bytes) -> object:
    """None if it is no JSON; JSON's own null is of no use either."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
