"""Failed logins: each costs its client a growing delay, and too many lock it out for a while.

Failures are counted for each user at each address, for each address, and for each user. The first count always applies.
The other two do not apply where that user has logged in before: a crowd at one address, or a botnet, must not lock out
those who are known. All tables are limited; the entry that was used longest ago is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from penstock.health import Usage

ENTRIES_MAX: Final = 10_000
# How many times as many failures an address, or a user, may have.
MANY: Final = 10
DELAY_S: Final = 0.05
DELAY_S_MAX: Final = 2.0


@dataclass(slots=True)
class _Failures:
    count: int = 0
    until_us: int = 0


class _Table:
    def __init__(self) -> None:
        self.entries: OrderedDict[tuple[str, str], _Failures] = OrderedDict()

    def get(self, key: tuple[str, str], now_us: int) -> _Failures:
        found = self.entries.get(key)
        return _Failures() if found is None or found.until_us <= now_us else found

    def put(self, key: tuple[str, str], failures: _Failures) -> None:
        self.entries[key] = failures
        self.entries.move_to_end(key)
        if len(self.entries) > ENTRIES_MAX:
            self.entries.popitem(last=False)


class Throttle:
    def __init__(self, failures_max: int, lockout_s: int) -> None:
        """`failures_max`: failures of a user at an address within `lockout_s`, by which they are locked out for as
        long; 0: never."""
        self._failures_max = failures_max
        self._lockout_us = lockout_s * 1_000_000
        self._tables = (_Table(), _Table(), _Table())
        # Users that have logged in at an address.
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def locked_s(self, user: str, address: str, now_us: int) -> float:
        """Return for how many seconds a login is refused unseen; 0: it is not."""
        if not self._failures_max:
            return 0
        until_us = 0
        is_known = (user, address) in self._known
        for table, key, limit in self._counts(user, address):
            failures = table.get(key, now_us)
            if failures.count >= limit and not (is_known and limit > self._failures_max):
                until_us = max(until_us, failures.until_us)
        return max(0, until_us - now_us) / 1e6

    def failed(self, user: str, address: str, now_us: int) -> float:
        """Count a failed login. Return for how many seconds its answer is held back."""
        count = 0
        for table, key, limit in self._counts(user, address):
            failures = table.get(key, now_us)
            # A lock-out is not extended by attempts that are refused unseen.
            table.put(key, _Failures(failures.count + 1, now_us + self._lockout_us))
            if limit == self._failures_max:
                count = failures.count
        return min(DELAY_S_MAX, DELAY_S * (1 << min(count, 10)))

    def succeeded(self, user: str, address: str) -> None:
        self._tables[0].entries.pop((user, address), None)
        self._known[user, address] = None
        self._known.move_to_end((user, address))
        if len(self._known) > ENTRIES_MAX:
            self._known.popitem(last=False)

    def usage(self) -> dict[str, Usage]:
        return {"failed_logins": Usage(max(len(table.entries) for table in self._tables), ENTRIES_MAX)}

    def _counts(self, user: str, address: str) -> list[tuple[_Table, tuple[str, str], int]]:
        one, at_address, of_user = self._tables
        found = [(one, (user, address), self._failures_max)]
        if address:
            found.append((at_address, ("", address), MANY * self._failures_max))
        if user:
            found.append((of_user, (user, ""), MANY * self._failures_max))
        return found
