"""The guard around the code of one session.

This code runs when someone else calls it: the transport, the sweep of the server, the broker during a delivery or a
commit, a task. Each of these calls goes through the guard. An unexpected exception is counted as a fault and closes the
connection with "internal error", and the caller continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec

from penstock.doors.dialect import Ending

if TYPE_CHECKING:
    from penstock.doors.session import Session

P = ParamSpec("P")


class FaultGuard:
    __slots__ = ("_is_faulty", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_faulty = False

    def __call__(self, callback: Callable[P, object]) -> Callable[P, None]:
        """Return a callback for the broker that closes the connection if it raises."""
        return partial(self.call, callback)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - this is the guard
            self._fail(error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine of the connection as a task."""
        task = self._session.shared.tasks.spawn(self._supervise(coroutine))
        # If it is cancelled before it begins, nobody has awaited the coroutine.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    async def _supervise(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001 - this is the guard
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close the connection because of an unexpected exception in it."""
        session = self._session
        session.broker.store.health.fault("session", f"connection {session.id} from {session.address}", error)
        if not self._is_faulty:
            self._is_faulty = True
            self.call(session.dialect.disconnect, Ending.FAULT)
        session.peer.close()
