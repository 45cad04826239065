"""The audit trail: who did what, from where, and what came of it.

Events are JSON. The broker stores them in the topic `$audit`; until it takes them, a limited number waits here.
Failures and refusals, which any client can cause, are limited in number; what was left out is counted in the next event
of the same kind. No event contains credentials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.clock import Clock
from penstock.health import Usage
from penstock.model.subject import clean

WAITING_MAX: Final = 10_000
# Failures and refusals: this many at once, and one more each so many µs.
BURST: Final = 100
EACH_US: Final = 100_000
_LIMITED: Final = ("denied", "failed")
_TEXT_CHARACTERS: Final = 500

Event = dict[str, Any]


class Audit:
    def __init__(self, clock: Clock, *, is_on: bool) -> None:
        self._clock = clock
        self.is_on = is_on
        self._waiting: deque[Event] = deque(maxlen=WAITING_MAX)
        # By result: how many more may be recorded, as of when, and how many were left out.
        self._rooms = dict.fromkeys(_LIMITED, float(BURST))
        self._at_us = dict.fromkeys(_LIMITED, clock.monotonic_us())
        self._left_out = dict.fromkeys(_LIMITED, 0)
        # Called when there are events to take.
        self.on_event: Callable[[], None] | None = None

    def record(
        self,
        what: str,
        *,
        user: str,
        address: str,
        door: str = "",
        result: str = "ok",
        resource: str = "",
        why: str = "",
    ) -> None:
        """Record an event. `what`: "login", an action, or a call; `result`: ok, denied or failed."""
        if not self.is_on:
            return
        more: Event = {}
        if result in self._rooms:
            if not self._has_room(result):
                self._left_out[result] += 1
                return
            if self._left_out[result]:
                more["left_out"], self._left_out[result] = self._left_out[result], 0
        texts = {"what": what, "user": user, "address": address, "door": door, "resource": resource, "why": why}
        found = {name: clean(text, _TEXT_CHARACTERS) for name, text in texts.items() if text}
        self._waiting.append({"time_us": self._clock.now_us(), **found, "result": result, **more})
        if self.on_event is not None:
            self.on_event()

    def take(self, count: int) -> list[Event]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def put_back(self, events: list[Event]) -> None:
        self._waiting.extendleft(reversed(events[: WAITING_MAX - len(self._waiting)]))

    def usage(self) -> dict[str, Usage]:
        return {"audit_events": Usage(len(self._waiting), WAITING_MAX)}

    def _has_room(self, result: str) -> bool:
        now_us = self._clock.monotonic_us()
        came = (now_us - self._at_us[result]) / EACH_US
        self._rooms[result], self._at_us[result] = min(BURST, self._rooms[result] + came), now_us
        if self._rooms[result] < 1:
            return False
        self._rooms[result] -= 1
        return True
