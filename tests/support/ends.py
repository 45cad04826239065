"""The ways in which the life of a broker ends, and what groups tell afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from penstock.testing import FaultyFiles
from tests.support.brokers import SECOND, Life, Recorder

DEADLINE = 5 * SECOND


async def by_stop(life: Life) -> FaultyFiles:
    await life.stop()
    assert isinstance(life.disk, FaultyFiles)
    return life.disk


async def by_kill(life: Life) -> FaultyFiles:
    await life.kill()
    assert isinstance(life.disk, FaultyFiles)
    return life.disk


async def by_power_cut(life: Life) -> FaultyFiles:
    return await life.power_cut()


End = Callable[[Life], Awaitable[FaultyFiles]]
ends = pytest.mark.parametrize("end", [by_stop, by_kill, by_power_cut])


def attempts(sink: Recorder) -> list[tuple[bytes, int]]:
    return [(message.value, message.attempts) for message in sink.got]
