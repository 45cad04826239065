"""The error tree: as its head draws it, one code for each leaf, and the same error on both ends of a wire."""

from __future__ import annotations

import gc
import inspect
import re
from pathlib import Path
from typing import Final

import pytest

from penstock import errors
from penstock.errors import (
    BadConfig,
    BadFrame,
    BadRequest,
    Closed,
    DeliveryFailed,
    LogDamaged,
    OffsetOutOfRange,
    PenstockError,
    from_wire,
)

MODULE: Final = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
CLASSES: Final = {kind.__name__: kind for kind in MODULE if issubclass(kind, PenstockError)}
PARENTS: Final = {parent for kind in CLASSES.values() for parent in kind.__bases__}
BRANCHES: Final = [kind for kind in CLASSES.values() if kind in PARENTS]
LEAVES: Final = [kind for kind in CLASSES.values() if kind not in PARENTS]
each_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)


def drawn() -> list[tuple[str, str | None]]:
    """The classes of the tree in the module's docstring, each with the one it hangs on, line by line."""
    found: list[tuple[str, str | None]] = []
    above: list[str] = []
    for match in re.finditer(r"^    ([│├└─ ]*)(\w+)( {2,}\S.*)?$", errors.__doc__ or "", re.MULTILINE):
        branches, name, _ = match.groups()
        del above[len(branches) // 4 :]
        found.append((name, above[-1] if above else None))
        above.append(name)
    return found


# ---- the tree


def test_the_tree_is_drawn_as_it_is() -> None:
    parents = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items() if kind is not PenstockError}

    assert dict(drawn()) == {PenstockError.__name__: None, **parents}


def test_nothing_is_drawn_twice() -> None:
    assert len(drawn()) == len(dict(drawn()))


def test_there_is_nothing_beside_the_tree() -> None:
    assert [kind for kind in MODULE if kind.__name__ not in CLASSES] == []


def test_every_error_hangs_on_one_other() -> None:
    assert [name for name, kind in CLASSES.items() if len(kind.__bases__) != 1] == []


# ---- codes


def test_no_two_errors_have_the_same_code() -> None:
    assert len({kind.code for kind in CLASSES.values()}) == len(CLASSES)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_every_error_has_a_code_of_its_own(kind: type[PenstockError]) -> None:
    assert "code" in vars(kind)


@each_leaf
def test_the_code_of_a_leaf_is_its_name_in_capitals(leaf: type[PenstockError]) -> None:
    assert leaf.code.replace("_", "") == leaf.__name__.upper()
    assert leaf.code == leaf.code.upper()


# ---- across a wire


@each_leaf
def test_an_error_is_the_same_at_the_other_end(leaf: type[PenstockError]) -> None:
    error = from_wire(leaf.code, "what went wrong")

    assert type(error) is leaf
    assert error.code == leaf.code
    assert str(error) == "what went wrong"


@pytest.mark.parametrize(
    "raised",
    [
        BadFrame("no frame"),
        BadRequest(""),
        BadConfig(["one", "two"]),
        OffsetOutOfRange(1, 2, 3),
        LogDamaged(Path("/data/0.log"), 1, 2, None, "checksum"),
        DeliveryFailed([("orders", b"x", Closed("stopping"))]),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_the_text_comes_as_it_was_written(raised: PenstockError) -> None:
    assert str(from_wire(raised.code, str(raised))) == str(raised)


@each_leaf
def test_an_error_of_a_peer_can_be_raised_and_caught_by_its_branch(leaf: type[PenstockError]) -> None:
    with pytest.raises(leaf.__bases__[0], match="what went wrong"):
        raise from_wire(leaf.code, "what went wrong")


@pytest.mark.parametrize("code", ["TEAPOT", "", "closed", *(branch.code for branch in BRANCHES)])
def test_of_a_code_that_is_no_leaf_the_text_shows_it(code: str) -> None:
    error = from_wire(code, "what went wrong")

    assert type(error) is PenstockError
    assert str(error) == f"{code}: what went wrong"


def test_an_error_of_a_newer_peer_keeps_its_code() -> None:
    assert from_wire("TEAPOT", "what went wrong").code == "TEAPOT"


def test_what_others_derive_from_an_error_is_not_taken_for_it() -> None:
    class Mine(Closed):
        pass

    try:
        assert type(from_wire(Mine.code, "stopping")) is Closed
    finally:
        del Mine
        gc.collect()


def test_an_offset_out_of_range_says_where_the_log_is() -> None:
    error = OffsetOutOfRange(7, 10, 20)

    assert (error.offset, error.start, error.end) == (7, 10, 20)
    assert str(error) == "offset 7 is out of range: the log holds 10 to 20"


def test_a_failed_delivery_says_which_messages_and_why() -> None:
    failed = [("orders", b"x", Closed("stopping")), ("orders", None, Closed("stopping"))]

    error = DeliveryFailed(failed)

    assert error.failed == failed
    assert str(error) == "2 messages were not stored; the first, to orders: stopping"
