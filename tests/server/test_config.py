"""The settings: where they come from, how they are checked together, and which are secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.inspect import StrType

from penstock.errors import BadConfig, PenstockError
from penstock.server.config import load
from penstock.server.settings import SETTINGS, Config
from tests.support.certificates import Certificates
from tests.support.configs import DEFAULTS, Place, changed, value_of

# ---- the list of settings


def test_without_any_source_everything_is_as_by_default(place: Place) -> None:
    loaded = place.load()
    assert loaded.config == Config()
    assert loaded.shown() == DEFAULTS
    assert loaded.origins == dict.fromkeys(DEFAULTS, "default")
    assert loaded.warnings == []


def test_every_setting_has_a_meaning_in_one_line_and_every_number_a_bound() -> None:
    assert list(SETTINGS) == list(DEFAULTS)
    for key, setting in SETTINGS.items():
        assert setting.about, key
        assert "\n" not in setting.about, key
        assert setting.choices or isinstance(setting.base, StrType) or setting.low is not None, key


def test_every_default_is_allowed() -> None:
    for key, setting in SETTINGS.items():
        assert setting.parse(setting.default) == DEFAULTS[key], key


def test_a_configuration_cannot_be_changed(place: Place) -> None:
    loaded = place.load({"topics": {"orders": {}}})
    config = loaded.config
    sections = (config.server, config.auth, config.storage, config.topic, config.flow, config.dlq, config.pipe)
    for part in (loaded, config, *sections, config.topics["orders"]):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("server.log_level", ["debug", "info", "warning", "error"]),
        ("log.format", ["text", "json"]),
        ("tls.min_version", ["1.2", "1.3"]),
        ("storage.reader", ["pread", "mmap"]),
        ("topic.durability", ["fsync", "flush"]),
        ("topic.cleanup", ["delete", "compact"]),
        ("topic.dedup", ["off", "id", "payload"]),
        ("flow.mode", ["block", "drop", "shed"]),
        ("pipe.on_gap", ["stop", "skip"]),
    ],
)
def test_every_choice_may_be_made(place: Place, key: str, choices: list[str]) -> None:
    assert [changed(place.load({key: choice})) for choice in choices] == [{key: choice} for choice in choices]


# ---- sources


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(place: Place) -> None:
    loaded = place.load(
        {"server": {"port": 1, "quiet_port": 2, "http_port": 3}},
        environ={"PENSTOCK_SERVER_PORT": "11", "PENSTOCK_SERVER_QUIET_PORT": "12"},
        flags={"server.port": 21, "server.stop_s": None},
    )
    server = loaded.config.server
    assert (server.port, server.quiet_port, server.http_port, server.stop_s) == (21, 12, 3, 10)
    keys = ("server.port", "server.quiet_port", "server.http_port", "server.stop_s")
    assert [loaded.origins[key] for key in keys] == [
        "flag --port",
        "environment PENSTOCK_SERVER_QUIET_PORT",
        f"file {place.path}",
        "default",
    ]


# Settings that need a certificate: tests/tls/test_settings.py has them.
OF_CERTIFICATES: Final = (
    *(f"tls.{name}" for name in ("cert", "key", "client_ca", "client_certificates", "required", "handshake_first")),
    *(f"pipe.{name}" for name in ("ca", "cert", "key")),
)


@pytest.mark.parametrize("key", [key for key in DEFAULTS if key not in OF_CERTIFICATES])
def test_every_setting_has_a_variable_of_its_own(place: Place, key: str) -> None:
    setting = SETTINGS[key]
    other = [choice for choice in setting.choices if choice != setting.default]
    text = "http://some" if "http" in (getattr(setting.base, "pattern", None) or "") else "some"
    value = other[0] if other else text if setting.low is None else setting.low + 1
    partners = {
        "auth.user": {"PENSTOCK_AUTH_PASSWORD": "other"},
        "auth.password": {"PENSTOCK_AUTH_USER": "other"},
        "pipe.user": {"PENSTOCK_PIPE_PASSWORD": "other", "PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.password": {"PENSTOCK_PIPE_USER": "other", "PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.token": {"PENSTOCK_PIPE_PARENTS": "http://root"},
        "pipe.topics": {"PENSTOCK_PIPE_PARENT": "http://root"},
        "pipe.up": {"PENSTOCK_REGISTRY_URL": "http://registry"},
        "server.host": {"PENSTOCK_SERVER_INSECURE": "true"},
        "server.lame_duck_s": {"PENSTOCK_SERVER_LAME_DUCK_GRACE_S": "0"},
    }.get(key, {})
    name = "PENSTOCK_" + key.upper().replace(".", "_")
    loaded = place.load(environ={name: str(value)} | partners)
    assert value_of(loaded.config, key) == value != DEFAULTS[key]
    assert loaded.origins[key] == f"environment {name}"


@pytest.mark.parametrize(
    ("name", "value", "key", "meant"),
    [
        ("QB_SERVER_HOST", "localhost", "server.host", "localhost"),
        ("QB_SERVER_PORT", "9999", "server.quiet_port", 9999),
        ("QB_DATA_DIR", "/srv/qb", "storage.data_dir", "/srv/qb"),
        ("QB_LOG_LEVEL", "DEBUG", "server.log_level", "debug"),
        ("QB_MAX_CONNECTIONS", "100", "server.connections_max", 100),
        ("QB_DEFAULT_PARTITIONS", "4", "topic.partitions", 4),
        ("NODE_ID", "broker-001", "server.node_id", "broker-001"),
        ("BROKER_PORT", "9093", "server.quiet_port", 9093),
        ("DATA_DIR", "/var/lib/broker", "storage.data_dir", "/var/lib/broker"),
        ("HTTP_PORT", "8081", "server.http_port", 8081),
        ("REGISTRY_URL", "http://registry.example.com", "registry.url", "http://registry.example.com"),
    ],
)
def test_variables_of_other_brokers_are_understood(place: Place, name: str, value: str, key: str, meant: Any) -> None:
    loaded = place.load(environ={name: value})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"environment {name}"
    # An own name beats them, and then they are not looked at.
    own = "PENSTOCK_" + key.upper().replace(".", "_")
    loaded = place.load(environ={name: "", own: value})
    assert changed(loaded) == {key: meant}
    assert loaded.origins[key] == f"environment {own}"


@pytest.mark.parametrize("name", ["QB_MAX_RETRIES", "QB_SNAPSHOT_DIR", "QB_SNAPSHOT_INTERVAL"])
def test_variables_that_have_no_effect_are_warned_of(place: Place, name: str) -> None:
    loaded = place.load(environ={name: "5"})
    assert changed(loaded) == {}
    [warning] = loaded.warnings
    assert warning.startswith(f"{name} (environment) is '5', which has no effect: ")


@pytest.mark.parametrize("name", ["PENSTOCK_CONFIG", "QB_CONFIG_FILE", "CONFIG_PATH"])
def test_a_variable_may_name_the_file(place: Place, tmp_path: Path, name: str) -> None:
    named = tmp_path / "named.toml"
    named.write_text("server.port = 5")
    loaded = load(path=None, environ={name: str(named)}, flags={})
    assert (loaded.config.server.port, loaded.origins["server.port"]) == (5, f"file {named}")
    assert place.load({"server.port": 6}, environ={name: str(named)}).config.server.port == 6


def test_the_own_variable_for_the_file_beats_the_other(tmp_path: Path) -> None:
    for number in (5, 6):
        (tmp_path / f"{number}.toml").write_text(f"server.port = {number}")
    environ = {"QB_CONFIG_FILE": str(tmp_path / "5.toml"), "PENSTOCK_CONFIG": str(tmp_path / "6.toml")}
    assert load(path=None, environ=environ, flags={}).config.server.port == 6


def test_all_problems_are_told_at_once_each_with_its_source(place: Place) -> None:
    assert place.problems(
        {"server": {"port": 70000, "prot": 1}, "topic": {"cleanup": "burn"}, "auth": {"user": "me"}},
        environ={"QB_SERVER_PORT": "x", "PENSTOCK_FLOW_RATE": "-1"},
        flags={"storage.data_dir": ""},
    ) == [
        "server.port (file FILE:1) is 70000: it must be an integer, 0 to 65535",
        "server.prot (file FILE:1) is not a setting: did you mean server.port?",
        "topic.cleanup (file FILE:1) is 'burn': it must be delete or compact",
        "flow.rate (environment PENSTOCK_FLOW_RATE) is '-1': it must be a non-negative integer",
        "server.quiet_port (environment QB_SERVER_PORT) is 'x': it must be an integer, 0 to 65535",
        "storage.data_dir (flag --data-dir) is '': it must be non-empty text (a number needs quotes)",
        "auth.user (file FILE:1) needs auth.password: set both, or neither",
    ]


def test_a_wrong_value_is_refused_even_if_a_right_one_beats_it(place: Place) -> None:
    [problem] = place.problems({"server": {"port": -1}}, flags={"server.port": 5})
    assert problem.startswith("server.port (file FILE:1) is -1")


def test_a_user_and_a_password_go_together(place: Place) -> None:
    config = place.load({"auth": {"user": "me"}}, environ={"PENSTOCK_AUTH_PASSWORD": "hush"}).config
    assert (config.auth.user, config.auth.password) == ("me", "hush")
    assert place.problems({"auth": {"password": "hush"}}) == [
        "auth.password (file FILE:1) needs auth.user: set both, or neither"
    ]
    assert place.problems({"auth": {"user": "me", "password": None}}) == [
        "auth.user (file FILE:1) needs auth.password: set both, or neither"
    ]
    # A password that is wrong is not missing too.
    assert len(place.problems({"auth": {"user": "me", "password": 1234}})) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "shop-7"])
def test_other_machines_are_not_served_without_credentials(place: Place, host: str) -> None:
    [problem] = place.problems(flags={"server.host": host})
    assert problem.startswith(f"server.host (flag --host) is '{host}', which other machines can reach")
    assert all(remedy in problem for remedy in ("auth.user and auth.password", "auth.token", "--insecure"))
    assert place.load(flags={"server.host": host, "server.insecure": True}).config.server.host == host


@pytest.mark.parametrize("secrets", [{"auth.token": "t"}, {"auth.user": "u", "auth.password": "p"}])
def test_other_machines_do_not_send_credentials_without_tls(
    place: Place, secrets: Mapping[str, str], certificates: Certificates
) -> None:
    flags = {"server.host": "0.0.0.0", **secrets}
    tls = {f"tls.{name.removeprefix('tls_')}": str(path) for name, path in certificates.settings().items()}

    [problem] = place.problems(flags=flags)
    [optional] = place.problems(flags={**flags, **tls, "tls.required": False})

    assert problem == optional
    assert "credentials may cross the network unencrypted: set tls.cert and tls.key" in problem
    assert place.load(flags={**flags, "server.insecure": True}).config.server.host == "0.0.0.0"
    assert place.load(flags={**flags, **tls}).config.server.host == "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1,0.0.0.0", "::1, ::", "localhost,::ffff:0.0.0.0", "[::]"])
def test_one_of_several_hosts_that_others_can_reach_needs_credentials(place: Place, host: str) -> None:
    [problem] = place.problems(flags={"server.host": host})
    assert "which other machines can reach" in problem


def test_several_hosts_are_a_list_or_have_commas_between(place: Place) -> None:
    hosts = ["127.0.0.1", "::1"]
    for given in (hosts, "127.0.0.1,::1"):
        assert place.load({"server": {"host": given}}).config.server.host == "127.0.0.1,::1"
    assert place.load(flags={"server.host": hosts}).config.server.host == "127.0.0.1,::1"
    assert place.load(environ={"PENSTOCK_SERVER_HOST": "127.0.0.1,::1"}).config.server.host == "127.0.0.1,::1"


@pytest.mark.parametrize(
    "host", [[], ["127.0.0.1", 7], "127.0.0.1:4222", "[::1]:4222", "a b", "nats://a", "a,", ",", 7]
)
def test_what_is_no_host_is_refused(place: Place, host: Any) -> None:
    [problem] = place.problems({"server": {"host": host}})
    assert problem.startswith(f"server.host (file FILE:1) is {host!r}: it must be ")
    assert problem.endswith("addresses or names without a port, like 127.0.0.1,::1")


def test_the_grace_period_is_shorter_than_the_lame_duck_mode(place: Place) -> None:
    [problem] = place.problems({"lame_duck_duration": 30, "lame_duck_grace_period": 30})
    assert problem == (
        "server.lame_duck_grace_s (file FILE:1) is 30, and server.lame_duck_s (file FILE:1) is 30: the grace period "
        "must be shorter"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "127.0.0.1,::1,localhost"])
def test_this_machine_is_served_without_credentials(place: Place, host: str) -> None:
    assert place.load(flags={"server.host": host}).config.server.host == host


def test_topics_to_pipe_need_a_parent(place: Place) -> None:
    assert place.problems({"pipe.topics": "a", "pipe.up": "b"}) == [
        "pipe.topics (file FILE:1) has no effect without a parent: set pipe.parent or registry.url as well",
        "pipe.up (file FILE:1) has no effect without a parent: set pipe.parent or registry.url as well",
    ]


def test_the_credentials_of_a_pipe_are_for_somebody(place: Place) -> None:
    assert place.problems({"pipe.user": "me", "pipe.password": "hush"}) == [
        "pipe.user (file FILE:1) has no parent to go to: list the parents that may get it in pipe.parents"
    ]
    assert place.problems({"pipe.token": "t", "pipe.user": "me", "pipe.parent": "http://root"}) == [
        "pipe.user (file FILE:1) needs pipe.password: set both, or neither"
    ]
    config = place.load(
        {"pipe.token": "t", "registry.url": "http://r", "pipe.parents": "http://a:1 , https://b"}
    ).config
    assert "'t'" not in repr(config)


def test_doors_do_not_share_a_port(place: Place) -> None:
    assert place.problems(flags={"server.port": 9092}) == [
        "server.port (flag --port) and server.quiet_port (default) are both 9092: they must differ"
    ]
    assert place.problems(flags={"server.http_port": 4222}) == [
        "server.port (default) and server.http_port (flag --http-port) are both 4222: they must differ"
    ]
    free = dict.fromkeys(("server.port", "server.quiet_port", "server.http_port"), 0)
    assert changed(place.load(flags=free)) == free


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"storage": {"dir": "a", "data_dir": "a"}},
            "storage.data_dir (file FILE:1) repeats storage.dir (file FILE:1): keep one of them",
        ),
        (
            {"server": {"node-id": "a", "node_id": "b"}},
            "server.node_id (file FILE:1) repeats server.node-id (file FILE:1): keep one of them",
        ),
        (
            {"server": {"port": 1}, "broker": {"server": {"port": 2}}},
            "broker.server.port (file FILE:1) repeats server.port (file FILE:1): keep one of them",
        ),
        (
            {"ack": {"max_retries": 3}, "topic": {"deliveries_max": 3}},
            "topic.deliveries_max (file FILE:1) repeats ack.max_retries (file FILE:1): keep one of them",
        ),
    ],
)
def test_one_file_says_a_thing_once(place: Place, content: dict[str, Any], problem: str) -> None:
    assert place.problems(content) == [problem]


def test_the_environment_says_a_thing_once_unless_by_its_own_name(place: Place) -> None:
    environ = {"QB_DATA_DIR": "/a", "DATA_DIR": "/b"}
    assert place.problems(environ=environ) == [
        ("storage.data_dir (environment QB_DATA_DIR) repeats storage.data_dir (environment DATA_DIR): keep one of them")
    ]
    assert place.load(environ=environ | {"PENSTOCK_STORAGE_DATA_DIR": "/c"}).config.storage.data_dir == "/c"


def test_a_bad_configuration_has_a_code_of_its_own() -> None:
    error = BadConfig(["one", "two"])
    assert isinstance(error, PenstockError)
    assert (error.code, error.problems, str(error)) == ("BAD_CONFIG", ["one", "two"], "one\ntwo")


# ---- secrets


def test_secrets_are_not_shown(place: Place) -> None:
    loaded = place.load({"auth": {"user": "me", "password": "hush", "token": "psst"}})
    assert changed(loaded) == {"auth.user": "me", "auth.password": "***", "auth.token": "***"}
    assert "hush" not in repr(loaded)
    assert "psst" not in repr(loaded)
    assert (loaded.config.auth.password, loaded.config.auth.token) == ("hush", "psst")
