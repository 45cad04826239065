"""The position of a shared group against a model: a dict of offsets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
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

from penstock.broker.inflight import Inflight, PositionRecord
from tests.support.inflights import as_json, check, outline
from tests.support.sampling import examples

# Which of the offsets that may be told: numbers, so that they can be drawn before the offsets are known.
REASON = st.sampled_from(("", "x", "y"))
PICK = st.integers(0, 99)
PICKS = st.lists(PICK, min_size=1, max_size=8)
MEMBER = st.integers(0, 2)  # and the next one, where a run is shared
DELAY_US = st.sampled_from((10, 0, 1, 40, -5))


@dataclass
class Message:
    """A pending one, as the model has it."""

    attempts: int
    at_us: int
    member: int | None = None
    dead: bool = False
    found_due: bool = False
    failed: tuple[int, str] | None = None

    def turn_back(self, at_us: int) -> None:
        self.member, self.at_us, self.found_due = None, at_us, False

    def go_out(self, at_us: int, member: int) -> None:
        self.attempts, self.at_us, self.member, self.found_due = self.attempts + 1, at_us, member, False

    def fail(self, reason: str) -> None:
        self.failed = (self.attempts, reason) if reason else self.failed


class InflightMachine(RuleBasedStateMachine):
    """One `Inflight` against a dict of all that is pending, searched from end to end for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.inflight: Inflight
        self.pending: dict[int, Message] = {}
        self.records: list[PositionRecord] = []
        self.floor = self.next = self.now_us = 0
        self.taken = self.acked = self.buried = self.lost = 0

    @initialize(floor=st.integers(0, 5), pending_max=st.sampled_from((30, 8, 10_000)))
    def begin(self, floor: int, pending_max: int) -> None:
        self.inflight = Inflight(floor, pending_max)
        self.floor = self.next = floor
        self._take([1, 1, 2, 1, 1], 0, 0, 10)

    def _living(self) -> dict[int, Message]:
        return {offset: message for offset, message in self.pending.items() if not message.dead}

    def _back(self) -> dict[int, Message]:
        return {offset: message for offset, message in self._living().items() if message.member is None}

    def _offset(self, pick: int) -> int:
        """A pending one for the most part, else one that is done or was never taken."""
        around = [self.next, self.next + 3, *range(max(0, self.floor - 1), self.floor + 3)]
        told: list[int] = [*sorted(self.pending), *around]
        return told[pick % len(told)]

    # Out.

    @rule(
        limit=st.sampled_from((20, 5, 1, 0)),
        gaps=st.lists(st.integers(1, 3), max_size=12),
        beyond=st.integers(0, 3),
        member=MEMBER,
        delay_us=DELAY_US,
    )
    def deliver(self, limit: int, gaps: list[int], beyond: int, member: int, delay_us: int) -> None:
        self._take_again(limit, member, delay_us)
        self._take(gaps, beyond, member, delay_us)

    def _take_again(self, limit: int, member: int, delay_us: int) -> None:
        due = {offset: message for offset, message in self._back().items() if message.at_us <= self.now_us}
        found = self.inflight.back(self.now_us, limit)
        assert found == sorted(due)[:limit]
        assert found == self.inflight.back(self.now_us, limit), "asking changes nothing"
        for message in due.values():
            message.found_due = True
        self.inflight.retake(found, member, self.now_us + delay_us)
        for offset in found:
            self.pending[offset].go_out(self.now_us + delay_us, member)

    def _take(self, gaps: list[int], beyond: int, member: int, delay_us: int) -> None:
        room = max(0, self.inflight.pending_max - len(self.pending))
        assert self.inflight.room() == room
        offsets = []
        for gap in gaps[:room]:
            self.next += gap
            offsets.append(self.next - 1)
        self.next += beyond
        shares = {member: offsets}
        if len(offsets) > 3:
            shares = {member: offsets[::2], member + 1: offsets[1::2]}
            self.inflight.share(list(shares.items()), self.next, self.now_us + delay_us)
        else:
            self.inflight.take(offsets, self.next, member, self.now_us + delay_us)
        for owner, share in shares.items():
            self.pending |= {offset: Message(1, self.now_us + delay_us, owner) for offset in share}
        self.taken += len(offsets)

    @rule(picks=PICKS, member=MEMBER, delay_us=DELAY_US)
    def deliver_again_early(self, picks: list[int], member: int, delay_us: int) -> None:
        again = {self._offset(pick) for pick in picks} & self._back().keys()
        self.inflight.retake(again, member, self.now_us + delay_us)
        for offset in again:
            self.pending[offset].go_out(self.now_us + delay_us, member)

    @rule(pick=PICK, delay_us=DELAY_US)
    def extend(self, pick: int, delay_us: int) -> None:
        offset = self._offset(pick)
        message = self.pending.get(offset)
        out = message is not None and message.member is not None
        assert self.inflight.extend(offset, self.now_us + delay_us) == out
        if message is not None and out:
            message.at_us = self.now_us + delay_us

    # Done.

    @rule(picks=PICKS, how=st.sampled_from(("ack", "ack_many", "ack_upto")))
    def ack(self, picks: list[int], how: str) -> None:
        offsets = [self._offset(pick) for pick in picks]
        match how:
            case "ack":
                acked = sum(self.inflight.ack(offset) for offset in offsets)
            case "ack_many":
                acked = self.inflight.ack_many(offsets)
            case _:
                acked = self.inflight.ack_upto(min(offsets))
                offsets = list(range(min(offsets) + 1))
        done = set(offsets) & self._living().keys()
        assert acked == len(done)
        for offset in done:
            del self.pending[offset]
        self.acked += len(done)

    @precondition(lambda self: len(self.pending) > 5)
    @rule(pick=PICK)
    def forget_below(self, pick: int) -> None:
        offset = self._offset(pick)
        kept = {pending: message for pending, message in self.pending.items() if pending >= offset}
        lost = len(self.pending) - len(kept)
        assert self.inflight.forget_below(offset) == lost
        self.pending = kept
        self.lost += lost
        self.next = max(self.next, offset)

    @precondition(lambda self: len(self.pending) > 10)
    @rule(offset=st.integers(0, 60))
    def reset(self, offset: int) -> None:
        self.inflight.reset(offset)
        self.lost += len(self.pending)
        self.pending = {}
        self.floor = self.next = offset

    # Back.

    @rule(picks=PICKS, delay_us=DELAY_US, reason=REASON)
    def nack(self, picks: list[int], delay_us: int, reason: str) -> None:
        for offset in [self._offset(pick) for pick in picks]:
            message = self._living().get(offset)
            assert self.inflight.nack(offset, self.now_us + delay_us, reason) == (message is not None)
            if message is not None:
                message.fail(reason)
                message.turn_back(self.now_us + delay_us)

    @rule(member=st.integers(0, 3))
    def release(self, member: int) -> None:
        had = [message for message in self.pending.values() if message.member == member]
        assert self.inflight.release_all(member, self.now_us) == len(had)
        for message in had:
            message.turn_back(self.now_us)

    @rule(us=st.sampled_from((10, 1, 0, 50)))
    def expire(self, us: int) -> None:
        self.now_us += us
        out = [message for message in self.pending.values() if message.member is not None]
        late = [message for message in out if message.at_us <= self.now_us]
        assert self.inflight.expire(self.now_us) == len(late)
        for message in late:
            message.turn_back(self.now_us)

    # Dead.

    @rule(deliveries_max=st.sampled_from((3, 2, 4, 1)))
    def doom(self, deliveries_max: int) -> None:
        tried = {offset: message for offset, message in self._back().items() if message.attempts >= deliveries_max}
        doomed = self.inflight.kill_exhausted(deliveries_max)
        assert doomed == [(offset, tried[offset].attempts) for offset in sorted(tried)]
        for message in tried.values():
            message.dead = True

    @rule(pick=PICK, reason=REASON)
    def kill(self, pick: int, reason: str) -> None:
        offset = self._offset(pick)
        message = self._living().get(offset)
        assert self.inflight.kill(offset, reason) == (message is not None)
        if message is not None:
            message.fail(reason)
            message.member, message.dead = None, True

    @precondition(lambda self: len(self._living()) < len(self.pending))
    @rule(picks=PICKS, all_dead=st.booleans())
    def bury(self, picks: list[int], all_dead: bool) -> None:
        offsets = [self._offset(pick) for pick in picks]
        if all_dead:
            offsets += [offset for offset, _ in self.inflight.dead()]
        dead = set(offsets) & (self.pending.keys() - self._living().keys())
        assert self.inflight.finish_dead(offsets) == len(dead)
        for offset in dead:
            del self.pending[offset]
        self.buried += len(dead)

    @rule(picks=PICKS)
    def revive(self, picks: list[int]) -> None:
        offsets = [self._offset(pick) for pick in picks]
        self.inflight.requeue(offsets, self.now_us)
        revived = {offset for offset in offsets if offset < self.next and offset not in self.pending}
        self.pending |= {offset: Message(0, self.now_us) for offset in revived}
        self.taken += len(revived)
        self.floor = min([self.floor, *revived])

    # Kept.

    @rule()
    def save(self) -> None:
        changes = self.inflight.changes(self.now_us)
        if changes is None:
            self.records = [as_json(self.inflight.snapshot(self.now_us))]
        else:
            self.records.append(as_json(changes))
        self.inflight.mark()

    @rule()
    def fail_to_save(self) -> None:
        self.inflight.unmark()

    @rule(then_us=st.integers(0, 50), pending_max=st.sampled_from((30, 8)))
    def restart(self, then_us: int, pending_max: int) -> None:
        self.save()
        again = Inflight.restore(self.records, then_us, pending_max)
        check(again)
        self.inflight = Inflight.restore([as_json(self.inflight.snapshot(self.now_us))], then_us, pending_max)
        assert outline(again) == outline(self.inflight)
        assert self.inflight.pending_max == pending_max
        for message in self._living().values():
            delay_us = max(0, message.at_us - self.now_us) if message.member is None else 0
            message.turn_back(then_us + delay_us)
        self.now_us = then_us

    @invariant()
    def it_says_what_the_model_says(self) -> None:
        inflight = self.inflight
        assert inflight.next == self.next
        assert inflight.floor == min([*self.pending, self.next])
        assert len(inflight) == len(self.pending)
        for offset in range(max(0, inflight.floor - 2), self.next + 2):
            message = self.pending.get(offset)
            assert inflight.owner(offset) == (message.member if message else None)
            assert inflight.attempts(offset) == (message.attempts if message else 0)
            assert inflight.reason(offset) == (message.failed if message else None)
        for member in range(4):
            out = sum(message.member == member for message in self.pending.values())
            assert inflight.held().get(member, 0) == out
        dead = [(offset, message.attempts) for offset, message in self.pending.items() if message.dead]
        assert inflight.dead() == sorted(dead)
        awaited = [message.at_us for message in self._living().values() if not message.found_due]
        assert inflight.next_us() == min(awaited, default=None)
        check(inflight)

    @invariant()
    def the_floor_goes_up_only(self) -> None:
        assert self.inflight.floor >= self.floor
        self.floor = self.inflight.floor

    @invariant()
    def nothing_taken_is_unaccounted_for(self) -> None:
        assert self.taken == self.acked + self.buried + self.lost + len(self.inflight)


SETTINGS = settings(
    max_examples=examples(80), stateful_step_count=50, deadline=None, print_blob=True, report_multiple_bugs=False
)


@pytest.mark.timeout(600)  # where they disagree, hypothesis makes the example smaller for up to 300 s
@pytest.mark.parametrize("stale_max", [0, 64])
def test_a_position_does_what_a_dict_does(stale_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.inflight._STALE_MAX", stale_max)
    run_state_machine_as_test(InflightMachine, settings=SETTINGS)
