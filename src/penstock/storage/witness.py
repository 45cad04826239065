"""Who else than its own files tells how far a log once reached.

A file that something made shorter looks like one that was never longer. So others are asked:

- `meta.db` knows where each log ended on the disk: as of the last upkeep, or of the stop if there was one. Of the state
  topic it also knows up to where it was applied.
- a group's position is an offset that was given out before. It may have gone with the power, under `flush`, but then
  the log has reserved it.

Each may be behind, and none is ever ahead: a witness can only raise the end of a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from penstock.storage.meta import Meta

Place = tuple[int, int]  # the id of a topic, and a partition
STATE_PLACE: Final[Place] = (0, 0)
# The key of a group's position, <group>/<topic id>/<partition>, and of what is added to it, with a number.
_POSITION: Final = re.compile(r"position/.*/(\d+)/(\d+)|position\+/.*/(\d+)/(\d+)/\d+", re.DOTALL)


class Witness(NamedTuple):
    """A log that has no batch up to `durable`, or has not even reserved what is below `given`, was cut short."""

    durable: int = 0
    given: int = 0

    @property
    def end(self) -> int:
        return max(self)


NOBODY: Final = Witness()


def of_state_topic(meta: Meta | None) -> Witness:
    if meta is None:
        return NOBODY
    ends = [row.end_offset for row in meta.segments() if (row.topic, row.partition) == STATE_PLACE]
    return Witness(max(meta.applied(), *ends, 0))


def of_topics(meta: Meta | None, state: Iterable[tuple[str, str, Any]]) -> Mapping[Place, Witness]:
    """All witnesses of all partitions; `state` is what the state topic has: kind, key and value."""
    found: dict[Place, Witness] = {}
    for row in meta.segments() if meta is not None else ():
        place = (row.topic, row.partition)
        durable, given = found.get(place, NOBODY)
        found[place] = Witness(max(durable, row.end_offset), given)
    for kind, key, value in state:
        match = _POSITION.fullmatch(f"{kind}/{key}")
        if match is not None and isinstance(value, dict):
            topic_id, partition = match[1] or match[3], match[2] or match[4]
            place = (int(topic_id), int(partition))
            durable, given = found.get(place, NOBODY)
            found[place] = Witness(durable, max(given, value.get("next", 0)))
    return found
