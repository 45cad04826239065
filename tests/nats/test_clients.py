"""Real clients, on nats-server and on Penstock: each check returns the same."""

from __future__ import annotations

import json
import os
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

# What a check returns that fails: see checks.mjs, checks.c and checks.go too.
FAILED: Final = "failed: "
NATS_JS: Final = "nats@2.29.3"
_INSTALL_SECONDS_MAX: Final = 60
# Building checks.go takes 3 s where Go's own packages come compiled, as on Debian 12; elsewhere 20 s the first time.
_BUILD_SECONDS_MAX: Final = 60
_HERE: Final = Path(__file__).parent
# Where Debian puts the sources of Go packages.
_GO_PATH: Final = Path("/usr/share/gocode")
_NATS_GO: Final = "golang-github-nats-io-go-nats-dev"
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
    judge(real, ours)


def test_libnats(peers: tuple[Peer, Peer], tmp_path: Path) -> None:
    program = _build_libnats_checks(tmp_path)
    real, ours = (_of_program("libnats", [str(program)], tmp_path, peer) for peer in peers)
    judge(real, ours)


def test_nats_go(peers: tuple[Peer, Peer], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    program = _build_nats_go_checks(tmp_path, pytestconfig)
    real, ours = (_of_program("nats.go", [str(program)], tmp_path, peer) for peer in peers)
    judge(real, ours)


def judge(real: dict[str, Any], ours: dict[str, Any]) -> None:
    assert real.keys() == ours.keys()
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
    return _of_program("nats.js", [node, "checks.mjs", package.rpartition("@")[0]], directory, peer)


def _of_program(client: str, program: list[str], directory: Path, peer: Peer) -> dict[str, Any]:
    command = [*program, peer.url, next(_subjects)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {f"{client} {name}": value for name, value in found.items()}


def _build_libnats_checks(directory: Path) -> Path:
    """Compile checks.c, or skip the test."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("libnats is not tested: install a C compiler and libnats-dev")
    probe = [compiler, "-E", "-include", "nats/nats.h", "-x", "c", os.devnull]
    if subprocess.run(probe, capture_output=True, check=False, timeout=_BUILD_SECONDS_MAX).returncode != 0:
        pytest.skip("libnats is not tested: install libnats-dev")
    program = directory / "checks"
    flags = ["-std=c11", "-Wall", "-Wextra", "-pthread"]
    _build("libnats", [compiler, *flags, "-o", str(program), str(_HERE / "checks.c"), "-lnats"])
    return program


def _build_nats_go_checks(directory: Path, config: pytest.Config) -> Path:
    """Compile checks.go, or skip the test."""
    go = shutil.which("go")
    if go is None:
        pytest.skip(f"nats.go is not tested: install golang-go and {_NATS_GO}")
    if not (_GO_PATH / "src/github.com/nats-io/nats.go/micro").exists():
        pytest.skip(f"nats.go is not tested: install {_NATS_GO} 1.22 or newer")
    assert config.cache is not None
    # As Debian builds: from the installed sources, without modules, so that nothing is downloaded.
    settings = {"GO111MODULE": "off", "GOPATH": str(_GO_PATH), "GOCACHE": str(config.cache.mkdir("go"))}
    program = directory / "checks"
    _build("nats.go", [go, "build", "-o", str(program), str(_HERE / "checks.go")], **settings)
    return program


def _build(client: str, command: list[str], **settings: str) -> None:
    environment = {**os.environ, **settings}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{client} is not tested: building its checks takes more than {_BUILD_SECONDS_MAX} s")
    assert done.returncode == 0, done.stderr
