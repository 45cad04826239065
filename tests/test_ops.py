"""What ships in ops/: every figure that it names exists, and what it starts would start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from penstock.errors import BadConfig
from penstock.replica.config import load as load_replica
from penstock.server.config import load
from penstock.server.settings import SETTINGS
from penstock.web.credentials import Credentials
from tests.docs import table
from tests.support.certificates import Certificates
from tests.support.server import Flux, Serve
from tests.support.web import get

OPS: Final = Path(__file__).parent.parent / "ops"
DOCKERFILE: Final = (OPS / "Dockerfile").read_text()
ALERTS: Final = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())
DASHBOARD: Final = json.loads((OPS / "grafana" / "penstock.json").read_text())
COMPOSE: Final = yaml.safe_load((OPS / "compose.yml").read_text())
RULES: Final[list[dict[str, Any]]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS: Final[list[dict[str, Any]]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


# Where to get a tool that may be missing.
PACKAGES: Final = {"promtool": "apt install prometheus", "systemd-analyze": "apt install systemd"}


def tool(name: str) -> str:
    """One that is installed here, or beside Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed: {PACKAGES.get(name, 'make test')} installs it")
    return found


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


# ---- figures


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> tuple[set[str], set[str]]:
    """The names of all series, and of all labels."""
    settings = certificates.settings(required=False)
    directory = tmp_path_factory.mktemp("ops")
    with Serve(directory, storage_retain_bytes=1 << 30, **settings) as server, Flux(server) as client:
        client.subscribe("orders", "DURABLE:clerks", "1")
        assert client.publish("orders", b"hello") == "+OK"
        text = get(server, "/metrics").body.decode()
    names = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    labels = set(re.findall(r'[{,](\w+)="', text))
    # What Prometheus adds, and what only a broker with pipes, or with a bug, has.
    return names, labels | {"instance", "job", "health", "direction", "seam"}


def expressions() -> list[str]:
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    asked = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    return [*shown, *asked, *(rule["expr"] for rule in RULES)]


@pytest.mark.parametrize("expression", expressions())
def test_what_is_shown_and_alerted_on_is_exported(expression: str, exported: tuple[set[str], set[str]]) -> None:
    names, labels = exported
    used = set(re.findall(r"\bbroker_\w+", expression))
    grouped = {label for each in re.findall(r"by \(([^)]*)\)", expression) for label in each.split(", ")}
    selected = set(re.findall(r"[{,](\w+)=", expression))

    assert used or expression.startswith("up{")
    assert used <= names
    assert grouped | selected <= labels


def test_the_names_in_the_texts_are_exported(exported: tuple[set[str], set[str]]) -> None:
    _, labels = exported
    for rule in RULES:
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
    for panel in PANELS:
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_the_dashboard_shows_what_matters(exported: tuple[set[str], set[str]]) -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    for name in (
        "broker_messages_received_total",
        "broker_delivery_seconds_bucket",
        "broker_fsync_seconds_bucket",
        "broker_consumer_lag",
        "broker_dead_letters_total",
        "broker_connections",
        "broker_segments",
        "broker_pipe_lag",
        "broker_pipe_health",
    ):
        assert re.search(rf"\b{name}\b", shown), name
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_figure_is_told_of(exported: tuple[set[str], set[str]]) -> None:
    page = (OPS.parent / "docs" / "operations.md").read_text()
    told = {name for row in table(page, "## Metrics") for name in re.findall(r"broker_\w+", row[0])}
    names, _ = exported

    # A histogram is one figure, and three series.
    assert told == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_every_limit_is_told_of(tmp_path: Path) -> None:
    page = (OPS.parent / "docs" / "operations.md").read_text()
    told = {name for row in table(page, "## Limits") for name in re.findall(r"\w+", row[0])}
    with Serve(tmp_path, storage_retain_bytes=1 << 30) as server:
        shown = get(server, "/varz").json["limits"]

    # Those of transactions are there once there was one.
    assert told == {*shown, "staged_batches", "transaction_names"}
    assert all(limit["used"] <= limit["limit"] for limit in shown.values())


def test_no_panel_lies_upon_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) is panel["title"]


def test_prometheus_takes_the_files() -> None:
    promtool = tool("promtool")
    for done in (
        run(promtool, "check", "rules", OPS / "prometheus" / "alerts.yml"),
        # It reads the token where compose.yml puts it.
        run(promtool, "check", "config", "--syntax-only", OPS / "prometheus" / "prometheus.yml"),
    ):
        assert done.returncode == 0, done.stderr + done.stdout


def test_prometheus_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    promtool = tool("promtool")
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(shown)
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))

    done = run(promtool, "check", "rules", path)

    assert done.returncode == 0, done.stderr + done.stdout


# Series by the minute, the minute to look at, and what must and must not be told by then.
CASES: Final[list[tuple[str, str, str, int, bool]]] = [
    ("PenstockDown", 'up{job="penstock", instance="a"}', "0x10", 5, True),
    ("PenstockDown", 'up{job="penstock", instance="a"}', "1x10", 5, False),
    ("PenstockUnhealthy", 'broker_healthy{instance="a"}', "0x10", 5, True),
    ("PenstockProblems", 'broker_problems{instance="a"}', "1x10", 5, True),
    ("PenstockProblems", 'broker_problems{instance="a"}', "0x10", 5, False),
    ("PenstockCertificateExpires", 'broker_tls_certificate_expiry_seconds{instance="a"}', "1000000x10", 5, True),
    ("PenstockCertificateExpires", 'broker_tls_certificate_expiry_seconds{instance="a"}', "2000000x10", 5, False),
    ("PenstockFaults", 'broker_faults_total{instance="a", seam="http"}', "1x10", 1, True),
    ("PenstockPartitionFailed", 'broker_partitions_failed{instance="a", topic="t"}', "1x10", 1, True),
    ("PenstockLagGrows", 'broker_consumer_lag{instance="a", consumer="c", topic="t"}', "2000+100x60", 40, True),
    ("PenstockLagGrows", 'broker_consumer_lag{instance="a", consumer="c", topic="t"}', "9000-100x60", 40, False),
    ("PenstockLagGrows", 'broker_consumer_lag{instance="a", consumer="c", topic="t"}', "0+1x60", 40, False),
    ("PenstockDeadLetters", 'broker_dead_letters_total{instance="a", consumer="c"}', "0x5 1x5", 8, True),
    ("PenstockDeadLetters", 'broker_dead_letters_total{instance="a", consumer="c"}', "7x60", 30, False),
    ("PenstockFsyncSlow", 'broker_fsync_seconds_bucket{instance="a", le="5"}', "0+10x60", 30, True),
    ("PenstockPipeUnhealthy", 'broker_pipe_health{instance="a", health="UNHEALTHY"}', "1x20", 10, True),
    ("PenstockPipeUnhealthy", 'broker_pipe_health{instance="a", health="UNHEALTHY"}', "0x20", 10, False),
    ("PenstockPipeUnhealthy", 'broker_pipe_health{instance="a", health="DEGRADED"}', "1x20", 10, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
def test_an_alert_is_raised_when_it_should_be_and_not_otherwise(
    case: tuple[str, str, str, int, bool], tmp_path: Path
) -> None:
    promtool = tool("promtool")
    alert, series, values, minute, is_raised = case
    lines = [{"series": series, "values": values}]
    if 'le="5"' in series:
        # All of them took longer than two and a half seconds, and none longer than five.
        lines += [
            {"series": series.replace('"5"', '"2.5"'), "values": "0x60"},
            {"series": series.replace('"5"', '"+Inf"'), "values": values},
        ]
    # What is asked is whether it is raised, not in what words.
    count = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if is_raised else []
    path = tmp_path / "case.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(OPS / "prometheus" / "alerts.yml")],
                "evaluation_interval": "1m",
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": lines,
                        "promql_expr_test": [{"expr": count, "eval_time": f"{minute}m", "exp_samples": expected}],
                    }
                ],
            }
        )
    )

    done = run(promtool, "test", "rules", path)

    assert done.returncode == 0, done.stderr + done.stdout


# ---- systemd


def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "penstock.service"
    # What it starts is not installed here.
    unit.write_text(re.sub(r"/opt/penstock/bin/penstock", sys.executable, (OPS / "penstock.service").read_text()))

    done = run(tool("systemd-analyze"), "verify", "--man=no", unit)

    said = done.stderr + done.stdout
    # It also tells of units of this machine.
    assert (done.returncode, "penstock" in said) == (0, False), said


def test_the_systemd_unit_starts_a_broker(tmp_path: Path) -> None:
    """The command and the environment of the unit, with its directories elsewhere."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", (OPS / "penstock.service").read_text(), re.MULTILINE))
    (tmp_path / "penstock.toml").write_text("[topic]\npartitions = 4\n")
    command = unit["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).split()
    name, _, value = unit["Environment"].partition("=")
    assert value.startswith(unit["WorkingDirectory"])
    assert command[:2] == ["/opt/penstock/bin/penstock", "serve"]

    assert name == "PENSTOCK_STORAGE_DATA_DIR"

    with Serve(tmp_path, flags=command[2:], storage_data_dir=tmp_path / "data") as server:
        assert get(server, "/admin/config").json["settings"]["topic.partitions"]["value"] == 4

    assert (tmp_path / "data" / "LOCK").exists()
    # A clean stop fits.
    assert int(unit["TimeoutStopSec"].removesuffix("s")) > SETTINGS["server.stop_s"].default


# ---- containers


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_the_image_is_small_tagged_and_not_run_by_root() -> None:
    for image in instructions("FROM"):
        name = image.split()[0]
        assert ":" in name
        assert not name.endswith(":latest")
    [user] = instructions("USER")
    assert int(user) > 0
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")
    [ports] = instructions("EXPOSE")
    assert {"9092", "4222", "8080"} == set(ports.split())
    assert instructions("VOLUME") == ["/app/data"]
    assert not instructions("ADD")


def test_the_image_is_what_a_linter_likes() -> None:
    done = run(tool("hadolint"), "--no-color", OPS / "Dockerfile")

    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_given_what_the_project_is_built_from() -> None:
    root = OPS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    copied = {name for each in instructions("COPY") if "--from" not in each for name in each.split()[:-1]}
    kept = {line[1:] for line in (OPS / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}

    assert copied == kept == {"pyproject.toml", "src", project["readme"], *project["license-files"]}
    assert all((root / name).exists() for name in copied)


def image_environment() -> dict[str, str]:
    [words] = instructions("ENV")
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(words)) if name != "PATH"}


def test_the_environment_of_the_image_is_understood() -> None:
    with pytest.raises(BadConfig, match="no credentials are required"):
        load(path=None, environ=image_environment(), flags={})
    secured = image_environment() | {"PENSTOCK_AUTH_TOKEN": "secret"}
    with pytest.raises(BadConfig, match=r"unencrypted: set tls\.cert and tls\.key"):
        load(path=None, environ=secured, flags={})
    loaded = load(path=None, environ=secured | {"PENSTOCK_SERVER_INSECURE": "true"}, flags={})

    assert loaded.warnings == []
    assert loaded.config.server.host == "0.0.0.0"
    # OP-03: the ports that the Provider's document publishes, and the text door.
    server = loaded.config.server
    assert (server.quiet_port, server.http_port) == (9092, 8080)
    [ports] = instructions("EXPOSE")
    assert set(map(int, ports.split())) == {server.port, server.quiet_port, server.http_port}
    assert loaded.config.storage.data_dir == "/app/data"


def test_the_health_check_tells_well_from_ill(tmp_path: Path) -> None:
    [check] = instructions("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python"
    with Serve(tmp_path) as server:
        environment = {**os.environ, "HTTP_PORT": str(server.ports["http"])}
        well = run(sys.executable, *command[1:], env=environment)
        server.kill()
        gone = run(sys.executable, *command[1:], env=environment)

    assert (well.returncode, gone.returncode) == (0, 1)


def test_the_brokers_of_the_tree_are_told_what_they_understand() -> None:
    nodes = {node["id"]: node for node in tomllib.loads((OPS / "tree.toml").read_text())["nodes"]}
    brokers = {name: service for name, service in COMPOSE["services"].items() if name in nodes}

    assert set(brokers) == set(nodes) == {"root", "l2", "l3"}
    for name, service in brokers.items():
        loaded = load(path=None, environ={**image_environment(), **composed(service)}, flags={})
        assert loaded.config.server.node_id == name
        assert loaded.config.auth.token == "secret"
        # Others name it so, and those that follow it may have its token.
        assert loaded.config.server.http_hosts == name
        parents = {
            nodes[parent]["url"] for parent in (*nodes[name].get("parents", ()), nodes[name].get("parent")) if parent
        }
        assert parents <= set((loaded.config.pipe.parents or "").split(","))
        assert (loaded.config.pipe.token == "secret") is bool(parents)
        # The registry hands this out: it must be where the broker is.
        assert nodes[name]["url"] == f"http://{name}:{loaded.config.server.http_port}"
        # What is lost with the container is not kept.
        assert [volume.split(":")[1] for volume in service["volumes"]] == [loaded.config.storage.data_dir]


def composed(service: dict[str, Any]) -> dict[str, str]:
    """The environment of a service, as docker gives it."""
    variable = re.compile(r"\$\{PENSTOCK_TOKEN(:\?[^}]*)?\}")
    return {name: variable.sub("secret", value) for name, value in service["environment"].items()}


def test_the_replica_of_the_tree_starts_and_needs_the_token() -> None:
    given = composed(COMPOSE["services"]["replica"])
    broker = Credentials(token=given["PENSTOCK_AUTH_TOKEN"])
    config = load_replica(environ=given, flags={}, credentials=broker)
    assert (config.host, config.credentials(broker).token) == ("0.0.0.0", "secret")


def test_nothing_of_the_tree_is_left_to_chance() -> None:
    volumes = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]]
    named = [volume for volume in volumes if not volume.startswith(".")]
    assert len(named) == len(set(named))
    assert set(named) == set(COMPOSE["volumes"])
    for name, service in COMPOSE["services"].items():
        assert ":" in service["image"], name
        assert not service["image"].endswith(":latest")
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
        # There is no TLS.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for volume in service["volumes"]:
            if volume.startswith("."):
                assert (OPS / volume.split(":")[0]).exists()
    targets = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert {target.split(":")[0] for target in targets[0]["targets"]} == {"root", "l2", "l3"}
