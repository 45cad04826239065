"""The long proof: `python -m tests.soak --seed 1 --cuts 10000 --kills 200 --serves 100 --clients 50 --fuzz 200000
--pipes 50 --drivers 5 --nats 20000 --hostile 3600 --cluster 10000`.

`--cuts` simulated lives of a store with power cuts, from `--seed` on, then `--kills` times kill -9 of a process that
appends, then `--fuzz` rounds of any bytes for the parsers of all doors, then `--serves` times kill -9 of a server
under load, then `--clients` blows that our own clients must survive: kill -9 of their server, or cut connections;
then `--pipes` times kill -9 of brokers in a tree while messages flow through it; then `--drivers` times kill -9
of a Spark driver between its sink's commit and Spark's own; then `--nats` scenarios on nats-server and on Penstock,
whose transcripts must be equal; then `--hostile` seconds of hostile clients at the doors of a server; and then
`--cluster` simulated lives of a cluster, and every history of small ones. A failure names the seed that shows it again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.progress import Progress, track

from tests.cluster.explore import Budget, explore
from tests.cluster.play import play
from tests.hostile.__main__ import besiege_all
from tests.hostile.doors import DOORS
from tests.hostile.siege import Scale
from tests.nats.generate import CHUNK as NATS_CHUNK
from tests.nats.generate import soak as soak_scenarios
from tests.support.client_journal import ClientFigures
from tests.support.client_kill import ClientJudge
from tests.support.fuzz import DOOR as FUZZ
from tests.support.fuzz import fuzz
from tests.support.kill import KillJudge
from tests.support.pipe_kill import PipeFigures, PipeJudge
from tests.support.serve_clients import Figures
from tests.support.serve_kill import ServeJudge
from tests.support.simulation import simulate
from tests.support.spark_soak import kill_drivers

CHUNK = 50
# After so many kills of a server what it stored is judged; it goes on with the same directory.
SETTLE_EVERY = 20
# So many blows make a life of clients; the next ones are of the next seed.
BLOWS = 50
# Small clusters whose histories are all visited: the number of machines, and what may happen.
SMALL_CLUSTERS = [
    (2, Budget(take_overs=2, rounds=2, unknowns=1)),
    (2, Budget(take_overs=2, rounds=1, checkpoints=1)),
    (2, Budget(take_overs=2, rounds=1, crashes=1)),
    (3, Budget(take_overs=2, rounds=1)),
]
STATES_MAX = 1_000_000


def cut(first: int, last: int) -> tuple[int, int, int]:
    """Simulate the seeds from `first` to before `last`: seeds, power cuts, acknowledged messages."""
    simulations = [simulate(seed) for seed in range(first, last)]
    messages = sum(len(topic.acknowledged) for simulation in simulations for topic in simulation.topics.values())
    return len(simulations), sum(simulation.cuts for simulation in simulations), messages


def soak_cuts(seed: int, count: int) -> Iterator[tuple[int, int, int]]:
    firsts = range(seed, seed + count, CHUNK)
    lasts = [min(first + CHUNK, seed + count) for first in firsts]
    with ProcessPoolExecutor() as workers:
        yield from track(workers.map(cut, firsts, lasts), "power cuts", total=len(firsts))


def soak_kills(seed: int, count: int) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory:
        judge = KillJudge(Path(directory) / "data", seed)
        for _ in track(range(count), "kill -9"):
            judge.kill_one()
        return sum(map(len, judge.acknowledged.values()))


def soak_serves(seed: int, count: int) -> Figures:
    # A failure leaves it behind, and names it.
    directory = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    judge = ServeJudge(directory, seed)
    for number in track(range(1, count + 1), "kill -9 of a server"):
        judge.kill_one()
        if number % SETTLE_EVERY == 0 or number == count:
            judge.settle()
    shutil.rmtree(directory)
    return judge.figures


def soak_clients(seed: int, count: int) -> ClientFigures:
    lives = []
    for number in track(range(count), "kill -9 under clients"):
        if number % BLOWS == 0:
            judge = ClientJudge(Path(tempfile.mkdtemp(prefix="penstock-soak-")), seed + number // BLOWS)
        judge.strike()
        if number % BLOWS == BLOWS - 1 or number == count - 1:
            judge.finish()
            shutil.rmtree(judge.directory)
            lives.append(judge.figures)
    return ClientFigures(*map(sum, zip(*lives, strict=True)))


def soak_drivers(seed: int, count: int) -> int:
    directory = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    rows = [*track(kill_drivers(directory, seed, count), "kill -9 of a Spark driver", total=count + 1)]
    shutil.rmtree(directory)
    return rows[-1]


def soak_fuzz(seed: int, rounds: int) -> int:
    with Progress(*Progress.get_default_columns(), transient=True) as progress:
        task = progress.add_task("any bytes", total=rounds)
        return fuzz(seed, rounds, lambda done: progress.update(task, completed=done))


def soak_pipes(seed: int, count: int) -> PipeFigures:
    # A failure leaves it behind, and names it.
    directory = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    judge = PipeJudge(directory, seed)
    with Progress() as progress:
        task = progress.add_task("kill -9 in a tree", total=count)
        while judge.kills < count:
            judge.kill_one()
            progress.update(task, completed=judge.kills)
    judge.finish()
    shutil.rmtree(directory)
    return judge.figures


def live(first: int, last: int) -> tuple[int, int]:
    """Simulate clusters with the seeds from `first` to before `last`: epochs, acknowledged records."""
    judges = [play(seed).oracle for seed in range(first, last)]
    return sum(judge.epoch for judge in judges), sum(len(judge.acknowledged) for judge in judges)


def soak_cluster(seed: int, count: int) -> tuple[int, int, int]:
    """Return epochs and acknowledged records of simulated clusters, and the states of all histories of small ones."""
    firsts = range(seed, seed + count, CHUNK)
    lasts = [min(first + CHUNK, seed + count) for first in firsts]
    with ProcessPoolExecutor() as workers:
        lives = [*track(workers.map(live, firsts, lasts), "lives of a cluster", total=len(firsts))]
        small = [workers.submit(explore, *small, STATES_MAX) for small in SMALL_CLUSTERS]
        states = sum(found.result() for found in track(small, "histories of a cluster"))
    return sum(epochs for epochs, _ in lives), sum(acknowledged for _, acknowledged in lives), states


def soak_nats(seed: int, count: int) -> None:
    for _ in track(soak_scenarios(seed, count), "scenarios of NATS", total=-(-count // NATS_CHUNK)):
        pass


def soak_hostile(seed: int, seconds: int) -> None:
    """As many seconds for each door, with as many connections as a server may have to bear, and as many topics."""
    doors = (*DOORS, FUZZ)
    scale = Scale(seconds / len(doors), connections_max=10_000, topics_max=1000)
    besiege_all(track(doors, "hostile clients"), seed, scale)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--serves", type=int, default=100)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--fuzz", type=int, default=200_000)
    parser.add_argument("--pipes", type=int, default=50)
    parser.add_argument("--drivers", type=int, default=5)
    parser.add_argument("--nats", type=int, default=20_000)
    parser.add_argument("--hostile", type=int, default=3600)
    parser.add_argument("--cluster", type=int, default=10_000)
    options = parser.parse_args()
    if options.cuts:
        seeds, cuts, messages = (sum(column) for column in zip(*soak_cuts(options.seed, options.cuts), strict=True))
        print(f"{seeds} lives, {cuts} power cuts, {messages} acknowledged messages: none lost, none twice")
    if options.kills:
        messages = soak_kills(options.seed, options.kills)
        print(f"{options.kills} kills, {messages} acknowledged messages: none lost, none twice")
    if options.fuzz:
        print(f"{options.fuzz} rounds, {soak_fuzz(options.seed, options.fuzz)} bytes parsed: only protocol errors")
    if options.serves:
        print(f"{soak_serves(options.seed, options.serves)}: none lost, none twice")
    if options.clients:
        print(f"{soak_clients(options.seed, options.clients)}: none lost, none twice")
    if options.pipes:
        print(f"{soak_pipes(options.seed, options.pipes)}: none lost, none twice")
    if options.drivers:
        print(f"{options.drivers} drivers killed, {soak_drivers(options.seed, options.drivers)} rows: each stored once")
    if options.nats:
        soak_nats(options.seed, options.nats)
        print(f"{options.nats} scenarios on nats-server and on Penstock: the same transcripts")
    if options.hostile:
        soak_hostile(options.seed, options.hostile)
        print(f"{options.hostile} s of hostile clients: nobody else noticed")
    if options.cluster:
        epochs, acknowledged, states = soak_cluster(options.seed, options.cluster)
        print(
            f"{options.cluster} lives of a cluster, {epochs} leaders, {acknowledged} acknowledged: none lost or twice"
        )
        print(f"{states} states of small clusters: the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
