"""What a user may do: for each action, patterns that allow and patterns that deny. A denial wins, and nothing is
allowed that no pattern allows.

Subjects and topics are matched as subscriptions match them: `*` is one token, `>` the rest. The names of groups and
transactions have no tokens: there `*` stands for any characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Final

from penstock.model.subject import AUDIT_SUBJECT, is_subset, matches, overlap, owns, whole_topic


class Action(StrEnum):
    """The value is the name in the file of users."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    GROUP_JOIN = "groups.join"
    GROUP_RESET = "groups.reset"
    GROUP_DELETE = "groups.delete"
    TOPIC_CREATE = "topics.create"
    TOPIC_ALTER = "topics.alter"
    TOPIC_DELETE = "topics.delete"
    TOPIC_PURGE = "topics.purge"
    # By the original subject of the letter.
    DEAD_LETTERS = "dead_letters"
    TRANSACTIONS = "transactions"
    PIPES = "pipes"
    METRICS = "metrics"
    ADMIN = "admin"
    # Whatever a user who may log in may do.
    CONNECT = "connect"


# Those that are allowed or not, whatever the resource.
SWITCHES: Final = frozenset({Action.PIPES, Action.METRICS, Action.ADMIN})
# Those whose patterns are of names, not of subjects.
NAMED: Final = frozenset({Action.GROUP_JOIN, Action.GROUP_RESET, Action.GROUP_DELETE, Action.TRANSACTIONS})
# Any of them shows a user the topic, and any of the others the group.
_SHOW_TOPIC: Final = (
    Action.PUBLISH,
    Action.SUBSCRIBE,
    Action.TOPIC_CREATE,
    Action.TOPIC_ALTER,
    Action.TOPIC_DELETE,
    Action.TOPIC_PURGE,
)
_SHOW_GROUP: Final = (Action.GROUP_JOIN, Action.GROUP_RESET, Action.GROUP_DELETE)


@dataclass(frozen=True, slots=True)
class Rule:
    allow: tuple[bytes, ...] = ()
    deny: tuple[bytes, ...] = ()

    def __or__(self, other: Rule) -> Rule:
        return Rule((*self.allow, *other.allow), (*self.deny, *other.deny))


@dataclass(frozen=True, slots=True)
class Responses:
    """Replies to requests that were received: how many to each, and until when."""

    count: int = 1
    ttl_s: int = 120


_NOTHING: Final = Rule()


@dataclass(frozen=True, slots=True)
class Permissions:
    rules: Mapping[Action, Rule] = field(default_factory=dict)
    switches: frozenset[Action] = frozenset()
    responses: Responses | None = None

    @property
    def is_admin(self) -> bool:
        return Action.ADMIN in self.switches

    def __or__(self, other: Permissions) -> Permissions:
        actions = {**self.rules, **other.rules}
        rules = {action: self.rule(action) | other.rule(action) for action in actions}
        return Permissions(rules, self.switches | other.switches, self.responses or other.responses)

    def rule(self, action: Action) -> Rule:
        return self.rules.get(action, _NOTHING)

    def allows(self, action: Action, resource: bytes) -> bool:
        """Return whether an action is allowed for a subject, a topic or a name; for SUBSCRIBE, a pattern of subjects,
        of which single subjects may still be denied: see `denied_within`."""
        if action is Action.CONNECT:
            return True
        if action in SWITCHES:
            return action in self.switches
        rule = self.rule(action)
        if action is Action.SUBSCRIBE:
            return all(_may_read(rule, part) for part in resource.split(b" "))
        test = _names if action in NAMED else _matches
        return any(test(each, resource) for each in rule.allow) and not any(test(each, resource) for each in rule.deny)

    def allows_all(self, action: Action, pattern: bytes) -> bool:
        """Return whether an action is allowed for everything that a pattern matches."""
        rule = self.rule(action)
        if pattern == whole_topic(AUDIT_SUBJECT):
            pattern = AUDIT_SUBJECT  # there is nothing below it
        return all(
            any(_includes(each, part) for each in rule.allow) and not any(overlap(part, each) for each in rule.deny)
            for part in pattern.split(b" ")
        )

    def denied_within(self, pattern: bytes) -> tuple[bytes, ...]:
        """Return the patterns of subjects that a subscription with this pattern must not receive."""
        return tuple(each for each in self.rule(Action.SUBSCRIBE).deny if overlap(pattern, each))

    def shows_topic(self, name: bytes) -> bool:
        """Return whether a user knows of a topic: it may do something with it, or with a subject in it."""
        whole = whole_topic(name)
        return any(
            any(_meets(each, whole) for each in rule.allow)
            and not all(any(is_subset(part, each) for each in rule.deny) for part in whole.split(b" "))
            for rule in map(self.rule, _SHOW_TOPIC)
        )

    def shows_group(self, name: bytes) -> bool:
        return any(self.allows(action, name) for action in _SHOW_GROUP)


NO_PERMISSIONS: Final = Permissions()


def _may_read(rule: Rule, pattern: bytes) -> bool:
    return any(_includes(each, pattern) for each in rule.allow) and not any(
        is_subset(pattern, each) for each in rule.deny
    )


def _matches(allowed: bytes, subject: bytes) -> bool:
    return matches(allowed, subject) and (not _is_audit(subject) or _is_audit(allowed))


def _includes(allowed: bytes, pattern: bytes) -> bool:
    return is_subset(pattern, allowed) and (not _is_audit(pattern) or _is_audit(allowed))


def _meets(allowed: bytes, whole: bytes) -> bool:
    return overlap(whole, allowed) and (not _is_audit(whole) or _is_audit(allowed))


def _is_audit(pattern: bytes) -> bool:
    return owns(AUDIT_SUBJECT, pattern.partition(b" ")[0])


def _names(pattern: bytes, name: bytes) -> bool:
    return _name_pattern(pattern).fullmatch(name) is not None


@cache
def _name_pattern(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(b".*".join(map(re.escape, pattern.split(b"*"))), re.DOTALL)


def is_denied(denied: Iterable[bytes], subject: bytes) -> bool:
    return any(matches(each, subject) for each in denied)
