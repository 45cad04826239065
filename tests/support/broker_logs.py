"""What a broker has stored."""

from __future__ import annotations

from tests.support.brokers import Life

NUMBERS = [b"%d" % number for number in range(100)]


def stored_in(life: Life, topic: bytes) -> list[list[bytes]]:
    served = life.broker.topics.get(topic)
    assert served is not None
    return [life.in_log(topic, number) for number in range(len(served.partitions))]
