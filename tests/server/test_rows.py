"""Answers of many rows: the same JSON as ever, made in slices, and limited in bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.doors.counters import Counters
from penstock.doors.journal import Journal
from penstock.doors.peer import UNREAD_ANSWERS_MAX, Peer
from penstock.doors.turns import Turns
from penstock.errors import Overloaded
from penstock.server.rows import SMALL_BYTES, UNSENT_BYTES_MAX, Answers, Rows, encode
from penstock.testing import ManualClock

SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=5)
DOCUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner))


@given(DOCUMENTS)
def test_a_document_is_what_json_makes_of_it(document: Any) -> None:
    assert json.loads(asyncio.run(encode(document))) == document


def test_iterators_are_lists_and_half_of_a_surrogate_pair_is_escaped() -> None:
    document = {"a": iter([1, 2]), "b": Rows([{"c": (n for n in range(200))}]), "d": Rows([]), "e": "\ud800"}

    found = json.loads(asyncio.run(encode(document)))

    assert found == {"a": [1, 2], "b": [{"c": list(range(200))}], "d": [], "e": "\ud800"}


@pytest.mark.parametrize(
    ("document", "turns_min"),
    [
        ({"rows": ({"number": number, "inner": [{"a": 1}]} for number in range(10_000))}, 100),
        ({"letters": [{"value": "x" * 300_000} for _ in range(30)]}, 20),
    ],
    ids=["thousands of rows", "large rows"],
)
def test_others_run_while_an_answer_is_made(document: Any, turns_min: int) -> None:
    turns = 0

    async def run() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count())
        await encode(document)
        other.cancel()

    asyncio.run(run())
    assert turns > turns_min


def test_rows_end_when_the_answer_is_full_but_the_rest_of_it_is_whole() -> None:
    rows = [{"name": "x" * 100} for _ in range(100)]

    found = json.loads(asyncio.run(encode({"rows": Rows(rows), "all": rows, "total": 100}, 1000)))

    assert 0 < len(found["rows"]) < 12
    assert len(found["all"]) == found["total"] == 100
    assert len(json.loads(asyncio.run(encode({"rows": Rows(rows)}, 1)))["rows"]) == 1


def test_answers_that_nobody_reads_are_limited() -> None:
    async def run(size: int) -> bytes:
        return await Answers(lambda: UNSENT_BYTES_MAX).make(encode("x" * size))

    with pytest.raises(Overloaded, match="wait for clients to read them"):
        asyncio.run(run(SMALL_BYTES))
    assert asyncio.run(run(10)) == b'"xxxxxxxxxx"'


def test_a_connection_that_does_not_read_its_answers_gets_no_more_of_them() -> None:
    async def run() -> None:
        peer = Peer(Counters(), Journal(ManualClock()), Turns())
        answers = Answers(lambda: 0)
        assert await answers.make_for(peer, {"a": 1}) == b'{"a":1}'
        peer.pause()
        peer._unread_answers = UNREAD_ANSWERS_MAX + 1
        waiting = asyncio.create_task(answers.make_for(peer, {"a": 2}))
        await asyncio.sleep(0)
        assert not waiting.done()
        peer.resume()
        assert await waiting == b'{"a":2}'

    asyncio.run(run())
