"""`penstock pipelines`: a directory of pipelines as a process, what the broker shows of them, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.client.sync import Client
from penstock.errors import BadRequest, PenstockError
from tests.support.server import Serve, clean_environment
from tests.support.web import get

pytest.importorskip("pyspark")

# Spark's start on a machine that has other things to do.
_PATIENCE_S: Final = 240.0

PIPELINE: Final = """
name = "double"
kind = "transform"
[source]
servers = "127.0.0.1:{port}"
topic = "numbers"
start = "earliest"
schema = "n int NOT NULL"
[transform]
sql = "SELECT 2 * n AS n FROM source"
[sink]
topic = "doubled"
"""
REPORT: Final = {
    "name": "night",
    "kind": "archive",
    "state": "done",
    "file": "night.toml",
    "runner": "far:7",
    "started_us": 1_000_000,
    "updated_us": 2_000_000,
    "rows": 1234,
    "lag": 0,
    "dead_letters": 7,
    "late_rows": 5,
}


def test_a_directory_is_served_until_sigterm(tmp_path: Path) -> None:
    with Serve(tmp_path / "broker") as server, Client(f"127.0.0.1:{server.port}") as client:
        for number in range(10):
            client.publish("numbers", json={"n": number})
        (tmp_path / "jobs").mkdir()
        (tmp_path / "jobs" / "double.toml").write_text(PIPELINE.format(port=server.port))
        command = [sys.executable, "-m", "penstock", "pipelines", "serve", str(tmp_path / "jobs"), "--json"]
        with subprocess.Popen(command, env=clean_environment(), text=True, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            states: list[str] = []
            while not states or states[-1] != "running":
                states.append(json.loads(process.stdout.readline())["state"])
            found = client.subscribe("doubled", start="earliest")
            rows = sorted(found.get(timeout=_PATIENCE_S).json()["n"] for _ in range(10))
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=_PATIENCE_S)
        [status] = client.pipelines()
        metrics = get(server, "/metrics").body.decode()

    assert states == ["starting", "running"]
    assert rows == list(range(0, 20, 2))
    assert (process.returncode, json.loads(out)["state"]) == (0, "stopped")
    assert (status.name, status.state, status.rows, status.lag) == ("double", "stopped", 10, 0)
    assert 'broker_pipeline_rows_total{kind="transform",pipeline="double"} 10.0' in metrics
    assert 'broker_pipeline_running{kind="transform",pipeline="double"} 0.0' in metrics


def test_pipelines_that_report_are_listed(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Client(f"127.0.0.1:{server.port}") as client:
        client.report_pipeline(**REPORT)
        environment = {"PENSTOCK_SERVERS": f"127.0.0.1:{server.port}", "COLUMNS": "200"}
        table = CliRunner().invoke(app, ["pipelines", "list"], env=environment)
        rows = CliRunner().invoke(app, ["pipelines", "list", "--json"], env=environment)
        [row] = get(server, "/admin/pipelines").json["pipelines"]
        with pytest.raises(BadRequest, match="name"):
            client.report_pipeline(**REPORT | {"name": "x" * 257})
        with pytest.raises(BadRequest, match="lag"):
            client.report_pipeline(**REPORT | {"lag": -1})

    assert table.stdout.splitlines()[-1].split()[:8] == ["night", "archive", "done", "1,234", "0", "0", "7", "5"]
    assert json.loads(rows.stdout) == [{**json.loads(rows.stdout)[0], **REPORT}]
    assert row == json.loads(rows.stdout)[0]


def test_a_file_without_another_version_is_not_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "double.toml"
    path.write_text(PIPELINE)
    done = CliRunner().invoke(app, ["pipelines", "rollback", str(path)])
    assert isinstance(done.exception, PenstockError)
    assert "has no other version to go back to" in str(done.exception)
    assert path.read_text() == PIPELINE
