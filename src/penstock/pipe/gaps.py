"""Where messages are missing from a copy, because the parent had dropped them before they were fetched.

A gap is in the state topic before anything behind it is stored, so it is never silent: it is shown in the status, and
a child of this broker that wants what is in it is told the same as we were. Where a new copy begins behind its origin's
beginning, that is noted in the same way; nothing was lost by it.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock.clock import Clock
from penstock.storage.meta import Change
from penstock.storage.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "pipe gap"

Place = tuple[int, int]  # the id of a topic, and a partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Offsets from `first` to before `last`."""

    direction: str
    first: int
    last: int
    # Whether the copy went on behind it; if not it waits for a parent that has them.
    is_passed: bool
    # Whether the copy had nothing yet: then it is no loss.
    is_begin: bool
    parent: str
    time_us: int


class Gaps:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._gaps: dict[Place, dict[int, Gap]] = {}
        for key, value in store.state.items(_KIND):
            topic_id, partition, first = map(int, key.split("/"))
            self._gaps.setdefault((topic_id, partition), {})[first] = Gap(**value)

    def behind(self, place: Place, offset: int) -> int:
        """`offset`, or where the copy goes on if that is in a gap that it passed."""
        for gap in self._passed(place):
            if gap.first <= offset < gap.last:
                offset = gap.last
        return offset

    def next(self, place: Place, offset: int) -> int | None:
        """Where the next gap begins, at `offset` or behind it."""
        return next((gap.first for gap in self._passed(place) if gap.first >= offset), None)

    def _passed(self, place: Place) -> list[Gap]:
        gaps = [gap for gap in self._gaps.get(place, {}).values() if gap.is_passed and gap.direction == "down"]
        return sorted(gaps, key=lambda gap: gap.first)

    def count(self, topic_id: int) -> int:
        """How many times messages of a topic were missed."""
        gaps = [gap for (number, _), found in self._gaps.items() if number == topic_id for gap in found.values()]
        return sum(not gap.is_begin for gap in gaps)

    def list(self, topic_id: int) -> list[dict[str, Any]]:
        """All that was missed of a topic, as people may see it."""
        return [
            {"partition": number, **asdict(gap)}
            for (topic, number), found in sorted(self._gaps.items())
            if topic == topic_id
            for gap in found.values()
        ]

    async def record(
        self, place: Place, first: int, last: int, *, direction: str, passes: bool, begins: bool, parent: str
    ) -> None:
        """Offsets from `first` to before `last` are not to be had; it counts when this returns."""
        known = self._gaps.get(place, {}).get(first)
        if known is not None and (known.last, known.is_passed) == (last, passes):
            return
        gap = Gap(
            direction=direction,
            first=first,
            last=last,
            is_passed=passes,
            is_begin=begins,
            parent=parent,
            time_us=self._clock.now_us(),
        )
        await self._write(place, first, asdict(gap))
        self._gaps.setdefault(place, {})[first] = gap
        if not begins:
            then = "passed over" if passes else "waited for"
            logger.error(
                "topic %d, partition %d: offsets %d to %d were dropped before they were fetched, and are %s",
                *place,
                first,
                last,
                then,
            )

    async def heal(self, place: Place, first: int) -> None:
        """What was waited for has come after all."""
        known = self._gaps.get(place, {}).get(first)
        if known is not None and not known.is_passed:
            await self._write(place, first, None)
            del self._gaps[place][first]

    async def forget_others(self, topics: set[int]) -> None:
        """Of topics that are deleted nothing is remembered."""
        for place in [place for place in self._gaps if place[0] not in topics]:
            for first in list(self._gaps[place]):
                await self._write(place, first, None)
            del self._gaps[place]

    async def _write(self, place: Place, first: int, value: dict[str, Any] | None) -> None:
        await self._store.write_state([Change(_KIND, f"{place[0]}/{place[1]}/{first}", value)])
