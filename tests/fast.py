"""A pytest plugin for `make fast`: run only the test files that start no process, and let nothing else start one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

# Whoever starts a process names one of these, or imports a module that does.
_STARTS_A_PROCESS: Final = re.compile(
    r"\b(subprocess|multiprocessing|Serve|PATIENCE_S|spark\w*|test_cli_broker|tests\.(\w*kill|trees|replicas|registries))\b",
    re.IGNORECASE,
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and _STARTS_A_PROCESS.search(collection_path.read_text()) else None


@pytest.fixture(scope="session", autouse=True)
def no_process() -> Iterator[None]:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("a fast test starts no process: see tests/fast.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(os, "fork", refuse)
        yield
