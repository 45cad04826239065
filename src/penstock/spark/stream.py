"""The stream reader for PySpark 4.2 and newer: each batch begins where Spark says, and may be limited.

Spark logs only ends, so the first end of a query also says where it begins, unless the first batch is empty: then its
end is where the query begins.
"""

# Method names are Spark's.
# ruff: noqa: N802

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import OffsetOutOfRange
from penstock.spark.catalogue import Holding, Holdings
from penstock.spark.offsets import BEGIN, Offsets, share
from penstock.spark.options import ReadOptions, TopicPartition
from penstock.spark.source import POLL_S, TopicStream

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# The pauses between two looks while there are messages that the batch does not take yet. They double up to the maximum.
_PAUSE_S: Final = 0.005
_PAUSE_S_MAX: Final = 0.04


class StreamReader(TopicStream, SupportsTriggerAvailableNow):
    """Reads a stream, batch after batch."""

    def __init__(self, options: ReadOptions, wanted: StructType) -> None:
        super().__init__(options, wanted)
        # With Trigger.AvailableNow: the offsets when the query began.
        self._target: dict[TopicPartition, Holding] | None = None
        self._last_batch_at = time.monotonic()

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.offsets_max is not None:
            return ReadMaxRows(options.offsets_max)
        if options.bytes_max is not None:
            return ReadMaxBytes(options.bytes_max)
        if options.offsets_min is not None:
            return ReadMinRows(options.offsets_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._catalogue.look(must_exist=False)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch. Wait a little if there is nothing new."""
        if not start:
            beginning = self._begin()
            first = self._next(beginning, limit)
            return first.to_json() | ({} if first == beginning else {BEGIN: beginning.to_json()})
        begin = Offsets.from_json(start)
        until, pause = time.monotonic() + POLL_S, 0.0
        while True:
            end = self._next(begin, limit)
            if end != begin:
                self._last_batch_at = time.monotonic()
                return end.to_json()
            left = until - time.monotonic()
            if self._target is not None or left <= pause or not self._wait(begin, left):
                # The same object, so that Spark sees no difference.
                return start
            # There are messages that this batch does not take: it waits for more, or has reached its end.
            time.sleep(pause)
            pause = min(max(2 * pause, _PAUSE_S), _PAUSE_S_MAX)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end of the log, regardless of limits. Spark derives the lag from it."""
        holdings = self._catalogue.look(must_exist=False, at_archive=False)
        ids = {place.topic: held.topic_id for place, held in holdings.items()}
        return Offsets(ids, {place: held.end for place, held in holdings.items()}).to_json()

    def _next(self, begin: Offsets, limit: ReadLimit) -> Offsets:
        waiting = self._waiting(begin)
        if isinstance(limit, ReadAllAvailable):
            return waiting.end
        # Messages that are gone do not count. They are reported when the batch is planned.
        available = {
            place: max(0, waiting.ends[place] - max(start, waiting.holdings[place].earliest))
            for place, start in waiting.starts.items()
        }
        if self._waits_for_more(sum(available.values())):
            return begin
        return waiting._replace(ends=self._limited(waiting.holdings, waiting.starts, available)).end

    def _limited(
        self, holdings: Holdings, starts: Mapping[TopicPartition, int], available: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        firsts = {place: max(start, holdings[place].earliest) for place, start in starts.items()}
        shares = dict(available)
        if self._options.offsets_max is not None:
            shares = share(available, self._options.offsets_max)
        ends = {place: firsts[place] + shares.get(place, 0) if available[place] else starts[place] for place in starts}
        if self._options.bytes_max is not None:
            waiting = [place for place, count in available.items() if count]
            for place in waiting:
                size = -(-self._options.bytes_max // len(waiting))
                try:
                    after = self._catalogue.client.offset_after(place.topic, place.partition, firsts[place], size)
                except OffsetOutOfRange:
                    # Dropped just now: the next look sees the new start.
                    after = starts[place]
                ends[place] = min(ends[place], after)
        return ends

    def _waits_for_more(self, available: int) -> bool:
        """Whether there are fewer messages than a batch should have, and time left to wait for more."""
        least = self._options.offsets_min
        if least is None or available >= least or self._target is not None:
            return False
        return time.monotonic() - self._last_batch_at < self._options.delay_s

    def _within(self, holdings: dict[TopicPartition, Holding]) -> dict[TopicPartition, Holding]:
        if self._target is None:
            return holdings
        return {
            place: replace(held, end=min(held.end, self._target[place].end))
            for place, held in holdings.items()
            if place in self._target
        }
