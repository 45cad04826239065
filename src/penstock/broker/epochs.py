"""The newest epoch of each producer in a topic: an older instance of the same producer is refused.

A producer that is restarted uses a higher epoch. From its first message on, nothing of the earlier instance is stored.
The new epoch is stored, and all that was published under the old one is decided, before the first message of the new
epoch is appended. So no message of the old epoch is behind it, also after an interruption.

In the state topic:

    epoch/<topic id>/<producer>    the newest epoch
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from penstock.errors import BadRequest, StaleEpoch
from penstock.health import Usage
from penstock.store.meta import Change
from penstock.store.store import Store

# The producer that was idle for the longest time is forgotten first, as in a log.
PRODUCERS_MAX: Final = 10_000
PRODUCER_BYTES_MAX: Final = 256

_KIND: Final = "epoch"


class _Epoch:
    """One epoch of a producer, and the number of publishes in progress."""

    __slots__ = ("_idle", "before", "is_stored", "number", "publishing", "storing")

    def __init__(self, number: int, before: _Epoch | None = None, *, is_stored: bool = False) -> None:
        self.number = number
        # The epoch that it replaced; None if there was none, or none of its publishes can be in progress.
        self.before = before
        self.is_stored = is_stored
        self.storing = asyncio.Lock()
        self.publishing = 0
        self._idle = asyncio.Event()

    def leave(self) -> None:
        self.publishing -= 1
        if not self.publishing:
            self._idle.set()

    async def ended(self) -> None:
        """Wait until no publish is in progress in it and the epochs before it. No new one begins meanwhile."""
        epoch: _Epoch | None = self
        while epoch is not None:
            while epoch.publishing:
                epoch._idle.clear()
                await epoch._idle.wait()
            epoch = epoch.before


class Epochs:
    def __init__(self, store: Store) -> None:
        self._store = store
        # By topic and producer, the one that was idle for the longest time first.
        self._newest: dict[str, _Epoch] = {
            key: _Epoch(number, is_stored=True) for key, number in store.state.items(_KIND)
        }

    def usage(self) -> dict[str, Usage]:
        return {"producer_epochs": Usage(len(self._newest), PRODUCERS_MAX)}

    @asynccontextmanager
    async def publishing(self, topic_id: int, producer: str, number: int) -> AsyncIterator[None]:
        """Publish within this context, as a producer under an epoch. Raises StaleEpoch if there is a newer one."""
        if len(producer.encode()) > PRODUCER_BYTES_MAX:
            raise BadRequest(
                f"a producer ID of {len(producer.encode())} bytes is too long: {PRODUCER_BYTES_MAX} are allowed"
            )
        key = f"{topic_id}/{producer}"
        epoch = self._newest.pop(key, None)
        if epoch is None or epoch.number < number:
            # Epochs without a publish in progress are left out, so the chain stays short.
            epoch = _Epoch(number, epoch if epoch is None or epoch.publishing else epoch.before)
        self._newest[key] = epoch
        if number < epoch.number:
            raise StaleEpoch(
                f"stale_producer_epoch producer={producer} current={epoch.number} got={number}: "
                f"a newer instance of this producer has taken over"
            )
        epoch.publishing += 1
        try:
            if not epoch.is_stored:
                await self._write(key, epoch)
            yield
        finally:
            epoch.leave()

    async def _write(self, key: str, epoch: _Epoch) -> None:
        async with epoch.storing:
            if epoch.is_stored:
                return
            if epoch.before is not None:
                await epoch.before.ended()
            changes = [Change(_KIND, key, epoch.number)]
            for other in list(self._newest)[: max(0, len(self._newest) - PRODUCERS_MAX)]:
                if not self._newest[other].publishing:
                    del self._newest[other]
                    changes.append(Change(_KIND, other, None))
            await self._store.write_state(changes)
            epoch.is_stored, epoch.before = True, None

    def forget_topic(self, topic_id: int) -> list[Change]:
        """Forget the epochs of a deleted topic, and return what to write."""
        gone = [key for key in self._newest if key.startswith(f"{topic_id}/")]
        for key in gone:
            del self._newest[key]
        return [Change(_KIND, key, None) for key in gone]
