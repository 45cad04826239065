"""Await an outcome in an event loop."""

from __future__ import annotations

import asyncio

from penstock.errors import PenstockError
from penstock.outcome import Outcome


async def settled(outcome: Outcome) -> None:
    """Wait until it is settled, and raise its error if it failed."""
    if not outcome.is_settled:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_error: PenstockError | None) -> None:
            if not future.done():  # the waiter may have been cancelled
                future.set_result(None)

        outcome.then(wake)
        await future
    outcome.check()
