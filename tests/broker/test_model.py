"""The whole broker against a stupid model of it: whatever is done, of each group

    published, since it is there = acknowledged + dead letters + pending

and what is acknowledged is never delivered again, also after a stop, a kill or a power cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.broker.broker import Settings
from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.start import Start
from penstock.broker.subscription import Subscription
from penstock.errors import PenstockError
from penstock.log.policy import Policy
from penstock.model.subject import matches
from penstock.outcome import Outcome
from penstock.testing import FaultyFiles, ManualClock
from tests.support import logs
from tests.support.brokers import SECOND, Got, Life, Recorder
from tests.support.sampling import examples

T = TypeVar("T")

TOPICS = {b"orders": 1, b"bills": 3}
SUBJECTS = (b"orders", b"orders.eu", b"orders.us", b"bills", b"bills.eu", b"fresh.x", b"fresh")
# None of them matches a dead letter.
PATTERNS = (b"orders", b"orders.>", b"*.eu", b"bills", b"fresh.*", b"*")
DEADLINE = 5 * SECOND
SETTINGS = Settings(policy=Policy(deliveries_max=3, segment_bytes=4096, ack_deadline_ms=5000))

PICK = st.integers(0, 1_000_000)


class Modelled:
    """What the model knows of a group."""

    def __init__(self, pattern: bytes) -> None:
        self.pattern = pattern
        # Values: all that are for it, and those that were acknowledged, as it was told.
        self.published: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        self.members: list[tuple[Recorder, Member]] = []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = FaultyFiles()
        self.clock = ManualClock()
        self.groups: dict[bytes, Modelled] = {}
        self.plain: list[tuple[Recorder, Subscription, Member, bytes, list[bytes]]] = []
        self.stored: dict[bytes, bytes] = {}  # value -> subject
        self.count = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 30))

    # Lives.

    @initialize(seed=PICK, tail=st.sampled_from([1, 2000, 1 << 20]))
    def begin(self, seed: int, tail: int) -> None:
        self.disk = FaultyFiles(seed=seed)
        self.tail = tail
        self.start()
        for name, partitions in TOPICS.items():
            self.run(self.life.broker.changes.create(name, partitions=partitions))

    def start(self) -> None:
        async def start() -> Life:
            life = Life(self.disk, clock=self.clock, settings=SETTINGS, tail_bytes_max=self.tail)
            return await life.__aenter__()

        self.life = self.run(start())
        assert {group.name for group in self.life.broker.groups} == self.groups.keys()
        for group in self.groups.values():
            group.members = []
        self.plain = []

    @rule()
    def restart(self) -> None:
        self.run(self.life.stop())
        self.start()

    @rule()
    def kill(self) -> None:
        self.run(self.life.kill())
        self.start()

    @rule()
    def cut(self) -> None:
        self.disk = self.run(self.life.power_cut())
        self.start()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.drain()
            self.run(self.life.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    # In.

    @rule(subject=st.sampled_from(SUBJECTS), count=st.integers(1, 5))
    def publish(self, subject: bytes, count: int) -> None:
        values = [b"%d" % (self.count + number) for number in range(count)]
        self.count += count
        self.run(self.life.stored(subject, *values))
        for value in values:
            self.stored[value] = subject
        for group in self.groups.values():
            if matches(group.pattern, subject):
                group.published.update(values)
        for _, _, _, pattern, expected in self.plain:
            if matches(pattern, subject):
                expected += values

    # Plain.

    @rule(pattern=st.sampled_from(PATTERNS))
    def subscribe(self, pattern: bytes) -> None:
        sink = Recorder()

        async def subscribe() -> tuple[Subscription, Member]:
            return self.life.subscribe(pattern, sink)

        self.plain.append((sink, *self.run(subscribe()), pattern, []))

    @precondition(lambda self: self.plain)
    @rule(pick=PICK)
    def unsubscribe(self, pick: int) -> None:
        _, subscription, member, _, _ = self.plain.pop(pick % len(self.plain))
        self.life.broker.subscriptions.unsubscribe(subscription, member)

    @precondition(lambda self: self.plain)
    @rule(pick=PICK)
    def stall(self, pick: int) -> None:
        self.plain[pick % len(self.plain)][0].is_open = False

    @precondition(lambda self: self.plain)
    @rule(pick=PICK)
    def go_on(self, pick: int) -> None:
        sink, subscription, _, _, expected = self.plain[pick % len(self.plain)]
        sink.is_open = True

        async def wake() -> None:
            subscription.wake()
            await self.life.settle()

        self.run(wake())
        assert sorted(sink.values) == sorted(expected)

    # Groups.

    @rule(name=st.sampled_from([b"g", b"h"]), pattern=st.sampled_from(PATTERNS), start=st.sampled_from(list(Start)))
    def create_group(self, name: bytes, pattern: bytes, start: Start) -> None:
        if name in self.groups:
            return
        self.run(self.life.broker.groups.create(name, pattern, start=start))
        group = self.groups[name] = Modelled(pattern)
        if start is Start.EARLIEST:
            group.published = {value for value, subject in self.stored.items() if matches(pattern, subject)}

    @precondition(lambda self: self.groups)
    @rule(pick=PICK, buffer=st.sampled_from([1, 3, 1000]))
    def join(self, pick: int, buffer: int) -> None:
        name, group = self.any_group(pick)
        sink = Recorder()
        _, member = self.run(self.life.join(name, group.pattern, sink, buffer=buffer))
        group.members.append((sink, member))

    @precondition(lambda self: any(group.members for group in self.groups.values()))
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        name, group = self.any_group(pick, with_members=True)
        _, member = group.members.pop(pick % len(group.members))

        async def leave() -> None:
            self.life.broker.groups.leave(self.life.broker.groups[name], member)
            await self.life.settle()

        self.run(leave())

    @precondition(lambda self: any(group.members for group in self.groups.values()))
    @rule(pick=PICK, count=st.integers(1, 10), waits=st.booleans())
    def ack(self, pick: int, count: int, waits: bool) -> None:
        name, group = self.any_group(pick, with_members=True)
        some = self.unfinished(group)[-count:]

        def ended(message: Got, error: PenstockError | None) -> None:
            if error is None:
                group.acknowledged.add(message.value)

        async def ack() -> None:
            for message in some:
                self.life.broker.groups[name].ack(
                    message.place,
                    message.offset,
                    Outcome(partial(ended, message)),
                )
            if waits:
                await self.life.settle()

        self.run(ack())

    @precondition(lambda self: any(group.members for group in self.groups.values()))
    @rule(pick=PICK, delay_us=st.sampled_from([0, SECOND]), kills=st.booleans())
    def give_back(self, pick: int, delay_us: int, kills: bool) -> None:
        name, group = self.any_group(pick, with_members=True)
        messages = self.unfinished(group)
        if messages:
            message = messages[pick % len(messages)]

            async def give_back() -> None:
                served = self.life.broker.groups[name]
                if kills and pick % 3 == 0:
                    served.reject(message.place, message.offset)
                else:
                    served.nack(message.place, message.offset, delay_us)
                await self.life.settle()

            self.run(give_back())

    @rule(us=st.sampled_from([1, SECOND, DEADLINE]))
    def advance(self, us: int) -> None:
        self.run(self.life.advance(us))

    def any_group(self, pick: int, *, with_members: bool = False) -> tuple[bytes, Modelled]:
        found = [(name, group) for name, group in self.groups.items() if group.members or not with_members]
        return found[pick % len(found)]

    def unfinished(self, group: Modelled) -> list[Got]:
        return [message for sink, _ in group.members for message in sink.got if message.value not in group.acknowledged]

    # What must hold.

    @invariant()
    def every_message_is_accounted_for(self) -> None:
        if not hasattr(self, "life"):
            return
        self.run(self.life.settle())
        self.judge_deliveries()
        values = self.by_offset()
        dead = self.dead_letters()
        for name, group in self.groups.items():
            served = self.life.broker.groups[name]
            pending = self.pending(served, values)
            done = group.acknowledged | dead[name]
            assert not group.acknowledged & dead[name], "acknowledged, and a dead letter too"
            assert not done & pending, "done and pending"
            assert group.published == done | pending, (name, group.published ^ (done | pending))

    def judge_deliveries(self) -> None:
        for group in self.groups.values():
            for sink, _ in group.members:
                first: dict[tuple[int, int], list[int]] = defaultdict(list)
                for message in sink.got:
                    assert message.value in group.published
                    if message.attempts == 1:
                        first[message.place].append(message.offset)
                for offsets in first.values():
                    assert offsets == sorted(set(offsets)), "first deliveries of a partition are in order, and once"

    def by_offset(self) -> dict[tuple[tuple[int, int], int], tuple[bytes, bytes]]:
        """(place, offset) -> subject and value, of all that is stored."""
        found = {}
        for topic in self.life.broker.topics:
            if not topic.is_internal and topic.name != b"DLQ":
                for partition in topic.partitions:
                    for offset, value in logs.messages(partition.log).items():
                        found[(partition.topic_id, partition.number), offset] = (self.stored.get(value, b"?"), value)
        return found

    def pending(self, group: Group, stored: dict[tuple[tuple[int, int], int], tuple[bytes, bytes]]) -> set[bytes]:
        found = set()
        for (place, offset), (subject, value) in stored.items():
            position = group.positions.get(place)
            if position is None or not matches(group.pattern, subject):
                continue
            inflight = position.inflight
            if offset >= inflight.next or offset in inflight._lots or offset in inflight._dead:
                found.add(value)
        return found

    def dead_letters(self) -> dict[bytes, set[bytes]]:
        found: dict[bytes, set[bytes]] = defaultdict(set)
        if self.life.broker.topics.get(b"DLQ") is not None:
            for letter in self.run(self.life.letters()):
                assert letter.value not in found[letter.group], "dead twice"
                found[letter.group].add(letter.value)
        return found

    def drain(self) -> None:
        """In the end everything that is neither acknowledged nor dead is delivered, and nothing else."""
        self.every_message_is_accounted_for()
        for name, group in self.groups.items():
            self.run(self.drain_group(name, group))
            assert group.published == group.acknowledged | self.dead_letters()[name]

    async def drain_group(self, name: bytes, group: Modelled) -> None:
        served = self.life.broker.groups[name]
        for _, member in group.members:
            served.leave(member)
        before = set(group.acknowledged)
        sink = Recorder()
        await self.life.join(name, group.pattern, sink)
        for _ in range(10):
            for message in sink.take():
                assert message.value not in before, "acknowledged, and delivered again"
                group.acknowledged.add(message.value)
                assert served.ack(message.place, message.offset, Outcome())
            await self.life.advance(SECOND)


def test_every_message_is_acknowledged_a_dead_letter_or_pending() -> None:
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    try:
        run_state_machine_as_test(
            Machine, settings=settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
        )
    finally:
        logging.getLogger("penstock").setLevel(logging.NOTSET)
