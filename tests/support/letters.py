"""Messages that become dead letters."""

from __future__ import annotations

from penstock.broker.broker import Settings
from penstock.log.policy import Policy
from tests.support.brokers import SECOND, Life, Recorder

DEADLINE = 5 * SECOND
SETTINGS = Settings(policy=Policy(deliveries_max=1))

# Two groups, one on each topic. Both let everything die.
GROUPS = {b"orders": b"orders.>", b"bills": b"bills.>"}


async def die(life: Life, *messages: tuple[bytes, bytes], headers: bytes = b"") -> None:
    """Publish (subject, value), and let nobody acknowledge it."""
    for name, pattern in GROUPS.items():
        if name not in life.broker.groups:
            await life.do(life.broker.groups.create(name, pattern))
    for subject, value in messages:
        await life.stored(subject, value, headers=headers)
    for name, pattern in GROUPS.items():
        group, member = await life.join(name, pattern, Recorder())
        await life.advance(DEADLINE)
        life.broker.groups.leave(group, member)
    await life.settle()
