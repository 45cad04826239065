"""Transactions through both clients, against a real server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import pytest

from penstock import Client
from penstock.errors import BadHeader, BadRequest, BatchTooLarge, Closed, StageLost
from penstock.model.batch import encode
from tests.support.proxy import Proxy
from tests.support.server import Serve
from tests.support.shells import SHELLS, Shell, shell_of

_NAMES: Final = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("data")) as serve:
        yield serve


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with shell_of(request.param) as made:
        yield made


@pytest.fixture
def client(shell: Shell, server: Serve) -> Client:
    return shell.client(f"127.0.0.1:{server.ports['text']}")


@pytest.fixture
def topics() -> tuple[str, str]:
    return f"x{next(_NAMES)}", f"x{next(_NAMES)}"


def values(client: Client, topic: str, partition: int = 0) -> list[bytes]:
    return [message.value for message in client.fetch(topic, partition)]


def held(client: Client, *topics: str) -> list[list[bytes]]:
    known = {topic.name for topic in client.topics()}
    return [values(client, topic) if topic in known else [] for topic in topics]


def test_all_of_it_is_stored_at_the_end(client: Client, topics: tuple[str, str]) -> None:
    orders, bills = topics
    with client.transaction() as transaction:
        transaction.publish(f"{orders}.eu", b"1", key="k", headers={"A": "b"})
        transaction.publish(bills, json={"n": 1}, message_id="one")
        assert held(client, orders, bills) == [[], []]
    assert not transaction.is_duplicate
    (order,) = client.fetch(orders)
    assert (order.subject, order.key, order.headers, order.value) == (f"{orders}.eu", b"k", {"A": "b"}, b"1")
    (bill,) = client.fetch(bills)
    assert (bill.json(), bill.message_id) == ({"n": 1}, "one")
    assert client.publish(bills, b"again", message_id="one").duplicate


def test_nothing_of_it_is_stored_if_the_block_raises(client: Client, topics: tuple[str, str]) -> None:
    orders, bills = topics

    def fail() -> None:
        with client.transaction() as transaction:
            transaction.publish(orders, b"1")
            transaction.publish(bills, bytes(300_000))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert held(client, orders, bills) == [[], []]


def test_messages_keep_their_order_in_each_partition_whatever_their_size(
    client: Client, topics: tuple[str, str]
) -> None:
    orders, _ = topics
    client.create_topic(orders, partitions=3)
    sent = [(b"%d" % (number % 7), b"%d" % number + bytes(number * 100)) for number in range(200)]
    with client.transaction() as transaction:
        for key, value in sent:
            transaction.publish(orders, value, key=key)
    found = [message for partition in range(3) for message in client.fetch(orders, partition)]
    assert len(found) == len(sent)
    for key in {key for key, _ in sent}:
        assert [message.value for message in found if message.key == key] == [v for k, v in sent if k == key]
        assert len({message.partition for message in found if message.key == key}) == 1


def test_one_with_a_name_is_stored_once(client: Client, topics: tuple[str, str]) -> None:
    orders, _ = topics
    assert client.last_transaction(f"job {orders}") is None
    for number in (0, 0, 1, 0, 1):
        with client.transaction(f"job {orders}", number) as transaction:
            transaction.publish(orders, b"%d" % number)
    assert values(client, orders) == [b"0", b"1"]
    assert transaction.is_duplicate
    assert client.last_transaction(f"job {orders}") == 1


def test_an_empty_one_is_nothing(client: Client) -> None:
    with client.transaction():
        pass


def test_one_that_is_over_takes_no_more(client: Client, topics: tuple[str, str]) -> None:
    orders, _ = topics
    transaction = client.transaction()
    transaction.publish(orders, b"1")
    assert transaction.commit()
    with pytest.raises(Closed, match="over"):
        transaction.publish(orders, b"2")
    with pytest.raises(Closed, match="over"):
        transaction.commit()
    transaction.abort()
    assert values(client, orders) == [b"1"]


def test_a_message_that_is_too_large_is_refused_at_once(client: Client, topics: tuple[str, str]) -> None:
    with pytest.raises(BatchTooLarge), client.transaction() as transaction:
        transaction.publish(topics[0], bytes(2 << 20))


def test_parts_of_several_clients_are_committed_together(
    shell: Shell, client: Client, server: Serve, topics: tuple[str, str]
) -> None:
    orders, bills = topics
    other = shell.client(f"127.0.0.1:{server.ports['text']}")
    offsets: list[int] = []
    for each, topic in ((client, orders), (other, bills)):
        stage = each.stage(orders, 7)
        for number in range(3):
            stage.append(each.resolve(topic).topic, 0, encode([b"%d" % number], timestamp=1))
        offsets += stage.close()
        assert not stage.is_done
    assert held(client, orders, bills) == [[], []]
    assert client.commit_transaction(orders, 7, offsets)
    assert held(client, orders, bills) == [[b"0", b"1", b"2"]] * 2
    again = client.stage(orders, 7)
    again.append(orders, 0, encode([b"again"], timestamp=1))
    assert (again.close(), again.is_done) == ([], True)
    assert not other.commit_transaction(orders, 7, offsets)
    assert held(client, orders) == [[b"0", b"1", b"2"]]


def test_what_is_refused_is_told(client: Client, topics: tuple[str, str]) -> None:
    orders, bills = topics
    client.create_topic(orders)
    late = encode([b"1"], timestamp=1, headers=[b"Delay: 5\r\n"], asks=True)
    stage = client.stage(bills, 0)
    stage.append(orders, 0, late)
    with pytest.raises(BadHeader, match="delayed"):
        stage.close()
    with pytest.raises(BadRequest, match="invalid topic"):
        client.stage(bills, 0).append(f"{orders}.eu", 0, encode([b"1"], timestamp=1))
    with pytest.raises(StageLost):
        client.commit_transaction(bills, 0, [1_000_000])
    client.abort_transaction(bills, 0)


def test_it_is_stored_once_though_the_connection_breaks(shell: Shell, server: Serve, topics: tuple[str, str]) -> None:
    orders, bills = topics
    direct = shell.client(f"127.0.0.1:{server.ports['text']}")
    direct.create_topic(orders)
    direct.create_topic(bills)
    with Proxy(server.ports["text"]) as proxy:
        client = shell.client(proxy.address)
        client.connect()
        proxy.rage(seed=1)
        for number in range(20):
            with client.transaction(orders, number) as transaction:
                for topic in topics:
                    transaction.publish(topic, b"%d" % number)
        proxy.calm()
    assert held(direct, orders, bills) == [[b"%d" % number for number in range(20)]] * 2
