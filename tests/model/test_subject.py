"""Subjects and patterns, compared with a second implementation that goes token by token."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.model.subject import (
    SUBJECT_BYTES_MAX,
    covers,
    is_literal,
    is_pattern,
    is_readable,
    is_subject,
    matches,
    meets,
    owns,
    selection,
    whole_topic,
)

TOKENS: Final = [b"a", b"b", b"*", b">"]
WORDS: Final = [b"a", b"b", b"ab"]
# Every pattern and every subject of up to four tokens, where nothing else matters than which are equal.
PATTERNS: Final = [
    pattern
    for size in range(1, 5)
    for tokens in product(TOKENS, repeat=size)
    if is_pattern(pattern := b".".join(tokens))
]
SUBJECTS: Final = [b".".join(tokens) for size in range(1, 5) for tokens in product(WORDS, repeat=size)]

TOKEN: Final = st.sampled_from([*TOKENS, b"ab", b"a*", b">a", b"**", b"$", "ü".encode()])
ANY_PATTERN: Final = st.lists(TOKEN, min_size=1, max_size=6).map(b".".join).filter(is_pattern)
ANY_SUBJECT: Final = ANY_PATTERN.filter(is_literal)


def matches_stupidly(pattern: list[bytes], subject: list[bytes]) -> bool:
    if not pattern or not subject:
        return pattern == subject
    if pattern == [b">"]:
        return True
    return pattern[0] in (b"*", subject[0]) and matches_stupidly(pattern[1:], subject[1:])


def is_pattern_stupidly(pattern: bytes) -> bool:
    tokens = pattern.split(b".")
    return (
        len(pattern) <= 1024
        and pattern.decode(errors="ignore").encode() == pattern
        and all(tokens)
        and all(byte > 0x20 and byte != 0x7F for byte in pattern)
        and b">" not in tokens[:-1]
    )


# ---- what is one

SUBJECTS_THAT_ARE: Final = [
    b"a",
    b"a.b.c",
    b"orders-eu_1/2.created",
    b"a*b.c>d",
    b"**",
    b">>",
    b"a>",
    b"$SYS",
    b"_INBOX.x",
    "grüße.天".encode(),
    b"a" * SUBJECT_BYTES_MAX,
    b".".join([b"a"] * (SUBJECT_BYTES_MAX // 2)),
]
PATTERNS_ALONE: Final = [b"*", b">", b"a.*", b"*.b", b"a.>", b"*.*", b"*.>", b"a.*.c.>"]
NEITHER: Final = [
    b"",
    b".",
    b"..",
    b".a",
    b"a.",
    b"a..b",
    b"a b",
    b" a",
    b"a\t",
    b"a\r\n",
    b"a\n",
    b"\x00",
    b"a.\x7f",
    b"\xff",
    b"*.\xc3",
    b">.a",
    b"a.>.b",
    b">.>",
    b"a" * (SUBJECT_BYTES_MAX + 1),
]


@pytest.mark.parametrize("subject", SUBJECTS_THAT_ARE)
def test_a_subject_is_a_pattern_that_matches_itself_alone(subject: bytes) -> None:
    assert is_subject(subject)
    assert is_pattern(subject)
    assert is_literal(subject)
    assert matches(subject, subject)


@pytest.mark.parametrize("pattern", PATTERNS_ALONE)
def test_a_pattern_may_be_no_subject(pattern: bytes) -> None:
    assert is_pattern(pattern)
    assert not is_subject(pattern)


@pytest.mark.parametrize("junk", NEITHER)
def test_what_is_neither_is_refused(junk: bytes) -> None:
    assert not is_pattern(junk)
    assert not is_subject(junk)


@given(st.binary(max_size=12) | st.lists(TOKEN | st.just(b""), max_size=6).map(b".".join))
@settings(max_examples=500)
@example(b"a" * SUBJECT_BYTES_MAX)
def test_any_bytes_are_a_pattern_or_not(data: bytes) -> None:
    assert is_pattern(data) == is_pattern_stupidly(data)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x7f", min_codepoint=0x21), min_size=1, max_size=8))
def test_any_text_without_wildcards_is_a_subject(text: str) -> None:
    subject = text.encode()
    assert is_subject(subject) == (is_pattern_stupidly(subject) and not {b"*", b">"} & {*subject.split(b".")})


# ---- what matches


@pytest.mark.parametrize(
    ("pattern", "subject", "does"),
    [
        (b"orders.*.created", b"orders.eu.created", True),
        (b"orders.*.created", b"orders.eu", False),
        (b"orders.*.created", b"orders.eu.x.created", False),
        (b"orders.*", b"orders", False),
        (b"orders.>", b"orders.eu", True),
        (b"orders.>", b"orders.eu.created", True),
        (b"orders.>", b"orders", False),
        (b"orders.>", b"ordersx.eu", False),
        (b">", b"orders", True),
        (b"*", b"orders", True),
        (b"*", b"orders.eu", False),
        (b"*.>", b"orders", False),
        (b"a*", b"ab", False),
        (b"orders", b"Orders", False),
        (b"orders", b"orders.eu", False),
    ],
)
def test_a_pattern_matches_as_documented(pattern: bytes, subject: bytes, does: bool) -> None:
    assert matches(pattern, subject) is does


def test_every_small_pattern_matches_as_token_by_token() -> None:
    for pattern, subject in product(PATTERNS, SUBJECTS):
        assert matches(pattern, subject) == matches_stupidly(pattern.split(b"."), subject.split(b"."))


@given(ANY_PATTERN, ANY_SUBJECT)
@settings(max_examples=500)
def test_any_pattern_matches_as_token_by_token(pattern: bytes, subject: bytes) -> None:
    assert matches(pattern, subject) == matches_stupidly(pattern.split(b"."), subject.split(b"."))


@given(ANY_PATTERN, ANY_SUBJECT)
def test_a_literal_matches_only_itself(pattern: bytes, subject: bytes) -> None:
    if is_literal(pattern):
        assert matches(pattern, subject) == (pattern == subject)


# ---- topics


def test_a_topic_owns_its_name_and_what_is_below_it() -> None:
    for topic, subject in product(SUBJECTS, SUBJECTS):
        assert owns(topic, subject) == (subject.split(b".")[: len(topic.split(b"."))] == topic.split(b"."))


def test_a_topic_does_not_own_a_name_that_begins_alike() -> None:
    assert not owns(b"orders", b"orders-eu")
    assert not owns(b"orders.eu", b"orders")


def test_a_pattern_meets_the_topics_of_which_it_can_match_a_subject() -> None:
    # A pattern of up to three tokens that matches anything below a topic matches something of up to four tokens there.
    small = [pattern for pattern in PATTERNS if pattern.count(b".") < 3]
    topics = [topic for topic in SUBJECTS if topic.count(b".") < 3]
    below = {topic: [subject for subject in SUBJECTS if owns(topic, subject)] for topic in topics}
    for pattern, topic in product(small, topics):
        assert meets(pattern, topic) == any(
            matches_stupidly(pattern.split(b"."), subject.split(b".")) for subject in below[topic]
        )


def test_a_pattern_covers_a_topic_by_its_name_or_by_everything_below() -> None:
    for pattern in PATTERNS:
        for topic in SUBJECTS:
            assert covers(pattern, topic) or not matches(pattern, topic)
            assert meets(pattern, topic) or not covers(pattern, topic)
    assert covers(b"stock.>", b"stock")
    assert not covers(b"stock.*", b"stock")
    assert not covers(b"stock.eu", b"stock")


def test_a_whole_topic_is_its_name_and_all_below() -> None:
    pattern = whole_topic(b"orders.eu")

    assert is_readable(pattern)
    assert not is_pattern(pattern)
    assert not is_literal(pattern)
    matched = [b"orders.eu", b"orders.eu.de", b"orders.eu.de.berlin"]
    assert all(matches(pattern, subject) for subject in matched)
    assert not any(matches(pattern, subject) for subject in (b"orders", b"orders.us", b"orders.eux"))
    assert [meets(pattern, topic) for topic in (b"orders", b"orders.eu", b"orders.us")] == [True, True, False]


@pytest.mark.parametrize("pattern", [b"a b", b"a a", b"a.> a", b"a  a.>", b" a.>", b"a a.> a", b"a.* a.*.>", b"a "])
def test_other_patterns_with_a_blank_cannot_be_read(pattern: bytes) -> None:
    assert not is_readable(pattern)


def test_who_reads_names_a_pattern_or_a_topic() -> None:
    assert (selection("orders.*", None), selection(None, "orders")) == ("orders.*", "orders orders.>")
    for pattern, topic in ((None, None), ("orders", "orders")):
        with pytest.raises(ValueError, match="either a pattern of subjects or a topic"):
            selection(pattern, topic)
