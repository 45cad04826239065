"""Subjects and patterns.

A subject consists of tokens separated by dots: `orders.eu.created`. A pattern may have `*` for exactly one token and,
at its end, `>` for one or more. Both are bytes, as on the wire.

A reader of a whole topic reads its name and everything below it, which is one pattern here: `orders orders.>`, two
patterns separated by a blank. No client can write this as a subject, or as a pattern of a text protocol.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import BadSubject

SUBJECT_BYTES_MAX: Final = 1024
LABEL_CHARS_MAX: Final = 256
# Groups are limited in number, so their names are limited in size.
GROUP_BYTES_MAX: Final = 4096

# A token has no dots, blanks and control characters.
_TOKENS: Final = re.compile(rb"[^\x00-\x20\x7f.]+(?:\.[^\x00-\x20\x7f.]+)*")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


# The audit trail. No wildcard matches it: it is read by its name.
AUDIT_SUBJECT: Final = b"$audit"


def is_subject(subject: bytes) -> bool:
    """Return whether a message can have this subject: a pattern without wildcards."""
    return is_pattern(subject) and is_literal(subject)


def is_pattern(pattern: bytes) -> bool:
    """Return whether this is a valid pattern: no empty token, `>` only at the end, and UTF-8."""
    if len(pattern) > SUBJECT_BYTES_MAX or not _TOKENS.fullmatch(pattern) or not is_text(pattern):
        return False
    return b">" not in pattern or b">" not in pattern.split(b".")[:-1]


def is_readable(pattern: bytes) -> bool:
    """Return whether a subscription or a group can read this: a pattern, or a whole topic."""
    topic, _, rest = pattern.partition(b" ")
    return is_pattern(pattern) if not rest else is_subject(topic) and pattern == whole_topic(topic)


def whole_topic(topic: bytes) -> bytes:
    """Return the pattern of all subjects that a topic stores."""
    return b"%b %b.>" % (topic, topic)


def selection(pattern: str | None, topic: str | None) -> str:
    """Return the pattern, or the pattern of the whole topic; exactly one must be given."""
    if (pattern is None) == (topic is None):
        raise ValueError("give either a pattern of subjects or a topic, such as 'orders.*' or topic='orders'")
    return whole_topic(topic.encode()).decode() if topic is not None else str(pattern)


def is_route(pattern: bytes) -> bool:
    """Return whether messages can be delivered by this pattern, even if they cannot be stored: no empty token, `>` only
    at the end."""
    tokens = pattern.split(b".")
    return all(tokens) and b">" not in tokens[:-1]


def is_literal(pattern: bytes) -> bool:
    """Return whether the pattern has no wildcard, so that it matches only the identical subject."""
    if b" " in pattern:
        return False
    if b"*" not in pattern and b">" not in pattern:
        return True
    tokens = pattern.split(b".")
    return b"*" not in tokens and b">" not in tokens


def matches(pattern: bytes, subject: bytes) -> bool:
    if pattern == subject:
        return True
    if b" " in pattern:
        return any(matches(each, subject) for each in pattern.split(b" "))
    wanted, tokens = pattern.split(b"."), subject.split(b".")
    if wanted[-1] == b">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(want in (b"*", token) for want, token in zip(wanted, tokens, strict=False))


def meets(pattern: bytes, topic: bytes) -> bool:
    """Return whether the pattern can match a subject at or below the topic's name."""
    if b" " in pattern:
        return any(meets(each, topic) for each in pattern.split(b" "))
    for want, token in zip(pattern.split(b"."), topic.split(b"."), strict=False):
        if want == b">":
            return True
        if want not in (b"*", token):
            return False
    return pattern.count(b".") >= topic.count(b".")


def is_subset(inner: bytes, outer: bytes) -> bool:
    """Return whether everything that `inner` matches is matched by `outer` too."""
    if b" " in inner:
        return all(is_subset(each, outer) for each in inner.split(b" "))
    wanted, tokens = outer.split(b"."), inner.split(b".")
    for at, token in enumerate(tokens):
        want = wanted[at] if at < len(wanted) else b""
        if want == b">":
            return True
        if token == b">" or want not in (b"*", token):
            return False
    return len(wanted) == len(tokens)


def overlap(pattern: bytes, other: bytes) -> bool:
    """Return whether a subject can match both patterns."""
    if b" " in pattern:
        return any(overlap(each, other) for each in pattern.split(b" "))
    mine, others = pattern.split(b"."), other.split(b".")
    for one, two in zip(mine, others, strict=False):
        if b">" in (one, two):
            return True
        if one != two and b"*" not in (one, two):
            return False
    return len(mine) == len(others)


def covers(pattern: bytes, topic: bytes) -> bool:
    """Return whether the pattern selects the whole topic: it matches its name, or everything below it."""
    return matches(pattern, topic) or (pattern.endswith(b".>") and matches(pattern[:-2], topic))


def owns(topic: bytes, subject: bytes) -> bool:
    """Return whether the subject is the topic's name or below it."""
    return subject.startswith(topic) and (len(subject) == len(topic) or subject[len(topic)] == ord("."))


def check_group_name(name: bytes) -> None:
    """Raise BadSubject unless a group can have this name."""
    if not name:
        raise BadSubject("a group name must not be empty")
    if len(name) > GROUP_BYTES_MAX:
        raise BadSubject(f"a group name of {len(name)} bytes is too long: at most {GROUP_BYTES_MAX}")
    if not is_text(name) or _UNPRINTABLE.search(name.decode()):
        raise BadSubject(f"invalid group name {name!r}: it must be UTF-8 without control characters")


def is_text(subject: bytes) -> bool:
    try:
        subject.decode()
    except UnicodeDecodeError:
        return False
    return True


def clean(label: object, chars_max: int = LABEL_CHARS_MAX) -> str:
    """Return a client's label as text that is safe to show: no control characters, no lone surrogates, and at most
    `chars_max` characters."""
    text = str(label)[:chars_max] if label is not None else ""
    return _UNPRINTABLE.sub("\ufffd", text)
