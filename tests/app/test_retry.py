"""Retry policies as numbers, and batches that are halved until one message is alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.retry import FailureAction, Retry, halves


def delays(retry: Retry, attempts: int) -> list[float | None]:
    return [retry.delay_s(attempt) for attempt in range(1, attempts + 1)]


def test_by_default_delays_double_up_to_half_a_minute_and_stay_there_for_ever() -> None:
    assert delays(Retry.exponential(), 12) == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30]
    assert Retry.exponential().delay_s(1_000_000) == 30


def test_after_the_doublings_the_last_delay_counts_be_it_longer_or_shorter() -> None:
    assert delays(Retry.exponential(initial=0.5, maximum=100, doublings=3, then=60), 5) == [0.5, 1, 2, 60, 60]
    assert delays(Retry.exponential(initial=8, maximum=10, doublings=2, then=1), 4) == [8, 10, 1, 1]


def test_without_doublings_all_delays_are_the_last_one() -> None:
    assert delays(Retry.exponential(doublings=0, then=5), 3) == [5, 5, 5]


def test_the_last_of_so_many_attempts_has_no_delay_behind_it() -> None:
    assert delays(Retry.exponential(attempts=3), 5) == [1, 2, None, None, None]
    assert delays(Retry.exponential(attempts=1), 2) == [None, None]


def test_a_bound_beyond_the_doublings_holds_too() -> None:
    assert delays(Retry.exponential(doublings=1, then=7, attempts=4), 5) == [1, 7, 7, None, None]


def test_forever_has_no_last_attempt() -> None:
    assert delays(Retry.forever(initial=2, maximum=9), 5) == [2, 4, 8, 9, 9]
    assert Retry.forever().delay_s(1_000_000) == 30
    policies = (Retry.forever(), Retry.exponential(), Retry.exponential(attempts=3), Retry.skip(), Retry.pause())
    assert [retry.deliveries_max for retry in policies] == [0, None, 3, None, None]


def test_skip_and_pause_never_try_again_by_themselves() -> None:
    assert (Retry.skip().action, delays(Retry.skip(), 2)) == (FailureAction.SKIP, [None, None])
    assert (Retry.pause().action, delays(Retry.pause(), 2)) == (FailureAction.PAUSE, [None, None])


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 1000), st.floats(0, 1e9), st.integers(1, 10**9))
def test_a_delay_is_never_negative_and_never_longer_than_it_may_be(
    initial: float, maximum: float, doublings: int, then: float, attempt: int
) -> None:
    delay = Retry.exponential(initial, maximum, doublings, then).delay_s(attempt)
    assert delay is not None
    assert 0 <= delay <= max(maximum, then)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"initial": -1}, "invalid initial -1: it must be 0 or more seconds"),
        ({"maximum": float("nan")}, "invalid maximum nan: it must be"),
        ({"then": float("inf")}, "invalid then inf: it must be"),
        ({"doublings": -1}, "invalid doublings -1: it must be 0 to 1000"),
        ({"doublings": 1001}, "invalid doublings 1001: it must be 0 to 1000"),
        ({"attempts": 0}, "invalid attempts 0: it must be at least 1, or None for no limit"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Retry.exponential(**options)  # type: ignore[arg-type]


def test_a_policy_is_a_value() -> None:
    assert Retry.exponential(attempts=3) == Retry.exponential(attempts=3)
    with pytest.raises(AttributeError):
        Retry.skip().attempts = 5  # type: ignore[misc]


@given(st.lists(st.integers(), min_size=2))
def test_halves_are_the_whole_in_its_order_and_neither_is_empty(batch: list[int]) -> None:
    first, second = halves(batch)
    assert [*first, *second] == batch
    assert abs(len(first) - len(second)) <= 1
    assert first
    assert second


@given(st.integers(2, 300), st.data())
def test_halved_again_and_again_one_bad_message_is_alone_after_few_calls(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    parts, calls, good = [list(range(count))], 0, []
    while parts:
        part = parts.pop()
        calls += 1
        if bad not in part:
            good += part
        elif len(part) > 1:
            parts += [list(half) for half in reversed(halves(part))]
        else:
            assert part == [bad]
    assert good == [number for number in range(count) if number != bad]
    assert calls <= 2 * count.bit_length() + 1
