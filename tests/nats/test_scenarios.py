"""Every scenario, on nats-server and on Penstock: each connection receives the same."""

from __future__ import annotations

import difflib

import pytest

from tests.nats.differences import DIFFERENCES
from tests.nats.run import Peer, run_both
from tests.nats.scenario import parse, restore
from tests.nats.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_connections_receive_what_they_receive_from_nats_server(peers: tuple[Peer, Peer], name: str) -> None:
    real, ours = run_both(peers, SCENARIOS[name])
    difference = DIFFERENCES.get(name)
    if difference is None:
        assert ours == real
        return
    if difference.is_rare and ours == real:
        return
    assert ours != real, f"the difference {name!r} is gone: remove it from tests/nats/differences.py"
    if difference.lines is not None:
        found = tuple(line for line in difflib.ndiff(real, ours) if line[0] in "+-")
        assert found == difference.lines, difference.reason


def test_differences_are_of_scenarios() -> None:
    assert DIFFERENCES.keys() <= SCENARIOS.keys()


def test_a_scenario_is_written_in_lines() -> None:
    text = """
a SUB ~.x w# 1
  2x PUB ~b.x ^ =m%d
  PING
b& HPUB ~.x {A: 1; B: 2} =x*3
b KILL
"""
    opened, sent, *others = parse(text, 1000007)
    assert opened.data.startswith(b"CONNECT {")
    assert sent.data == (
        b"SUB t.1000007.x w1000007 1\r\n"
        b"PUB tb.1000007.x n1000007 2\r\nm0\r\nPUB tb.1000007.x n1000007 2\r\nm1\r\nPING\r\n"
    )
    assert (sent.pings, sent.waits, [*sent.queues()]) == (1, True, [(b"1", b"w1000007")])
    assert [(step.connection, step.act.name, step.waits) for step in others] == [
        ("b", "OPEN", True),
        ("b", "SEND", False),
        ("b", "KILL", True),
    ]
    assert others[1].data == b"HPUB t.1000007.x 24 27\r\nNATS/1.0\r\nA: 1\r\nB: 2\r\n\r\nxxx\r\n"
    assert restore("t.1000007.x n1000007 tb.1000007 w1000007", 1000007) == "~.x ^ ~b w#"
