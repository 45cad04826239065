"""An outcome keeps its error, and nothing else of the work that failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from penstock.errors import PenstockError
from penstock.outcome import Outcome


class Batch:
    pass


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_what_could_not_be_stored_is_freed_while_the_error_is_kept() -> None:
    outcome = Outcome()

    def store() -> ref[Batch]:
        batch = Batch()
        try:
            raise PenstockError("the disk is full")
        except PenstockError as error:
            outcome.settle(error)
        return ref(batch)

    assert store()() is None
    with pytest.raises(PenstockError, match="the disk is full"):
        outcome.check()


def test_a_callback_gets_the_error_whenever_it_is_added() -> None:
    found: list[PenstockError | None] = []
    outcome, error = Outcome(found.append), PenstockError("no")
    outcome.settle(error)
    outcome.then(found.append)
    assert found == [error, error]
