"""Pipelines whose files name no schema: their topics do."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.errors import BadConfig
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.topic_schemas import with_schemas

FILE = """\
name = "clean"
kind = "transform"
[source]
servers = "{servers}"
topic = "orders"
{schema}
[transform]
sql = "SELECT id FROM source"
[sink]
topic = "clean"
"""


@pytest.fixture
def broker(tmp_path: Path) -> penstock.Broker:
    return penstock.Broker(tmp_path / "data", listen="127.0.0.1:0")


def _pipeline(tmp_path: Path, broker: penstock.Broker, schema: str = "") -> Pipeline:
    path = tmp_path / "clean.toml"
    path.write_text(FILE.format(servers=broker.address, schema=schema))
    return load(path)


def test_a_file_without_a_schema_takes_that_of_the_topic(tmp_path: Path, broker: penstock.Broker) -> None:
    with broker:
        broker.create_topic("orders")
        broker.set_schema("orders", '{"type": "object", "properties": {"id": {"type": "integer", "minimum": 3}}}')

        assert with_schemas(_pipeline(tmp_path, broker)).source.schema == "id BIGINT"
        assert with_schemas(_pipeline(tmp_path, broker, 'schema = "id int"')).source.schema == "id int"


def test_a_topic_without_a_usable_schema_is_an_error_that_says_so(tmp_path: Path, broker: penstock.Broker) -> None:
    with broker:
        broker.create_topic("orders")
        where = rf"clean\.toml:3: \[source\] schema is missing, and that of topic orders at {broker.address} cannot"
        with pytest.raises(BadConfig, match=where + ".* has no schema: register one"):
            with_schemas(_pipeline(tmp_path, broker))
        broker.set_schema("orders", '{"type": "array"}')
        with pytest.raises(BadConfig, match=where + ".* must be an object with properties"):
            with_schemas(_pipeline(tmp_path, broker))
