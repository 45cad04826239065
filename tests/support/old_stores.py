"""Stores that earlier versions wrote: how one is made, and what can be seen in it.

Each is kept in `tests/store/stores/`: `<name>.tar.xz`, a data directory as a killed server left it, and `<name>.json`,
what that version showed of it. Every later version must open it and show the same (`tests/store/test_old_stores.py`).
When the format of the data directory changes, the last version before that makes one more:

    git archive <commit> src | tar -x -C /tmp/before
    PYTHONPATH=/tmp/before/src .venv/bin/python -m tests.support.old_stores format-1
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from penstock import Client
from penstock.model.batch import encode
from tests.support.registries import until
from tests.support.server import Serve

STORES: Final = Path(__file__).parents[1] / "store" / "stores"
# The longest delay there is. A year after a store was made these messages are in their topics.
LATER: Final = timedelta(days=365)
DELAYED: Final = ("a message for later", "another one")
SMALL: Final = {"segment_bytes": 4096}


def write(server: Serve) -> None:
    """Fill a store with all that a broker keeps. Retention stays off: it would empty the store as time goes by."""
    with Client(f"127.0.0.1:{server.port}") as client:
        client.create_topic("orders", partitions=3, **SMALL)
        client.create_topic("clicks", durability="flush", **SMALL)
        client.create_topic("prices", cleanup="compact", tombstone_ms=0, **SMALL)
        client.create_topic("jobs", deliveries_max=1)
        client.create_group("billing", "orders.>", start="earliest")
        client.create_group("audit", "orders.>", mode="partitioned", start="earliest")
        client.create_group("workers", "jobs", start="earliest")
        for compression in ("none", "lz4", "zstd"):
            with client.producer(compression=compression) as producer:
                for number in range(60):
                    headers = {"Origin": compression, "Number": str(number)}
                    value = f"{compression} order {number} ".encode() * 5
                    producer.publish(f"orders.{compression}", value, key=f"customer-{number % 7}", headers=headers)
        for number in range(150):
            client.publish("clicks", f"click {number} ".encode() * 10)
        for number in range(200):
            price = None if number % 11 == 10 else f"price {number} ".encode() * 10
            client.publish("prices", price, key=f"product-{number % 13}")
        client.publish("orders.id", b"once", message_id="order-1")
        assert client.publish("orders.id", b"again", message_id="order-1").duplicate
        _consume(client)
        with client.transaction("import", 7) as transaction:
            transaction.publish("orders.import", b"first of two", key="a")
            transaction.publish("clicks", b"second of two")
        stage = client.stage("import", 8)
        stage.append("clicks", 0, encode([b"nobody reads this"], timestamp=0))
        stage.close()
        client.publish("orders.late", DELAYED[0].encode(), delay=LATER)
        client.publish("clicks", DELAYED[1].encode(), delay=LATER, headers={"A": "b"})


def _consume(client: Client) -> None:
    with client.subscribe("orders.>", group="billing") as subscription:
        for number, message in enumerate(_take(subscription, 90)):
            if number % 3:
                message.ack()
        subscription.flush()
    client.commit("audit", "orders", 1, 5)
    for number in range(6):
        client.publish("jobs", f"job {number}".encode(), headers={"Number": str(number)})
    with client.subscribe("jobs", group="workers") as subscription:
        for number, message in enumerate(_take(subscription, 5)):
            if number % 2:
                message.nack()
            else:
                message.ack()
        subscription.flush()
    until(lambda: len(client.dead_letters()) == 2)


def _take(subscription: Any, count: int) -> list[Any]:
    return [subscription.get(timeout=20) for _ in range(count)]


def survey(server: Serve) -> dict[str, Any]:
    """What a broker shows of its store, as JSON."""
    with Client(f"127.0.0.1:{server.port}") as client:
        return {
            "topics": {topic.name: _topic(client, topic) for topic in client.topics()},
            "groups": {
                group.name: {
                    "pattern": group.pattern,
                    "mode": group.mode,
                    "lag": group.lag,
                    "committed": [[each.topic, each.partition, each.committed] for each in group.positions],
                }
                for group in client.groups()
            },
            "dead_letters": [
                [each.subject, each.topic, each.origin_offset, each.group, each.attempts, each.value.decode()]
                for each in client.dead_letters()
            ],
            "delayed": client.statistics()["delayed"],
        }


def _topic(client: Client, topic: Any) -> dict[str, Any]:
    messages = [
        [
            each.partition,
            each.offset,
            each.subject,
            (each.key or b"").decode(),
            each.value.decode(),
            each.headers,
            each.timestamp_us,
        ]
        for partition in range(topic.partitions)
        for each in client.fetch(topic.name, partition)
    ]
    return {"id": topic.id, "partitions": topic.partitions, "policy": topic.policy, "messages": messages}


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with Serve(Path(directory), storage_upkeep_ms=50) as server:
            write(server)
            with Client(f"127.0.0.1:{server.port}") as client:
                prices = server.data / "topics" / str(client.topic("prices").id) / "0"
            # Compacted: all but the active segment have a few messages together.
            until(lambda: sum(path.stat().st_size for path in prices.glob("*.log")) < 8000)
        server.restart(storage_upkeep_ms=10**9)
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish("clicks", b"the last one before a kill")
        seen = survey(server)
        server.kill()
        (STORES / f"{name}.json").write_text(json.dumps(seen) + "\n")
        with tarfile.open(STORES / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(server.data, "data")


if __name__ == "__main__":
    make(sys.argv[1])
