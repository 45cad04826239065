"""Users of a running broker: logins, changes of the file, and what is told of them."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.embedded import Broker
from penstock.errors import PermissionDenied, Unauthorized
from penstock.security.users_edit import UsersEditor
from tests.support import forks
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.server import Raw, Serve, clean_environment
from tests.support.trees import eventually
from tests.support.users import PASSWORD, hashed, write_users
from tests.support.web import ask, basic

USERS = """
[users]
root = { password = "{password}", admin = true }
[users.ann]
password = "{password}"
publish = ["a", "a.>"]
subscribe = ["a", "a.>"]
groups = ["placeholder"]
"""


def client(server: Serve, user: str = "ann", password: str = PASSWORD, **more: Any) -> Client:
    return Client(server.url, user=user, password=password, timeout=PATIENCE_S, **more)


class Users:
    """A server, and the file of its users."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        text = USERS.replace('groups = ["placeholder"]', 'groups = { join = ["g*"] }')
        self.path = write_users(directory / "users.toml", text)
        self.server = Serve(directory / "serve", auth_users=self.path, **settings)
        self.edit = UsersEditor(self.path)

    def reload(self) -> None:
        """Let the server read the file again, and wait until it has."""
        before = self.server.stderr.count("users.toml")
        self.server.process.send_signal(signal.SIGHUP)
        while self.server.stderr.count("users.toml") == before:
            time.sleep(0.01)


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    found = Users(tmp_path)
    with found.server:
        yield found


def test_each_credential_logs_in(users: Users) -> None:
    token, _ = users.edit.add_token("ann")
    users.reload()
    right: list[dict[str, Any]] = [{"user": "ann", "password": PASSWORD}, {"token": token}]
    for given in right:
        with Client(users.server.url, timeout=PATIENCE_S, **given) as ann:
            ann.publish("a.x", b"1")
            with pytest.raises(PermissionDenied, match=r"ann has no permission for publish: 'b.x'"):
                ann.publish("b.x", b"1")
    wrongs: list[dict[str, Any]] = [
        {"user": name, "password": word} for name, word in (("ann", "x"), ("eve", PASSWORD))
    ]
    for wrong in (*wrongs, {"token": f"{token}x"}):
        with pytest.raises(Unauthorized), Client(users.server.url, timeout=PATIENCE_S, **wrong):
            pass
    assert ask(users.server, "GET", "/admin/topics", headers={"Authorization": f"Bearer {token}"}).status == 200


def test_a_denied_publish_creates_no_topic(users: Users) -> None:
    with client(users.server) as ann, pytest.raises(PermissionDenied):
        ann.publish("b.x", b"1")
    with client(users.server, "root") as root:
        # The trail is made with its first event, which is stored behind the refusal.
        eventually("the trail has begun", lambda: {topic.name for topic in root.topics()} == {"$audit"})


def test_a_change_of_permissions_counts_for_open_connections(users: Users) -> None:
    with client(users.server) as ann, client(users.server, "root") as root:
        ann.publish("a.x", b"1")
        subscription = ann.subscribe("a.>")
        users.edit.change("ann", {"publish": ["b"], "subscribe": ["a.y"]})
        users.reload()
        ann.publish("b", b"2")
        with pytest.raises(PermissionDenied):
            ann.publish("a.x", b"3")
        with pytest.raises(PermissionDenied):
            subscription.get(PATIENCE_S)
        assert root.topic("b").name == "b"


@pytest.mark.parametrize("change", ["disable", "remove", "password", "revoke"])
def test_a_login_that_is_no_longer_valid_ends_its_connection(users: Users, change: str) -> None:
    token, number = users.edit.add_token("ann")
    users.reload()
    with Raw(users.server.port) as raw, client(users.server, "root") as root:
        raw.line()
        shown = {"auth_token": token} if change == "revoke" else {"user": "ann", "pass": PASSWORD}
        raw.send(f"CONNECT {json.dumps(shown | {'verbose': False})}\r\nPING\r\n")
        assert raw.line() == "PONG"
        match change:
            case "disable":
                users.edit.enable("ann", is_enabled=False)
            case "remove":
                users.edit.remove("ann")
            case "password":
                users.edit.change("ann", {"password": hashed("another")})
            case "revoke":
                users.edit.revoke_tokens("ann", number)
        users.reload()
        assert raw.line() == "-ERR 'User Authentication Revoked'"
        assert raw.rest() == ""
        assert root.topics() is not None


def test_an_invalid_file_keeps_the_users(users: Users) -> None:
    users.path.write_text("[users.ann]\npublish = 7\n")
    users.reload()
    with client(users.server) as ann:
        ann.publish("a.x", b"1")
    assert f"{users.path}:2: users.ann.publish is 7: it must be a list of patterns" in users.server.stderr
    assert "is invalid: the 2 users stay as they were" in users.server.stderr
    users.path.chmod(0o644)
    users.reload()
    assert "others can read it" in users.server.stderr


def test_changes_of_users_lose_no_message(users: Users) -> None:
    """A producer and a consumer go on while the file changes beneath them."""
    count = 3000
    with client(users.server) as ann, client(users.server) as reader:
        subscription = reader.subscribe("a.>", buffer=count)
        for number in range(count):
            ann.publish("a.x", b"%d" % number)
            if number % 500 == 0:
                users.edit.change("ann", {"quotas": {"connections": 10 + number}})
                users.reload()
        received = [int(subscription.get(PATIENCE_S).value) for _ in range(count)]
    assert received == list(range(count))


def test_over_http_an_administrator_manages_users(users: Users) -> None:
    def http(method: str, path: str, body: Any = None, user: str = "root") -> Any:
        answer = ask(users.server, method, path, body, headers=basic(user, PASSWORD))
        return answer.status, answer.body and answer.json

    assert http("GET", "/admin/users", user="ann")[0] == 403
    status, made = http("POST", "/admin/users", {"name": "bob", "password": "secret", "fields": {"publish": ["c"]}})
    assert (status, made["permissions"]) == (201, {"publish": {"allow": ["c"]}})
    with client(users.server, "bob", "secret") as bob:
        bob.publish("c", b"1")
    status, token = http("POST", "/admin/users/bob/tokens", {"about": "ci"})
    assert status == 201
    with Client(users.server.url, token=token["token"], timeout=PATIENCE_S) as bob:
        bob.publish("c", b"2")
    assert http("POST", "/admin/users/bob/revoke", {}) == (200, {"revoked": 1})
    assert http("PATCH", "/admin/users/bob", {"fields": {"publish": ["a..b"]}})[0] == 400
    assert http("DELETE", "/admin/users/bob")[0] == 204
    [_, names] = http("GET", "/admin/users")
    assert [user["name"] for user in names["users"]] == ["ann", "root"]
    assert "argon2" not in json.dumps(names)


def test_secrets_are_told_nowhere(users: Users) -> None:
    token, _ = users.edit.add_token("ann")
    users.reload()
    for given in (
        {"user": "ann", "pass": f"{PASSWORD}!"},
        {"auth_token": f"{token}!"},
        {"user": "ann", "pass": PASSWORD},
    ):
        with Raw(users.server.port) as raw:
            raw.line()
            raw.send(f"CONNECT {json.dumps(given)}\r\nPING\r\n")
            raw.line()
    headers = basic("root", PASSWORD)
    told = [ask(users.server, "GET", path, headers=headers).body.decode() for path in TELLING]
    with client(users.server, "root") as root:
        told += [message.value.decode() for message in root.fetch("$audit", 0)]
    told += [users.server.stderr, Path(f"/proc/{users.server.process.pid}/cmdline").read_text()]
    for text in told:
        for secret in (PASSWORD, token, "argon2id"):
            assert secret not in text


TELLING = ("/varz", "/connz?subs=detail", "/subsz", "/metrics", "/admin/config", "/admin/users", "/admin/statistics")


def test_the_audit_trail_tells_who_did_what(users: Users) -> None:
    with client(users.server, "root") as root:
        root.create_topic("orders")
        root.delete_topic("orders")
        with client(users.server) as ann, pytest.raises(PermissionDenied):
            ann.create_topic("x")
        with pytest.raises(Unauthorized), client(users.server, password="wrong"):
            pass
        events = [json.loads(message.value) for message in root.fetch("$audit", 0)]
    found = [
        (event["user"], event["what"], event["result"], event.get("resource"))
        for event in events
        if event["what"] not in ("users",)
    ]
    assert found == [
        ("root", "login", "ok", None),
        ("root", "create_topic", "ok", "orders"),
        ("root", "delete_topic", "ok", "orders"),
        ("ann", "login", "ok", None),
        ("ann", "topics.create", "denied", "x"),
        ("ann", "login", "failed", None),
    ]
    assert {(event["address"], event["door"]) for event in events} == {("127.0.0.1", "binary")}


def test_only_the_broker_writes_the_audit_trail(users: Users) -> None:
    with Raw(users.server.port) as raw, client(users.server, "root") as root:
        raw.line()
        raw.send(f'CONNECT {{"user":"root","pass":"{PASSWORD}","verbose":false}}\r\nPING\r\n')
        assert raw.line() == "PONG"
        raw.send("SUB > 1\r\nSUB $audit 2\r\nPING\r\n")
        assert raw.line() == "PONG"
        root.create_topic("orders")
        event: dict[str, Any] = {}
        while event.get("what") != "create_topic":
            assert re.fullmatch(r"MSG \$audit 2 \d+", raw.line())
            event = json.loads(raw.line())
        raw.send("PUB $audit 2\r\n{}\r\nPUB orders 2\r\n{}\r\n")
        # Neither is the forged event delivered, nor does a wildcard get the real ones.
        told = [raw.line() for _ in range(3)]
        assert {line.partition(": STORAGE")[0] for line in told} == {
            "MSG orders 1 2",
            "{}",
            '-ERR \'Permissions Violation for Publish to "$audit"',
        }
    assert all(message.value != b"{}" for message in _trail(users))


def _trail(users: Users) -> list[Any]:
    with client(users.server, "root") as root:
        return list(root.fetch("$audit", 0))


def test_penstock_audit_shows_the_trail(users: Users) -> None:
    with client(users.server, "root") as root:
        root.create_topic("orders")
    environment = clean_environment() | {
        "PENSTOCK_SERVERS": users.server.url,
        "PENSTOCK_AUTH_USER": "root",
        "PENSTOCK_AUTH_PASSWORD": PASSWORD,
    }
    done = forks.run(["audit", "--who", "root", "--limit", "3"], environment=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^20\S+Z ok root create_topic orders from 127.0.0.1 \(binary\)$", done.stdout.decode(), re.MULTILINE
    )
    done = forks.run(["audit", "--json"], environment=environment)
    assert [json.loads(line)["what"] for line in done.stdout.splitlines()][:2] == ["login", "create_topic"]


def test_failures_lock_out_a_user_at_an_address(tmp_path: Path) -> None:
    found = Users(tmp_path, auth_failures_max=2)
    with found.server:
        for _ in range(2):
            with pytest.raises(Unauthorized, match="does not know"), client(found.server, password="wrong"):
                pass
        with pytest.raises(Unauthorized, match="too many failed logins: try again in"), client(found.server):
            pass
        with client(found.server, "root") as root:
            assert root.topics() is not None


def test_wrong_tokens_do_not_lock_out_who_has_the_right_one(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="right", auth_failures_max=2) as server:
        for _ in range(3):
            with pytest.raises(Unauthorized), Client(server.url, token="wrong", timeout=PATIENCE_S):
                pass
        with Client(server.url, token="right", timeout=PATIENCE_S) as right:
            assert right.topics() == []


def test_a_client_certificate_is_a_credential(tmp_path: Path, certificates: Certificates) -> None:
    users = write_users(tmp_path / "users.toml", '[users.ann]\ncertificates = ["CN=ann"]\npublish = ["a"]\n')
    settings = certificates.settings(client_ca=certificates.ca, client_certificates="optional")
    with Serve(tmp_path / "serve", auth_users=users, **settings) as server:
        address = f"tls://localhost:{server.port}"
        with Client(address, tls=certificates.options("ann"), timeout=PATIENCE_S) as ann:
            ann.publish("a", b"1")
            with pytest.raises(PermissionDenied):
                ann.publish("b", b"1")
        for other in ("bob", None):
            with pytest.raises(Unauthorized), Client(address, tls=certificates.options(other), timeout=PATIENCE_S):
                pass


def test_quotas_are_named_in_refusals(users: Users) -> None:
    users.edit.change("ann", {"quotas": {"connections": 1, "subscriptions": 1}})
    users.reload()
    with client(users.server) as ann:
        ann.subscribe("a.x")
        with pytest.raises(Exception, match="quota subscriptions of user ann: 1 of 1 are in use"):
            ann.subscribe("a.y")
        with Raw(users.server.port) as raw:
            raw.line()
            raw.send(f'CONNECT {{"user":"ann","pass":"{PASSWORD}"}}\r\nPING\r\n')
            assert raw.line() == "-ERR 'QUOTA_EXCEEDED quota connections of user ann: 1 of 1 are in use'"
        shown = ask(users.server, "GET", "/admin/users", headers=basic("root", PASSWORD)).json["users"][0]
        assert shown["quotas"]["connections"] == {"used": 1, "limit": 1}
        told = ask(users.server, "GET", "/metrics", headers=basic("root", PASSWORD)).body.decode()
        assert 'broker_user_usage{quota="subscriptions",user="ann"} 1.0' in told
        rows = ask(users.server, "GET", "/connz", headers=basic("root", PASSWORD)).json["connections"]
        assert "ann" in {row["authorized_user"] for row in rows}


def test_the_embedded_broker_is_its_own_administrator(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.toml", USERS.replace('groups = ["placeholder"]\n', ""))
    with Broker(listen="127.0.0.1:0", settings={"auth.users": str(path)}) as broker:
        broker.publish("b", b"1")
        with Client(f"nats://{broker.address}", user="ann", password=PASSWORD) as ann, pytest.raises(PermissionDenied):
            ann.publish("b", b"2")


def test_the_first_start_creates_an_administrator_and_tells_its_password_once(tmp_path: Path) -> None:
    command = ["serve", "--create-admin", "--host", "127.0.0.1", "--data", str(tmp_path / "data")]
    free = {f"PENSTOCK_SERVER_{name}": "0" for name in ("PORT", "QUIET_PORT", "HTTP_PORT")}
    environment = clean_environment() | free | {"PENSTOCK_SERVER_QB_PORT": "none"}
    told = []
    for _ in range(2):
        with (tmp_path / "stderr").open("wb") as stderr:
            process = forks.start(command, environment=environment, stderr=stderr)
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or "ready" not in lines[-1]:
                lines.append(process.stdout.readline().decode())
            told.append(lines)
            port = int(re.findall(r"text on \S+:(\d+)", lines[-1])[0])
            password = told[0][0].split()[-1]
            with Client(f"nats://127.0.0.1:{port}", user="admin", password=password) as admin:
                assert admin.topics() is not None
            with pytest.raises(Unauthorized), Client(f"nats://127.0.0.1:{port}"):
                pass
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            process.stdout.close()
    assert [len(lines) for lines in told] == [2, 1]
