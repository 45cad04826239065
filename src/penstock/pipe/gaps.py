"""Gaps: offsets that are missing from a copy, because the parent dropped them before they were fetched.

A gap is written to the state topic before any later message is stored, so it is never silent: the status shows it, and
a child of this broker gets the same error for these offsets as this broker did. If a new copy starts after its
origin's first message, that is recorded in the same way, but nothing is lost.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any, Final

from penstock.clock import Clock
from penstock.store.meta import Change
from penstock.store.store import Store

logger = logging.getLogger(__name__)

_KIND: Final = "pipe gap"

Place = tuple[int, int]  # the ID of a topic, and a partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Offsets from `first` up to but not including `last`."""

    direction: str
    first: int
    last: int
    # Whether the copy continued after it; otherwise it waits for a parent that has the messages.
    is_passed: bool
    # Whether the copy was empty: then nothing is lost.
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
        """Return `offset`, or the end of the gap if it is in a gap that the copy skipped."""
        for gap in self._passed(place):
            if gap.first <= offset < gap.last:
                offset = gap.last
        return offset

    def next(self, place: Place, offset: int) -> int | None:
        """Return the start of the next gap at or after `offset`."""
        return next((gap.first for gap in self._passed(place) if gap.first >= offset), None)

    def _passed(self, place: Place) -> list[Gap]:
        gaps = [gap for gap in self._gaps.get(place, {}).values() if gap.is_passed and gap.direction == "down"]
        return sorted(gaps, key=lambda gap: gap.first)

    def count(self, topic_id: int) -> int:
        """Return the number of gaps with lost messages of a topic."""
        gaps = [gap for (number, _), found in self._gaps.items() if number == topic_id for gap in found.values()]
        return sum(not gap.is_begin for gap in gaps)

    def list(self, topic_id: int) -> list[dict[str, Any]]:
        """Return all gaps of a topic as JSON objects."""
        return [
            {"partition": number, **asdict(gap)}
            for (topic, number), found in sorted(self._gaps.items())
            if topic == topic_id
            for gap in found.values()
        ]

    async def record(
        self, place: Place, first: int, last: int, *, direction: str, passes: bool, begins: bool, parent: str
    ) -> None:
        """Record durably that offsets from `first` up to but not including `last` are missing."""
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
            action = "skipped" if passes else "waiting for them"
            logger.error(
                "topic %d, partition %d: offsets %d to %d were dropped before they were copied: %s",
                *place,
                first,
                last,
                action,
            )

    async def heal(self, place: Place, first: int) -> None:
        """Delete a gap that the copy waited for, because its messages have arrived."""
        known = self._gaps.get(place, {}).get(first)
        if known is not None and not known.is_passed:
            await self._write(place, first, None)
            del self._gaps[place][first]

    async def forget_others(self, topics: set[int]) -> None:
        """Delete the gaps of all other topics, which were deleted."""
        for place in [place for place in self._gaps if place[0] not in topics]:
            for first in list(self._gaps[place]):
                await self._write(place, first, None)
            del self._gaps[place]

    async def _write(self, place: Place, first: int, value: dict[str, Any] | None) -> None:
        await self._store.write_state([Change(_KIND, f"{place[0]}/{place[1]}/{first}", value)])
