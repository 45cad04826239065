"""`penstock fetch --format parquet --flatten`: the fields of JSON values as columns."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet

from penstock.client.sync import Client
from tests.support.commands import Penstock, wrong_usage


def test_fields_are_columns(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.create_topic("flat")
    client.set_schema("flat", "id bigint NOT NULL, name string")
    values = [json.dumps({"id": number, "name": f"n{number}"}).encode() for number in range(5)]
    for value in [*values, b"oops"]:
        client.publish("flat", value)
    client.publish("flat", None, key="k")

    done = penstock("fetch", "flat", "--format", "parquet", "--flatten", "--output", tmp_path / "flat.parquet")
    assert done.out.startswith("wrote 7 messages to "), done.err
    found = pyarrow.parquet.read_table(tmp_path / "flat.parquet")
    assert found.schema.field("id").type == pyarrow.int64()
    assert found["value"].to_pylist()[:6] == [*values, b"oops"]
    assert found.select(["id", "name", "value_problem"]).to_pylist() == [
        *({"id": number, "name": f"n{number}", "value_problem": None} for number in range(5)),
        {"id": None, "name": None, "value_problem": "it is not JSON"},
        {"id": None, "name": None, "value_problem": None},
    ]

    schema = "name string, timestamp timestamp"
    penstock("fetch", "flat", "--format", "parquet", "--flatten", "--schema", schema, "--output", tmp_path / "two")
    found = pyarrow.parquet.read_table(tmp_path / "two")
    assert found["name"].to_pylist() == ["n0", "n1", "n2", "n3", "n4", None, None]
    assert found["value_timestamp"].null_count == 7


def test_what_has_no_fields_is_refused(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.create_topic("plain")
    file = ("--format", "parquet", "--output", tmp_path / "plain.parquet")
    assert "only --format parquet has columns" in wrong_usage(penstock("fetch", "plain", "--flatten"))
    assert "give --flatten too" in wrong_usage(penstock("fetch", "plain", *file, "--schema", "id int"))
    assert "plain has no schema" in penstock("fetch", "plain", *file, "--flatten").err
    assert "unknown type 'strin'" in penstock("fetch", "plain", *file, "--flatten", "--schema", "id strin").err
    assert not (tmp_path / "plain.parquet").exists()
