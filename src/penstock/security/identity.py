"""The identity of one connection, and `authorize`: the one question that every door asks.

An identity remembers the answers for the subjects that its client publishes to, so a run of messages costs one look-up
per subject. When users change, the identity gets its user as it is now, and forgets the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, PermissionDenied
from penstock.security.permissions import Action
from penstock.security.users import Grant, User

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.security.audit import Audit
    from penstock.security.quotas import Meter

# Subjects whose answers are remembered, if they are short; requests that may be replied to.
_REMEMBERED_MAX: Final = 4096
_REMEMBERED_BYTES: Final = 256
_REPLIES_MAX: Final = 4096
# What begins like this is never stored. A requester names where the reply goes, so it must not choose a topic.
_UNSTORED: Final = b"_"


class Identity:
    __slots__ = (
        "_audit",
        "_clock",
        "_denied",
        "_published",
        "_replies",
        "address",
        "door",
        "grant",
        "is_limited",
        "meter",
    )

    def __init__(self, grant: Grant, meter: Meter, audit: Audit, clock: Clock, *, address: str, door: str) -> None:
        self.address = address
        self.door = door
        self.meter = meter
        self._audit = audit
        self._clock = clock
        self.change(grant)

    def change(self, grant: Grant) -> None:
        """The user has changed."""
        self.grant = grant
        # Whether anything is checked at all.
        self.is_limited = not grant.user.permissions.is_admin
        self._published: dict[bytes, bool] = {}
        # What a subscription with a pattern must not receive.
        self._denied: dict[bytes, tuple[bytes, ...]] = {}
        # Subjects of replies to requests that were received: how many are left, and until when.
        self._replies: dict[bytes, tuple[int, int]] = {}

    @property
    def user(self) -> User:
        return self.grant.user

    @property
    def name(self) -> str:
        return self.grant.user.name

    def may_publish(self, subject: bytes) -> bool:
        known = self._published.get(subject)
        if known is None:
            known = not self.is_limited or self.user.permissions.allows(Action.PUBLISH, subject)
            if len(subject) <= _REMEMBERED_BYTES:
                if len(self._published) >= _REMEMBERED_MAX:
                    self._published.clear()
                self._published[subject] = known
        return known

    def may_publish_all(self, pattern: bytes) -> bool:
        """Return whether it may publish to whatever matches."""
        return not self.is_limited or self.user.permissions.allows_all(Action.PUBLISH, pattern)

    def may_read(self, subject: bytes) -> bool:
        return self.allows(Action.SUBSCRIBE, subject)

    def allows(self, action: Action, resource: bytes = b"") -> bool:
        return not self.is_limited or self.user.permissions.allows(action, resource)

    def allows_all(self, pattern: bytes) -> bool:
        """Return whether it may read whatever matches."""
        return not self.is_limited or self.user.permissions.allows_all(Action.SUBSCRIBE, pattern)

    def denied(self, pattern: bytes) -> tuple[bytes, ...]:
        """Return the patterns of what a subscription with this pattern must not receive."""
        if not self.is_limited:
            return ()
        found = self._denied.get(pattern)
        if found is None:
            if len(self._denied) >= _REMEMBERED_MAX:
                self._denied.clear()
            found = self._denied[pattern] = self.user.permissions.denied_within(pattern)
        return found

    def shows_topic(self, name: bytes) -> bool:
        return not self.is_limited or self.user.permissions.shows_topic(name)

    def shows_group(self, name: bytes, pattern: bytes | None) -> bool:
        """`pattern`: what it reads, or None if there is no such group."""
        return not self.is_limited or (
            self.user.permissions.shows_group(name) and (pattern is None or self.allows_all(pattern))
        )

    # Replies.

    @property
    def replies_to_requests(self) -> bool:
        return self.is_limited and self.user.permissions.responses is not None

    def expect_reply(self, reply: bytes) -> None:
        """The client is sent a request: it may reply, where nothing is stored."""
        responses = self.user.permissions.responses
        if responses is None or not reply.startswith(_UNSTORED) or self.user.permissions.allows(Action.PUBLISH, reply):
            return
        if len(self._replies) >= _REPLIES_MAX:
            del self._replies[next(iter(self._replies))]
        self._replies.pop(reply, None)
        self._replies[reply] = responses.count, self._clock.monotonic_us() + responses.ttl_s * 1_000_000

    @property
    def has_replies(self) -> bool:
        return bool(self._replies)

    def may_reply(self, subject: bytes) -> bool:
        count, until_us = self._replies.pop(subject, (0, 0))
        if not count or self._clock.monotonic_us() > until_us:
            return False
        if count > 1:
            self._replies[subject] = count - 1, until_us
        return True

    # What came of it.

    def refuse(self, action: Action, resource: bytes) -> PermissionDenied:
        """Record a refusal, and return it as an error."""
        shown = resource.decode(errors="replace")
        self.record(str(action), resource=shown, result="denied")
        return PermissionDenied(
            f"the user {self.name} has no permission for {action}" + (f": {shown!r}" if shown else "")
        )

    def record(self, what: str, *, resource: str = "", result: str = "ok", why: str = "") -> None:
        self._audit.record(
            what, user=self.name, address=self.address, door=self.door, result=result, resource=resource, why=why
        )


def authorize(identity: Identity | None, action: Action, resource: bytes = b"") -> None:
    """Raise PermissionDenied unless a client may do something. `identity`: None where no credentials are required.

    For SUBSCRIBE, a pattern is allowed of which single subjects may be denied: the reader leaves out `denied` ones."""
    if identity is not None and not identity.allows(action, resource):
        raise identity.refuse(action, resource)


def authorize_all(identity: Identity | None, pattern: bytes, action: Action = Action.SUBSCRIBE) -> None:
    """Raise PermissionDenied unless a client may read (or publish) all that a pattern matches: for readers that cannot
    leave out single messages."""
    if identity is not None and identity.is_limited and not identity.user.permissions.allows_all(action, pattern):
        raise identity.refuse(action, pattern)


def authorize_group(identity: Identity | None, action: Action, name: bytes, pattern: bytes | None) -> None:
    """Raise PermissionDenied unless a client may do something with a group, and read all that it reads. The error names
    only the group. `pattern`: None if there is no such group."""
    if identity is not None and not (
        identity.allows(action, name) and (pattern is None or identity.allows_all(pattern))
    ):
        raise identity.refuse(action, name)


def audited(identity: Identity | None, what: str, resource: str, error: PenstockError | None) -> None:
    """Record a change that a client has asked for, and what came of it."""
    if identity is not None and not isinstance(error, PermissionDenied):
        result = "ok" if error is None else "failed"
        identity.record(what, resource=resource, result=result, why="" if error is None else str(error))
