"""Which segments a policy does not keep: whole segments only, oldest first, never the active one.

A small log would never fill a segment, so a segment also ends when it holds a tenth of what is retained, in time or in
bytes (4 KiB at least). Bytes are looked at as they come, the time by upkeep: a log gains one segment by age per upkeep
at most. A message goes, at the latest, when it is a tenth older than the policy says and upkeep has looked twice.

A limit in bytes holds at upkeep, and nine tenths of it are used: a segment that is larger, because a batch is, stays
if less than that would be left. So the newest messages stay, however large they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from penstock.errors import LogDamaged
from penstock.storage.policy import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Policy
from penstock.storage.segment import Segment

# What is retained is spread over about this many segments.
_PARTS: Final = 10


def expired(segments: Sequence[Segment], policy: Policy, now_us: int) -> int:
    """How many of the oldest segments are too old, or make the log too large."""
    sealed = segments[:-1]
    count = 0
    if policy.retain_ms is not None:
        horizon_us = now_us - policy.retain_ms * 1000
        # The last message of a segment is no younger than the head of the next.
        while count < len(sealed) and begun_at(segments, count + 1) <= horizon_us:
            count += 1
    if policy.retain_bytes is not None:
        size = sum(segment.size for segment in segments[count:])
        least = policy.retain_bytes - part_bytes(policy.retain_bytes)
        while count < len(sealed) and size > policy.retain_bytes and size - segments[count].size >= least:
            size -= segments[count].size
            count += 1
    return count


def begun_at(segments: Sequence[Segment], place: int) -> int:
    """Return when the segment at `place` was begun, or, if nothing in it can be read, a later one."""
    for segment in segments[place:-1]:
        with contextlib.suppress(LogDamaged):
            return segment.begun_at()
    return segments[-1].begun_at()


def segment_span_us(policy: Policy) -> int | None:
    """Return the time that one segment should span; None: any."""
    return None if policy.retain_ms is None else policy.retain_ms * 1000 // _PARTS


def segment_bytes(policy: Policy, store_limit: int | None) -> int:
    """Return the size at which a segment ends. `store_limit`: what the whole store retains, if that is limited."""
    limits = [limit for limit in (policy.retain_bytes, store_limit) if limit is not None]
    return min(policy.segment_bytes, *map(part_bytes, limits), SEGMENT_BYTES_MAX)


def part_bytes(retain_bytes: int) -> int:
    """Return how much of a limit one segment has, unless a batch is larger."""
    return max(retain_bytes // _PARTS, SEGMENT_BYTES_MIN)
