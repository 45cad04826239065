from __future__ import annotations

import pytest

from penstock.errors import QuotaExceeded
from penstock.security.quotas import Meter, Quotas
from penstock.security.throttle import ENTRIES_MAX, MANY, Throttle

SECOND = 1_000_000


def test_a_user_at_an_address_is_locked_out_for_a_while() -> None:
    throttle = Throttle(failures_max=3, lockout_s=60)
    delays = [throttle.failed("ann", "10.0.0.1", 0) for _ in range(3)]

    assert delays == sorted(delays)
    assert throttle.locked_s("ann", "10.0.0.1", 10 * SECOND) == 50
    assert throttle.locked_s("ann", "10.0.0.2", 10 * SECOND) == 0
    assert throttle.locked_s("bob", "10.0.0.1", 10 * SECOND) == 0
    assert throttle.locked_s("ann", "10.0.0.1", 60 * SECOND) == 0


def test_success_forgets_the_failures() -> None:
    throttle = Throttle(failures_max=3, lockout_s=60)
    for _ in range(2):
        throttle.failed("ann", "10.0.0.1", 0)
    throttle.succeeded("ann", "10.0.0.1")
    throttle.failed("ann", "10.0.0.1", 0)
    assert throttle.locked_s("ann", "10.0.0.1", 0) == 0


def test_a_crowd_locks_out_its_address_but_not_those_who_are_known_there() -> None:
    throttle = Throttle(failures_max=3, lockout_s=60)
    throttle.succeeded("ann", "10.0.0.1")
    for number in range(MANY * 3):
        throttle.failed(f"guess-{number}", "10.0.0.1", 0)
    assert throttle.locked_s("carol", "10.0.0.1", 0) == 60
    assert throttle.locked_s("ann", "10.0.0.1", 0) == 0


def test_guesses_from_everywhere_lock_out_the_user_but_not_where_it_is_known() -> None:
    throttle = Throttle(failures_max=3, lockout_s=60)
    throttle.succeeded("ann", "10.0.0.1")
    for number in range(MANY * 3):
        throttle.failed("ann", f"10.1.0.{number}", 0)
    assert throttle.locked_s("ann", "10.2.0.1", 0) == 60
    assert throttle.locked_s("ann", "10.0.0.1", 0) == 0


def test_the_tables_are_limited() -> None:
    throttle = Throttle(failures_max=3, lockout_s=60)
    for number in range(ENTRIES_MAX + 10):
        throttle.failed(f"user-{number}", f"{number}", 0)
        throttle.succeeded(f"user-{number}", "x")
    assert throttle.usage()["failed_logins"].used <= ENTRIES_MAX


def test_none_is_locked_out_if_that_is_off() -> None:
    throttle = Throttle(failures_max=0, lockout_s=60)
    for _ in range(100):
        throttle.failed("ann", "10.0.0.1", 0)
    assert throttle.locked_s("ann", "10.0.0.1", 0) == 0


# Quotas.


def test_a_rate_is_paid_for_by_waiting() -> None:
    meter = Meter("ann", Quotas(messages_in_s=100), 0)
    assert meter.took("in", 100, 10, 0) == 0  # the burst
    assert meter.took("in", 50, 10, 0) == 0.5
    assert meter.took("in", 50, 10, SECOND // 2) == 0.5
    assert meter.took("out", 1000, 10, 0) == 0


def test_only_a_debt_of_many_seconds_is_refused() -> None:
    meter = Meter("ann", Quotas(bytes_in_s=100), 0)
    meter.took("in", 1, 1100, 0)
    meter.check_rates(0)
    meter.took("in", 1, 100, 0)
    with pytest.raises(QuotaExceeded, match="quota bytes_in_s of user ann"):
        meter.check_rates(0)
    meter.check_rates(2 * SECOND)


def test_connections_are_counted() -> None:
    meter = Meter("ann", Quotas(connections=2), 0)
    for _ in range(2):
        meter.begin("connections")
    with pytest.raises(QuotaExceeded, match="quota connections of user ann: 2 of 2 are in use"):
        meter.begin("connections")
    meter.end("connections")
    meter.begin("connections")
    assert meter.usage(0)["connections"] == 2
