"""Who wants which subject: compared with a list of patterns, through every order of adding, removing and asking."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.broker import interest
from penstock.broker.interest import Interest
from penstock.model.subject import is_pattern, matches
from tests.support.batches import peak_bytes
from tests.support.sampling import examples

# Patterns of five tokens meet others in the middle of a branch that does not fork.
SUBJECTS: Final = [b".".join(tokens) for size in (1, 2, 3, 5) for tokens in product([b"a", b"b"], repeat=size)]
PATTERNS: Final = [
    pattern
    for size in (1, 2, 3, 5)
    for tokens in product([b"a", b"b", b"*", b">"], repeat=size)
    if is_pattern(pattern := b".".join(tokens))
]
TARGETS: Final = ["ann", "bob", "eve"]


def is_empty(tree: Interest[str]) -> bool:
    return tree._root.below is None and tree._root.targets is None


class InterestAgainstAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree: Interest[str] = Interest()
        self.list: list[tuple[bytes, str]] = []

    @rule(pattern=st.sampled_from(PATTERNS), who=st.sampled_from(TARGETS))
    def add(self, pattern: bytes, who: str) -> None:
        self.tree.add(pattern, who)
        if (pattern, who) not in self.list:
            self.list.append((pattern, who))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.list:
            pattern, target = data.draw(st.sampled_from(self.list))
            self.tree.remove(pattern, target)
            self.list.remove((pattern, target))

    @rule(subject=st.sampled_from(SUBJECTS))
    def match(self, subject: bytes) -> None:
        found = self.tree.match(subject)
        assert len(found) == len(set(found))
        assert set(found) == {target for pattern, target in self.list if matches(pattern, subject)}

    @rule()
    def match_all(self) -> None:
        for subject in SUBJECTS:
            self.match(subject)

    @invariant()
    def nothing_is_left_of_nobody(self) -> None:
        assert is_empty(self.tree) == (not self.list)

    def teardown(self) -> None:
        self.match_all()
        for pattern, target in self.list:
            self.tree.remove(pattern, target)
        self.list = []
        assert is_empty(self.tree)
        self.match_all()


InterestAgainstAList.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
TestInterestAgainstAList = InterestAgainstAList.TestCase


def test_nobody_wants_anything_at_first() -> None:
    assert Interest[str]().match(b"a") == ()


def test_one_who_wants_a_subject_by_several_patterns_is_found_once() -> None:
    tree = Interest[str]()
    for pattern in (b"a.b", b"a.*", b"*.b", b"*.*", b"a.>", b"*.>", b">"):
        tree.add(pattern, "ann")

    assert tree.match(b"a.b") == ("ann",)


def test_one_pattern_may_have_several_who_want_it() -> None:
    tree = Interest[str]()
    for target in TARGETS:
        tree.add(b"a.*", target)
    tree.remove(b"a.*", "bob")

    assert tree.match(b"a.b") == ("ann", "eve")


def test_one_who_is_added_twice_is_removed_at_once() -> None:
    tree = Interest[str]()
    tree.add(b"a", "ann")
    tree.add(b"a", "ann")
    tree.remove(b"a", "ann")

    assert tree.match(b"a") == ()
    assert is_empty(tree)


@pytest.mark.parametrize("pattern", [b"a.b", b"a.*", b"*.b", b"a.>", b">"])
def test_a_remembered_subject_is_forgotten_when_someone_comes_or_goes(pattern: bytes) -> None:
    tree = Interest[str]()
    tree.add(b"a.>", "bob")
    assert tree.match(b"a.b") == ("bob",)

    tree.add(pattern, "ann")
    assert set(tree.match(b"a.b")) == {"ann", "bob"}

    tree.remove(pattern, "ann")
    assert tree.match(b"a.b") == ("bob",)


def test_a_literal_that_comes_leaves_other_subjects_remembered() -> None:
    tree = Interest[str]()
    tree.add(b"a.>", "ann")
    found = tree.match(b"a.c")

    tree.add(b"a.b", "bob")

    assert tree.match(b"a.c") is found


def test_a_subject_is_walked_to_once() -> None:
    tree = Interest[str]()
    tree.add(b"a.>", "ann")

    assert tree.match(b"a.b") is tree.match(b"a.b")


@pytest.mark.parametrize(
    ("pattern", "target"),
    [(b"b", "ann"), (b"a.b", "ann"), (b"a", "bob"), (b"c.d", "ann"), (b"c.x", "ann"), (b"c.d.e.f", "ann")],
)
def test_what_was_not_added_cannot_be_removed(pattern: bytes, target: str) -> None:
    tree = Interest[str]()
    tree.add(b"a", "ann")
    tree.add(b"c.d.e", "ann")

    with pytest.raises(KeyError):
        tree.remove(pattern, target)
    assert tree.match(b"a") == tree.match(b"c.d.e") == ("ann",)


def test_a_pattern_of_many_tokens_takes_little_more_than_its_bytes() -> None:
    tree = Interest[int]()
    patterns = [b"a.%d.%b.>" % (number, b"x." * 1900 + b"x") for number in range(100)]

    def flood() -> None:
        for number, pattern in enumerate(patterns):
            tree.add(pattern, number)
            # It leaves the way of the pattern before in its middle, and ends there.
            tree.add(pattern[:2000].rstrip(b"."), -number)

    # A node for each token would take 70 MB.
    assert peak_bytes(flood) < 200 * 5000
    assert set(tree.match(b"a.7.%b.y" % (b"x." * 1900 + b"x"))) == {7}


def test_a_flood_of_subjects_is_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest, "_REMEMBERED_BYTES_MAX", 30_000)
    tree = Interest[str]()
    tree.add(b"s.*", "ann")

    def flood() -> None:
        for number in range(5000):
            assert tree.match(b"s.%d" % number) == ("ann",)

    assert peak_bytes(flood) < 1 << 16


def test_a_subject_that_many_want_takes_the_room_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest, "_REMEMBERED_BYTES_MAX", 1 << 20)
    tree = Interest[int]()
    for number in range(1000):
        tree.add(b"s.>", number)

    def flood() -> None:
        for number in range(2000):
            assert len(tree.match(b"s.%d" % number)) == 1000
            assert tree.usage.used <= tree.usage.limit

    # Each answer has 8 KiB: 16 MiB, if all were remembered.
    assert peak_bytes(flood) < 2 << 20


def test_what_is_forgotten_leaves_its_room() -> None:
    tree = Interest[str]()
    tree.add(b"a", "ann")
    tree.match(b"a")
    assert tree.usage.used > 0
    tree.remove(b"a", "ann")
    assert tree.usage.used == 0
