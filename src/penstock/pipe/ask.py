"""Request a JSON document over HTTP, with limits on time and size."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Final

import httpx

from penstock.errors import BadTopology, ConnectionLost, NoBroker, TimedOut, from_wire
from penstock.tls.dial import explain
from penstock.tls.options import TlsOptions

ANSWER_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 1 << 20
_LINE_CHARACTERS: Final = 300
# Uncompressed: a compressed reply could exceed the limit when it is opened.
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}


def http_client(url: str, tls: TlsOptions | None = None) -> httpx.AsyncClient:
    """Return a client for the server at a URL, with the TLS options of the environment if none are given."""
    verify = context_for(url, TlsOptions.from_environment() if tls is None else tls)
    return httpx.AsyncClient(headers=_HEADERS, timeout=ANSWER_S, verify=verify)


def context_for(url: str, tls: TlsOptions) -> ssl.SSLContext | bool:
    """Return what verifies the server at a URL. Without https it is not used."""
    return tls.context() if url.lower().startswith("https:") else False


def explained(url: str, error: Exception) -> str:
    """Return why a server cannot be reached, and what to do if TLS is the reason."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return explain(url, cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


async def ask(
    client: httpx.AsyncClient,
    url: str,
    *,
    params: Mapping[str, str] | None = None,
    bytes_max: int = ANSWER_BYTES_MAX,
    answer_s: float = ANSWER_S,
) -> object:
    """Return the document of a 200 reply. Raise NoBroker, ConnectionLost, TimedOut or BadTopology without one, or the
    error of a reply in Penstock's format."""
    try:
        # httpx limits the time of each read, so a server that sends single bytes would never time out.
        async with asyncio.timeout(answer_s), client.stream("GET", url, params=params) as response:
            data = await _body(response, url, bytes_max)
    except (TimeoutError, httpx.TimeoutException):
        raise TimedOut(f"{url} did not answer within {answer_s:g} s") from None
    except (httpx.ConnectError, httpx.InvalidURL) as error:
        raise NoBroker(f"no answer from {url}: {explained(url, error)}") from None
    except ssl.SSLError as error:
        # With TLS 1.3 a server refuses a client's certificate only after the handshake.
        raise NoBroker(explain(url, error)) from None
    except AttributeError:
        # anyio raises this under uvloop if a connection ends right after it was opened.
        raise ConnectionLost(f"the connection to {url} was lost right after it was opened") from None
    except httpx.HTTPError as error:
        # The text of the error has a number of bytes, which differs each time: it would be logged each time.
        raise ConnectionLost(f"the reply of {url} is incomplete: {type(error).__name__}") from None
    document = _document(data)
    if response.status_code == httpx.codes.OK:
        if document is None:
            raise BadTopology(f"{url} replied with invalid JSON")
        return document
    if isinstance(document, dict) and isinstance(document.get("code"), str) and isinstance(document.get("text"), str):
        raise from_wire(_line(document["code"]), _line(document["text"]))
    raise BadTopology(f"{url} replied with status {response.status_code}")


async def _body(response: httpx.Response, url: str, bytes_max: int) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > bytes_max:
            raise BadTopology(f"{url} replied with more than {bytes_max} bytes")
    return bytes(data)


def _line(text: str) -> str:
    """Shorten and escape foreign text for a line of a log."""
    return text[:_LINE_CHARACTERS] if text.isprintable() else repr(text[:_LINE_CHARACTERS])


def _document(data: bytes) -> object:
    """Return the parsed document; None if it is not JSON, or null."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
