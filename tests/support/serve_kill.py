"""kill -9 of a real `penstock serve` under load, judged by what it had told its clients.

One directory has many lives. In each, publishers of both dialects and members of durable groups work until a number
of acknowledgements that the seed decides; then the server is killed, and the next life goes on with what is left. Now
and then a life ends in peace: the groups get and acknowledge all that is stored, and the judge reads the logs.

- A message that was acknowledged is stored: once, if it was sent once or has an id. Others are stored at most as often
  as they were sent. Whatever anyone was given is stored, where it was said to be.
- What one publisher sent to one subject is in each partition in the order in which it was sent, unless it was delayed.
- Each group was given all that was published after it was made, and has acknowledged it, or it is a dead letter, once.
- What a group was told is acknowledged never comes again in a later life: so a kill brings back no more than what
  was in flight. No position of a group moves back.
- All bytes of all logs are sound.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from penstock.model.headers import value_of
from penstock.model.run import Run, open_batch
from penstock.model.subject import matches
from penstock.store.state import STATE_TOPIC, read_changes
from penstock.store.store import Store
from penstock.wire.text import sequence_base
from tests.support.serve_clients import TOPICS, Figures, Group, Journal, Life, Member, Message, Publisher
from tests.support.server import Serve

# Under both policies, with few and many partitions. Nothing but what lies in `delta` becomes a dead letter.
CONFIG: Final = """
[storage]
upkeep_ms = 200
[flow]
buffer = 200
[topic]
deliveries_max = 1000
segment_bytes = "64KiB"
[topics.alpha]
durability = "fsync"
partitions = 3
[topics.beta]
durability = "flush"
partitions = 2
ack_deadline_ms = 400
[topics.gamma]
durability = "flush"
[topics.delta]
durability = "fsync"
ack_deadline_ms = 150
deliveries_max = 2
"""
DEAD_LETTERS: Final = "DLQ"
# Groups that are made under load.
LATE_GROUPS_MAX: Final = 6


class Stored(NamedTuple):
    sequence: int
    place: tuple[int, int]
    topic: str
    subject: str
    value: bytes
    headers: bytes


class ServeJudge:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.random = Random(seed)
        self.journal = Journal()
        self.groups: list[Group] = []
        self._publishers = [Publisher(f"p{number}", self.journal, seed, is_nats=number % 2 == 1) for number in range(4)]
        self._last = Publisher("last", self.journal, seed, is_nats=False)
        self._members: list[Member] = []
        self._server: Serve | None = None
        self._lates = 0
        self._kills = 0
        self._dead_letters = 0
        workers = Group("workers", "alpha.*")
        tellers = Group("tellers", "beta.>")
        self._add([workers], [workers], [workers])
        self._add([tellers], [tellers])
        self._add([Group("DURABLE:audit", "*.a"), Group("turns", "alpha")])
        self._add([Group("graves", "delta.>", buries=True)])
        self._add([Group("DURABLE:ship", "gamma.>")], is_nats=True)

    @property
    def figures(self) -> Figures:
        journal = self.journal
        return Figures(
            kills=self._kills,
            published=len(journal.messages),
            acknowledged=sum(message.acknowledged for message in journal.messages.values()),
            confirmed=journal.confirmed,
            redelivered=journal.redelivered,
            resent=sum(publisher.resent for publisher in self._publishers),
            dead_letters=self._dead_letters,
        )

    def kill_one(self) -> None:
        """A life under load, to its sudden end."""
        with self._told():
            self._kill_one()

    def settle(self) -> None:
        """A life in which all is read and acknowledged, to a clean stop; then judge what is there."""
        with self._told():
            server = self._start_and_settle()
            ended = server.stop()
            assert ended.code == 0, ended.stderr
            check_stderr(ended.stderr)
            self._judge()

    def _kill_one(self) -> None:
        journal = self.journal
        acknowledgements = self.random.choice((1, 10, 100, 1000, 3000)) * self.random.randint(1, 5)
        has_late = self._lates < LATE_GROUPS_MAX and self.random.random() < 0.3
        life = self._start()
        try:
            before = journal.acknowledged + journal.confirmed
            for member in self._members:
                life.start(member.run)
            if not self._kills:
                journal.wait("all groups are made", lambda: all(group.made_at for group in self.groups))
            for publisher in self._publishers:
                life.start(publisher.run)
            self._wait_count(before + acknowledgements)
            if has_late:
                self._add_late(life)
                if self.random.random() < 0.5:
                    self._wait_count(journal.acknowledged + journal.confirmed + acknowledgements)
        finally:
            life.kill()
        self._kills += 1
        if journal.failures:
            raise journal.failures[0]
        check_stderr(life.server.stderr)

    def _add_late(self, life: Life) -> None:
        """Two members make a group at once. The first answer, then a publish, is all that the kill may wait for."""
        self._lates += 1
        late = Group(f"late{self._lates}", "beta.b")
        self._add([late], [late])
        for member in self._members[-2:]:
            life.start(member.run)
        self.journal.wait("the group is made", lambda: late.made_at is not None)
        before = self.journal.acknowledged
        self.journal.wait("one more publish", lambda: self.journal.acknowledged > before)

    def _start_and_settle(self) -> Serve:
        journal = self.journal
        life = self._start()
        try:
            for member in self._members:
                life.start(member.run_thoroughly)
            journal.wait("all groups are made", lambda: all(group.made_at for group in self.groups))
            last = self._last.make_last()
            life.start(partial(self._last.publish, last))
            journal.wait("the last messages come", lambda: not self._lacking(last), lambda: self._lacking(last))
            while True:
                for group in self.groups:
                    group.lag = None
                for member in self._members:
                    member.ask_lags()
                journal.wait("groups tell how far they are", lambda: all(g.lag is not None for g in self.groups))
                if not any(group.lag for group in self.groups):
                    break
            life.part()
        except BaseException:
            life.is_over.set()
            life.server.kill()
            raise
        if journal.failures:
            raise journal.failures[0]
        return life.server

    def _lacking(self, last: list[Message]) -> list[tuple[str, Message]]:
        return [
            (group.name, message)
            for group in self.groups
            for message in last
            if _matches(group, message.subject) and message.value not in group.values
        ]

    def _wait_count(self, wanted: int) -> None:
        journal = self.journal
        journal.wait(f"{wanted} acknowledgements", lambda: journal.acknowledged + journal.confirmed >= wanted)

    def _add(self, *groups: list[Group], is_nats: bool = False) -> None:
        """A member of each list of groups."""
        for several in groups:
            self._members.append(Member(f"m{len(self._members)}", self.journal, self.seed, several, is_nats=is_nats))
            self.groups += [group for group in several if group not in self.groups]

    def _start(self) -> Life:
        self.journal.life += 1
        if self._server is None:
            # Ports are free ones in every life: others may have taken those of the last one.
            self._server = Serve(self.directory, config=CONFIG, server_port=0, server_quiet_port=0, server_http_port=0)
        else:
            self._server.restart()
        return Life(self.journal, self._server)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note(
                f"seed {self.seed}, life {self.journal.life}, {self.directory}: "
                f"python -m tests.soak --seed {self.seed} --cuts 0 --kills 0 --serves {self._kills + 1}"
            )
            raise

    # The judge.

    def _judge(self) -> None:
        verify(self.directory / "data")
        with Store(self.directory / "data") as store:
            assert not store.catalogue.refused, store.catalogue.refused
            stored = list(_read(store))
            topic_ids = {topic.name: topic.id for topic in store.topics}
            positions = read_positions(store)
        messages = [each for each in stored if each.topic in TOPICS]
        letters = [each for each in stored if each.topic == DEAD_LETTERS]
        self._judge_publishes(messages)
        self._judge_order(messages)
        buried = self._judge_letters(letters, topic_ids)
        for group in self.groups:
            self._judge_group(group, messages, buried[group.name])
        self._judge_positions(positions)
        self._dead_letters = len(letters)

    def _judge_publishes(self, stored: list[Stored]) -> None:
        found = Counter(each.value for each in stored)
        unknown = [each for each in stored if each.value not in self.journal.messages]
        assert not unknown, f"nobody published {unknown[:3]}"
        for message in self.journal.messages.values():
            times = found[message.value]
            low = 1 if message.acknowledged else 0
            high = 1 if message.has_id else message.sent
            assert low <= times <= high, f"{message} is stored {times} times, not {low} to {high}"
        strayed = [each for each in stored if self.journal.messages[each.value].subject != each.subject]
        assert not strayed, f"of another subject than it was sent to: {strayed[:3]}"
        at = {each.sequence: each.value for each in stored}
        for sequence, value in self.journal.values.items():
            assert at.get(sequence) == value, f"{value!r} was delivered with {sequence}, where {at.get(sequence)!r} is"

    def _judge_order(self, stored: list[Stored]) -> None:
        rows: dict[tuple[str, str, tuple[int, int]], dict[int, None]] = defaultdict(dict)
        for each in stored:
            message = self.journal.messages[each.value]
            if not message.is_delayed:
                # What was sent again comes where it came first.
                rows[message.publisher, message.subject, each.place].setdefault(message.number)
        for row, numbers in rows.items():
            for one, other in pairwise(numbers):
                assert one < other, f"{row}: {other} comes behind {one}"

    def _judge_letters(self, letters: list[Stored], topic_ids: dict[str, int]) -> dict[str, set[int]]:
        """The sequences that each group has buried."""
        buried: dict[str, set[int]] = defaultdict(set)
        for letter in letters:
            fields = {
                name: (value_of(letter.headers, f"Dead-Letter-{name}".encode()) or b"").decode()
                for name in ("Group", "Topic", "Partition", "Offset")
            }
            sequence = sequence_base(topic_ids[fields["Topic"]], int(fields["Partition"])) + int(fields["Offset"])
            group = fields["Group"]
            assert sequence not in buried[group], f"{group}: two dead letters of {letter.value!r}"
            buried[group].add(sequence)
        return buried

    def _judge_group(self, group: Group, stored: list[Stored], buried: set[int]) -> None:
        assert group.made_at is not None
        for each in stored:
            if not _matches(group, each.subject) or each.sequence in buried:
                continue
            message = self.journal.messages[each.value]
            if message.sent_at > group.made_at:
                assert each.sequence in group.delivered, f"{group.name} was never given {each.sequence}, {message}"
            if each.sequence in group.delivered:
                # The confirmation may have been lost in a kill; then it is enough that it does not come again.
                assert each.sequence in group.acknowledged, (
                    f"{group.name} has not acknowledged {each.sequence}, {message}"
                )

    def _judge_positions(self, positions: dict[str, list[dict[str, Any]]]) -> None:
        for group in self.groups:
            own = {
                key: rows for key, rows in positions.items() if key.rpartition("/")[0].rpartition("/")[0] == group.name
            }
            assert own, f"{group.name} has no positions"
            for key, rows in own.items():
                for one, other in pairwise(rows):
                    assert one["floor"] <= other["floor"], f"{key} goes back: {one['floor']}, {other['floor']}"
                    assert one["next"] <= other["next"], f"{key} goes back: {one['next']}, {other['next']}"
                last = rows[-1]
                assert last["floor"] == last["next"], f"{key} is not done: {last}"


def _matches(group: Group, subject: str) -> bool:
    return matches(group.pattern.encode(), subject.encode())


def _read(store: Store) -> Iterator[Stored]:
    """All messages of all topics, each partition in its order."""
    for topic in store.topics:
        for partition in range(topic.partitions):
            base = sequence_base(topic.id, partition)
            for run in _runs(store, topic.id, partition, topic.name.encode()):
                for index, (subject, value) in enumerate(zip(run.subjects, run.values, strict=True)):
                    yield Stored(
                        base + run.offset(index),
                        (topic.id, partition),
                        topic.name,
                        subject.decode(),
                        value,
                        run.headers.get(index, b""),
                    )


def _runs(store: Store, topic_id: int, partition: int, name: bytes) -> Iterator[Run]:
    log = store.log(topic_id, partition)
    offset = log.start
    while batches := log.read(offset, 1 << 20):
        for batch in batches:
            yield open_batch(batch, name)
        offset = batches[-1].end


def read_positions(store: Store) -> dict[str, list[dict[str, Any]]]:
    """What was ever written of each position, in its order, as far as compaction has left it."""
    log = store.log(STATE_TOPIC)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    offset = log.start
    while batches := log.read(offset, 1 << 20):
        for batch in batches:
            for kind, key, value in read_changes(batch):
                if kind == "position":
                    found[key].append(value)
        offset = batches[-1].end
    return found


def verify(data: Path) -> None:
    command = [sys.executable, "-m", "penstock", "log", "verify", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_stderr(stderr: str) -> None:
    wrong = [line for line in stderr.splitlines() if "Traceback" in line or "ERROR" in line.upper()]
    assert not wrong, stderr
