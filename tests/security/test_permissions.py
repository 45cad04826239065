from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.subject import is_subset, matches, overlap
from penstock.security.permissions import Action, Permissions, Rule

_TOKENS = st.sampled_from(["a", "b", "*"])
PATTERNS = st.builds(
    lambda tokens, rest: ".".join([*tokens, *rest]).encode(),
    st.lists(_TOKENS, min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
) | st.just(b">")


def subjects(length: int = 5) -> Iterator[bytes]:
    """All subjects of a few tokens: enough to tell patterns of three tokens apart. `c` is in no pattern."""
    level = [b"a", b"b", b"c"]
    for _ in range(length):
        yield from level
        level = [b"%b.%b" % (subject, token) for subject in level for token in (b"a", b"b", b"c")]


ALL = list(subjects())


@given(PATTERNS, PATTERNS)
def test_a_subset_and_an_overlap_are_what_the_subjects_say(one: bytes, other: bytes) -> None:
    ones, others = ({subject for subject in ALL if matches(pattern, subject)} for pattern in (one, other))

    assert is_subset(one, other) == (ones <= others)
    assert overlap(one, other) == bool(ones & others)


@given(st.lists(PATTERNS, max_size=3), st.lists(PATTERNS, max_size=3), PATTERNS)
def test_a_subscription_gets_only_what_may_be_read(allow: list[bytes], deny: list[bytes], pattern: bytes) -> None:
    permissions = Permissions({Action.SUBSCRIBE: Rule(tuple(allow), tuple(deny))})
    if not permissions.allows(Action.SUBSCRIBE, pattern):
        return
    denied = permissions.denied_within(pattern)
    for subject in ALL:
        if matches(pattern, subject) and not any(matches(each, subject) for each in denied):
            assert permissions.allows(Action.SUBSCRIBE, subject)
    if permissions.allows_all(Action.SUBSCRIBE, pattern):
        assert not denied


def test_nothing_is_allowed_that_no_pattern_allows() -> None:
    nothing = Permissions()
    assert not any(nothing.allows(action, b"a") for action in Action if action is not Action.CONNECT)
    assert not nothing.shows_topic(b"a")
    assert not nothing.shows_group(b"a")


def test_a_denial_wins_also_from_a_role() -> None:
    user = Permissions({Action.PUBLISH: Rule((b"a.>",))})
    role = Permissions({Action.PUBLISH: Rule((b"b",), (b"a.secret",))})
    both = user | role
    assert [both.allows(Action.PUBLISH, each) for each in (b"a.x", b"a.secret", b"b", b"c")] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("action", [Action.PUBLISH, Action.SUBSCRIBE, Action.TOPIC_DELETE, Action.TOPIC_ALTER])
def test_no_wildcard_includes_the_audit_trail(action: Action) -> None:
    every, named = (Permissions({action: Rule((pattern,))}) for pattern in (b">", b"$audit"))
    assert not every.allows(action, b"$audit")
    assert not every.shows_topic(b"$audit")
    assert named.allows(action, b"$audit")
    assert named.shows_topic(b"$audit")


@pytest.mark.parametrize(
    ("allow", "deny", "is_shown"),
    [
        ([b"orders"], [], True),
        ([b"orders.>"], [], True),
        ([b"*.eu"], [], True),
        ([b"other"], [], False),
        ([b">"], [b"orders"], True),
        ([b">"], [b"orders", b"orders.>"], False),
        ([b">"], [b">"], False),
    ],
)
def test_a_topic_is_shown_to_who_may_do_something_with_it(
    allow: list[bytes], deny: list[bytes], *, is_shown: bool
) -> None:
    permissions = Permissions({Action.SUBSCRIBE: Rule(tuple(allow), tuple(deny))})
    assert permissions.shows_topic(b"orders") is is_shown


def test_names_are_matched_as_text() -> None:
    permissions = Permissions({Action.GROUP_JOIN: Rule((b"billing*", b"orders:*"), (b"*test*",))})
    allowed = [b"billing", b"billing.eu", b"orders:x", b"billing-test", b"other"]
    assert [permissions.allows(Action.GROUP_JOIN, name) for name in allowed] == [True, True, True, False, False]
