"""A directory with the copies of a topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.replica.copies import Copies
from tests.support.copies import opened


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    copies = opened(tmp_path / "data")
    yield copies
    copies.close()
