"""Offsets of a stream: what Spark keeps of them, and how much is read at once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.offsets import OffsetRange, Offsets, share, split
from penstock.spark.options import TopicPartition

_PLACES = st.builds(TopicPartition, st.sampled_from(["a", "b", "a.b"]), st.integers(0, 20))
_AVAILABLE = st.dictionaries(_PLACES, st.integers(0, 10_000), max_size=12)


@given(_AVAILABLE, st.integers(1, 20_000))
def test_what_is_shared_out_is_the_limit_or_all_there_is(available: dict[TopicPartition, int], limit: int) -> None:
    shares = share(available, limit)

    assert sum(shares.values()) == min(limit, sum(available.values()))
    assert all(0 < count <= available[place] for place, count in shares.items())


@given(_AVAILABLE, st.integers(1, 20_000))
def test_no_partition_is_left_waiting_while_there_is_one_for_each(
    available: dict[TopicPartition, int], limit: int
) -> None:
    waiting = {place for place, count in available.items() if count}

    shares = share(available, limit)

    if limit >= len(waiting):
        assert set(shares) == waiting


def test_the_limit_is_shared_in_proportion_to_what_waits() -> None:
    available = {TopicPartition("a", 0): 9_001, TopicPartition("a", 1): 901, TopicPartition("a", 2): 101}

    assert share(available, 1_003) == {
        TopicPartition("a", 0): 901,
        TopicPartition("a", 1): 91,
        TopicPartition("a", 2): 11,
    }


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 5_000)), max_size=8),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(1, 5_000),
)
def test_split_ranges_are_the_same_offsets_in_order(
    spans: list[tuple[int, int]], partitions_min: int | None, records_max: int | None
) -> None:
    ranges = [
        OffsetRange(TopicPartition("a", number), start, start + size) for number, (start, size) in enumerate(spans)
    ]

    parts = split(ranges, partitions_min=partitions_min, records_max=records_max)

    for whole in ranges:
        own = [part for part in parts if part.place == whole.place]
        assert own[0].start == whole.start
        assert own[-1].end == whole.end
        assert all(before.end == after.start for before, after in pairwise(own))
    assert all(part.size > 0 for part in parts)
    if records_max is not None:
        assert all(part.size <= records_max for part in parts)
    if partitions_min is not None and ranges:
        assert len(parts) >= min(partitions_min, sum(whole.size for whole in ranges), len(parts))
        if all(whole.size >= partitions_min for whole in ranges):
            assert len(parts) >= partitions_min


def test_ranges_that_are_many_enough_are_not_split() -> None:
    ranges = [OffsetRange(TopicPartition("a", number), 0, 100) for number in range(4)]

    assert split(ranges, partitions_min=4, records_max=None) == ranges


@given(st.dictionaries(_PLACES, st.integers(0, 1 << 62)), st.integers(1, 1 << 40))
def test_offsets_are_the_same_after_a_round_through_json(ends: dict[TopicPartition, int], number: int) -> None:
    offsets = Offsets({place.topic: number for place in ends}, ends)

    assert Offsets.from_json(json.loads(json.dumps(offsets.to_json()))) == offsets


def test_offsets_of_another_source_are_refused() -> None:
    with pytest.raises(ValueError, match="belongs to another source"):
        Offsets.from_json({"orders": {"0": 5}})
