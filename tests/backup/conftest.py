"""A store, and a target for its backups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.backup.target import DirectoryTarget, Target
from penstock.errors import BadBackup
from penstock.object_store import ObjectStore
from penstock.store.store import Store
from penstock.testing import ManualClock


@pytest.fixture(params=["directory", "memory", "local"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "directory":
        return DirectoryTarget(tmp_path / "backups")
    stores = pytest.importorskip("obstore.store")
    from penstock.backup.objects import ObjectTarget

    if request.param == "memory":
        return ObjectTarget(ObjectStore(stores.MemoryStore(), "memory://", BadBackup))
    return ObjectTarget.open(f"file://{tmp_path}/objects")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "data", clock=ManualClock(now_us=1_000_000)) as store:
        yield store
