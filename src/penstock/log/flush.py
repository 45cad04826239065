"""Work that a log hands to a worker and gets back: a write, and a sync.

Running them touches only the writing side of the active segment. The result counts for readers and outcomes when the
log's owner has it back: `Flusher.finish_write`, `Flusher.finish_sync`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import AppendFailed, DiskError, LogFailed
from penstock.log.files import File
from penstock.log.policy import Durability
from penstock.log.segment import Segment
from penstock.log.segment_writer import SegmentWriter
from penstock.model.batch import Batch, Control, encode_control
from penstock.model.run import Run

if TYPE_CHECKING:
    from penstock.log.flusher import Flusher
    from penstock.log.log import Log


@dataclass(slots=True)
class WritePart:
    """Batches for one segment: a new one if there is a snapshot of the producers for its head."""

    snapshot: bytes | None
    batches: list[Batch | Run]


class Write:
    """A write of one log, for a worker, and its result."""

    __slots__ = (
        "_flusher",
        "_parts",
        "_previous",
        "_writer",
        "control",
        "created",
        "done",
        "end",
        "error",
        "fault",
        "fresh",
        "log",
        "size",
    )

    def __init__(self, flusher: Flusher, parts: list[WritePart], size: int, control: Control | None) -> None:
        """`size` is that of all batches; `control` is written before them, to reserve offsets."""
        self._flusher = flusher
        self.log: Log = flusher.log
        self.size = size
        self.control = control
        self._parts = parts
        self._writer = SegmentWriter(flusher.segments.active)
        self._previous = flusher.segments.previous_base
        self.created: list[Segment] = []
        self.done: list[Batch] = []
        # The same as they were appended, so that runs need not be opened again to be delivered.
        self.fresh: list[Batch | Run] = []
        self.end = flusher.marks.written
        self.error: DiskError | None = None
        # The unexpected exception that caused `error`, if it was one.
        self.fault: Exception | None = None

    @property
    def syncs(self) -> bool:
        """Whether running it syncs: because a segment is sealed, or because the policy asks for it."""
        return len(self._parts) > 1 or self._flusher.terms.policy.durability is Durability.FSYNC

    def run(self) -> None:
        try:
            for part in self._parts:
                self._write(part)
        except DiskError as error:
            self.error = error
        except Exception as fault:  # noqa: BLE001 - it fails this log, and no other one of the round
            self.fault = fault
            self.error = LogFailed(f"{self.log.directory}: unexpected error in a write: {fault!r}")

    def sync(self) -> Sync:
        """Return what must be synced to make this write durable. That includes reservations of earlier writes."""
        reserved = self.control.reserved if self.control and not self.error else self._flusher.marks.reserved_written
        segment = self._writer.segment
        return Sync(self.log, segment, segment.written, self.end, reserved)

    def _write(self, part: WritePart) -> None:
        if not part.batches and part.snapshot is None:
            return
        clock = self._flusher.append_clock
        last_append_time = clock.last
        append_time = clock.next() if part.batches else last_append_time
        batches = self._encoded(part.batches, append_time)
        if part.snapshot is not None:
            self._roll(batches[0].base_offset if batches else self.end, part.snapshot, last_append_time)
        if not batches:
            return
        writer = self._writer
        number = self._flusher.segments.number
        durable_bytes = writer.durable_bytes
        for batch in batches:
            batch.stamp(
                batch.base_offset,
                append_time=append_time,
                log=number,
                durable_bytes=durable_bytes,
                source=batch.source,
                position=batch.position,
            )
        if self.control is not None and not self.done:
            reservation = encode_control(self.control)
            offset = batches[0].base_offset
            reservation.stamp(offset, append_time=append_time, log=number, durable_bytes=durable_bytes)
            writer.write([reservation, *batches])
        else:
            writer.write(batches)
        self.done += batches
        self.fresh += part.batches
        self.end = batches[-1].end

    def _roll(self, offset: int, snapshot: bytes, last_append_time: int) -> None:
        """Seal the segment, and continue in a new one that begins at `offset`."""
        full = self._writer.segment
        reserved = self.control.reserved if self.control else self._flusher.marks.reserved_written
        self._writer.write_control(Control(reserved, self._previous), offset, last_append_time)
        full.save_index()
        control = Control(max(offset, reserved), full.base, snapshot=snapshot)
        # The head has the time of the last message before it: retention takes it for the age of the full segment.
        segment = self._flusher.segments.create(offset, control, last_append_time)
        self._writer = SegmentWriter(segment)
        self.created.append(segment)
        self._previous = full.base

    def _encoded(self, batches: list[Batch | Run], now_us: int) -> list[Batch]:
        """Encode the runs. Nothing is written yet, so what cannot be encoded is only rejected."""
        try:
            return [self._encode(batch, now_us) if isinstance(batch, Run) else batch for batch in batches]
        except Exception as fault:
            self.fault = fault
            raise AppendFailed(f"{self.log.directory}: unexpected error in encoding a batch: {fault!r}") from fault

    def _encode(self, run: Run, now_us: int) -> Batch:
        run.stamp(now_us)
        batch = run.batch = run.encode(self._flusher.terms.subject, now_us)
        batch.base_offset = run.base_offset
        return batch


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync of one log, for a worker: everything written up to a position, and an offset."""

    log: Log
    segment: Segment
    position: int
    written: int
    reserved: int

    @property
    def file(self) -> File:
        return self.segment.file
