"""Our own clients lose nothing and double nothing, whenever the server is killed or the network breaks."""

from __future__ import annotations

from pathlib import Path

from tests.support.client_kill import Blow, ClientJudge


def test_clients_go_on_by_themselves_when_their_server_is_killed_or_the_network_breaks(tmp_path: Path) -> None:
    judge = ClientJudge(tmp_path, seed=1)
    for blow in (Blow.KILL, Blow.CUT, Blow.KILL, Blow.STOP, Blow.MANY_CUTS, Blow.KILL):
        judge.strike(blow)
    judge.finish()
    figures = judge.figures
    assert figures.published, "nothing was stored"
    assert figures.again, "no blow found anything in flight"
    assert figures.confirmed, "nothing that groups did was confirmed"
    assert figures.dead_letters, "nothing became a dead letter"
