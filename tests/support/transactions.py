"""Batches that are staged and committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.awaiting import settled
from penstock.broker import transactions
from penstock.log.policy import Durability, Policy
from penstock.model.batch import Batch, accept, encode
from penstock.outcome import Outcome
from tests.support.brokers import Life

JOB: Final = b"job"


FSYNC, FLUSH = Policy(), Policy(durability=Durability.FLUSH)


def batch_of(*values: bytes, headers: bytes | None = None) -> Batch:
    lines = None if headers is None else [headers] * len(values)
    return accept(encode(values, timestamp=1, headers=lines, asks=headers is not None).data)


def opened(life: Life) -> transactions.Transactions:
    assert life.broker.transactions is not None
    return life.broker.transactions


async def make_topics(life: Life, **policies: Policy) -> None:
    await life.do(life.broker.open_transactions())
    for name, policy in policies.items():
        await life.do(life.broker.changes.create(name.encode(), policy=policy))


async def stage(
    life: Life, topic: bytes, *values: bytes, name: bytes = JOB, number: int = 0, partition: int = 0
) -> int:
    return await stage_batch(life, topic, batch_of(*values), name=name, number=number, partition=partition)


async def stage_batch(
    life: Life, topic: bytes, batch: Batch, *, name: bytes = JOB, number: int = 0, partition: int = 0
) -> int:
    served = life.broker.topics.named(topic)
    outcome = Outcome()
    offset = opened(life).stage((served.topic.id, partition, len(served.partitions)), name, number, batch, outcome)
    await life.do(settled(outcome))
    return offset


async def commit(life: Life, offsets: Sequence[int], *, name: bytes = JOB, number: int = 0) -> bool:
    return await life.do(opened(life).commit(name, number, offsets))


def _path(life: Life, topic: bytes) -> str:
    return f"topics/{life.partition(topic).topic_id}/0/00000000000000000000.log"
