"""An id is known for as long as its window, and no more of them than there is room for."""

from __future__ import annotations

import gc
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.dedup import ENTRY_BYTES, DedupBudget, DedupWindow
from penstock.errors import Overloaded, PenstockError
from penstock.outcome import Outcome
from tests.support.batches import peak_bytes

WINDOW_US: Final = 100
FAILURE: Final = Overloaded("the disk is full")


def test_an_id_that_never_came_is_not_found() -> None:
    assert DedupWindow(WINDOW_US).find(b"a", 0) is None


def test_an_id_is_found_where_it_is_stored() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.add(b"b", 8, 0)

    assert (dedup.find(b"a", 0), dedup.find(b"b", 0)) == (7, 8)


def test_an_id_at_offset_zero_is_found() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 0, 0)

    assert dedup.find(b"a", 0) == 0


def test_an_id_is_found_until_its_window_ends() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 1000)

    assert dedup.find(b"a", 1000 + WINDOW_US - 1) == 7
    assert dedup.find(b"a", 1000 + WINDOW_US) is None


def test_asking_does_not_make_the_window_longer() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.find(b"a", 90)

    assert dedup.find(b"a", 110) is None


def test_an_id_that_comes_again_within_the_window_stays_where_it_was() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.add(b"a", 9, 50)

    assert dedup.find(b"a", 60) == 7
    assert dedup.find(b"a", 110) is None


def test_an_id_that_comes_again_behind_the_window_is_new() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.add(b"a", 9, 150)

    assert dedup.find(b"a", 160) == 9


def test_of_too_many_ids_the_oldest_are_forgotten() -> None:
    dedup = DedupWindow(WINDOW_US, entries_max=3)
    for number in range(5):
        dedup.add(b"%d" % number, number, number)

    assert [dedup.find(b"%d" % number, 5) for number in range(5)] == [None, None, 2, 3, 4]
    assert len(dedup) == 3


def test_ids_whose_window_has_ended_take_no_room() -> None:
    dedup = DedupWindow(WINDOW_US)
    for number in range(5):
        dedup.add(b"%d" % number, number, number)
    dedup.find(b"", 1000)

    assert len(dedup) == 0


def test_what_was_taken_back_is_new_again() -> None:
    dedup = DedupWindow(WINDOW_US)
    for number, identity in enumerate([b"a", b"b", b"c"]):
        dedup.add(identity, number, 0)

    dedup.settle([b"b", b"never came"], FAILURE)

    assert [dedup.find(identity, 0) for identity in (b"a", b"b", b"c")] == [0, None, 2]


def test_what_was_taken_back_and_came_again_has_its_own_window() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 0, 0)
    dedup.settle([b"a"], FAILURE)
    dedup.add(b"a", 5, 50)

    assert dedup.find(b"a", 120) == 5
    assert dedup.find(b"a", 150) is None


def test_what_was_taken_back_does_not_push_out_others() -> None:
    dedup = DedupWindow(WINDOW_US, entries_max=2)
    dedup.add(b"a", 0, 0)
    dedup.add(b"b", 1, 0)
    dedup.settle([b"b"], FAILURE)
    dedup.add(b"c", 1, 0)

    assert [dedup.find(identity, 0) for identity in (b"a", b"b", b"c")] == [0, None, 1]


def test_what_was_stored_stays_known() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.expect([b"a"])
    dedup.settle([b"a"], None)

    assert dedup.find(b"a", 0) == 7


# ---- messages that wait for the disk


def test_nobody_waits_for_what_is_not_on_its_way() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    waiting = Outcome()

    assert not dedup.wait(b"a", waiting)
    assert not waiting.is_settled


@pytest.mark.parametrize("error", [None, FAILURE])
def test_all_who_wait_are_told_what_became_of_the_message(error: PenstockError | None) -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.expect([b"a", b"b"])
    waiting, another, other = Outcome(), Outcome(), Outcome()
    assert dedup.wait(b"a", waiting)
    assert dedup.wait(b"a", another)
    assert dedup.wait(b"b", other)

    dedup.settle([b"a"], error)

    assert (waiting.is_settled, waiting.error) == (another.is_settled, another.error) == (True, error)
    assert not other.is_settled
    assert not dedup.wait(b"a", Outcome())


def test_what_was_taken_back_is_new_again_when_those_who_waited_are_told() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.expect([b"a"])
    found: list[int | None] = []
    dedup.wait(b"a", Outcome(lambda _: found.append(dedup.find(b"a", 0))))

    dedup.settle([b"a"], FAILURE)

    assert found == [None]


def test_who_waits_is_told_even_if_the_window_ends_meanwhile_and_the_id_comes_anew() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 7, 0)
    dedup.expect([b"a"])
    waiting = Outcome()
    assert dedup.wait(b"a", waiting)

    if dedup.find(b"a", 2 * WINDOW_US) is None:
        dedup.add(b"a", 8, 2 * WINDOW_US)
        dedup.expect([b"a"])
        dedup.settle([b"a"], None)
    dedup.settle([b"a"], None)

    assert waiting.is_settled


# ---- figures


def test_it_counts_what_it_was_asked_and_what_it_found() -> None:
    dedup = DedupWindow(WINDOW_US)
    dedup.add(b"a", 0, 0)
    for identity in (b"a", b"b", b"a"):
        dedup.find(identity, 0)

    assert (dedup.checked, dedup.found) == (3, 2)


def test_a_full_window_takes_as_much_memory_as_it_says() -> None:
    dedup = DedupWindow(10**9)

    def fill() -> None:
        for number in range(150_000):
            dedup.add(b"%036d" % number, number, number)

    assert peak_bytes(fill) < 32 << 20
    assert len(dedup) == 100_000


def test_all_topics_share_their_room_and_the_largest_gives_first() -> None:
    budget = DedupBudget(3000 * ENTRY_BYTES)
    large, small = (DedupWindow(1_000_000, budget=budget) for _ in range(2))
    for number in range(500):
        small.add(b"s%d" % number, number, number)
    for number in range(20_000):
        large.add(b"l%d" % number, number, number)

    assert budget.usage.used <= budget.usage.limit + 1000 * ENTRY_BYTES
    assert len(small) == 500
    assert large.find(b"l19999", 20_000) == 19_999
    assert large.find(b"l0", 20_000) is None

    del large
    gc.collect()
    assert budget.usage.used == 500 * ENTRY_BYTES


def test_an_entry_takes_no_more_than_it_counts_for() -> None:
    dedup = DedupWindow(1 << 62)
    ids = [b"%065d" % number for number in range(20_000)]

    def fill() -> None:
        for number, each in enumerate(ids):
            dedup.add(bytes(bytearray(each)), number + 1000, number + 1_000_000_000)

    assert peak_bytes(fill) < 20_000 * ENTRY_BYTES


IDENTITIES: Final = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
STEPS: Final = st.lists(
    st.tuples(st.sampled_from(["publish", "publish", "find", "forget"]), IDENTITIES, st.integers(0, 60)), max_size=40
)


@given(STEPS, st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_any_steps_find_what_a_list_finds(steps: list[tuple[str, bytes, int]], entries_max: int) -> None:
    """A message is published as a broker does it: asked for, and added when it is not found."""
    dedup = DedupWindow(WINDOW_US, entries_max)
    stored: list[tuple[bytes, int, int]] = []
    now_us = 0
    for offset, (step, identity, passed_us) in enumerate(steps):
        now_us += passed_us
        if step == "forget":
            dedup.settle([identity], FAILURE)
            stored = [entry for entry in stored if entry[0] != identity]
            continue
        stored = [entry for entry in stored if now_us - entry[2] < WINDOW_US]
        expected = next((at for name, at, _ in stored if name == identity), None)
        assert dedup.find(identity, now_us) == expected
        assert len(dedup) == len(stored)
        if step == "publish" and expected is None:
            dedup.add(identity, offset, now_us)
            stored = [*stored, (identity, offset, now_us)][-entries_max:]
