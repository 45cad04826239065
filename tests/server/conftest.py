"""A place for a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
