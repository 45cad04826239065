"""The one way to report the result of work that takes a while: an append, an acknowledgement, a published run.

The caller creates an Outcome, or gets one. The worker settles it once: without an error when the work is as durable as
promised, otherwise with the reason why it is not done.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError

Callback = Callable[[PenstockError | None], object]


class Outcome:
    __slots__ = ("_callbacks", "error", "is_settled")

    def __init__(self, callback: Callback | None = None) -> None:
        self.is_settled = False
        # Why it failed; None while it is not settled, and if it succeeded.
        self.error: PenstockError | None = None
        self._callbacks: list[Callback] = [] if callback is None else [callback]

    def then(self, callback: Callback) -> None:
        """Call `callback` with the error, or None: when it is settled, or at once if it is."""
        if self.is_settled:
            callback(self.error)
        else:
            self._callbacks.append(callback)

    def check(self) -> None:
        """Raise the error, if it failed."""
        if self.error is not None:
            raise self.error

    def settle(self, error: PenstockError | None = None) -> None:
        assert not self.is_settled, "an outcome is settled once"
        self.is_settled = True
        # Without the traceback: its frames would keep the outcome and what was to be stored alive.
        self.error = None if error is None else error.with_traceback(None)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)
