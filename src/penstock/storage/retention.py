"""Which segments a policy does not keep: whole segments only, oldest first, never the active one.

A small log would never fill a segment, so a log also begins a new one when its active segment holds a tenth of what is
retained, in time or in bytes (4 KiB at least). Upkeep looks, so a log gains one such segment per upkeep at most. A
message goes, at the latest, when it is a tenth older than the policy says and upkeep has looked twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.storage.policy import SEGMENT_BYTES_MIN, Policy
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
        while count < len(sealed) and segments[count + 1].begun_at() <= horizon_us:
            count += 1
    if policy.retain_bytes is not None:
        size = sum(segment.size for segment in segments[count:])
        while count < len(sealed) and size > policy.retain_bytes:
            size -= segments[count].size
            count += 1
    return count


def fills_part(policy: Policy, store_limit: int | None, age_us: int, size: int) -> bool:
    """Return whether a segment whose oldest message is so old, and that is so large, is a part of its own; of what the
    whole store retains (`store_limit` bytes), too."""
    span_us, bytes_max = part_limits(policy)
    limits = [limit for limit in (bytes_max, _part_bytes(store_limit)) if limit is not None]
    return (span_us is not None and age_us >= span_us) or any(size >= limit for limit in limits)


def part_limits(policy: Policy) -> tuple[int | None, int | None]:
    """Return the time and the bytes that one segment should span; None: any."""
    span_us = None if policy.retain_ms is None else policy.retain_ms * 1000 // _PARTS
    return span_us, _part_bytes(policy.retain_bytes)


def _part_bytes(retain_bytes: int | None) -> int | None:
    return None if retain_bytes is None else max(retain_bytes // _PARTS, SEGMENT_BYTES_MIN)
