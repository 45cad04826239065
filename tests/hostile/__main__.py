"""One siege after another: `python -m tests.hostile --seconds 60 --door NATS --attack half_a_payload`.

Without `--door` all doors, without `--attack` all of a door's attacks. The table tells the longest stall and the most
memory for each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.hostile.doors import DOORS
from tests.hostile.oracle import table
from tests.hostile.siege import Door, Scale, besiege


def besiege_all(doors: Iterable[Door], seed: int, scale: Scale) -> None:
    """Print a row for each door. A failure leaves the directory of its server behind, and names the seed."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-hostile-"))
    for number, door in enumerate(doors):
        head, row = table([besiege(directory / door.name, door, seed, scale)]).splitlines()
        print(row if number else f"{head}\n{row}", flush=True)
    directory.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5, help="for each door")
    parser.add_argument("--connections", type=int, default=Scale(0).connections_max, help="of one attack at a time")
    parser.add_argument("--door", choices=[door.name for door in DOORS])
    parser.add_argument("--attack")
    options = parser.parse_args()
    doors = [door for door in DOORS if options.door in (None, door.name)]
    if options.attack is not None:
        doors = [door._replace(attacks=door.named(options.attack)) for door in doors if door.named(options.attack)]
    scale = Scale(options.seconds, connections_max=options.connections)
    besiege_all(doors, options.seed, scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
