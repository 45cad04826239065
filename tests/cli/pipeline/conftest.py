"""A broker with the orders of the example pipelines, and the examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import SparkBroker
from tests.support.pipeline_files import ORDERS, PAYMENTS, Example, publish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def broker() -> Iterator[SparkBroker]:
    """With the orders that the examples are about: of a hundred ten are there twice, and one is none."""
    with SparkBroker(listen="127.0.0.1:0") as broker:
        publish(broker, "orders", *ORDERS)
        broker.publish("orders", b"no order")
        publish(broker, "payments", *PAYMENTS)
        yield broker


@pytest.fixture
def example(request: pytest.FixtureRequest, spark: SparkSession, broker: SparkBroker, tmp_path: Path) -> Example:
    return Example(request.param, tmp_path, broker)
