"""The segments with an open file, over all logs of a store, within a limit."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.health import Usage
from penstock.log.files import is_disk_full

if TYPE_CHECKING:
    from penstock.log.segment import Segment

T = TypeVar("T")

_INDEX_BYTES_MAX: Final = 64 << 20


class OpenSegments:
    """Active segments count too. Above the limit, the least recently used ones are closed; they are opened again when
    they are needed.

    A segment is closed only while everything written to it is synced: Linux reports an error of a sync to the files
    that were open when the bytes were written. A reader that holds the file of a closed segment keeps it open until
    it is done.
    """

    def __init__(self, segments_max: int = 256, release: Callable[[], bool] = lambda: False) -> None:
        """`release` is called when the disk is full; it returns whether it made room."""
        # Least recently used first, with the bytes of an index that can be loaded again.
        self._segments: OrderedDict[Segment, int] = OrderedDict()
        self._segments_max = segments_max
        self._index_bytes = 0
        self._release = release
        self._lock = threading.Lock()

    @property
    def files_usage(self) -> Usage:
        return Usage(len(self._segments), self._segments_max)

    @property
    def index_usage(self) -> Usage:
        return Usage(self._index_bytes, _INDEX_BYTES_MAX)

    def touch(self, segment: Segment) -> None:
        """Count a segment that has opened its file or loaded its index."""
        with self._lock:
            self._forget(segment)
            self._segments[segment] = size = segment.index_bytes
            self._index_bytes += size
            # Each is looked at at most twice: used, and then no longer used.
            for _ in range(2 * len(self._segments)):
                if len(self._segments) <= self._segments_max and self._index_bytes <= _INDEX_BYTES_MAX:
                    break
                oldest = next(iter(self._segments))
                if oldest is segment or oldest.used or not oldest.is_closable:
                    oldest.used = False
                    self._segments.move_to_end(oldest)
                else:
                    self._forget(oldest)
                    oldest.release()

    def hold(self, segment: Segment) -> None:
        """Keep the file of a segment open, because it is written to, until everything is synced."""
        with self._lock:
            segment.is_writing = True

    def drop(self, segment: Segment) -> None:
        """Close a segment: now, or if it is written to, with the last user."""
        with self._lock:
            self._forget(segment)
            if segment.is_closable:
                segment.release()

    def attempt(self, call: Callable[[], T]) -> T:
        """Call the disk, and once more if it lacked a file descriptor or room that could be freed."""
        try:
            return call()
        except OSError as error:
            if not self._makes_way(error):
                raise
        return call()

    def _makes_way(self, error: OSError) -> bool:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return is_disk_full(error) and self._release()
        with self._lock:
            for segment in list(self._segments):
                if segment.is_closable:
                    self._forget(segment)
                    segment.release()
        return True

    def _forget(self, segment: Segment) -> None:
        self._index_bytes -= self._segments.pop(segment, 0)
