"""Real clients, on nats-server and on Penstock: each check returns the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import count
from pathlib import Path
from typing import Any, Final

import nats.errors
import pytest

from tests.nats.differences import CLIENT_DIFFERENCES
from tests.nats.python_client import CHECKS, run_check
from tests.nats.run import Peer

# What a check returns that fails: see checks.mjs too.
FAILED: Final = "failed: "
NATS_JS: Final = "nats@2.29.3"
_INSTALL_SECONDS_MAX: Final = 60
_subjects: Final = (f"clients.c{number}" for number in count())


# nats-py's services ask for the time in a way that Python 3.12 warns of.
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
@pytest.mark.parametrize("name", CHECKS)
def test_nats_py(peers: tuple[Peer, Peer], name: str) -> None:
    real, ours = (_of_nats_py(peer, name) for peer in peers)
    judge({f"nats-py {name}": real}, {f"nats-py {name}": ours})


def test_nats_js(peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    node = install_nats_js(tmp_path, NATS_JS)
    real, ours = (of_nats_js(node, tmp_path, NATS_JS, peer) for peer in peers)
    assert real.keys() == ours.keys()
    judge(real, ours)


def judge(real: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, wanted in real.items():
        assert not str(wanted).startswith(FAILED), f"{name} fails on nats-server: {wanted}"
        if difference := CLIENT_DIFFERENCES.get(name):
            gone = ours[name] == wanted and not difference.is_rare
            assert not gone, f"the difference {name!r} is gone: remove it from tests/nats/differences.py"
        else:
            assert (name, ours[name]) == (name, wanted)


def _of_nats_py(peer: Peer, name: str) -> Any:
    try:
        return run_check(CHECKS[name], peer.url, next(_subjects))
    except (nats.errors.Error, TimeoutError) as error:
        return f"{FAILED}{type(error).__name__}"


def install_nats_js(directory: Path, *packages: str) -> str:
    """Install the client from npm, or skip the test."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("nats.js is not tested: there is no node")
    shutil.copy(Path(__file__).with_name("checks.mjs"), directory)
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(directory), *packages]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=_INSTALL_SECONDS_MAX)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"nats.js is not tested: npm cannot install {' '.join(packages)}")
    return node


def of_nats_js(node: str, directory: Path, package: str, peer: Peer) -> dict[str, Any]:
    command = [node, "checks.mjs", package.rpartition("@")[0], peer.url, next(_subjects)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {f"nats.js {name}": value for name, value in found.items()}
