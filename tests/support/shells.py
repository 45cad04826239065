"""Both clients behind one face, so that a test is written once: AsyncClient's methods are awaited in another thread."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, cast

from penstock.client.aio import AsyncClient
from penstock.client.producer import AsyncProducer
from penstock.client.subscription import AsyncSubscription
from penstock.client.sync import Client
from penstock.client.transaction import AsyncStage, AsyncTransaction
from tests.support.proxy import LoopThread

SHELLS: Final = ("threads", "asyncio")

_OBJECTS: Final = (AsyncSubscription, AsyncProducer, AsyncStage, AsyncTransaction)


class Awaited:
    """An object of the asyncio client, used from a thread that waits for what it does."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*positional: Any, **named: Any) -> Any:
            result = self._thread.run(_call(found, positional, named))
            if isinstance(result, _OBJECTS) or inspect.isasyncgen(result):
                return Awaited(result, self._thread)
            return result

        return call

    def __enter__(self) -> Self:
        self._thread.run(self._inner.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.run(self._inner.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        end = object()
        found = self._thread.run(_next(self._inner, end))
        if found is end:
            raise StopIteration
        return found


async def _call(function: Any, positional: Any, named: Any) -> Any:
    result = function(*positional, **named)
    return await result if inspect.iscoroutine(result) else result


async def _next(inner: Any, end: object) -> Any:
    return await anext(aiter(inner), end)


class Shell:
    """Makes clients of one kind, and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._thread: LoopThread | None = None
        self._clients: list[Any] = []

    def client(self, *servers: Any, **options: Any) -> Client:
        """What is typed as a Client is one, or behaves as one."""
        if self.kind == "threads":
            self._clients.append(Client(*servers, **options))
        else:
            self._thread = self._thread or LoopThread()
            self._clients.append(Awaited(AsyncClient(*servers, **options), self._thread))
        return cast(Client, self._clients[-1])

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()
        if self._thread is not None:
            self._thread.close()
            self._thread = None


@contextmanager
def shell_of(kind: str) -> Iterator[Shell]:
    shell = Shell(kind)
    try:
        yield shell
    finally:
        shell.close()
