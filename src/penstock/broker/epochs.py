"""The newest epoch of each producer that has one, by topic: an older instance of the same producer is refused.

A producer that was restarted takes a higher epoch, and from its first message on nothing more is stored of the one
before it. The new epoch is in the state topic, and whatever the old one had under way is decided, before the first
message of the new epoch is appended. So no message of the old one lies behind it, whatever is interrupted.

In the state topic:

    epoch/<topic id>/<producer>    the newest epoch
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

from penstock.errors import BadRequest, StaleEpoch
from penstock.health import Usage
from penstock.storage.meta import Change
from penstock.storage.store import Store

# The producer that has been silent for longest is forgotten first, as a log forgets its producers.
PRODUCERS_MAX: Final = 10_000
PRODUCER_BYTES_MAX: Final = 256

_KIND: Final = "epoch"


class Host(Protocol):
    store: Store


class _Epoch:
    """One epoch of a producer, and how much is being published under it."""

    __slots__ = ("_idle", "before", "is_stored", "number", "publishing", "storing")

    def __init__(self, number: int, before: _Epoch | None = None, *, is_stored: bool = False) -> None:
        self.number = number
        # The one that it has replaced; None if there was none, or once nothing of that can be under way.
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
        """Wait until nothing is under way under it, nor under those before it. Nothing new begins meanwhile."""
        epoch: _Epoch | None = self
        while epoch is not None:
            while epoch.publishing:
                epoch._idle.clear()
                await epoch._idle.wait()
            epoch = epoch.before


class Epochs:
    def __init__(self, host: Host) -> None:
        self._host = host
        # By topic and producer, the one that has been silent for longest first.
        self._newest: dict[str, _Epoch] = {
            key: _Epoch(number, is_stored=True) for key, number in host.store.state.items(_KIND)
        }

    def usage(self) -> dict[str, Usage]:
        return {"producer_epochs": Usage(len(self._newest), PRODUCERS_MAX)}

    @asynccontextmanager
    async def publishing(self, topic_id: int, producer: str, number: int) -> AsyncIterator[None]:
        """Publish within this, as a producer under an epoch; raises StaleEpoch if there is a newer one."""
        if len(producer.encode()) > PRODUCER_BYTES_MAX:
            raise BadRequest(f"a producer id of {len(producer.encode())} bytes: {PRODUCER_BYTES_MAX} are allowed")
        key = f"{topic_id}/{producer}"
        epoch = self._newest.pop(key, None)
        if epoch is None or epoch.number < number:
            # Nobody waits for an epoch under which nothing is published, so the chain stays short.
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
                await self._store(key, epoch)
            yield
        finally:
            epoch.leave()

    async def _store(self, key: str, epoch: _Epoch) -> None:
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
            await self._host.store.write_state(changes)
            epoch.is_stored, epoch.before = True, None

    def forget_topic(self, topic_id: int) -> list[Change]:
        """Return what to write when a topic is gone."""
        gone = [key for key in self._newest if key.startswith(f"{topic_id}/")]
        for key in gone:
            del self._newest[key]
        return [Change(_KIND, key, None) for key in gone]
