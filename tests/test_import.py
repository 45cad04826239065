"""`penstock publish --file`: JSON lines, CSV and Parquet that others wrote."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from penstock.cli.imports import Import
from penstock.client.sync import Client
from penstock.client.values import Outgoing
from penstock.errors import BadRequest
from tests.support.commands import Penstock, client, penstock, server  # noqa: F401

ORDERS = [{"id": 1, "country": "de", "amount": 9.5}, {"id": 2, "country": "fr", "amount": 7}]


class File(io.BytesIO):
    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def read(
    data: bytes, name: str = "orders.jsonl", *, subject: str = "orders", form: Any = "auto", **fields: str
) -> list[Outgoing]:
    given = Import(form=form, common=Outgoing(subject), **fields)
    return [message for message, _ in given.messages(File(data, name), lambda count: None)]


def json_lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def test_plain_objects_are_values_as_they_are_written() -> None:
    line = b'{"id": 1,  "name": "\xc3\xa9"}'
    assert [(each.subject, each.value, each.key) for each in read(line + b"\n\n" + line)] == [
        ("orders", line, None)
    ] * 2


@pytest.mark.parametrize(("name", "text"), [("orders.jsonl", '{"id":"1"}'), ("orders.csv", "id\n1\n")])
def test_a_byte_order_mark_is_not_part_of_the_first_message(name: str, text: str) -> None:
    assert [message.value for message in read(text.encode("utf-8-sig"), name)] == [b'{"id":"1"}']


@pytest.mark.parametrize("name", ["orders.jsonl", "orders.csv", "orders.parquet"])
def test_fields_are_key_and_subject(name: str) -> None:
    data = {
        "orders.jsonl": json_lines(*ORDERS),
        "orders.csv": b"id,country,amount\n1,de,9.5\n2,fr,7\n",
        "orders.parquet": parquet(ORDERS),
    }[name]

    found = read(data, name, subject="", key_field="id", subject_field="country")

    assert [(each.subject, each.key) for each in found] == [("de", "1"), ("fr", "2")]
    values = [json.loads(each.value or b"") for each in found]
    if name.endswith(".csv"):
        values = [
            {"id": int(each["id"]), "country": each["country"], "amount": float(each["amount"])} for each in values
        ]
    assert values == ORDERS


@pytest.mark.parametrize(
    ("first", "form", "is_message"),
    [
        ({"value": "x"}, "auto", True),
        ({"subject": "a", "json": 1}, "auto", True),
        ({"value": 1}, "auto", False),
        ({"value": True}, "auto", False),
        ({"value": "x", "colour": "red"}, "auto", False),
        ({"key": "x"}, "auto", False),
        ({}, "auto", False),
        ({"value": "x"}, "objects", False),
    ],
)
def test_the_first_row_tells_messages_from_objects(first: dict[str, Any], form: str, is_message: bool) -> None:
    [found] = read(json_lines(first), form=form)
    value = found.value or b""
    assert (value != json.dumps(first).encode()) == is_message


def test_what_parquet_has_and_json_does_not_is_text() -> None:
    moment = datetime.datetime(2030, 1, 31, 12, tzinfo=datetime.UTC)
    row = {
        "at": moment,
        "day": moment.date(),
        "price": decimal.Decimal("1.50"),
        "text": b"x",
        "raw": b"\xff",
    }
    [found] = read(parquet([row]), "orders.parquet")
    assert json.loads(found.value or b"") == {
        "at": "2030-01-31T12:00:00+00:00",
        "day": "2030-01-31",
        "price": "1.50",
        "text": "x",
        "raw": "/w==",
    }


@pytest.mark.parametrize(
    ("data", "name", "how", "reason"),
    [
        (json_lines({"a": 1}), "f.jsonl", {"subject": ""}, "line 1: a plain object has no subject: give SUBJECT or"),
        (json_lines({"a": 1}), "f.jsonl", {"key_field": "id"}, "line 1: no field 'id', given by --key-field"),
        (
            json_lines({"a": None}),
            "f.jsonl",
            {"key_field": "a"},
            "field 'a', given by --key-field, is None",
        ),
        (b'{"a": 1}\n[]\n', "f.jsonl", {}, "line 2: not a JSON object"),
        (b"a,b\n1,2\n3\n", "f.csv", {}, "line 3: the number of columns differs"),
        (b"a\n\xff\n", "f.csv", {}, "invalid CSV in UTF-8"),
        (b"\xff\n1\n", "f.csv", {}, "line 1: invalid CSV in UTF-8"),
        (b"id,name,id\n1,2,3\n", "f.csv", {}, "line 1: duplicate column 'id'"),
        (b'{"a": NaN}\n', "f.jsonl", {}, "line 1: invalid JSON: NaN is not allowed in JSON"),
        (b"PAR1", "f.parquet", {}, "invalid Parquet file"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, name: str, how: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        read(data, name, **how)


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_what_fetch_writes_is_published_as_it_was(
    penstock: Penstock,  # noqa: F811
    client: Client,  # noqa: F811
    tmp_path: Path,
    form: str,
) -> None:
    source = f"exported-{form}"
    client.publish(f"{source}.eu", b"one", key="k", headers={"Colour": "red"})
    client.publish(source, b'two, "2"')
    client.publish(source, b"\xff")
    client.publish(source, None, key="k")
    path = tmp_path / f"out.{form}"
    assert penstock("fetch", source, "--format", form, "--output", path).code == 0

    done = penstock("publish", f"{source}-again", "--file", path)

    assert (done.err, done.out.startswith("published 4 messages: ")) == ("", True)
    found = [(each.key, each.value, each.deleted, each.headers) for each in client.fetch(f"{source}-again")]
    assert found == [(each.key, each.value, each.deleted, each.headers) for each in client.fetch(source)]


def test_objects_are_published_and_counted(penstock: Penstock, client: Client, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "orders.jsonl"
    path.write_bytes(json_lines(*ORDERS))
    done = penstock("publish", "imported", "--file", path, "--key-field", "country")
    assert (done.err, done.out.startswith("published 2 objects: ")) == ("", True)
    assert [(each.key, each.json()) for each in client.fetch("imported")] == [(b"de", ORDERS[0]), (b"fr", ORDERS[1])]
