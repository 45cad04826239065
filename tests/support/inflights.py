"""Members and positions of a shared group, and what must always hold of them."""

from __future__ import annotations

import json

from penstock.broker.inflight import Inflight, PositionRecord

ANN, BOB = 1, 2
LONG = 1 << 60


def took(*offsets: int, upto: int | None = None, member: int = ANN, due_us: int = 100) -> Inflight:
    """A group that began at 0 and took `offsets`."""
    inflight = Inflight(0)
    inflight.take(offsets, max(offsets) + 1 if upto is None else upto, member, due_us)
    return inflight


def as_json(record: PositionRecord | None) -> PositionRecord:
    assert record is not None
    found: PositionRecord = json.loads(json.dumps(record))
    return found


def outline(inflight: Inflight) -> tuple[int, int, dict[int, int], list[tuple[int, int]]]:
    """Return all that must survive a restart, except for delays."""
    attempts = {offset: inflight.attempts(offset) for offset in inflight._lots}
    return inflight.floor, inflight.next, attempts, inflight.dead()


def check(inflight: Inflight) -> None:
    """What holds at any moment, inside too."""
    pending = sorted((*inflight._lots, *inflight._dead))
    assert len(pending) == len(inflight)
    assert all(inflight.floor <= offset < inflight.next for offset in pending)
    assert inflight.floor == min([*pending, inflight.next])
    assert list(inflight._lots) == sorted(inflight._lots)
    assert not inflight._lots.keys() & inflight._dead.keys()
    assert set(pending) <= set(inflight._order)
    assert list(inflight._order) == sorted(set(inflight._order))
    by_member = {(lot, member) for member, lots in inflight._out.items() for lot in lots}
    by_attempts = {(lot, attempts) for attempts, lots in inflight._back.items() for lot in lots}
    lots = set(inflight._lots.values())
    assert {(lot, lot.member) for lot in lots if lot.member is not None} == by_member
    assert {(lot, lot.attempts) for lot in lots if lot.member is None} == by_attempts
    assert all(inflight._out.values())
    assert all(inflight._back.values())
    for lot in lots:
        assert len(inflight._left(lot)) == lot.size
        assert len(lot.offsets) <= max(4 * lot.size, 3), "a lot keeps no more than it needs"
        assert lot.timeline is (inflight._deadlines if lot.member is not None else inflight._delays) or (
            lot.member is None and lot.timeline is None
        )
    for timeline in (inflight._deadlines, inflight._delays):
        on_it = [lot for _, _, lot in timeline._heap if lot.timeline is timeline]
        assert sorted(map(id, on_it)) == sorted(id(lot) for lot in lots if lot.timeline is timeline)
        assert timeline._size == len(on_it)
    assert {offset for offset in inflight._lots if inflight._is_ready(offset)} <= set(inflight._ready)
