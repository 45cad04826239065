"""Decides which segments a policy does not keep: whole segments only, oldest first, never the active one.

A small log would never fill a segment, so a segment also ends when it holds a tenth of the retention, in time or in
bytes (at least 4 KiB). Bytes are checked by each write, the time by upkeep, so a log gains at most one segment by age
per upkeep. A message is dropped at the latest when it is a tenth older than the policy says and upkeep has run twice.

A limit in bytes holds at upkeep, and at least nine tenths of it are used: a segment stays if less would be left without
it. So the newest messages stay, however large they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from penstock.errors import LogDamaged
from penstock.log.policy import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Policy
from penstock.log.segment import Segment

# The retained messages are spread over about this many segments.
_PARTS: Final = 10


def expired(segments: Sequence[Segment], policy: Policy, now_us: int) -> int:
    """Return how many of the oldest segments are too old, or make the log too large."""
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
    """Return when the segment at `place` was begun, or a later one if nothing in it can be read."""
    for segment in segments[place:-1]:
        with contextlib.suppress(LogDamaged):
            return segment.begun_at()
    return segments[-1].begun_at()


def segment_span_us(policy: Policy) -> int | None:
    """Return the time that one segment should span; None: any."""
    return None if policy.retain_ms is None else policy.retain_ms * 1000 // _PARTS


def segment_bytes(policy: Policy, store_limit: int | None) -> int:
    """Return the size at which a segment ends. `store_limit` is the limit of the whole store, if it has one."""
    limits = [limit for limit in (policy.retain_bytes, store_limit) if limit is not None]
    return min(policy.segment_bytes, *map(part_bytes, limits), SEGMENT_BYTES_MAX)


def part_bytes(retain_bytes: int) -> int:
    """Return the part of a limit that one segment may have, unless a batch is larger."""
    return max(retain_bytes // _PARTS, SEGMENT_BYTES_MIN)
