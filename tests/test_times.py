"""Times as text: one parser for all that accept a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.times import read_delay, read_duration, read_moment, read_place

NOW = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
NOW_US = 1_700_000_000_000_000
HOUR_US = 3_600_000_000


@pytest.mark.parametrize(
    ("given", "time_us"),
    [
        ("2023-11-14T22:13:20Z", NOW_US),
        ("2023-11-14T23:13:20+01:00", NOW_US),
        ("2023-11-14 22:13:20", NOW_US),
        ("@1700000000", NOW_US),
        ("1700000000.123457", NOW_US + 123_457),
        ("-1h", NOW_US - HOUR_US),
        ("1h", NOW_US + HOUR_US),
        ("+1.5h", NOW_US + HOUR_US * 3 // 2),
        ("-500ms", NOW_US - 500_000),
        (1_700_000_000, NOW_US),
        (1_700_000_000.5, NOW_US + 500_000),
        (NOW, NOW_US),
        (timedelta(hours=-1), NOW_US - HOUR_US),
    ],
)
def test_a_time_is_iso_seconds_since_1970_or_relative(given: Any, time_us: int) -> None:
    assert read_moment(given, NOW_US) == time_us


@pytest.mark.parametrize("given", ["", "soon", "22:13", "5w", "--5m", "- 5m", "@", "1e9", "inf", "٣", None, True, []])
def test_anything_else_is_refused_with_what_is_allowed(given: Any) -> None:
    with pytest.raises(ValueError, match=r"it must be a time like 2030-.*@1900000000, or relative to now like -5m "):
        read_moment(given, NOW_US)


@pytest.mark.parametrize("given", ["@1700000000000", 1_700_000_000_000, "-999999d", timedelta(days=-999_999)])
def test_milliseconds_are_not_taken_for_seconds(given: Any) -> None:
    with pytest.raises(ValueError, match="not in the years 1 to 9999: give seconds since 1970, not milliseconds"):
        read_moment(given, NOW_US)


def test_a_datetime_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        read_moment(datetime(2030, 1, 1), NOW_US)  # noqa: DTZ001


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("12", 12),
        (12, 12),
        ("@1700000000", NOW),
        (1_700_000_000.0, NOW),
        ("-1h", NOW - timedelta(hours=1)),
        (timedelta(hours=-1), NOW - timedelta(hours=1)),
        ("2023-11-14T22:13:20", NOW),
        (NOW, NOW),
    ],
)
def test_a_whole_number_is_an_offset_where_one_can_be(given: Any, place: Any) -> None:
    assert read_place(given, NOW_US) == place


@pytest.mark.parametrize("given", ["soon", "-1", "1.5", str(1 << 63), "9" * 30, -1, 1 << 63, True, None])
def test_any_other_place_is_refused_with_what_is_allowed(given: Any) -> None:
    with pytest.raises(ValueError, match="it must be earliest, latest, an offset, a time like"):
        read_place(given, NOW_US)


@pytest.mark.parametrize("given", ["1h", "+1h", timedelta(hours=1)])
def test_a_place_cannot_be_relative_to_now_and_in_the_future(given: Any) -> None:
    with pytest.raises(ValueError, match="it is in the future, use a minus for the past, such as -5m"):
        read_place(given, NOW_US)


@pytest.mark.parametrize(
    ("text", "delay"),
    [("5", 5.0), ("0.5", 0.5), ("500ms", 0.5), ("+2h", 7200.0), ("@1700000000", NOW), ("2023-11-14T22:13:20Z", NOW)],
)
def test_a_delay_is_seconds_a_duration_or_a_time(text: str, delay: object) -> None:
    assert read_delay(text) == delay


@pytest.mark.parametrize("text", ["soon", "-5s", "-5", "5w", ""])
def test_any_other_delay_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"it must be seconds, a duration like 500ms, .*, or a time like"):
        read_delay(text)


def test_a_duration_has_a_unit() -> None:
    assert read_duration("1.5m") == 90_000_000
    with pytest.raises(ValueError, match="must be like 500ms, 5s, 2m, 1h or 1d"):
        read_duration("90")
