from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.doors import DOORS
from tests.hostile.oracle import table
from tests.hostile.siege import Door, Scale, besiege


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_hostile_clients_harm_nobody_else(tmp_path: Path, door: Door) -> None:
    print("\n" + table([besiege(tmp_path / "hostile", door, seed=1, scale=Scale(seconds=5))]))
