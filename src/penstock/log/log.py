"""The log of one partition: an endless sequence of batches, stored in segments.

A log is made of parts, each with one job. `Log` is the handle that joins them:

    appender ──▶ flusher ──▶ segments ──▶ reader        in memory · to the disk and back · on the disk · out
        │           │            ▲
        ▼           ▼            │
      marks ◀── handover       upkeep                   offsets · to the server · retention

    marks       start, committed, written, durable, end; the commit rule that moves `committed`
    handover    passes what is committed to the server of the log
    appender    takes batches and runs into memory
    flusher     hands them to a worker that writes and syncs them
    reader      returns committed batches
    upkeep      retention, compaction, truncation

A piped log is a copy of another one: its batches have the offsets that they have there, gaps included. So it continues
at its own `end`, and nothing is published to it.

A log can be held: what is appended from then on becomes durable as ever, but `committed` stays until the log is
released. So several logs can show their readers something at the same moment.

One thread owns a log: it appends, and only it moves the marks. `reader.read_disk` and `upkeep` are for any thread.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from penstock.clock import Clock
from penstock.errors import Closed, LogDamaged, LogFailed
from penstock.log import examine, opening
from penstock.log.appender import Appender, LogOwner, LogState
from penstock.log.damage import KnownDamage
from penstock.log.files import Files
from penstock.log.flusher import Flusher
from penstock.log.handover import Handover, OnCommit, OnReject
from penstock.log.log_reader import LogReader
from penstock.log.marks import Marks, commit_rule
from penstock.log.open_segments import OpenSegments
from penstock.log.policy import Policy
from penstock.log.producers import Producers
from penstock.log.segment import ReadMode, Segment
from penstock.log.tail import Tail, TailBudget
from penstock.log.terms import LogTerms
from penstock.log.upkeep import Upkeep
from penstock.log.witness import NOBODY, Witness


class Log:
    def __init__(
        self,
        directory: Path,
        *,
        policy: Policy,
        files: Files,
        clock: Clock,
        owner: LogOwner,
        open_segments: OpenSegments,
        tail_budget: TailBudget,
        read_mode: ReadMode = "pread",
        piped: bool = False,
        witness: Witness = NOBODY,
        strict: bool = False,
    ) -> None:
        """Open the log in `directory`: recover it if necessary, or begin a new one.

        `witness` says how far the log once reached, independent of the files. With `strict`, damage in the last segment
        or a missing segment is raised, and nothing is changed; otherwise the log continues after it.

        This is long because it joins the parts, and does nothing else.
        """
        self.directory = directory
        terms = self.terms = LogTerms(policy, piped)
        marks = self.marks = Marks(commit_rule(policy, is_piped=piped), partial(owner.fault, "finish", self))
        self._damage = KnownDamage(files, directory, partial(owner.damaged, self))
        opened = opening.open_log(
            directory,
            marks,
            self._damage,
            files=files,
            clock=clock,
            open_segments=open_segments,
            read_mode=read_mode,
            piped=piped,
            witness=witness,
            strict=strict,
        )
        segments = self._segments = opened.segments
        tail = Tail(tail_budget)
        self._handover = Handover(marks, owner.announce)
        appender = self._appender = Appender(self, directory, owner, terms, marks, self._handover, opened.producers)
        self.flusher = Flusher(self, owner, terms, marks, appender, self._handover, tail, opened, files, clock)
        self.reader = LogReader(terms, marks, segments, tail, self._damage)
        self.upkeep = Upkeep(terms, marks, segments, appender, self.flusher, tail, files, clock)
        # Bound here, not wrapped in methods: a second call would add 4 % to a `gather`.
        self.append = appender.append
        self.append_at = appender.append_at
        self.gather = appender.gather
        self.check_open = appender.check_open
        self.when_committed = marks.when_committed
        self.when_durable = marks.when_durable
        self.confirm = marks.confirm
        self.read = self.reader.read
        self.read_tail = self.reader.read_tail
        self.read_disk = self.reader.read_disk
        self.offset_at = self.reader.offset_at
        self.offset_after = self.reader.offset_after
        self.flush = self.flusher.flush
        for damage in opened.damage:
            self._damage.remember(damage)

    # How it stands.

    @property
    def start(self) -> int:
        return self.marks.start

    @property
    def committed(self) -> int:
        return self.marks.committed

    @property
    def end(self) -> int:
        return self.marks.end

    @property
    def number(self) -> int:
        """Return the number that is stamped into every batch of this log."""
        return self._segments.number

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._segments.all

    @property
    def rewrites(self) -> int:
        """Return how often segments were rewritten or cut: batches that were read before may be outdated."""
        return self._segments.rewrites

    @property
    def damage(self) -> list[LogDamaged]:
        """Return the known damage. For any thread."""
        return self._damage.all()

    @property
    def state(self) -> LogState:
        return self._appender.state

    @property
    def failure(self) -> LogFailed | None:
        """Return why the log takes no more appends, if it failed."""
        return self._appender.failure

    @property
    def has_pending(self) -> bool:
        return self._appender.has_pending

    @property
    def producers(self) -> Producers:
        return self._appender.producers

    @property
    def is_held(self) -> bool:
        return self.marks.held_at is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever appended, and nobody is about to."""
        return self.marks.end == 0 and not self.is_held

    def verify(self) -> examine.Report:
        return examine.verify(self._segments.all)

    # Requests of the store.

    @property
    def policy(self) -> Policy:
        return self.terms.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.terms.policy = policy
        self.marks.rule = commit_rule(policy, is_piped=self.terms.is_piped)

    def pipe(self) -> None:
        """Make it a piped log. It must be empty."""
        assert self.is_empty, "it has messages of its own"
        self.terms.is_piped = True
        self.policy = self.terms.policy

    # Serving.

    def attach(self, subject: bytes, on_commit: OnCommit, on_reject: OnReject) -> None:
        """Serve the log, as `Handover.attach` says. `subject` is that of messages that name none."""
        self.terms.subject = subject
        self._handover.attach(on_commit, on_reject)

    def detach(self) -> None:
        """Serve the log no more: a commit confirms appends at once."""
        self._handover.detach()

    def hold(self) -> None:
        """Commit nothing that is appended from now on before `release`."""
        self._handover.hold()

    def release(self) -> None:
        self._handover.release()
        self.flusher.commit()

    # The end.

    def fail(self, error: LogFailed) -> None:
        """Take no more appends until a restart, and reject what is not committed. The rest can still be read."""
        self.flusher.fail(error)

    def close(self) -> None:
        """Make everything durable, note that it is, and close the files."""
        if self.state is LogState.CLOSED:
            return
        self.flush()
        if self.state is LogState.OPEN:
            self.flusher.note_close()
        self._appender.stop(LogState.CLOSED, Closed(f"{self.directory}: the log is closed"))
        self._segments.let_go(self._segments.all)

    def abandon(self) -> None:
        """Take no more appends, because the log is being deleted. A worker may still write to it."""
        self._appender.stop(LogState.CLOSED, Closed(f"{self.directory}: the log is deleted"))
