"""A consumer: a function that is called with messages, how it wants them, and what became of them so far."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias, get_args

from penstock.app.retry import Retry
from penstock.client.message import Message

# Plain functions or `async def`; what they return is ignored.
MessageHandler: TypeAlias = Callable[[Message], object]
BatchHandler: TypeAlias = Callable[[list[Message]], object]
# It gets the message, or the first of the batch, and what the handler raised.
ErrorHandler: TypeAlias = Callable[[Message, Exception], object]

Mode: TypeAlias = Literal["shared", "partitioned"]
Start: TypeAlias = str | int | datetime | timedelta | float

_AT_LEAST_1: Final = ("concurrency", "batch", "buffer")


@dataclass(slots=True, kw_only=True, eq=False)
class Consumer:
    """Its figures count from when it was made, over all runs of its app. They are changed by the app's loop only."""

    name: str
    function: MessageHandler | BatchHandler
    pattern: str
    group: str
    mode: Mode
    retry: Retry
    on_error: ErrorHandler | None
    concurrency: int
    start: Start
    batch: int | None
    buffer: int

    handled: int = field(default=0, init=False)  # messages that went well
    failed: int = field(default=0, init=False)  # calls that raised something
    retried: int = field(default=0, init=False)  # messages that were given back, or that waited to be tried again
    skipped: int = field(default=0, init=False)  # messages that count as done though they failed
    rejected: int = field(default=0, init=False)  # messages that were made dead letters here
    paused: int = field(default=0, init=False)  # times
    is_paused: bool = field(default=False, init=False)
    # Whoever runs it wants to know that it was paused or resumed.
    changed: Callable[[], object] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for function in (self.function, self.on_error):
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(
                    f"{function.__name__} is a generator: called, it would not run, and nobody would notice"
                )
        if not self.group:
            raise ValueError("a consumer needs a group: its name is what the broker remembers the position by")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}, it must be one of {', '.join(get_args(Mode))}")
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}, it must be at least 1")

    def pause(self) -> None:
        """Handlers that run finish, and no others begin, until `resume`. From any thread."""
        if not self.is_paused:
            self.is_paused = True
            self.paused += 1
        self._tell()

    def resume(self) -> None:
        self.is_paused = False
        self._tell()

    def _tell(self) -> None:
        changed = self.changed
        if changed is not None:
            changed()
