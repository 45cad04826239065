"""The replies that a client is owed.

Some dialects reply in the order of the requests: `reserve` a reply, `fill` it when it is known, and it goes out when
those before it have. Others reply as soon as they know: `begin` and `end` only count. Either way `finish` waits for
the replies that are due.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.doors.peer import Peer

# Replies that wait for messages or for the disk. With more of them, the connection is not read from.
REPLIES_MAX: Final = 10_000


class Reply:
    """The place of a reply among the others. It is sent when `data` is known and nothing holds it."""

    __slots__ = ("data", "holds", "on_next")

    def __init__(self, data: bytes | None = None, on_next: Callable[[Reply], None] | None = None) -> None:
        self.data = data
        # Called once, when all replies before this one are sent. It may add holds.
        self.on_next = on_next
        self.holds = 0


class Replies:
    def __init__(self, peer: Peer, has_room: Callable[[], None]) -> None:
        """`has_room` is called when the client may send requests again."""
        self._peer = peer
        self._has_room = has_room
        self._queue: deque[Reply] = deque()
        self._count = 0
        self._done: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._queue) + self._count

    @property
    def is_full(self) -> bool:
        return len(self._queue) > REPLIES_MAX

    # In order.

    def send(self, data: bytes) -> None:
        """Reply, behind the replies that are due."""
        if self._queue:
            self._queue.append(Reply(data))
            self.flush()
        elif data:
            self._peer.answer(data)

    def reserve(self) -> Reply:
        reply = Reply()
        self._queue.append(reply)
        return reply

    def add(self, reply: Reply) -> None:
        self._queue.append(reply)
        self.flush()

    def fill(self, reply: Reply, data: bytes) -> None:
        reply.data = data
        self.flush()

    def flush(self) -> None:
        queue = self._queue
        was_full = self.is_full
        ready = []
        while queue and (data := queue[0].data) is not None:
            reply = queue[0]
            if reply.on_next is not None:
                on_next, reply.on_next = reply.on_next, None
                on_next(reply)
            if reply.holds:
                break
            ready.append(data)
            queue.popleft()
        if data := b"".join(ready):
            self._peer.answer(data)
        if self._done is not None:
            self._end_if_done()
        elif was_full and not self.is_full:
            self._has_room()

    # As they are known.

    def begin(self) -> None:
        self._count += 1

    def end(self) -> None:
        """A reply was sent, or is sent in this turn of the loop."""
        self._count -= 1
        if self._done is not None:
            asyncio.get_running_loop().call_soon(self._end_if_done)

    # The end.

    def finish(self, done: Callable[[], None]) -> None:
        """Call `done` when all replies that are due are sent. They wait for messages no longer."""
        if self._done is None:
            self._done = done
            for reply in self._queue:
                reply.on_next, reply.holds = None, 0
            self.flush()

    def clear(self) -> None:
        self._queue.clear()

    def _end_if_done(self) -> None:
        done = self._done
        if done is not None and not len(self):
            self._done = _nothing
            done()


def _nothing() -> None:
    pass
