"""All commands that talk to a broker: top and bench, where the broker is, completion."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import MODULES, app
from penstock.cli.bench import histogram
from penstock.client.sync import Client
from tests.support.commands import (
    NOBODY,
    Done,
    Penstock,
    at_terminal,
    interrupt,
    line_of,
    publish,
    topic_names,
    until,
    wrong_usage,
)
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

# ---- top and bench


def test_top_tells_programs_the_rates(penstock: Penstock, client: Client) -> None:
    publish(client, "rated", "one")
    client.create_group("raters", "rated")
    with penstock.begin("top", "--json", "--interval", "0.1") as process:
        first = json.loads(line_of(process))
        [topic] = [each for each in first["topics"] if each["name"] == "rated"]
        assert (topic["messages"], topic["messages_per_second"]) == (1, 0)
        publish(client, "rated", "two", "three")
        flow = 0.0
        lag = 0
        end = time.monotonic() + PATIENCE_S
        while not flow or lag < 2:
            assert time.monotonic() < end, "nothing flows"
            sample = json.loads(line_of(process))
            [topic] = [each for each in sample["topics"] if each["name"] == "rated"]
            [group] = [each for each in sample["groups"] if each["name"] == "raters"]
            flow += topic["messages_per_second"]
            lag = group["lag"]
        assert topic["bytes"] > 0
        assert interrupt(process).code == 0


def test_top_prints_tables_to_a_pipe(penstock: Penstock, client: Client) -> None:
    publish(client, "piped", "one")
    printed = penstock("top", "--interval", "0.1", "--count", 2)
    assert len([row for row in printed.rows if row[:1] == ["piped"]]) == 2
    assert "\x1b" not in printed.out


def test_top_is_live_at_a_terminal(penstock: Penstock, client: Client) -> None:
    publish(client, "watched", "one")
    shown = at_terminal(penstock, "top", "--interval", "0.1", "--count", 2)
    assert shown.code == 0
    assert "watched" in shown.out
    assert "messages/s" in shown.out


def test_bench_measures_and_leaves_nothing_behind(penstock: Penstock, client: Client) -> None:
    options = ("--messages", 2000, "--size", "1KiB", "--topic", "measured")
    done = penstock("bench", *options, "--durability", "flush", "--json").json
    assert (done["messages"], done["size"], done["durability"]) == (2000, 1024, "flush")
    for step in ("publish", "consume"):
        assert done[step]["messages_per_second"] > 0
        assert done[step]["bytes_per_second"] == pytest.approx(1024 * done[step]["messages_per_second"])
    latency = done["latency"]
    assert 0 < latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"] <= latency["max_ms"]
    assert "measured" not in topic_names(client)
    shown = penstock("bench", *options)
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[0] for line in shown.lines[1:4]] == ["publish", "consume", "latency"]
    assert "█" in shown.out
    assert "measured" not in topic_names(client)


def test_bench_does_not_touch_a_topic_that_exists(penstock: Penstock, client: Client) -> None:
    publish(client, "precious", "one")
    done = penstock("bench", "--topic", "precious", "--messages", 10)
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert "precious" in topic_names(client)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_behind(penstock: Penstock, client: Client, number: signal.Signals) -> None:
    topic = f"cut-{number.name}"
    with penstock.begin("bench", "--topic", topic, "--messages", 50_000_000) as process:
        until(lambda: topic in topic_names(client))
        done = interrupt(process, number)
    assert done.code == 128 + number
    assert "Traceback" not in done.err
    assert topic not in topic_names(client)


def test_a_histogram_counts_every_time_once() -> None:
    times = sorted([0.5, 0.5, 0.6, 1.0, 2.0, 30.0])
    counts = [int(line.split()[-1]) for line in histogram(times)]
    assert sum(counts) == len(times)
    assert counts[-1] == 1
    assert sum(int(line.split()[-1]) for line in histogram([0.5])) == 1


# ---- where the broker is, and who asks

ASKING = [
    ("topic", "list"),
    ("publish", "x", "y"),
    ("subscribe", "x", "--json"),
    ("fetch", "x"),
    ("top",),
    ("bench",),
]


@pytest.mark.parametrize("arguments", ASKING, ids=" ".join)
def test_without_a_broker_it_says_so_and_how_to_start_one(arguments: tuple[str, ...]) -> None:
    done = Penstock(NOBODY)(*arguments)
    assert done == Done(
        1, "", f"error: no broker at {NOBODY}: start one with `penstock serve`, or name another with --servers\n"
    )


@pytest.mark.parametrize("servers", ["", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:4222,"])
def test_an_address_that_is_none_is_wrong_usage(servers: str) -> None:
    assert "it must be host:port" in wrong_usage("topic", "list", f"--servers={servers}")


def test_servers_are_tried_in_turn(server: Serve) -> None:
    assert Penstock(NOBODY)("topic", "list", "--servers", f"{NOBODY},127.0.0.1:{server.port}").code == 0


def test_a_server_does_not_mind_where_commands_look_for_one() -> None:
    assert Penstock(NOBODY)("config").code == 0


def test_a_broker_that_wants_a_token_is_given_one(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="secret") as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        for options in ((), ("--token", "wrong"), ("--user", "me", "--password", "wrong")):
            refused = penstock("topic", "list", *options)
            assert (refused.code, refused.out) == (1, "")
            assert refused.err.startswith("error: ")
            assert refused.err.endswith(": give --user and --password, or --token\n")
        assert penstock("topic", "list", "--token", "secret").code == 0
        assert Penstock(f"127.0.0.1:{server.port}", PENSTOCK_AUTH_TOKEN="secret")("topic", "list").code == 0


def test_a_broker_that_wants_a_user_is_given_one(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_user="me", auth_password="secret") as server:
        penstock = Penstock(f"127.0.0.1:{server.port}")
        assert penstock("topic", "list").code == 1
        assert penstock("topic", "list", "--user", "me", "--password", "secret").code == 0


# ---- the command line itself


def completions(penstock: Penstock, *words: str) -> list[str]:
    """What Tab proposes in bash for the last of the words."""
    line = " ".join(("penstock", *words))
    asking = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        penstock.command(), capture_output=True, text=True, check=False, env=penstock.environment | asking
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_tab_completes_commands_options_and_choices(penstock: Penstock) -> None:
    assert completions(penstock, "sub") == ["subscribe"]
    assert completions(penstock, "topic", "de") == ["describe", "delete"]
    assert completions(penstock, "topic", "create", "x", "--durability", "f") == ["fsync", "flush"]
    assert "--follow" in completions(penstock, "fetch", "x", "--f")


def test_tab_completes_names_that_the_broker_knows(penstock: Penstock, client: Client) -> None:
    publish(client, "tabbed-one", "x")
    publish(client, "tabbed-two", "x")
    client.create_group("tabbers", "tabbed-one")
    assert sorted(completions(penstock, "topic", "describe", "tabbed-")) == ["tabbed-one", "tabbed-two"]
    assert completions(penstock, "group", "delete", "tabb") == ["tabbers"]


def test_tab_says_nothing_without_a_broker() -> None:
    assert completions(Penstock(NOBODY), "topic", "describe", "t") == []


def test_every_listed_command_is_there() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    # They talk to no broker, or by HTTP.
    alone = ("serve", "config", "demo", "registry", "replica", "restore", "topology")
    for name in (*MODULES, "serve", "config", "demo", "worker"):
        assert f" {name} " in listed
        helped = CliRunner().invoke(app, [name, "--help"], catch_exceptions=False)
        assert helped.exit_code == 0
        assert "--servers" in helped.stdout or "COMMAND" in helped.stdout or name in alone


def test_a_command_that_is_not_there_is_wrong_usage_and_near_ones_are_named() -> None:
    assert "Did you mean 'topic'" in wrong_usage("topc", "list")


def test_help_does_not_wait_for_what_commands_need() -> None:
    modules = [f"penstock.cli.{name}" for name in MODULES] + ["penstock.client", "asyncio"]
    code = (
        "import sys; from typer.testing import CliRunner; from penstock.cli import app\n"
        f"CliRunner().invoke(app, ['--help']); print([name for name in {modules} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
