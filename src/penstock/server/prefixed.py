"""A connection at the prefixed door: frames to whoever speaks its protocol, and back.

`qb.py` and `cursus.py` are the two protocols. This is what they share: the connection, what is published, and the
groups that it is a member of.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.broker.group import Group
from penstock.broker.intake import Receipt
from penstock.broker.member import Member, Place
from penstock.broker.topic import RESERVED, ServedTopic
from penstock.errors import BadSubject, Closed, PenstockError, Unauthorized, UnknownTopic
from penstock.run import Run, payload_bytes
from penstock.server.connection import INTERNAL_ERROR, TURN_S, Connection
from penstock.server.cursus import Cursus
from penstock.server.gate import HANDSHAKE_BYTES_MAX
from penstock.server.pending_replies import SLICE_MESSAGES, PendingReplies
from penstock.server.qb import Qb
from penstock.subject import is_subject
from penstock.wire.prefixed import FRAME_BYTES_MAX, Dialect, FrameReader, Message, Style

if TYPE_CHECKING:
    from penstock.server.server import Server

# A frame, unless a single message may be larger; and what such a frame has besides the message.
SERVED_BYTES_MAX: Final = 16 << 20
MORE_BYTES: Final = 1 << 20

Frame = Message | bytes


class Speaker(Protocol):
    """One of the two protocols, for one connection."""

    def credentials(self, frame: Frame) -> Mapping[str, Any] | None:
        """Return the credentials that a first frame carries; None if it is none that can."""
        ...

    def deny(self, frame: Frame) -> None:
        """Say that a first frame does not admit its connection."""
        ...

    def do(self, frames: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        """Take one frame, or several that go together; what those behind them must wait for, if they must."""
        ...

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None: ...

    def fail(self, member: Member, error: PenstockError) -> None: ...

    def refuse(self, error: PenstockError) -> None:
        """Say what is wrong, where it is nobody's answer."""
        ...

    def beat(self, silent_s: float) -> float:
        """A sign of life is due, after so long without one of the peer's; when the next one is, in seconds."""
        ...

    def end(self) -> None:
        """The connection is gone."""
        ...


class PrefixedSession(Connection, asyncio.Protocol):
    type = "prefixed"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.pending_replies = PendingReplies(self, self._stopped)
        # The groups that it is a member of, by what it calls them; one may have it as several members.
        self.memberships: dict[str, list[tuple[Member, Group]]] = {}
        payload_bytes_max = server.config.server.payload_bytes_max
        self._frame_bytes_max = min(max(SERVED_BYTES_MAX, payload_bytes_max + MORE_BYTES), FRAME_BYTES_MAX)
        self._reader = FrameReader(
            HANDSHAKE_BYTES_MAX if server.gate.needs_auth else self._frame_bytes_max, frames_max=SLICE_MESSAGES
        )
        self._speaker: Speaker | None = None
        self._heard_at = 0.0
        # Why it is closed, when the answers that are owed are given.
        self._goodbye: PenstockError | None = None
        # Frames that wait for one that is being awaited; None: none is.
        self._waiting: deque[Frame] | None = None

    # From the transport.

    def data_received(self, data: bytes) -> None:
        self.received(len(data))
        self._heard_at = asyncio.get_running_loop().time()
        frames = self._reader.feed(data)
        if self.peer.is_closing:
            return
        if self._speaker is None and self._reader.dialect is not None:
            self._speaker = Qb(self) if self._reader.dialect is Dialect.QB else Cursus(self)
            self.ping_at = self._heard_at + self._speaker.beat(0)
        if frames:
            if self._waiting is not None:
                self._waiting.extend(frames)
            else:
                self._handle(deque(frames))
        elif self._reader.refusal is not None:
            self._refuse(self._reader.refusal)
        if not self.is_admitted and not self.peer.is_closing and not self.server.gate.received(self, len(data)):
            self._refuse(Unauthorized(f"{HANDSHAKE_BYTES_MAX} bytes were sent without credentials"))
        if self._waiting is None:
            self.expect(self._reader.expected, is_next=bool(frames))

    def pause_writing(self) -> None:
        self.peer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.read_on()
        for memberships in list(self.memberships.values()):
            for _, group in memberships:
                group.wake()

    def end(self) -> Iterator[None]:
        self._reader.clear()
        if self._speaker is not None:
            self._speaker.end()
        for name in list(self.memberships):
            self.call(self.leave, name)
            yield

    def tell_fault(self) -> None:
        if self._speaker is not None:
            self._speaker.refuse(INTERNAL_ERROR)

    def read_on(self) -> None:
        if self._waiting is None and not self.pending_replies.is_stopping:
            self.peer.read_on()

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        assert self._speaker is not None, "it has subscribed"
        self.peer.count_sent(len(run), payload_bytes(run))
        self._speaker.send(member, place, run, attempts)

    def has_published(self, place: Place, offset: int) -> bool:
        return False  # it hears itself

    def fail(self, member: Member, error: PenstockError) -> None:
        assert self._speaker is not None, "it has subscribed"
        self._speaker.fail(member, error)

    # For the server.

    def ping(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._speaker is not None:
            self.ping_at = now + self._speaker.beat(now - self._heard_at)

    def expire(self) -> None:
        self.server.counters.silent += 1
        self._refuse(Closed("no whole frame came in time"))

    def stop(self) -> None:
        """The server stops: no more frames, but the answers to what was published."""
        if self.peer.is_connected and not self.pending_replies.is_stopping:
            self.peer.hold()
            self.pending_replies.stop()

    def _stopped(self) -> None:
        # Whoever awaits something has not answered it yet.
        if self._waiting is None:
            self._close()

    def _close(self) -> None:
        if self._goodbye is not None and self._speaker is not None and not self.peer.is_closing:
            self._speaker.refuse(self._goodbye)
        self.peer.close()

    @property
    def subscriptions(self) -> dict[tuple[str, int], tuple[Member, Group]]:
        return {
            (name, number): membership
            for name, memberships in self.memberships.items()
            for number, membership in enumerate(memberships)
        }

    # Frames.

    def _handle(self, frames: deque[Frame]) -> None:
        assert self._speaker is not None, "there are frames"
        loop = asyncio.get_running_loop()
        until = loop.time() + TURN_S
        while frames and not (self.peer.is_closing or self.pending_replies.is_stopping):
            if not self.is_admitted:
                if not self.server.gate.admit(self, self._speaker.credentials(frames[0])):
                    self._speaker.deny(frames[0])
                    self.peer.close()
                    return
                self._reader.bytes_max = self._frame_bytes_max
            waits = self._speaker.do(frames)
            if waits is not None:
                self._waiting = frames
                self.peer.hold()
                self.spawn(self._wait(waits))
                return
            if frames and loop.time() > until:
                break
        if self.peer.is_closing or self.pending_replies.is_stopping:
            return
        if frames or self._reader.has_more:
            # Let the others have a turn.
            self._waiting = frames
            self.peer.hold()
            self.spawn(self._wait(asyncio.sleep(0)))
        elif self._reader.refusal is not None:
            self._refuse(self._reader.refusal)

    async def _wait(self, waits: Coroutine[Any, Any, None]) -> None:
        """Let something take its time; what comes behind it waits."""
        await waits
        frames, self._waiting = self._waiting or deque(), None
        if self.pending_replies.is_stopping:
            self._close()
        elif not self.peer.is_closing:
            if not frames and self._reader.has_more:
                frames.extend(self._reader.feed(b""))
            self._handle(frames)
            if self._waiting is None:
                self.expect(self._reader.expected, is_next=True)
            self.read_on()

    def _refuse(self, error: PenstockError) -> None:
        """Give the answers that are owed, say why, and close."""
        self.server.counters.protocol_errors += 1
        self._goodbye = error
        self.stop()

    # For the two protocols.

    @property
    def style(self) -> Style:
        return self._reader.style

    def publish(self, run: Run, told: Callable[[Receipt], None]) -> Coroutine[Any, Any, None] | None:
        return self.pending_replies.publish(run, told)

    def topic_of(self, subject: bytes) -> ServedTopic:
        """The one that stores a subject: these protocols make no topic by publishing to it."""
        if not is_subject(subject) or subject.startswith(RESERVED):
            raise BadSubject(f"{subject.decode(errors='replace')!r} cannot be the name of a topic")
        topic = self.broker.topics.owner(subject)
        if topic is None:
            raise UnknownTopic(f"topic '{subject.decode()}' does not exist")
        if topic.refusal is not None:
            raise topic.refusal
        return topic

    async def join(self, name: str, group: Group, members: list[Member]) -> None:
        """Become these members of a group; what it sends them comes behind the answer to this."""
        assert group.name is not None, "it has one"
        self.memberships[name] = [(member, group) for member in members]
        try:
            for member in members:
                await self.broker.join(group.name, group.pattern, member, group.mode)
        except PenstockError:
            self.leave(name)
            raise
        if not self.peer.is_connected:
            self.leave(name)

    def leave(self, name: str) -> None:
        for member, group in self.memberships.pop(name, ()):
            self.broker.leave(group, member)

    def group_of(self, member: Member) -> tuple[str, Group]:
        for name, memberships in self.memberships.items():
            for each, group in memberships:
                if each is member:
                    return name, group
        raise AssertionError("it is a member")
