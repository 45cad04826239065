"""`penstock config`, and the options of `penstock serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.configs import DEFAULTS


def penstock(*arguments: str | Path, command: str = "config", **environment: str) -> subprocess.CompletedProcess[str]:
    """With nothing in the environment that would be a setting."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "penstock", command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=inherited | environment,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yml"
    path.write_text(
        "auth: {token: hush}\nstorage: {dir: '[red]x'}\ncluster: {node_id: x}\ntopics: {t: {partitions: 2}}\n"
    )
    return path


def test_a_server_takes_its_file_as_flux_does(tmp_path: Path) -> None:
    file = tmp_path / "node1.json"
    file.write_text(json.dumps({"cluster": {"enabled": True}}))
    result = penstock("-config", file, command="serve")
    assert (result.returncode, result.stderr) == (
        1,
        f"error: cluster.enabled (file {file}:1) is true: it must be false: clustering is not available yet\n",
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--prot", "5"], "unknown option --prot, did you mean --port?"),
        (["--lingr-ms=5"], "unknown option --lingr-ms, did you mean --linger-ms?"),
        (["orders"], "unexpected argument 'orders': serve takes only options"),
    ],
)
def test_options_that_nobody_has_are_refused(options: list[str], problem: str) -> None:
    result = penstock(*options, command="serve")
    assert result.returncode == 2
    assert problem in result.stderr


def test_flags_may_be_written_as_go_programs_have_them() -> None:
    result = penstock("-port", "70000", "-health-port=-1", "--tls", "--linger-ms", command="serve")
    assert result.returncode == 1
    assert [line.partition(": it must")[0] for line in result.stderr.splitlines()] == [
        "error: broker_port (flag --port) is '70000'",
        "error: health_check_port (flag --health-port) is '-1'",
        "error: linger_ms (flag --linger-ms) is ''",
        "error: tls.required (flag --tls) has no effect without a certificate: set tls.cert as well",
    ]


def test_the_command_shows_every_value_and_its_origin(file: Path) -> None:
    result = penstock("--config", file, QB_LOG_LEVEL="ERROR")
    assert result.returncode == 0
    assert (
        result.stderr == f"warning: cluster.node_id (file {file}:3) is 'x', which has no effect: there is no cluster\n"
    )
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if "." in line}
    assert rows["auth.token"] == f"*** file {file}"
    assert rows["storage.data_dir"] == f"[red]x file {file}"
    assert rows["server.log_level"] == "error environment QB_LOG_LEVEL"
    assert rows["topics.t.partitions"] == f"2 file {file}"
    assert rows["topic.retain_ms"] == "none default"
    assert rows["topic.dead_letters"] == "true default"
    assert rows.keys() > DEFAULTS.keys()


def test_the_command_tells_programs_the_same(file: Path) -> None:
    result = penstock("--json", PENSTOCK_CONFIG=str(file))
    assert result.returncode == 0
    assert result.stderr.startswith("warning: cluster.node_id ")
    document = json.loads(result.stdout)
    assert document["auth.token"] == {"value": "***", "from": f"file {file}"}
    assert document["server.port"] == {"value": 4222, "from": "default"}
    assert document["topic.retain_ms"] == {"value": None, "from": "default"}
    assert document["topics.t.partitions"] == {"value": 2, "from": f"file {file}"}
    assert document.keys() > DEFAULTS.keys()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_prints_each_problem_in_a_line(options: list[str]) -> None:
    result = penstock(*options, PENSTOCK_SERVER_PORT="x", PENSTOCK_SERVER_PROT="1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "error: server.port (environment PENSTOCK_SERVER_PORT) is 'x': it must be an integer, 0 to 65535",
        "error: PENSTOCK_SERVER_PROT (environment) is not a setting: did you mean PENSTOCK_SERVER_PORT?",
    ]
