"""The judge of the simulated cluster: it sees every object when it is created, and decides again what is valid.

It shares with the nodes only the bytes of a record. It reads them with a struct of its own, and keeps the whole log:
what is deleted from the store stays here.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import NamedTuple

_HEADER = struct.Struct("<4sIHBBIQQQQQ")
LEAD, ROUND, CHECKPOINT = 1, 2, 3


class Valid(NamedTuple):
    position: int
    data: bytes
    kind: int
    epoch: int
    number: int


class Message(NamedTuple):
    log: int
    offset: int
    value: int


def encode_round(messages: list[Message]) -> bytes:
    return b";".join(b"%d:%d:%d" % message for message in messages)


def decode_round(body: bytes) -> list[Message]:
    return [Message(*map(int, part.split(b":"))) for part in body.split(b";")]


class Oracle:
    def __init__(self) -> None:
        # What was created first at each position, and the first position without anything.
        self.first: dict[int, bytes] = {}
        self.end = 0
        # The valid records, in order, and how many are below each position.
        self.truth: list[Valid] = []
        self.below: list[int] = [0]
        self.epoch = self.leader = self.number = 0
        # The content of the logs, as the valid rounds say.
        self.logs: dict[int, list[int]] = defaultdict(list)
        self.values: set[tuple[int, int]] = set()
        # What any leader acknowledged, by position; and the acknowledgements after a later epoch had begun.
        self.acknowledged: dict[int, bytes] = {}
        self.late = 0
        # The newest trim mark: number and position.
        self.mark = (0, 0)

    # The store.

    def created(self, position: int, data: bytes) -> None:
        self.first.setdefault(position, data)
        while self.end in self.first:
            self._judge(self.end, self.first[self.end])
            self.end += 1
            self.below.append(len(self.truth))

    def _judge(self, position: int, data: bytes) -> None:
        _, _, _, kind, _, _, there, epoch, leader, number, _ = _HEADER.unpack_from(data)
        assert there == position
        if kind == LEAD:
            if epoch <= self.epoch:
                return
            self.epoch, self.leader, self.number = epoch, leader, 0
        else:
            if epoch != self.epoch or leader != self.leader or number != self.number + 1:
                return
            self.number = number
        self.truth.append(Valid(position, data, kind, epoch, number))
        if kind == ROUND:
            for log, offset, value in decode_round(data[_HEADER.size :]):
                assert offset == len(self.logs[log]), f"offset {offset} of log {log} is not next"
                assert (log, value) not in self.values, f"{value} is stored twice in log {log}"
                self.logs[log].append(value)
                self.values.add((log, value))

    def marked(self, number: int, position: int, checkpoint: int, begins_at: int) -> None:
        assert number == self.mark[0] + 1, "a trim mark is missing"
        assert position >= self.mark[1], "the trim mark moved back"
        assert position == begins_at, "the trim mark is not where its checkpoint begins"
        found = self._valid_at(checkpoint)
        assert found is not None, "the trim mark names a checkpoint that is not committed"
        assert found.kind == CHECKPOINT
        self.mark = (number, position)

    def deleted(self, position: int) -> None:
        assert position < self.mark[1], f"{position} is deleted before the mark is stored"

    # The nodes.

    def index_at(self, position: int) -> int:
        """Return how many valid records are below a position."""
        assert position <= self.end, f"position {position} is beyond a gap at {self.end}"
        return self.below[position]

    def committed(self, index: int, position: int, data: bytes) -> None:
        """A node took this for the next valid record, after `index` others."""
        assert index < len(self.truth), f"{position} is taken for committed: a gap is before it"
        found = self.truth[index]
        assert (found.position, found.data) == (position, data), f"{position} is taken for valid, after {index} others"

    def acknowledge(self, position: int, data: bytes, epoch: int) -> None:
        found = self._valid_at(position)
        assert found is not None, f"{position} is acknowledged, and not in the log"
        assert found.data == data, f"{position} is acknowledged, and holds something else"
        self.acknowledged[position] = data
        self.late += epoch < self.epoch

    def leads(self, epoch: int, index: int, logs: dict[int, list[int]]) -> None:
        """A node leads: it knows everything that was acknowledged, unless another one leads already."""
        assert self.truth[index - 1].kind == LEAD
        assert self.truth[index - 1].epoch == epoch
        self.check_logs(logs)
        if epoch == self.epoch and self.number == 0:
            assert {log: values for log, values in logs.items() if values} == dict(self.logs)

    def check_logs(self, logs: dict[int, list[int]]) -> None:
        """The content of a node is a prefix of the shared log."""
        for log, values in logs.items():
            assert values == self.logs[log][: len(values)], f"log {log} has other content than the shared log"

    def _valid_at(self, position: int) -> Valid | None:
        if position >= self.end:
            return None
        index = self.below[position]
        found = self.truth[index] if index < len(self.truth) else None
        return found if found is not None and found.position == position else None
