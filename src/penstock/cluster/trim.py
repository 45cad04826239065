"""Trims the log below a committed checkpoint.

    checkpoint committed ─▶ mark stored ─▶ its rounds deleted ─▶ the next checkpoint may be written

The mark comes first: else a node that reads, or appends, where a round was deleted could not know. Only valid rounds
are deleted. LEAD and void records stay for ever, few and small: they are what a leader finds that was paused for days
and repeats its appends, which must not succeed.

One step follows the other, so a new leader repeats the last trim and knows that all before it were completed.
"""

from __future__ import annotations

from penstock.cluster.actions import Action, Answer, Delete, Stored, StoreMark, Unknown
from penstock.cluster.checkpoint import Mark
from penstock.cluster.place import Trimmable


class Trim:
    __slots__ = ("_trimmable", "mark")

    def __init__(self, trimmable: Trimmable, newest: Mark) -> None:
        """Trim what a committed checkpoint allows; `newest` is a mark that was seen."""
        self._trimmable = trimmable
        self.mark = newest

    def begin(self) -> list[Action]:
        if self.mark.position >= self._trimmable.position:
            return self._delete()
        self.mark = Mark(self.mark.number + 1, self._trimmable.position, self._trimmable.checkpoint)
        return [StoreMark(self.mark)]

    def awaits(self, mark: Mark) -> bool:
        """Whether this is the mark that is being stored."""
        return mark == self.mark

    def deletes(self, delete: Delete) -> bool:
        """Whether this is what is being deleted."""
        return delete.ranges == self._trimmable.rounds

    def answered(self, answer: Answer) -> list[Action]:
        """The outcome of storing the mark."""
        if isinstance(answer, Unknown):
            return [StoreMark(self.mark)]
        if isinstance(answer, Stored) or answer.data == self.mark.encode():
            return self._delete()
        self.mark = Mark.decode(answer.data, self.mark.number)
        return self.begin()

    def _delete(self) -> list[Action]:
        return [Delete(self._trimmable.rounds)]
