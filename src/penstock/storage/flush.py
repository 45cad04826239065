"""What a log hands to a worker and gets back: a write, and a sync.

Running them touches only the writing side of the active segment. What they did counts, for readers and for those who
wait, when the log's owner has them back: `Log.finish_write`, `Log.finish_sync`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.batch import Batch, Control, encode_control
from penstock.errors import AppendFailed, DiskError, LogFailed
from penstock.run import Run
from penstock.storage.files import File
from penstock.storage.policy import Durability
from penstock.storage.segment import Segment

if TYPE_CHECKING:
    from penstock.storage.log import Log


@dataclass(slots=True)
class Part:
    """Batches for one segment: a new one if there is a snapshot for its head."""

    snapshot: bytes | None
    batches: list[Batch | Run]


class Write:
    """What one log hands to a worker to be written, and how that went."""

    __slots__ = (
        "control",
        "created",
        "done",
        "end",
        "error",
        "fault",
        "fresh",
        "log",
        "size",
        "_parts",
        "_previous",
        "_segment",
    )

    def __init__(self, log: Log, parts: list[Part], size: int, control: Control | None) -> None:
        """`size` is that of all batches; `control` goes before them, to reserve offsets."""
        self.log = log
        self.size = size
        self.control = control
        self._parts = parts
        self._segment = log.segments[-1]
        self._previous = log.previous_base()
        self.created: list[Segment] = []
        self.done: list[Batch] = []
        # The same as they were appended: a run is not opened again for those who wait for it.
        self.fresh: list[Batch | Run] = []
        self.end = log.written
        self.error: DiskError | None = None
        # The unexpected exception behind `error`, if it was one.
        self.fault: Exception | None = None

    @property
    def syncs(self) -> bool:
        """Whether running it syncs: because a segment is sealed, or because the policy asks for it."""
        return len(self._parts) > 1 or self.log.policy.durability is Durability.FSYNC

    def run(self) -> None:
        try:
            for part in self._parts:
                self._write(part)
        except DiskError as error:
            self.error = error
        except Exception as fault:  # noqa: BLE001 - it fails this log, and none of the others of the round
            self.fault = fault
            self.error = LogFailed(f"{self.log.directory}: unexpected error in a write: {fault!r}")

    def sync(self) -> Sync:
        """What must be synced for this write to be durable."""
        reserved = self.control.reserved if self.control and not self.error else 0
        return Sync(self.log, self._segment, self._segment.written, self.end, reserved)

    def _write(self, part: Part) -> None:
        if not part.batches and part.snapshot is None:
            return
        log = self.log
        last_append_time = log.append_time
        append_time = log.next_append_time() if part.batches else last_append_time
        batches = self._encoded(part.batches, append_time)
        offset = batches[0].base_offset if batches else self.end
        reserved = self.control.reserved if self.control else log.reserved_written
        if part.snapshot is not None:
            full = self._segment
            full.write_control(Control(reserved, self._previous), offset, last_append_time)
            full.save_index()
            control = Control(max(offset, reserved), full.base, snapshot=part.snapshot)
            # The time of the last message before it: retention takes it for the age of the full segment.
            self._segment = log.create_segment(offset, control, last_append_time)
            self.created.append(self._segment)
            self._previous = full.base
        if not batches:
            return
        segment = self._segment
        durable_bytes = segment.durable_bytes
        for batch in batches:
            batch.stamp(
                batch.base_offset,
                append_time=append_time,
                log=log.number,
                durable_bytes=durable_bytes,
                source=batch.source,
                position=batch.position,
            )
        if self.control is not None and not self.done:
            reservation = encode_control(self.control)
            reservation.stamp(offset, append_time=append_time, log=log.number, durable_bytes=durable_bytes)
            segment.write([reservation, *batches])
        else:
            segment.write(batches)
        self.done += batches
        self.fresh += part.batches
        self.end = batches[-1].end

    def _encoded(self, batches: list[Batch | Run], now_us: int) -> list[Batch]:
        """Encode the runs. Nothing has been written yet, so what cannot be encoded is only taken back."""
        try:
            return [self._encode(batch, now_us) if isinstance(batch, Run) else batch for batch in batches]
        except Exception as fault:
            self.fault = fault
            raise AppendFailed(f"{self.log.directory}: unexpected error in encoding a batch: {fault!r}") from fault

    def _encode(self, run: Run, now_us: int) -> Batch:
        run.stamp(now_us)
        batch = run.batch = run.encode(self.log.subject, now_us)
        batch.base_offset = run.base_offset
        return batch


@dataclass(frozen=True, slots=True)
class Sync:
    """What one log hands to a worker to be synced: all that is written up to a position, and an offset."""

    log: Log
    segment: Segment
    position: int
    written: int
    reserved: int

    @property
    def file(self) -> File:
        return self.segment.file
