"""The offsets of a stream as Spark stores them in its log, and the arithmetic of how much a batch reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from penstock.spark.options import TopicPartition

VERSION: Final = 1
# The part of the first end of a query that says where it begins.
BEGIN: Final = "begin"


@dataclass(frozen=True, slots=True)
class Offsets:
    """The end of reading in each partition. The ID distinguishes a topic from an earlier one of the same name.

    {"version": 1, "topics": {"orders": {"id": 7, "offsets": {"0": 23, "1": 5}}}}
    """

    ids: dict[str, int]
    ends: dict[TopicPartition, int]

    def to_json(self) -> dict[str, Any]:
        topics: dict[str, Any] = {name: {"id": number, "offsets": {}} for name, number in sorted(self.ids.items())}
        for place, end in sorted(self.ends.items()):
            topics[place.topic]["offsets"][str(place.partition)] = end
        return {"version": VERSION, "topics": topics}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        version = found.get("version")
        if version != VERSION or not isinstance(found.get("topics"), dict):
            raise ValueError(
                f"unknown version {version!r} of the offsets in the checkpoint, this Penstock reads {VERSION}: "
                "it belongs to another source, or to a newer Penstock"
            )
        ids, ends = {}, {}
        for name, topic in found["topics"].items():
            ids[name] = int(topic["id"])
            for partition, end in topic["offsets"].items():
                ends[TopicPartition(name, int(partition))] = int(end)
        return cls(ids, ends)


class OffsetRange(NamedTuple):
    """Offsets of a partition, excluding the end."""

    place: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def share(available: Mapping[TopicPartition, int], limit: int) -> dict[TopicPartition, int]:
    """Share out `limit` in proportion to the backlogs, with at least one for each partition while it lasts.

    So partitions with different backlogs finish together, and a small one never starves.
    """
    waiting = {place: count for place, count in available.items() if count > 0}
    total = sum(waiting.values())
    if total <= limit:
        return waiting
    shares = dict.fromkeys(sorted(waiting, key=lambda place: (-waiting[place], place))[:limit], 1)
    left, rest = limit - len(shares), total - len(waiting)
    if left:
        for place in shares:
            shares[place] += (waiting[place] - 1) * left // rest
        # The remainder of rounding: less than one for each.
        left = limit - sum(shares.values())
        for place in [place for place in shares if shares[place] < waiting[place]][:left]:
            shares[place] += 1
    return shares


def split(ranges: Sequence[OffsetRange], *, partitions_min: int | None, records_max: int | None) -> list[OffsetRange]:
    """Split ranges into at least `partitions_min` of at most `records_max` offsets."""
    total = sum(each.size for each in ranges)
    found = []
    for each in ranges:
        parts = 1
        if partitions_min is not None and len(ranges) < partitions_min:
            # Rounded up, so that the sum is never smaller.
            parts = -(-each.size * partitions_min // total)
        if records_max is not None:
            parts = max(parts, -(-each.size // records_max))
        found += _cut(each, min(parts, each.size))
    return found


def _cut(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    edges = [whole.start + whole.size * number // parts for number in range(parts + 1)]
    return [OffsetRange(whole.place, start, end) for start, end in pairwise(edges)]
