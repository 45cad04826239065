"""JSON values as typed columns: what matches a type, and what becomes of the rest."""

from __future__ import annotations

import io
import json
import pickle
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pyarrow.json
import pytest

from penstock.errors import BadSchema
from penstock.topic_schema.flatten import PROBLEM, Flattener

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
BAD = object()


def flattened(ddl: str, *values: bytes | None, taken: tuple[str, ...] = ("value",)) -> dict[str, list[Any]]:
    made = Flattener(ddl, taken)
    columns = made.columns(values)
    assert [column.type for column in columns] == [field.type for field in made.schema]
    return {name: column.to_pylist() for name, column in zip(made.schema.names, columns, strict=True)}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("boolean", "true", True),
        ("boolean", "1", BAD),
        ("tinyint", "-128", -128),
        ("tinyint", "128", BAD),
        ("smallint", "32767", 32767),
        ("smallint", "-32769", BAD),
        ("int", "5.0", 5),
        ("int", "5.5", BAD),
        ("int", '"5"', BAD),
        ("int", "true", BAD),
        ("int", "1e999", BAD),
        ("bigint", "9223372036854775807", 2**63 - 1),
        ("bigint", "9223372036854775808", BAD),
        ("double", "5", 5.0),
        ("double", "1e400", BAD),
        ("double", "true", BAD),
        ("float", "0.5", 0.5),
        ("float", "1e39", BAD),
        ("decimal(5,2)", "123.45", Decimal("123.45")),
        ("decimal(5,2)", "0.1", Decimal("0.10")),
        ("decimal(5,2)", "1000", BAD),
        ("decimal(5,2)", "1.234", BAD),
        ("decimal(5,2)", "1e999999999", BAD),
        ("decimal(38,0)", "12345678901234567890123", Decimal("12345678901234567890123")),
        ("string", '"x"', "x"),
        ("string", "5", BAD),
        ("string", r'"\ud800"', BAD),
        ("date", '"2030-01-31"', date(2030, 1, 31)),
        ("date", '"2030-01-32"', BAD),
        ("date", '"2030-01-31T12:00:00Z"', BAD),
        ("timestamp", '"2030-01-31T12:00:00Z"', NOON),
        ("timestamp", '"2030-01-31T13:00:00+01:00"', NOON),
        ("timestamp", '"2030-01-31 12:00:00"', NOON),
        ("timestamp", '"2030-01-31"', BAD),
        ("timestamp", '"0001-01-01T00:00:00+23:59"', BAD),
        ("timestamp_ntz", '"2030-01-31T12:00:00"', NOON.replace(tzinfo=None)),
        ("timestamp_ntz", '"2030-01-31T12:00:00Z"', BAD),
        ("binary", '"AP8="', b"\x00\xff"),
        ("binary", '"AP8"', BAD),
        ("array<int>", "[1, null]", [1, None]),
        ("array<int>", '[1, "x"]', BAD),
        ("array<int>", "{}", BAD),
        ("map<string,int>", '{"a": 1, "b": null}', [("a", 1), ("b", None)]),
        ("map<string,int>", "[]", BAD),
        ("struct<a: int, b: string>", '{"a": 1, "c": 2}', {"a": 1, "b": None}),
        ("struct<a: int NOT NULL>", "{}", BAD),
        ("variant", '{"a": [1.10]}', '{"a":[1.10]}'),
        ("int", "null", None),
    ],
)
def test_what_a_type_takes(kind: str, text: str, expected: object) -> None:
    found = flattened(f"x {kind}, other string", b'{"x": %s, "other": "y"}' % text.encode())

    if expected is BAD:
        assert found["x"] == found["other"] == [None], "a value matches as a whole or not at all"
        assert found[PROBLEM][0].startswith("field x is not of type ")
    else:
        assert (found["x"], found["other"], found[PROBLEM]) == ([expected], ["y"], [None])


def test_why_a_value_has_no_fields() -> None:
    values = (b'{"id": 1}', b"x", b"\xff", b'{"id": 1} x', b"[]", b"{}", b'{"id": null}', b"", None, b"[" * 100_000)

    assert flattened("id int NOT NULL", *values)[PROBLEM] == [
        None,
        "it is not JSON",
        "it is not JSON",
        "it is not JSON",
        "it is JSON, but not an object",
        "field id is missing",
        "field id is missing",
        "it is not JSON",
        None,
        "it is not JSON",
    ]


def test_a_field_with_the_name_of_a_column_gets_another() -> None:
    found = flattened("timestamp string, id int", b'{"timestamp": "t", "id": 1}', taken=("value", "timestamp"))
    assert found == {"value_timestamp": ["t"], "id": [1], PROBLEM: [None]}
    for ddl, taken in [("a int, value_a int", ("a",)), (f"{PROBLEM} int", ()), ("problem int", ("problem",))]:
        with pytest.raises(BadSchema, match="two columns would be named value_"):
            Flattener(ddl, taken)


def test_it_is_sent_to_other_processes() -> None:
    made = pickle.loads(pickle.dumps(Flattener("id int", ["value"])))
    batch = pyarrow.record_batch({"value": [b'{"id": 1}', b"x", b""], "tombstone": [False, False, True]})

    assert made.add_to(batch).select(["id", PROBLEM]).to_pylist() == [
        {"id": 1, PROBLEM: None},
        {"id": None, PROBLEM: "it is not JSON"},
        {"id": None, PROBLEM: None},
    ]


def test_random_values_are_the_columns_that_pyarrow_reads() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    made = Flattener("id bigint, amount double, name string, is_new boolean, tags array<string>, at struct<x: int>", [])
    rows = []
    for _ in range(500):
        row: dict[str, Any] = {
            "id": chance.randrange(-(2**63), 2**63),
            "amount": chance.uniform(-1e9, 1e9),
            "name": chance.choice(["", "é", "\U0001f600", 'a"b\\']),
            "is_new": chance.random() < 0.5,
            "tags": [chance.choice("abc") for _ in range(chance.randrange(3))],
            "at": {"x": chance.randrange(-(2**31), 2**31)},
        }
        rows.append({name: value for name, value in row.items() if chance.random() < 0.8})
    values = [json.dumps(row).encode() for row in rows]
    schema = pyarrow.schema(list(made.schema)[:-1])
    options = pyarrow.json.ParseOptions(explicit_schema=schema)

    expected = pyarrow.json.read_json(io.BytesIO(b"\n".join(values)), parse_options=options)
    *columns, problems = made.columns(values)

    assert pyarrow.table(columns, schema=schema).to_pylist() == expected.select(schema.names).to_pylist()
    assert problems.null_count == len(rows)
