"""The guard around the code of one session.

This code runs when someone else calls it: the transport, the sweep of the server, the broker during a delivery or a
commit, a task. Each of these calls goes through the guard. An unexpected exception is counted as a fault and closes the
connection with "internal error", and the caller continues.

When a connection has ended, and nothing runs for it any more, the guard is closed: calls that come later, such as the
commit of what its client had published, do nothing.
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
    __slots__ = ("_is_faulty", "_session", "_tasks")

    def __init__(self, session: Session) -> None:
        # None when it is closed.
        self._session: Session | None = session
        self._is_faulty = False
        self._tasks = 0

    @property
    def is_idle(self) -> bool:
        """Whether no task of the connection runs."""
        return not self._tasks

    def close(self) -> None:
        self._session = None

    def __call__(self, callback: Callable[P, object]) -> Callable[P, None]:
        """Return a callback for the broker that closes the connection if it raises."""
        return partial(self.call, callback)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._session is None:
            return None
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - this is the guard
            self._fail(error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine of the connection as a task."""
        assert self._session is not None, "the connection has not ended"
        self._tasks += 1
        task = self._session.shared.tasks.spawn(self._supervise(coroutine))
        # If it is cancelled before it begins, nobody has awaited the coroutine.
        task.add_done_callback(lambda _: self._end_task(coroutine))
        return task

    def _end_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        coroutine.close()
        self._tasks -= 1
        if self._session is not None:
            self._session.dissolve_if_done()

    async def _supervise(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001 - this is the guard
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close the connection because of an unexpected exception in it."""
        session = self._session
        assert session is not None, "it is not closed while something runs"
        session.broker.store.health.fault("session", f"connection {session.id} from {session.address}", error)
        if not self._is_faulty:
            self._is_faulty = True
            self.call(session.dialect.disconnect, Ending.FAULT)
        session.peer.close()
