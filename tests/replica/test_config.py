"""The settings of a replica: by the names of the environment and by flags, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import BadConfig
from penstock.replica.config import FIELDS, OnError, ReplicaConfig, load
from penstock.web.credentials import Credentials

DOCUMENT = {
    "CONSUMER_TYPE": "price",
    "CONSUMER_TOPIC": "price-topic",
    "CONSUMER_GROUP": "price-group",
    "CONSUMER_PORT": "8083",
    "BROKER_HOST": "localhost",
    "BROKER_PORT": "9093",
    "STORAGE_DATA_DIR": "./copies",
    "CONSUMER_RETRY_POLICY": "SKIP_ON_ERROR",
    "STORAGE_SEGMENT_SIZE": "1073741824",
}
LEAST = {"CONSUMER_TOPIC": "prices", "CONSUMER_GROUP": "shop"}


def test_the_environment_says_it_all() -> None:
    assert load(environ=DOCUMENT, flags={}) == ReplicaConfig(
        topic="price-topic",
        group="price-group",
        type="price",
        host="127.0.0.1",
        port=8083,
        broker_host="localhost",
        broker_port=9093,
        data_dir="./copies",
        segment_bytes_max=1 << 30,
        on_error=OnError.SKIP_ON_ERROR,
    )


def test_what_is_not_said_has_a_default() -> None:
    config = load(environ=LEAST | {"CONSUMER_PORT": ""}, flags={"host": None})
    assert (config.type, config.port, config.broker) == ("replica", 8082, "127.0.0.1:9092")
    assert (config.data_dir, config.segment_bytes_max) == ("./consumer-data", 64 << 20)
    assert config.on_error is OnError.EXPONENTIAL_THEN_FIXED


def test_flags_win() -> None:
    flags = {"topic": "orders", "port": "0", "segment_bytes_max": "1MiB", "on_error": "pause_on_error"}
    config = load(environ=DOCUMENT, flags=flags)
    assert (config.topic, config.port, config.segment_bytes_max) == ("orders", 0, 1 << 20)
    assert config.on_error is OnError.PAUSE_ON_ERROR
    assert config.group == "price-group"


def test_an_address_of_version_six_has_brackets() -> None:
    assert load(environ=LEAST, flags={"broker_host": "::1"}).broker == "[::1]:9092"


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(BadConfig) as refused:
        load(
            environ=DOCUMENT | {"CONSUMER_PORT": "65536", "STORAGE_SEGMENT_SIZE": "1Mb", "CONSUMER_GROUP": ""},
            flags={"topic": "a..b", "on_error": "IGNORE"},
        )
    assert refused.value.problems == [
        "--topic is 'a..b': it must be a topic, or a pattern such as prices.>",
        "CONSUMER_GROUP (or --group) is not set: it must be a name without blanks",
        "CONSUMER_PORT is '65536': it must be an integer, 0 to 65535",
        f"STORAGE_SEGMENT_SIZE is '1Mb': it must be {FIELDS['segment_bytes_max'].allowed}",
        "--retry-policy is 'IGNORE': it must be EXPONENTIAL_THEN_FIXED, SKIP_ON_ERROR or PAUSE_ON_ERROR",
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CONSUMER_TOPIC", "a b"),
        ("CONSUMER_TOPIC", ">.a"),
        ("CONSUMER_GROUP", "a b"),
        ("CONSUMER_TYPE", "a\n"),
        ("CONSUMER_PORT", "-1"),
        ("CONSUMER_PORT", "８０"),
        ("CONSUMER_PORT", "1e3"),
        ("BROKER_PORT", "http"),
        ("BROKER_HOST", "http://localhost"),
        ("CONSUMER_HOST", " "),
        ("STORAGE_SEGMENT_SIZE", "4095"),
        ("STORAGE_SEGMENT_SIZE", "3GiB"),
        ("STORAGE_SEGMENT_SIZE", "-5"),
        ("STORAGE_SEGMENT_SIZE", "9" * 30),
        ("STORAGE_DATA_DIR", "a\0b"),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(BadConfig) as refused:
        load(environ=LEAST | {name: text}, flags={})
    [problem] = refused.value.problems
    assert problem.startswith(f"{name} is {text!r}: it must be ")


def test_other_machines_are_not_answered_without_credentials() -> None:
    public = LEAST | {"CONSUMER_HOST": "0.0.0.0"}
    with pytest.raises(BadConfig, match=r"'0.0.0.0', which other machines can reach.*CONSUMER_HTTP_TOKEN.*--insecure"):
        load(environ=public, flags={})
    assert load(environ=public, flags={"insecure": "true"}).insecure


def test_other_machines_do_not_send_credentials_without_tls() -> None:
    public = LEAST | {"CONSUMER_HOST": "0.0.0.0"}
    tls = {"CONSUMER_HTTP_TLS_CERT": "replica.pem"}
    cases = [(public | {"CONSUMER_HTTP_TOKEN": "t"}, Credentials()), (public, Credentials(token="t"))]
    for environ, credentials in cases:
        with pytest.raises(BadConfig, match=r"unencrypted: set CONSUMER_HTTP_TLS_CERT and CONSUMER_HTTP_TLS_KEY"):
            load(environ=environ, flags={}, credentials=credentials)
        assert load(environ=environ | tls, flags={}, credentials=credentials).host == "0.0.0.0"
        assert load(environ=environ, flags={"insecure": "true"}, credentials=credentials).host == "0.0.0.0"


def test_queries_need_the_credentials_of_the_replica_or_else_of_the_broker() -> None:
    broker, own = Credentials(token="b"), Credentials(user="ann", password="secret")
    named = load(environ=LEAST, flags={"http_user": "ann", "http_password": "secret"})
    assert (named.credentials(broker), load(environ=LEAST, flags={}).credentials(broker)) == (own, broker)
    assert "secret" not in repr(named)
    with pytest.raises(BadConfig, match="set both, or neither"):
        load(environ=LEAST, flags={"http_user": "ann"})


def test_the_command_tells_what_is_wrong_and_fails(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in DOCUMENT}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "replica", "--port", "x"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: CONSUMER_TOPIC (or --topic) is not set: it must be a topic, or a pattern such as prices.>",
        "error: CONSUMER_GROUP (or --group) is not set: it must be a name without blanks",
        "error: --port is 'x': it must be an integer, 0 to 65535",
    ]
    assert list(tmp_path.iterdir()) == []
