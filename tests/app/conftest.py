"""A broker, and an app that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.app import App
from penstock.embedded import Broker
from tests.support.handlers import make_topic


@pytest.fixture(scope="package")
def broker() -> Iterator[Broker]:
    with Broker(settings={"topic.durability": "flush"}) as broker:
        yield broker


@pytest.fixture
def app(broker: Broker) -> App:
    return App(broker)


@pytest.fixture
def topic(broker: Broker) -> str:
    """One of this test alone, whose messages are not delivered again while it runs."""
    return make_topic(broker)
