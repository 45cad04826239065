"""SETTLE: what a client says of messages of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.broker.group import Group
from penstock.errors import BadRequest, PenstockError
from penstock.model import headers
from penstock.outcome import Outcome
from penstock.wire import binary
from penstock.wire.binary import Verb

if TYPE_CHECKING:
    from penstock.doors.binary.dialect import Binary


def settle(dialect: Binary, number: int, settle: binary.Settle) -> None:
    """Answer when it is stored, with the offsets that were refused."""
    held = dialect.session.subscriptions.get(settle.subscription)
    if held is None or not isinstance(held[1], Group):
        raise BadRequest(f"there is no subscription {settle.subscription} of a group")
    member, group = held[0], held[1]
    place, offsets = (settle.topic_id, settle.partition), settle.offsets
    if settle.verb != Verb.COMMIT and group.is_stale(place, settle.generation):
        # These were delivered before the group was reset, and are delivered again: this is not about those.
        dialect.answer(number, {"refused": list(offsets)})
        return
    match Verb(settle.verb):
        case Verb.ACK:
            # The outcome may be settled before `ack_many` returns, but not if that refuses anything.
            refused: list[int] = []
            saved = _saved(dialect, number, refused)
            refused += group.ack_many(place, offsets, saved)
            if len(refused) == len(offsets):
                saved.settle()
        case Verb.COMMIT:
            group.commit(place, offsets[-1], settle.generation, _saved(dialect, number, ()))
        case Verb.NACK:
            delay_us = min(settle.delay_us, headers.DELAY_US_MAX)
            _each(
                _saved(dialect, number, refused := []),
                offsets,
                refused,
                lambda offset, saved: group.nack(place, offset, delay_us, member, saved, settle.reason),
            )
        case Verb.EXTEND:
            refused = [offset for offset in offsets if not group.extend(place, offset, member)]
            dialect.answer(number, {"refused": refused})
        case Verb.RELEASE:
            refused = [offset for offset in offsets if not group.release(place, offset, member)]
            dialect.answer(number, {"refused": refused})
        case Verb.REJECT:
            _each(
                _saved(dialect, number, refused := []),
                offsets,
                refused,
                lambda offset, saved: group.reject(place, offset, member, saved, settle.reason),
            )


def _each(
    all_saved: Outcome, offsets: Sequence[int], refused: list[int], settle: Callable[[int, Outcome], bool]
) -> None:
    """Settle one message after the other, and the outcome when all of it is stored."""
    left, failure = len(offsets), None

    def saved(error: PenstockError | None) -> None:
        nonlocal left, failure
        left, failure = left - 1, failure or error
        if not left:
            all_saved.settle(failure)

    for offset in offsets:
        outcome = Outcome(saved)
        if not settle(offset, outcome):
            refused.append(offset)
            outcome.settle()


def _saved(dialect: Binary, number: int, refused: Sequence[int]) -> Outcome:
    def saved(error: PenstockError | None) -> None:
        dialect.settle(number, {"refused": list(refused)}, error)

    return Outcome(dialect.session.guard(saved))
