"""A pytest plugin, loaded automatically once Penstock is installed: a broker for each test that uses the fixture, and
pipelines on a sample of messages.

def test_orders_are_billed(penstock_broker):
    penstock_broker.publish("orders", b"first")

def test_orders_are_cleaned(penstock_pipeline):
    assert penstock_pipeline("orders.toml", [{"id": "a", "amount": 5.0}]).values == [{"id": "a", "tax": 1.0}]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.embedded import Broker
    from penstock.pipelines.sample import SampleOutput


@pytest.fixture
def penstock_broker(tmp_path: Path) -> Iterator[Broker]:
    """A real broker in this process, without a port. Its data is in the `tmp_path` of the test."""
    from penstock.embedded import Broker

    with Broker(tmp_path / "penstock") as broker:
        yield broker


@pytest.fixture(scope="session")
def penstock_pipeline() -> Iterator[Callable[..., SampleOutput]]:
    """A function that runs a pipeline file on a sample, without a broker: see `penstock.testing.run_pipeline`.

    All tests share one Spark session.
    """
    from penstock.pipelines.execution import opened
    from penstock.pipelines.sample import CONFIG
    from penstock.testing.samples import run_pipeline

    with opened("tests", config=CONFIG) as spark:
        yield partial(run_pipeline, spark=spark)
