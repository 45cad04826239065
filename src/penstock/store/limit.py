"""Enforces the limit on the bytes of a whole store: drops the oldest segments, whichever log they are in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from penstock.errors import PenstockError
from penstock.log.appender import LogState
from penstock.log.log import Log

logger = logging.getLogger(__name__)


def trim(logs: Sequence[Log], excess: int, spare: int) -> tuple[list[Log], int]:
    """Drop the oldest segments of these logs until `excess` bytes are freed, and at most `spare` bytes more.

    A segment is as old as its last message. Return the logs whose active segment is next, and must be sealed before it
    can be dropped, and how many bytes are too many even without all of them.
    """
    oldest = [(time, number) for number, log in enumerate(logs) if (time := _oldest_time(log)) is not None]
    heapify(oldest)
    unsealed: list[Log] = []
    while excess > 0 and oldest:
        number = oldest[0][1]
        log = logs[number]
        if log.segments[0].size > excess + spare:
            return unsealed, 0
        if len(log.segments) == 1:
            unsealed.append(log)
            excess -= log.segments[0].size
            heappop(oldest)
            continue
        freed = _drop_oldest(log)
        excess -= freed
        time = _oldest_time(log)
        if freed and time is not None:
            heapreplace(oldest, (time, number))
        else:
            heappop(oldest)
    return unsealed, max(0, excess)


def _oldest_time(log: Log) -> int | None:
    try:
        return log.upkeep.oldest_segment_time()
    except (PenstockError, OSError) as error:
        logger.error("%s: the age of its oldest segment is unknown, it is kept: %s", log.directory, error)
        return None


def _drop_oldest(log: Log) -> int:
    with log.upkeep.lock:
        if log.state is LogState.CLOSED:
            return 0
        try:
            return log.upkeep.drop_oldest()
        except (PenstockError, OSError) as error:
            logger.error("%s: its oldest segment cannot be dropped, tried again later: %s", log.directory, error)
            return 0
