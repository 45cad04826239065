"""Configuration files: formats, variables in them, and problems with their lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import table_file
from penstock.errors import BadConfig
from penstock.server.config import load
from penstock.server.settings import SETTINGS
from tests.support.configs import MIB, Place, changed, nested

# ---- files


CONTENT: dict[str, Any] = {
    "server": {"port": 4000, "node-id": "n", "heartbeat_s": "2m"},
    "topic": {"dead_letters": False, "segment_bytes": "1MiB", "dedup": "off"},
    "topics": {"orders.eu": {"retain_ms": "7d", "partitions": 3}, "my-topic": {}},
}


FORMATS = {
    ".json": json.dumps(CONTENT),
    ".yaml": yaml.safe_dump(CONTENT, sort_keys=False),
    ".yml": """
server: {port: 4000, node-id: n, heartbeat_s: 2m}
topic: {dead_letters: no, segment_bytes: 1MiB, dedup: off}
topics:
  orders.eu: {retain_ms: 7d, partitions: 3}
  my-topic:
""",
    ".toml": """
[server]
port = 4000
node-id = "n"
heartbeat_s = "2m"
[topic]
dead_letters = false
segment_bytes = "1MiB"
dedup = "off"
[topics."orders.eu"]
retain_ms = "7d"
partitions = 3
[topics.my-topic]
""",
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_says_the_same(place: Place, suffix: str) -> None:
    loaded = place.load(FORMATS[suffix], suffix=suffix)
    config = loaded.config
    assert (config.server.port, config.server.node_id, config.server.heartbeat_s) == (4000, "n", 120)
    policy = config.topic.policy
    assert (policy.dead_letters, policy.segment_bytes, policy.dedup) == (False, MIB, "off")
    assert list(config.topics) == ["orders.eu", "my-topic"]
    assert config.topics["my-topic"] == config.topic
    orders = config.topics["orders.eu"]
    assert (orders.policy.retain_ms, orders.partitions, orders.policy.segment_bytes) == (7 * 86_400_000, 3, MIB)
    assert loaded.warnings == []


def test_a_suffix_may_be_in_capitals(place: Place) -> None:
    assert place.load("server: {port: 5}", suffix=".YAML").config.server.port == 5


def test_topics_may_stand_in_the_table_of_the_broker(place: Place) -> None:
    config = place.load({"topics": {"a": {}}, "broker": {"topics": {"b": {"partitions": 2}, "c": None}}}).config
    assert [(name, topic.partitions) for name, topic in config.topics.items()] == [("a", 1), ("b", 2), ("c", 1)]


def test_what_a_topic_does_not_set_comes_from_the_general_policy_with_its_origin(place: Place) -> None:
    loaded = place.load(
        {"topic": {"retain_ms": "1h"}, "topics": {"a-b": {"retain-ms": "none", "dedup-window_ms": "1m"}}},
        environ={"PENSTOCK_TOPIC_DURABILITY": "flush"},
    )
    topic = loaded.config.topics["a-b"].policy
    assert (topic.retain_ms, topic.dedup_window_ms, topic.durability, topic.cleanup) == (
        None,
        60_000,
        "flush",
        "delete",
    )
    origins = {key: origin for key, origin in loaded.origins.items() if key.startswith("topics.")}
    assert list(origins)[:2] == ["topics.a-b.partitions", "topics.a-b.durability"]
    assert origins["topics.a-b.retain_ms"] == f"file {place.path}"
    assert origins["topics.a-b.durability"] == "environment PENSTOCK_TOPIC_DURABILITY"
    assert origins["topics.a-b.cleanup"] == "default"
    assert loaded.shown()["topics.a-b.dedup_window_ms"] == 60_000


@pytest.mark.parametrize("name", ["auto_create", "topics_max", "dedup_ids_max"])
def test_what_is_of_all_topics_is_no_setting_of_one(place: Place, name: str) -> None:
    [problem] = place.problems({"topics": {"orders": {name: 1}}})
    assert problem.startswith(f"topics.orders.{name} (file FILE:1) is not a setting")


@pytest.mark.parametrize(("suffix", "content"), [(".yaml", ""), (".toml", ""), (".json", "{}"), (".yaml", "server:\n")])
def test_an_empty_file_or_table_sets_nothing(place: Place, suffix: str, content: str) -> None:
    assert changed(place.load(content, suffix=suffix)) == {}


def _aliases(form: str) -> str:
    """Forty values, each twice the one before."""
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {form.format(f'a{n - 1}')}" for n in range(1, 40))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("suffix", "content", "problem"),
    [
        (".ini", "", "FILE: unknown format: the name must end with .toml, .json, .yaml, .yml"),
        (".json", "{", "FILE:1: invalid JSON: Expecting property name"),
        (".toml", "port = ", "FILE:1: invalid TOML: Invalid value"),
        (".yaml", "a: [1\nauth: {password: hush}", "FILE:2: invalid YAML: expected ',' or ']', but got ':'"),
        (".yaml", "a: \x00", "FILE: invalid YAML: unexpected characters"),
        (".json", "[1]", "FILE: the file must contain tables, not a list"),
        (".json", "null", "FILE: the file must contain tables, not null"),
        (".json", "7", "FILE: the file must contain tables, not a number or time"),
        (".json", '{"a": 1' + "0" * 5000 + "}", "FILE: invalid JSON: Exceeds the limit"),
        (".json", "[" * 100_000, "FILE: too many nested tables"),
        (".toml", "a = 1" + "0" * 5000, "FILE: invalid TOML: Exceeds the limit"),
        (".toml", "a = " + "[" * 100_000, "FILE: too many nested tables"),
        (".yaml", "text", "FILE: the file must contain tables, not text"),
        (".yaml", "null", "FILE: the file must contain tables, not null"),
        (".yaml", "- 1", "FILE: the file must contain tables, not a list"),
        (".yaml", "true", "FILE: the file must contain tables, not true or false"),
        (".yaml", "3.5", "FILE: the file must contain tables, not a number or time"),
        (".yaml", "[" * 100_000, "FILE: too many nested tables"),
        (".yaml", "a: 2026-13-01", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!bool maybe", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!timestamp now", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!int ''", "FILE: invalid YAML: a date, number or tagged value is invalid"),
        (".yaml", "a: !!python/object:os.system {}", "FILE:1: invalid YAML: could not determine a constructor"),
        (".yaml", "a: 1\nb: &b\n  c: *b", "FILE:2: invalid YAML: an alias refers to a value that contains it"),
        (".yaml", _aliases("[*{0},*{0}]"), "FILE:13: invalid YAML: aliases repeat more than 10000 values"),
        (".yaml", _aliases("{{x: *{0}, y: *{0}}}"), "FILE:12: invalid YAML: aliases repeat more than 10000 values"),
        (".yaml", _aliases("{{<<: [*{0},*{0}]}}"), "FILE:12: invalid YAML: aliases repeat more than 10000 values"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_name(
    place: Place, suffix: str, content: str, problem: str
) -> None:
    [found] = place.problems(content, suffix=suffix)
    assert found.startswith(problem)
    assert "hush" not in found


def test_aliases_and_merged_tables_are_understood() -> None:
    content = "base: &base {port: 1, http_port: 2}\nserver: {<<: *base, port: 3}"

    merged = table_file.parse(Path("f.yaml"), content.encode())
    assert merged.tables["server"] == {"port": 3, "http_port": 2}
    assert (merged.lines.of(("server", "port")), merged.repeated) == (2, [])


def test_a_file_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=re.escape(f"{tmp_path / 'no.toml'}: No such file or directory")):
        load(path=tmp_path / "no.toml", environ={}, flags={})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="not UTF-8 text"):
        load(path=path, environ={}, flags={})


# ---- variables within a file


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("server.port", "${PORT}", 7000),
        ("server.port", "${NONE:7001}", 7001),
        ("server.port", "${PORT:7001}", 7000),
        ("server.port", "7${DIGIT}${NONE:0}2", 7102),
        ("storage.data_dir", "/srv/${NAME}/data", "/srv/x y/data"),
        ("storage.data_dir", "/srv/${NONE:}/data", "/srv//data"),
        ("storage.data_dir", "${NONE:http://h:80/}", "http://h:80/"),
        ("storage.data_dir", "$HOME {x}", "$HOME {x}"),
        ("topic.dead_letters", "${NONE:false}", False),
        ("topic.retain_ms", "${NONE:1h}", 3_600_000),
        ("topic.retain_bytes", "${NONE:1KiB}", 1024),
    ],
)
def test_variables_in_a_file_are_replaced_and_the_result_is_converted(
    place: Place, key: str, text: str, meant: Any
) -> None:
    loaded = place.load({key: text}, environ={"PORT": "7000", "DIGIT": "1", "NAME": "x y"})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"file {place.path}"


def test_variables_are_replaced_in_the_settings_of_one_topic(place: Place) -> None:
    loaded = place.load({"topics": {"t": {"partitions": "${COUNT}"}}}, environ={"COUNT": "7"})
    assert loaded.config.topics["t"].partitions == 7


def test_a_variable_that_is_not_set_is_refused_with_its_key(place: Place) -> None:
    assert place.problems({"auth": {"token": "hush${SECRET}"}}) == [
        "auth.token (file FILE:1): SECRET is not in the environment: set it, or write ${SECRET:default}"
    ]


@pytest.mark.parametrize("text", ["${", "${A", "${}", "${A B}", "${1A:2}", "x${:y}"])
def test_a_variable_that_is_misspelled_is_refused(place: Place, text: str) -> None:
    assert place.problems({"storage": {"dir": text}}, environ={"A": "a"}) == [
        "storage.dir (file FILE:1): invalid variable: write ${NAME} or ${NAME:default}"
    ]


def test_nothing_is_replaced_outside_a_file(place: Place) -> None:
    loaded = place.load(environ={"DATA_DIR": "${HOME}"}, flags={"server.node_id": "${HOME}"})
    assert (loaded.config.storage.data_dir, loaded.config.server.node_id) == ("${HOME}", "${HOME}")


# ---- refusals


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("server.prot", ": did you mean server.port?"),
        ("server.Port", ": did you mean server.port?"),
        ("sever.host", ": did you mean server.host?"),
        ("server.port.number", ": did you mean server.port?"),
        ("storage.retention.max_agee", ": did you mean storage.retention.max_age?"),
        ("topic.durabilty", ": did you mean topic.durability?"),
        ("durability", ": did you mean topic.durability?"),
        ("port", ": did you mean server.port?"),
        ("zzz", ""),
    ],
)
def test_a_wrong_key_is_refused_with_the_nearest_right_one(place: Place, key: str, hint: str) -> None:
    assert place.problems({key: 1}) == [f"{key} (file FILE:1) is not a setting{hint}"]


def test_a_wrong_key_of_one_topic_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems({"topics": {"a-b": {"retain-sm": 1}}}) == [
        "topics.a-b.retain-sm (file FILE:1) is not a setting: did you mean topics.a-b.retain_ms?"
    ]


def test_a_wrong_variable_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems(environ={"PENSTOCK_SERVER_PROT": "1", "PENSTOCK_CONFG": "x", "QB_WHATEVER": "1"}) == [
        "PENSTOCK_SERVER_PROT (environment) is not a setting: did you mean PENSTOCK_SERVER_PORT?",
        "PENSTOCK_CONFG (environment) is not a setting: did you mean PENSTOCK_CONFIG?",
    ]


def test_a_wrong_flag_is_refused_with_the_nearest_right_one(place: Place) -> None:
    assert place.problems(flags={"server.prot": 1}) == [
        "server.prot (flag --prot) is not a setting: did you mean server.port?"
    ]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".toml", '# first\n[server]\nport = 1\n\n[storage]\ndir = 7\n[topics."a.b"]\nretain = 1\n'),
        (".yaml", "# first\nserver:\n  port: 1\nstorage:\n\n  dir: 7\ntopics:\n  a.b: {retain: 1}\n"),
        (".json", '{\n"server":\n{"port":\t1},\n"storage":\n\n{"dir": 7},\n"topics": {\n"a.b": {"retain": 1}}}'),
    ],
)
def test_a_problem_has_its_file_and_line_in_every_format(place: Place, suffix: str, content: str) -> None:
    assert place.problems(content, suffix=suffix) == [
        f"storage.dir (file FILE:6) is 7: it must be {SETTINGS['storage.data_dir'].allowed}",
        "topics.a.b.retain (file FILE:8) is not a setting: did you mean topics.a.b.retain_ms?",
    ]


@pytest.mark.parametrize(
    ("suffix", "content"), [(".yaml", "server:\n  port: 1\n  port: 2\n"), (".json", '{"a": 1,\n\n"a": 2}')]
)
def test_a_key_that_is_repeated_is_refused_with_its_line(place: Place, suffix: str, content: str) -> None:
    name = "port" if suffix == ".yaml" else "a"
    assert f"FILE:3: '{name}' is repeated: keep one of them" in place.problems(content, suffix=suffix)


@pytest.mark.parametrize("key", ["server", "topics", "topics.orders", "broker", "registry", "storage.retention"])
def test_a_value_in_the_place_of_a_table_is_refused_and_not_shown(place: Place, key: str) -> None:
    assert place.problems(nested(key, "hush")) == [f"{key} (file FILE:1) must be a table of settings"]
