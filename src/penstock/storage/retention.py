"""Which segments a policy does not keep. Whole segments only, oldest first, never the active one."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.storage.policy import Policy
from penstock.storage.segment import Segment


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
