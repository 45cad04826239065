"""The two clients have the same methods, parameters and constructors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from penstock import AsyncClient, Client
from penstock.client.blocking import Stage, Transaction
from penstock.client.producer import AsyncProducer
from penstock.client.subscription import AsyncSubscription
from penstock.client.sync import Producer, Subscription
from penstock.client.transaction import AsyncStage, AsyncTransaction
from tests import blocking


@pytest.mark.parametrize(
    ("threads", "aio"),
    [
        (Client, AsyncClient),
        (Subscription, AsyncSubscription),
        (Producer, AsyncProducer),
        (Stage, AsyncStage),
        (Transaction, AsyncTransaction),
    ],
)
def test_both_clients_have_the_same_methods_with_the_same_parameters(threads: type, aio: type) -> None:
    for_the_link = {"connected", "disconnected", "writable"}

    def methods(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            name: [(each.name, each.kind, each.default) for each in inspect.signature(found).parameters.values()]
            for name, found in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name not in for_the_link
        }

    assert methods(threads) == methods(aio)
    for kind in (threads, aio):
        for name in methods(kind):
            assert getattr(kind, name).__doc__, f"{kind.__name__}.{name} has no docstring"


def test_methods_that_are_generated_are_up_to_date() -> None:
    assert blocking.TARGET.read_text() == blocking.generate(), "run `python -m tests.blocking --write`"


def test_constructors_are_the_same() -> None:
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
