"""A pytest plugin, loaded automatically once Penstock is installed: a broker for each test that uses the fixture.

def test_orders_are_billed(penstock_broker):
    penstock_broker.publish("orders", b"first")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.embedded import Broker


@pytest.fixture
def penstock_broker(tmp_path: Path) -> Iterator[Broker]:
    """A real broker in this process, without a port. Its data is in the `tmp_path` of the test."""
    from penstock.embedded import Broker

    with Broker(tmp_path / "penstock") as broker:
        yield broker
