"""A consumer: a function that is called with messages, its options, and its counters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from penstock.app.retry import Retry
from penstock.client.message import Message
from penstock.client.values import Place

# Plain functions or `async def`. The result is ignored.
MessageHandler: TypeAlias = Callable[[Message], object]
BatchHandler: TypeAlias = Callable[[list[Message]], object]
# Called with the message, or the first of the batch, and the exception that the handler raised.
ErrorHandler: TypeAlias = Callable[[Message, Exception], object]

Mode: TypeAlias = Literal["shared", "partitioned"]

_AT_LEAST_1: Final = ("concurrency", "batch", "buffer")


@dataclass(slots=True, kw_only=True, eq=False)
class Consumer:
    """A registered function. Its counters start at 0 and continue over all runs of the app; only the app's loop changes
    them."""

    name: str
    function: MessageHandler | BatchHandler
    pattern: str
    group: str
    mode: Mode
    retry: Retry
    on_error: ErrorHandler | None
    concurrency: int
    start: Place
    batch: int | None
    buffer: int

    handled: int = field(default=0, init=False)  # messages that succeeded
    failed: int = field(default=0, init=False)  # calls that raised
    retried: int = field(default=0, init=False)  # messages given back to the broker, or kept for a retry
    skipped: int = field(default=0, init=False)  # messages that failed and were acknowledged
    rejected: int = field(default=0, init=False)  # messages that were dead-lettered here
    paused: int = field(default=0, init=False)  # how often it was paused
    is_paused: bool = field(default=False, init=False)
    # Called when the consumer is paused or resumed.
    changed: Callable[[], object] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for function in (self.function, self.on_error):
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(
                    f"{function.__name__} is a generator: a call would not run its body, use a plain or async function"
                )
        if not self.group:
            raise ValueError("a consumer needs a group: the broker stores the position under its name")
        if self.mode not in get_args(Mode):
            raise ValueError(f"invalid mode {self.mode!r}: it must be one of {', '.join(get_args(Mode))}")
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"invalid {name} {value!r}: it must be at least 1")

    def pause(self) -> None:
        """Start no more handlers until `resume`; running ones finish. Any thread may call this."""
        if not self.is_paused:
            self.is_paused = True
            self.paused += 1
        self._notify()

    def resume(self) -> None:
        """Continue after `pause`. Any thread may call this."""
        self.is_paused = False
        self._notify()

    def _notify(self) -> None:
        changed = self.changed
        if changed is not None:
            changed()
