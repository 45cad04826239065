"""`/metrics`: what the broker counts, as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.client.sync import Client
from penstock.server.metrics import CONSUMERS_MAX, TOPICS_MAX, pipe_metrics
from penstock.server.stalls import Stalls
from penstock.testing.clock import ManualClock
from tests.support.server import Flux, Nats, Serve, hpub, pub
from tests.support.web import get, metrics

# The names that the Provider's document has.
NAMES = {
    "broker_messages_received_total",
    "broker_messages_stored_total",
    "broker_messages_sent_total",
    "broker_consumer_offset",
    "broker_consumer_lag",
    "broker_consumer_messages_sent_total",
    "broker_consumer_acks_total",
    "broker_consumer_failures_total",
    "broker_consumer_retries_total",
}


def worked(server: Serve) -> None:
    """Something of everything has happened."""
    with Flux(server) as client:
        client.subscribe("orders.>", "DURABLE:clerks", "1")
        assert client.publish("orders.eu", b"hello") == "+OK"
        client.ack(client.message())
        assert client.publish_with_headers("orders.eu", b"hello", msg_id="7") == "+OK"
        client.message()


def test_the_metrics_pass_promtool(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        worked(server)
        text = get(server, "/metrics").body.decode()

    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    families = list(text_string_to_metric_families(text))
    check(families)
    series = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(series) == len(set(series))


def check(families: list[Metric]) -> None:
    """The rules of promtool, for where there is none."""
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert re.fullmatch(r"broker_[a-z_]+", family.name)
        assert family.documentation.endswith((".", ".)"))
        assert family.type in ("counter", "gauge", "histogram")
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_us", "_mb", "_kb"))
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")


def test_prometheus_may_ask_for_open_metrics(tmp_path: Path) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    with Serve(tmp_path) as server:
        worked(server)
        answer = get(server, "/metrics", Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")

    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = parse(answer.body.decode())  # type: ignore[no-untyped-call]
    assert "broker_messages_stored" in {family.name for family in families}


def test_messages_are_counted_by_topic(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as reader, Flux(server) as client:
        reader.send("SUB orders.> 1\r\n")
        assert reader.ask("PING") == "PONG"
        for number in range(3):
            assert client.publish("orders.eu", b"%d" % number) == "+OK"
        assert client.publish("refunds", b"x") == "+OK"
        assert [reader.message().payload for _ in range(3)] == [b"0", b"1", b"2"]

        found = metrics(server)

    assert found['broker_messages_received_total{topic="orders"}'] == 3
    assert found['broker_messages_stored_total{topic="orders"}'] == 3
    assert found['broker_messages_sent_total{topic="orders"}'] == 3
    assert found['broker_messages_stored_total{topic="refunds"}'] == 1
    assert found['broker_messages_sent_total{topic="refunds"}'] == 0
    assert found['broker_stored_bytes_total{topic="orders"}'] > 0
    assert found['broker_segments{topic="orders"}'] == 1
    assert found['broker_log_bytes{topic="orders"}'] > 0
    assert found['broker_log_messages{topic="orders"}'] == 3
    assert found['broker_partitions_failed{topic="orders"}'] == 0
    assert (found["broker_connections"], found["broker_connections_opened_total"]) == (2, 2)
    assert (found["broker_subscriptions"], found["broker_topics"], found["broker_healthy"]) == (1, 2, 1)
    assert found["broker_received_bytes_total"] > found["broker_messages_refused_total"] == 0
    # One round after the other stored them, and one run after the other was delivered.
    assert found["broker_fsync_seconds_count"] >= 4
    assert found["broker_flush_messages_sum"] >= 4
    assert found["broker_delivery_seconds_count"] == 3
    assert found["broker_delivery_seconds_sum"] > 0
    assert found['broker_delivery_seconds_bucket{le="+Inf"}'] == 3


def test_history_and_fetches_are_sent_too_and_are_not_late(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as client, Client(f"127.0.0.1:{server.port}") as ours:
        assert client.publish("orders", b"old") == "+OK"
        client.send("REPLAY FIRST 10\r\n")
        assert client.message().payload == b"old"
        assert client.line() == "+OK 1"
        with ours.subscribe("orders", start="earliest") as subscription:
            assert next(iter(subscription)).value == b"old"
        assert [message.value for message in ours.fetch("orders")] == [b"old"]

        found = metrics(server)

    assert found['broker_messages_sent_total{topic="orders"}'] == 3
    # They were stored before anyone wanted them.
    assert found["broker_delivery_seconds_count"] == 0


def test_what_is_live_only_is_counted_apart(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Nats(server) as client:
        client.send(b"SUB _INBOX.1 1\r\n" + pub("_INBOX.1", b"hello"))
        assert client.message().payload == b"hello"

        found = metrics(server)

    assert found['broker_messages_received_total{topic="_"}'] == 1
    assert found['broker_messages_sent_total{topic="_"}'] == 1
    assert found["broker_topics"] == 0


def test_repetitions_are_received_and_not_stored(tmp_path: Path) -> None:
    with Serve(tmp_path) as server, Flux(server) as client:
        client.send(hpub("orders", b"hello", msg_id="7"))
        client.send(hpub("orders", b"hello", msg_id="7"))
        assert [client.line(), client.line()] == ["+OK", "+OK DUP"]

        found = metrics(server)
        figures = get(server, "/varz").json

    assert (figures["ids_checked"], figures["duplicates"], figures["ids_known"]) == (2, 1, 1)
    assert found['broker_messages_received_total{topic="orders"}'] == 2
    assert found['broker_messages_stored_total{topic="orders"}'] == 1
    assert found['broker_dedup_hits_total{topic="orders"}'] == 1
    assert found['broker_dedup_checks_total{topic="orders"}'] == 2


def test_a_group_tells_how_far_it_is_and_how_it_fares(tmp_path: Path) -> None:
    labels = '{consumer="orders:clerks",group="clerks",topic="orders"}'
    with Serve(tmp_path, topic_deliveries_max=2) as server, Client(f"127.0.0.1:{server.port}") as client:
        with client.subscribe("orders", group="orders:clerks") as subscription:
            client.publish_many([("orders", b"%d" % number) for number in range(5)])
            for _, message in zip(range(6), subscription, strict=False):
                if message.value == b"3":
                    # It comes once more, and is a dead letter then.
                    message.nack()
                else:
                    message.ack()
            while metrics(server)[f"broker_consumer_lag{labels}"]:
                pass
        found = metrics(server)

    assert found[f"broker_consumer_offset{labels}"] == 5
    assert found[f"broker_consumer_lag{labels}"] == 0
    assert found[f"broker_consumer_pending{labels}"] == 0
    assert found[f"broker_consumer_acks_total{labels}"] == 4
    assert found[f"broker_consumer_failures_total{labels}"] == 2
    assert found[f"broker_consumer_retries_total{labels}"] == 1
    assert found[f"broker_consumer_messages_sent_total{labels}"] == 6
    assert found[f"broker_consumer_oldest_unacknowledged_seconds{labels}"] == 0
    assert found['broker_dead_letters_total{consumer="orders:clerks"}'] == 1
    assert found['broker_consumer_members{consumer="orders:clerks"}'] == 0


def test_what_waits_for_a_group_ages_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    labels = '{consumer="clerks",group="clerks",topic="orders"}'
    age, lag = f"broker_consumer_oldest_unacknowledged_seconds{labels}", f"broker_consumer_lag{labels}"
    with Serve(tmp_path) as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.create_group("clerks", "orders", start="earliest")
            client.publish("orders", b"hello")
            first = metrics(server)
            second = metrics(server)
        server.stop()
        server.restart()
        third = metrics(server)

    assert [found[lag] for found in (first, second, third)] == [1, 1, 1]
    assert 0 < first[age] < second[age] < third[age]


def test_a_flood_of_topics_and_groups_is_summed_up(tmp_path: Path) -> None:
    topics = TOPICS_MAX + 3
    groups = CONSUMERS_MAX // topics + 1
    with Serve(tmp_path, topic_durability="flush") as server, Client(f"127.0.0.1:{server.port}") as client:
        client.publish_many([(f"t{number}", b"x") for number in range(topics)])
        for number in range(groups):
            client.create_group(f"g{number}", ">", start="earliest")

        found = metrics(server)

    stored = {name: value for name, value in found.items() if name.startswith("broker_messages_stored_total")}
    assert len(stored) == TOPICS_MAX + 1
    assert stored['broker_messages_stored_total{topic="other"}'] == 3
    assert sum(stored.values()) == topics
    lags = {name: value for name, value in found.items() if name.startswith("broker_consumer_lag")}
    assert len(lags) == CONSUMERS_MAX + 1
    others = topics * groups - CONSUMERS_MAX
    assert lags['broker_consumer_lag{consumer="other",group="other",topic="other"}'] == others


def test_the_names_of_the_document_are_there(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        worked(server)
        found = metrics(server)

    assert {name.partition("{")[0] for name in found} >= NAMES
    # As it labels them.
    assert 'broker_consumer_acks_total{consumer="orders.>:clerks",group="orders.>:clerks",topic="orders"}' in found


@pytest.mark.parametrize("health", ["HEALTHY", "DEGRADED", "UNHEALTHY"])
def test_pipes_are_told_of(health: str) -> None:
    status = {
        "health": health,
        "topics": [
            {"topic": "orders", "direction": "down", "lag": 7, "position": [3, 4], "gaps": 1},
            {"topic": "sales", "direction": "up", "lag": 0, "position": [9], "gaps": 0},
        ],
        "children": [{"node": "l3", "address": "127.0.0.1", "seen": "2026-11-16T12:00:00Z"}],
    }
    families = list(pipe_metrics(status))
    check(families)
    found = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}

    assert found["broker_pipe_lag", "orders", "down"] == 7
    assert found["broker_pipe_gaps_total", "orders", "down"] == 1
    assert found["broker_pipe_children",] == 1
    assert [found["broker_pipe_health", state] for state in ("HEALTHY", "DEGRADED", "UNHEALTHY")] == [
        int(state == health) for state in ("HEALTHY", "DEGRADED", "UNHEALTHY")
    ]


def test_stalls_of_the_event_loop_are_counted_by_their_length() -> None:
    stalls = Stalls(ManualClock())
    for late_us in (-200, 0, 900, 9_000, 11_000, 250_000, 3_000_000):
        stalls.observe(late_us)

    assert stalls.figures() == {"longest_ms": 3000.0, "above_10ms": 3, "above_100ms": 2, "above_1000ms": 1}
    assert stalls.seconds.cumulative()[-1] == 7
    assert stalls.seconds.total == pytest.approx(3.2709)


def test_what_holds_the_event_loop_is_seen() -> None:
    clock = ManualClock()

    async def run() -> Stalls:
        stalls = Stalls(clock)
        stalls.start()
        # The loop is held: nothing else runs meanwhile.
        clock.advance(500_000)
        while not stalls.longest_us:
            await asyncio.sleep(0)
        stalls.stop()
        return stalls

    assert asyncio.run(run()).longest_us == 490_000


def test_stalls_problems_and_faults_are_exported(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        figures = metrics(server)
        stalls = get(server, "/varz").json["loop_stalls"]

    assert figures["broker_problems"] == 0
    assert "broker_loop_stall_seconds_count" in figures
    assert stalls.keys() == {"longest_ms", "above_10ms", "above_100ms", "above_1000ms"}
