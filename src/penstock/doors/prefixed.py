"""What QB and Cursus share: the codec, the end of a connection, topics and memberships.

Both protocols subscribe by name. A name stands for one or more members of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.broker.group import Group
from penstock.broker.member import Member
from penstock.broker.topic import ServedTopic, is_reserved
from penstock.doors.dialect import TLS_REQUIRED, Ending
from penstock.doors.gate import HANDSHAKE_BYTES_MAX
from penstock.doors.publishing import SLICE_MESSAGES
from penstock.errors import BadSubject, Closed, PenstockError, Unauthorized, UnknownTopic
from penstock.model.subject import is_subject
from penstock.wire.prefixed import FRAME_BYTES_MAX, PrefixedReader

if TYPE_CHECKING:
    from penstock.doors.session import Session

# The size of a frame, unless a single message may be larger; and what such a frame has besides the message.
SERVED_BYTES_MAX: Final = 16 << 20
MORE_BYTES: Final = 1 << 20

_REASONS: Final = {
    Ending.PLAIN: TLS_REQUIRED,
    Ending.UNAUTHORIZED: Unauthorized(f"{HANDSHAKE_BYTES_MAX} bytes were sent without credentials"),
    Ending.EXPIRED: Closed("no whole frame came in time"),
    Ending.FAULT: PenstockError("internal error"),
}


def open_reader(session: Session) -> PrefixedReader:
    """Return the codec of a connection, with the limits for clients without credentials if the server wants some."""
    bytes_max = HANDSHAKE_BYTES_MAX if session.shared.gate.needs_auth else _frame_bytes_max(session)
    return PrefixedReader(bytes_max, frames_max=SLICE_MESSAGES)


def admit(session: Session, reader: PrefixedReader) -> None:
    reader.bytes_max = _frame_bytes_max(session)


def _frame_bytes_max(session: Session) -> int:
    return min(max(SERVED_BYTES_MAX, session.shared.settings.payload_bytes_max + MORE_BYTES), FRAME_BYTES_MAX)


def disconnect(session: Session, reason: Ending | PenstockError, say: Callable[[PenstockError], None]) -> None:
    """Say why, behind the replies that are due, and close. A client of a server that stops is told nothing."""
    if reason in (Ending.STOPPED, Ending.STALE):
        session.peer.close()
        return
    error = _REASONS[reason] if isinstance(reason, Ending) else reason
    if reason is Ending.FAULT:
        say(error)
    else:
        session.shared.counters.protocol_errors += 1
        session.finish(lambda: say(error))


def topic_of(session: Session, subject: bytes) -> ServedTopic:
    """Return the topic that stores a subject. These protocols do not create topics by publishing."""
    if not is_subject(subject) or is_reserved(subject):
        raise BadSubject(f"{subject.decode(errors='replace')!r} cannot be the name of a topic")
    topic = session.broker.topics.owner(subject)
    if topic is None:
        raise UnknownTopic(f"topic '{subject.decode()}' does not exist")
    if topic.refusal is not None:
        raise topic.refusal
    return topic


class Memberships:
    """The groups that a connection is a member of, by name. The session has them as (name, number)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __contains__(self, name: str) -> bool:
        return (name, 0) in self._session.subscriptions

    def __bool__(self) -> bool:
        return bool(self._session.subscriptions)

    def __iter__(self) -> Iterator[tuple[str, Member, Group]]:
        for (name, _), (member, group) in list(self._session.subscriptions.items()):
            assert isinstance(group, Group), "these protocols have groups only"
            yield name, member, group

    def find(self, member: Member) -> tuple[str, Group]:
        return next((name, group) for name, each, group in self if each is member)

    async def join(self, name: str, group: Group, members: list[Member]) -> None:
        """Become these members of a group. What the group sends them comes behind the reply to this."""
        assert group.name is not None, "it has one"
        for number, member in enumerate(members):
            self._session.subscriptions[name, number] = member, group
        try:
            for member in members:
                await self._session.broker.groups.join(group.name, group.pattern, member, group.mode)
        except PenstockError:
            self.leave(name)
            raise
        if not self._session.is_connected:
            self.leave(name)

    def leave(self, name: str) -> None:
        for key in [key for key in self._session.subscriptions if key[0] == name]:
            self._session.unsubscribe(key)
