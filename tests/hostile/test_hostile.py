from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.hostile.doors import DOORS
from tests.hostile.frames import BINARY
from tests.hostile.oracle import table
from tests.hostile.prefixed import CURSUS, QB
from tests.hostile.siege import LITTLE, NOBODY, Door, Scale, besiege
from tests.hostile.text import NATS
from tests.support.certificates import Certificates

# One that reads into a buffer, and uvicorn.
OVER_TLS: Final = ("binary", "HTTP")


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_hostile_clients_harm_nobody_else(tmp_path: Path, door: Door) -> None:
    print("\n" + table([besiege(tmp_path / "hostile", door, seed=1, scale=Scale(seconds=5))]))


@pytest.mark.parametrize("door", [each for each in DOORS if each.name in OVER_TLS], ids=lambda door: door.name)
def test_hostile_clients_over_tls_harm_nobody_else(tmp_path: Path, door: Door, certificates: Certificates) -> None:
    scale = Scale(seconds=2, connections_max=50)
    print("\n" + table([besiege(tmp_path / "hostile", door, seed=1, scale=scale, certificates=certificates)]))


@pytest.mark.parametrize(
    ("door", "user"), [(NATS, NOBODY), (NATS, LITTLE), (BINARY, LITTLE), (QB, LITTLE), (CURSUS, NOBODY)]
)
def test_hostile_users_with_few_permissions_harm_nobody_else(tmp_path: Path, door: Door, user: str) -> None:
    print("\n" + table([besiege(tmp_path / "hostile", door, seed=1, scale=Scale(seconds=1), user=user)]))
