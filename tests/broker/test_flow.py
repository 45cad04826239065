"""How fast a reader is served, and what it misses when it falls behind."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.flow import Flow, Overflow, TokenBucket, Window, window

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


def test_a_full_bucket_grants_its_burst_at_once_and_no_more() -> None:
    bucket = TokenBucket(10, 5)
    assert bucket.take(8, 0) == 5
    assert bucket.take(1, 0) == 0


def test_a_bucket_grants_no_more_than_was_asked_for() -> None:
    bucket = TokenBucket(10, 5)
    assert bucket.take(2, 0) == 2
    assert bucket.tokens(0) == 3


def test_a_bucket_fills_at_its_rate_up_to_its_burst() -> None:
    bucket = TokenBucket(10, 5)
    bucket.take(5, 0)
    assert bucket.tokens(50_000) == 0.5
    assert bucket.take(5, 250_000) == 2
    assert bucket.tokens(250_000) == 0.5
    assert bucket.tokens(HOUR_US) == 5
    assert bucket.take(100, HOUR_US) == 5


def test_a_rate_of_nothing_is_no_limit() -> None:
    bucket = TokenBucket(0, 1)
    assert bucket.take(10**9, 0) == 10**9
    assert (bucket.tokens(0), bucket.ready_us(7)) == (math.inf, 7)


def test_a_token_is_ready_at_the_first_moment_at_which_it_is_granted() -> None:
    bucket = TokenBucket(3, 2)
    assert bucket.ready_us(0) == 0
    bucket.take(2, 0)
    assert bucket.ready_us(0) == bucket.ready_us(200_000) == 333_334
    assert bucket.take(1, 333_333) == 0
    assert bucket.ready_us(333_333) == 333_334
    assert bucket.take(1, 333_334) == 1
    assert bucket.ready_us(SECOND_US) == SECOND_US


def test_an_earlier_moment_brings_and_takes_nothing() -> None:
    bucket = TokenBucket(10, 5)
    bucket.take(5, SECOND_US)
    assert bucket.take(1, 0) == 0
    assert bucket.ready_us(0) == SECOND_US + 100_000
    assert bucket.take(5, SECOND_US + 100_000) == 1
    bucket.refund(1)
    assert bucket.ready_us(0) == 0


def test_unused_tokens_come_back_up_to_the_burst() -> None:
    bucket = TokenBucket(10, 5)
    bucket.take(4, 0)
    bucket.refund(2)
    assert bucket.tokens(0) == 3
    bucket.refund(9)
    assert bucket.tokens(0) == 5


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 7, 999.999, 123_456.789])
def test_a_long_run_grants_its_rate_exactly(rate: float) -> None:
    bucket = TokenBucket(rate, 10_000)
    bucket.take(10_000, 0)
    now_us = granted = 0
    for turn in range(20_000):
        now_us += 1 + turn * 7919 % 30_000
        granted += bucket.take(1 << 40, now_us)
    assert granted == math.floor(Fraction(rate) * now_us / SECOND_US)


ACTS = st.lists(st.tuples(st.integers(0, 3 * SECOND_US), st.integers(0, 20), st.integers(0, 20)), max_size=40)


@given(st.floats(0.01, 1e6), st.integers(1, 20), ACTS)
def test_no_stretch_of_time_is_granted_more_than_burst_and_rate_allow(
    rate: float, burst: int, acts: list[tuple[int, int, int]]
) -> None:
    bucket = TokenBucket(rate, burst)
    kept: list[tuple[int, int]] = []
    now_us = 0
    for wait_us, wanted, unused in acts:
        now_us += wait_us
        assert bucket.ready_us(now_us) >= now_us
        granted = bucket.take(wanted, now_us)
        assert 0 <= granted <= wanted
        assert granted == wanted or bucket.tokens(now_us) < 1, "all that is there"
        bucket.refund(min(unused, granted))
        kept.append((now_us, granted - min(unused, granted)))
    for first, (begin_us, _) in enumerate(kept):
        total = 0
        for end_us, count in kept[first:]:
            total += count
            assert total <= burst + Fraction(rate) * (end_us - begin_us) / SECOND_US


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": -1.0}, "rate is -1.0, it must be at least 0 and finite"),
        ({"rate": math.inf}, "rate is inf, it must be at least 0 and finite"),
        ({"rate": math.nan}, "rate is nan, it must be at least 0 and finite"),
        ({"burst": 0}, "burst is 0, it must be at least 1"),
        ({"buffer": 0}, "buffer is 0, it must be at least 1"),
    ],
)
def test_a_flow_that_cannot_be_is_refused_by_name(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Flow(**settings)  # type: ignore[arg-type]


def test_the_smallest_flow_is_allowed() -> None:
    assert Flow(rate=0, burst=1, buffer=1).overflow is Overflow.BLOCK


@pytest.mark.parametrize("overflow", Overflow)
@pytest.mark.parametrize("behind", [0, 1, 10])
def test_a_reader_within_its_buffer_misses_nothing(overflow: Overflow, behind: int) -> None:
    flow = Flow(buffer=10, overflow=overflow)
    assert window(flow, 100, 100 + behind) == Window(100, 100 + behind, 100 + behind, 0)


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        (Overflow.BLOCK, Window(100, 150, 150, 0)),
        (Overflow.DROP, Window(100, 110, 150, 40)),
        (Overflow.SHED, Window(140, 150, 150, 40)),
    ],
)
def test_a_reader_beyond_its_buffer(overflow: Overflow, expected: Window) -> None:
    assert window(Flow(buffer=10, overflow=overflow), 100, 150) == expected


@given(st.sampled_from(Overflow), st.integers(1, 50), st.lists(st.integers(0, 100), max_size=30))
def test_every_offset_is_read_once_or_counted_as_skipped(overflow: Overflow, buffer: int, growth: list[int]) -> None:
    flow = Flow(buffer=buffer, overflow=overflow)
    position = end = read = skipped = 0
    for grown in growth:
        end += grown
        part = window(flow, position, end)
        assert position <= part.begin <= part.until <= part.jump <= end
        assert overflow is Overflow.BLOCK or part.until - part.begin <= buffer
        read += part.until - part.begin
        skipped += part.skipped
        position = part.jump
    assert read + skipped == position == end


def test_a_position_beyond_the_end_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        window(Flow(), 5, 4)
