"""What a topic may ask of its logs, and how that is remembered."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from penstock.log.policy import PARTITIONS_MAX, Cleanup, Dedup, Durability, OnDamage, Policy, Topic
from penstock.schema import shown
from penstock.store.meta import Change, Meta
from penstock.store.store import Store
from penstock.testing import FaultyFiles, ManualClock
from penstock.topic_schema.compatibility import Compatibility
from tests.support.stores import DATA

FULL = Policy(
    durability=Durability.FLUSH,
    segment_bytes=5000,
    cleanup=Cleanup.COMPACT,
    retain_ms=1,
    retain_bytes=2,
    retain_for="group",
    tombstone_ms=3,
    dedup=Dedup.PAYLOAD,
    dedup_window_ms=4,
    ack_deadline_ms=5,
    deliveries_max=6,
    dead_letters=False,
    refresh_wait_ms=7,
    on_damage=OnDamage.SKIP,
    schema_compatibility=Compatibility.FULL,
    schema_enforced=True,
)


def test_a_policy_is_the_same_after_a_round_trip() -> None:
    default = Policy()
    assert all(getattr(FULL, field.name) != getattr(default, field.name) for field in fields(Policy))
    for policy in (default, FULL):
        again = Policy.from_json(json.loads(json.dumps(policy.to_json())))
        assert again == policy
        assert [type(getattr(again, field.name)) for field in fields(Policy)] == [
            type(getattr(policy, field.name)) for field in fields(Policy)
        ]


def test_what_was_written_before_a_name_was_known_has_its_default() -> None:
    older = {
        "durability": "flush",
        "segment_bytes": 5000,
        "cleanup": "compact",
        "retain_ms": None,
        "retain_bytes": 2,
        "tombstone_ms": 3,
    }
    policy = Policy.from_json(older)
    assert (policy.durability, policy.segment_bytes, policy.retain_bytes) == (Durability.FLUSH, 5000, 2)
    assert (policy.dedup, policy.dedup_window_ms, policy.ack_deadline_ms) == (Dedup.ID, None, 5000)
    assert (policy.deliveries_max, policy.dead_letters) == (None, True)
    assert Policy.from_json({}) == Policy()


def test_a_store_opens_with_a_topic_that_was_written_before_a_name_was_known() -> None:
    disk = FaultyFiles()
    older = {"name": "orders", "partitions": 2, "policy": {"durability": "fsync", "segment_bytes": 5000}}
    with Store(DATA, files=disk, meta=Meta(None), clock=ManualClock()) as store:
        store._write_state([Change("topic", "1", older), Change("store", "next_topic", 2)])
    with Store(DATA, files=disk, meta=Meta(None), clock=ManualClock()) as store:
        assert store.topics == [Topic(1, "orders", 2, Policy(segment_bytes=5000))]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'size' is unknown: there are durability, "):
        Policy.from_json({"size": 1, "durability": "fsync", "colour": "red"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("segment_bytes", 4095, "an integer, 4096 to 2147483648"),
        ("segment_bytes", (2 << 30) + 1, "an integer, 4096 to 2147483648"),
        ("segment_bytes", None, "an integer, 4096 to 2147483648"),
        ("retain_ms", 0, "a positive integer, or none"),
        ("retain_bytes", 0, "a positive integer, or none"),
        ("tombstone_ms", -1, "a non-negative integer"),
        ("dedup_window_ms", 0, "a positive integer, or none"),
        ("ack_deadline_ms", 0, "a positive integer"),
        ("ack_deadline_ms", None, "a positive integer"),
        ("ack_deadline_ms", "5", "a positive integer"),
        ("ack_deadline_ms", 1.5, "a positive integer"),
        ("deliveries_max", 0, "an integer, 1 to 1000, or none"),
        ("deliveries_max", 1001, "an integer, 1 to 1000, or none"),
        ("deliveries_max", True, "an integer, 1 to 1000, or none"),
        ("durability", "twice", "fsync or flush"),
        ("cleanup", "never", "delete or compact"),
        ("dedup", "sometimes", "off, id or payload"),
        ("dedup", None, "off, id or payload"),
        ("refresh_wait_ms", 0, "a positive integer"),
        ("dead_letters", 1, "true or false"),
        ("dead_letters", None, "true or false"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    expected = f"{name} is {shown(value)}: it must be {allowed}"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        Policy.from_json({name: value})
    with pytest.raises(ValueError, match=f"^{expected}$"):
        Policy(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment_bytes", 4096),
        ("segment_bytes", 2 << 30),
        ("retain_ms", 1),
        ("tombstone_ms", 0),
        ("dedup_window_ms", 1),
        ("ack_deadline_ms", 1),
        ("deliveries_max", 1),
        ("deliveries_max", 1000),
    ],
)
def test_the_bounds_themselves_are_allowed(name: str, value: int) -> None:
    assert getattr(Policy.from_json({name: value}), name) == value


@pytest.mark.parametrize(
    ("dedup", "window_ms", "window_us"),
    [
        (Dedup.ID, None, 300_000_000),
        (Dedup.PAYLOAD, None, 1_800_000_000),
        (Dedup.ID, 7, 7_000),
        (Dedup.PAYLOAD, 7, 7_000),
        (Dedup.OFF, None, 0),
        (Dedup.OFF, 7, 0),
    ],
)
def test_how_long_a_repetition_is_known(dedup: Dedup, window_ms: int | None, window_us: int) -> None:
    assert Policy(dedup=dedup, dedup_window_ms=window_ms).dedup_window_us == window_us


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1, 1.5, "2", None, True])
def test_a_topic_has_1_to_256_partitions(partitions: Any) -> None:
    assert [Topic(1, "orders", allowed, FULL).partitions for allowed in (1, 256)] == [1, PARTITIONS_MAX]
    with pytest.raises(ValueError, match=f"^partitions is {shown(partitions)}: it must be an integer, 1 to 256$"):
        Topic(1, "orders", partitions, FULL)


def test_a_topic_with_too_many_partitions_is_not_created() -> None:
    disk = FaultyFiles()
    with Store(DATA, files=disk, meta=Meta(None), clock=ManualClock()) as store:
        with pytest.raises(ValueError, match="1 to 256"):
            store.create_topic("orders", partitions=257)
        assert (store.topics, store.create_topic("next").id) == ([], 1)
