"""Knows how far each log once reached, from outside its own files.

- `meta.db` knows where each log ended on the disk, as of the last upkeep or stop, and up to where the state topic was
  applied.
- a group's position is an offset that was given out. Under `flush`, a power cut may have lost its message, but then the
  log has reserved the offset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.log.witness import NOBODY, PartitionId, Witness
from penstock.store.meta import Meta

STATE_PARTITION: Final[PartitionId] = (0, 0)
# The key of a group's position, <group>/<topic ID>/<partition>, and of its additions, with a number.
_POSITION: Final = re.compile(r"position/.*/(\d+)/(\d+)|position\+/.*/(\d+)/(\d+)/\d+", re.DOTALL)


def of_state_topic(meta: Meta | None) -> Witness:
    if meta is None:
        return NOBODY
    ends = [row.end_offset for row in meta.segments() if (row.topic, row.partition) == STATE_PARTITION]
    return Witness(max(meta.applied(), *ends, 0))


def of_topics(meta: Meta | None, state: Iterable[tuple[str, str, Any]]) -> Mapping[PartitionId, Witness]:
    """Return the witnesses of all partitions. `state` has kind, key and value of everything in the state topic."""
    found: dict[PartitionId, Witness] = {}
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
