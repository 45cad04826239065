"""Who may do what, at every door: identity × action × door → allowed, or the exact refusal.

The tables below have an entry for each verb of each door, and the tests enumerate the verbs themselves: a new verb
without an entry fails. Three users try each of them: `nobody` may do nothing, `little` may do everything with the topic
"mine", the groups "g*" and the transactions "t*", and nothing else; `admin` may do everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final, get_args

import pytest

from penstock.server.calls import CALLS
from penstock.wire import binary, cursus
from penstock.wire.binary import Append, Fetch, Read, Settle, StageTarget, Type, Verb
from penstock.wire.events import Event
from penstock.wire.qb import Kind
from tests.support.frames import Frames, batch, read_json
from tests.support.lengths import Cursus, Qb
from tests.support.server import Raw, Serve
from tests.support.users import PASSWORD, write_users
from tests.support.web import Answer, ask, basic

USERS: Final = """
[users]
admin = { password = "{password}", admin = true }
nobody = { password = "{password}" }
[users.little]
password = "{password}"
publish = ["mine", "mine.>"]
subscribe = ["mine", "mine.>"]
groups = { join = ["g*", "mine:*"], reset = ["g*"], delete = ["g*", "mine:*"] }
topics = { create = ["mine"], alter = ["mine"], delete = ["mine"], purge = ["mine"] }
dead_letters = ["mine", "mine.>"]
transactions = ["t*"]
"""
IDENTITIES: Final = ("nobody", "little", "admin")
DENIED: Final = "PERMISSION_DENIED"
# Of a topic by its ID, to who may not know of it.
UNKNOWN: Final = "UNKNOWN_TOPIC"
# Who may call it: about "mine" and about "other". `little` is refused where it may not; nobody always is.
OWN: Final = {"nobody": (False, False), "little": (True, False), "admin": (True, True)}
ADMIN: Final = {"nobody": (False, False), "little": (False, False), "admin": (True, True)}
ANYONE: Final = dict.fromkeys(IDENTITIES, (True, True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    directory = tmp_path_factory.mktemp("matrix")
    users = write_users(directory / "users.toml", USERS)
    with Serve(directory / "serve", auth_users=users, auth_failures_max=0, server_test_endpoints="true") as server:
        with Frames(server, user="admin", password=PASSWORD) as admin:
            for name in ("mine", "other"):
                admin.call("create_topic", name=name)
                admin.call("create_group", name="g1" if name == "mine" else "x1", topic=name)
                admin.publish(name, b"1")
                admin.publish(f"{name}.below", b"2")
        yield server


# Calls, at the binary door and over HTTP.

_NOW: Final = {"time_us": 0}


def _report(name: str) -> dict[str, Any]:
    texts = {"name": name, "kind": "transform", "state": "running", "file": "f", "runner": "r"}
    return {**texts, "started_us": 1, "updated_us": 1}


# The rule, the arguments about what is "mine", and those about what is "other".
CALL_RULES: Final[dict[str, tuple[dict[str, tuple[bool, bool]], dict[str, Any], dict[str, Any]]]] = {
    "resolve": (OWN, {"subject": "mine.x"}, {"subject": "other.x"}),
    "topics": (ANYONE, {}, {}),
    "topic": (OWN, {"name": "mine"}, {"name": "other"}),
    "create_topic": (OWN, {"name": "mine"}, {"name": "other2"}),
    "alter_topic": (OWN, {"name": "mine"}, {"name": "other"}),
    "purge_topic": (OWN, {"name": "mine", "before": _NOW}, {"name": "other", "before": _NOW}),
    "delete_topic": (OWN, {"name": "mine"}, {"name": "missing"}),
    "refresh_topic": (OWN, {"name": "mine"}, {"name": "other"}),
    "refresh_status": (OWN, {"name": "mine"}, {"name": "other"}),
    "set_schema": (OWN, {"name": "mine", "schema": "a INT"}, {"name": "other", "schema": "a INT"}),
    "schema": (OWN, {"name": "mine"}, {"name": "other"}),
    "schemas": (OWN, {"name": "mine"}, {"name": "other"}),
    "check_schema": (OWN, {"name": "mine", "schema": "a INT"}, {"name": "other", "schema": "a INT"}),
    "offset_at": (OWN, {"name": "mine", "partition": 0, "time_us": 0}, {"name": "other", "partition": 0, "time_us": 0}),
    "offset_after": (
        OWN,
        {"name": "mine", "partition": 0, "offset": 0, "bytes": 1},
        {"name": "other", "partition": 0, "offset": 0, "bytes": 1},
    ),
    "wait": (
        OWN,
        {"positions": [["id of mine", 0, 0]], "wait_ms": 0},
        {"positions": [["id of other", 0, 0]], "wait_ms": 0},
    ),
    "groups": (ANYONE, {}, {}),
    "group": (OWN, {"name": "g1"}, {"name": "x1"}),
    "create_group": (OWN, {"name": "g2", "topic": "mine"}, {"name": "g3", "topic": "other"}),
    "reset_group": (OWN, {"name": "g1", "start": "earliest"}, {"name": "x1", "start": "earliest"}),
    "delete_group": (OWN, {"name": "g9"}, {"name": "x9"}),
    "commit": (
        OWN,
        {"group": "g1", "topic": "mine", "partition": 0, "offset": 0},
        {"group": "x1", "topic": "other", "partition": 0, "offset": 0},
    ),
    "transaction": (OWN, {"name": "t1"}, {"name": "x1"}),
    "commit_transaction": (
        OWN,
        {"name": "t1", "number": 1, "offsets": []},
        {"name": "x1", "number": 1, "offsets": []},
    ),
    "abort_transaction": (OWN, {"name": "t1", "number": 2}, {"name": "x1", "number": 2}),
    "dead_letters": (OWN, {"pattern": "mine.>"}, {"pattern": ">"}),
    "redrive": (OWN, {"pattern": "mine.>"}, {"pattern": ">"}),
    "purge_dead_letters": (OWN, {"pattern": "mine.>"}, {"pattern": ">"}),
    "delayed": (OWN, {"pattern": "mine.>"}, {"pattern": ">"}),
    "cancel_delayed": (OWN, {"pattern": "mine.>"}, {"pattern": ">"}),
    "report_pipeline": (OWN, _report("g1"), _report("x1")),
    "pipelines": (ADMIN, {}, {}),
    "users": (ADMIN, {}, {}),
    "add_user": (ADMIN, {"name": "a user!"}, {"name": "a user!"}),
    "change_user": (ADMIN, {"name": "missing", "fields": {"enabled": True}}, {"name": "missing"}),
    "remove_user": (ADMIN, {"name": "missing"}, {"name": "missing"}),
    "create_token": (ADMIN, {"name": "missing"}, {"name": "missing"}),
    "revoke_token": (ADMIN, {"name": "missing"}, {"name": "missing"}),
    "statistics": (ADMIN, {}, {}),
}


@pytest.mark.parametrize("call", [*CALLS, "statistics"])
def test_calls(server: Serve, call: str) -> None:
    rule, mine, other = CALL_RULES[call]
    ids = _topic_ids(server)
    found = {
        name: tuple(
            _is_allowed(_call(server, name, call, _with_ids(asked, ids)), by_id="positions" in asked)
            for asked in (mine, other)
        )
        for name in IDENTITIES
    }
    if call == "delete_topic":
        _restore(server)
    assert found == rule


def _call(server: Serve, user: str, call: str, arguments: dict[str, Any]) -> str:
    """Return the code of the answer; "" without an error."""
    with Frames(server, user=user, password=PASSWORD) as client:
        frame = client.answer(client.request(Type.CALL, {"call": call, **arguments}))
        return "" if frame.type == Type.RESULT else str(read_json(frame)["code"])


def _is_allowed(code: str, *, by_id: bool = False) -> bool:
    return code != DENIED and not (by_id and code == UNKNOWN)


def _topic_ids(server: Serve) -> dict[str, int]:
    with Frames(server, user="admin", password=PASSWORD) as admin:
        return {f"id of {name}": admin.call("topic", name=name)["id"] for name in ("mine", "other")}


def _with_ids(arguments: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Put the IDs of topics in: they are not known before."""
    found: dict[str, Any] = json.loads(json.dumps(arguments))
    for position in found.get("positions", ()):
        position[0] = ids[position[0]]
    return found


def _restore(server: Serve) -> None:
    with Frames(server, user="admin", password=PASSWORD) as admin:
        admin.call("create_topic", name="mine")
        admin.publish("mine", b"1")


def test_lists_show_only_what_a_user_may_know_of(server: Serve) -> None:
    def names(user: str, call: str) -> set[str]:
        with Frames(server, user=user, password=PASSWORD) as client:
            answer = client.call(call)
            assert answer["total"] == len(answer[call])
            return {row["name"] for row in answer[call]}

    assert (names("nobody", "topics"), names("nobody", "groups")) == (set(), set())
    assert names("little", "topics") == {"mine"}
    assert "x1" not in names("little", "groups")
    assert {"mine", "other", "$audit"} <= names("admin", "topics")


# HTTP.

# What a path needs; a call has the rule of its table.
HTTP_RULES: Final[dict[tuple[str, str], str]] = {
    **dict.fromkeys(
        [("GET", path) for path in ("/healthz", "/health", "/pipe/status", "/openapi.json", "/docs")], "open"
    ),
    **dict.fromkeys([("GET", path) for path in ("/metrics", "/varz", "/connz", "/subsz")], "admin"),
    ("GET", "/admin/topics"): "topics",
    ("GET", "/admin/groups"): "groups",
    ("GET", "/admin/pipelines"): "pipelines",
    ("POST", "/admin/topics"): "create_topic",
    ("POST", "/admin/topics/{name}/schema"): "set_schema",
    ("GET", "/admin/topics/{name}/schema"): "schema",
    ("GET", "/admin/topics/{name}/schemas"): "schemas",
    ("POST", "/admin/topics/{name}/schema/check"): "check_schema",
    ("GET", "/admin/topics/{name}"): "topic",
    ("PATCH", "/admin/topics/{name}"): "alter_topic",
    ("POST", "/admin/topics/{name}/purge"): "purge_topic",
    ("DELETE", "/admin/topics/{name}"): "delete_topic",
    ("POST", "/admin/groups"): "create_group",
    ("GET", "/admin/groups/{name}"): "group",
    ("DELETE", "/admin/groups/{name}"): "delete_group",
    ("POST", "/admin/groups/{name}/reset"): "reset_group",
    ("GET", "/admin/dead-letters"): "dead_letters",
    ("POST", "/admin/dead-letters/redrive"): "redrive",
    ("POST", "/admin/dead-letters/purge"): "purge_dead_letters",
    ("GET", "/admin/delayed"): "delayed",
    ("POST", "/admin/delayed/cancel"): "cancel_delayed",
    ("GET", "/admin/users"): "users",
    ("POST", "/admin/users"): "add_user",
    ("PATCH", "/admin/users/{name}"): "change_user",
    ("DELETE", "/admin/users/{name}"): "remove_user",
    ("POST", "/admin/users/{name}/tokens"): "create_token",
    ("POST", "/admin/users/{name}/revoke"): "revoke_token",
    ("POST", "/admin/refresh-topic"): "refresh_topic",
    ("GET", "/admin/refresh-status"): "refresh_status",
    ("GET", "/admin/config"): "admin",
    ("GET", "/admin/statistics"): "admin",
    ("GET", "/pipe/topics"): "admin",
    ("GET", "/pipe/stream"): "admin",
    ("GET", "/pipe/poll"): "admin",
    ("GET", "/pipe/push"): "admin",
    ("POST", "/pipe/push"): "admin",
    **{
        (method, f"/schema-registry{path}"): rule
        for method, path, rule in (
            ("GET", "/subjects", "topics"),
            ("GET", "/subjects/{subject}/versions", "schemas"),
            ("GET", "/subjects/{subject}/versions/{version}", "schema"),
            ("POST", "/subjects/{subject}/versions", "set_schema"),
            ("POST", "/subjects/{subject}", "check_schema"),
            ("POST", "/compatibility/subjects/{subject}/versions/{version}", "check_schema"),
            ("POST", "/compatibility/subjects/{subject}/versions", "check_schema"),
            # It shows a schema only to who may know of its topic, and others are told that there is none.
            ("GET", "/schemas/ids/{id}", "topics"),
            ("GET", "/schemas/types", "topics"),
            ("GET", "/config", "topics"),
            ("GET", "/config/{subject}", "schema"),
            ("PUT", "/config/{subject}", "alter_topic"),
        )
    },
    ("POST", "/test/load-from-sqlite"): "admin",
    ("POST", "/test/inject-messages"): "admin",
    ("GET", "/test/stats"): "admin",
}
# The name of a parameter over HTTP, where it differs from the call's.
_TOPIC_PARAMETER: Final = ("/admin/refresh-topic", "/admin/refresh-status")


def test_http(server: Serve) -> None:
    document = ask(server, "GET", "/openapi.json").json
    every = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    for endpoint in every:
        rule = HTTP_RULES[endpoint]
        if rule == "open":
            assert _ask(server, endpoint, None, {}).status == 200, endpoint
            continue
        own, mine, other = CALL_RULES.get(rule, (ADMIN, {}, {}))
        if endpoint[1] in _TOPIC_PARAMETER:
            mine, other = {"topic": mine["name"]}, {"topic": other["name"]}
        assert _ask(server, endpoint, None, mine).status == 401, endpoint
        for user in IDENTITIES:
            allowed = tuple(_ask(server, endpoint, user, asked).status not in (401, 403) for asked in (mine, other))
            assert allowed == own[user], (endpoint, user)
        if rule == "delete_topic":
            _restore(server)


def _ask(server: Serve, endpoint: tuple[str, str], user: str | None, asked: dict[str, Any]) -> Answer:
    method, path = endpoint
    given = dict(asked)
    if "{subject}" in path:
        path = path.replace("{subject}", f"{given.pop('name')}-value")
        if method == "PUT":
            given["compatibility"] = "NONE"
    path = path.replace("{version}", "1").replace("{id}", "1")
    if "{name}" in path:
        path = path.replace("{name}", str(given.pop("name")).replace(" ", "%20"))
    headers = {} if user is None else basic(user, PASSWORD)
    if method == "GET" or method == "DELETE":
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return ask(server, method, f"{path}?{query}" if query else path, headers=headers)
    return ask(server, method, path, given, headers=headers)


# The binary door.

Probe = Callable[[Frames, str, int], str]


def _answered(client: Frames, number: int) -> str:
    frame = client.answer(number)
    return "" if frame.type != Type.ERROR else str(read_json(frame)["code"])


def _append(client: Frames, name: str, topic_id: int) -> str:
    return _answered(client, client.ask_append(topic_id, batch(b"x")))


def _append_below(client: Frames, name: str, topic_id: int) -> str:
    return _answered(client, client.ask_append(topic_id, batch(b"x", subjects=[f"{name}.below".encode()])))


def _publish(client: Frames, name: str, _topic_id: int) -> str:
    [receipt] = client.publish(name, b"x")
    return str(receipt["code"]) if isinstance(receipt, dict) else ""


def _stage(client: Frames, name: str, topic_id: int) -> str:
    transaction = b"t1" if name == "mine" else b"x1"
    stage = binary.stage_frame(77, StageTarget(Append(topic_id, 0, 1), transaction, 9), batch(b"x").data)
    client.send(stage)
    return _answered(client, 77)


def _fetch(client: Frames, _name: str, topic_id: int) -> str:
    client.send(binary.fetch_frame(78, Fetch(topic_id, 0, 1 << 20, 0, 0, 0)))
    return _answered(client, 78)


def _open(client: Frames, name: str, _topic_id: int) -> str:
    return _answered(client, client.request(Type.OPEN, {"subscription": 1, "pattern": f"{name}.>"}))


def _open_group(client: Frames, name: str, _topic_id: int) -> str:
    group = "g7" if name == "mine" else "x7"
    return _answered(client, client.request(Type.OPEN, {"subscription": 1, "pattern": f"{name}.>", "group": group}))


def _call_topic(client: Frames, name: str, _topic_id: int) -> str:
    return _answered(client, client.request(Type.CALL, {"call": "topic", "name": name}))


def _snapshot(client: Frames, _name: str, _topic_id: int) -> str:
    return _answered(client, client.request(Type.SNAPSHOT, {}))


def _read(client: Frames, _name: str, _topic_id: int) -> str:
    client.send(binary.read_frame(79, Read(1, 0, 0, 1)))
    return _answered(client, 79)


def _settle(client: Frames, _name: str, topic_id: int) -> str:
    client.send(binary.settle_frame(80, Settle(1, Verb.ACK, topic_id, 0, 0, 0, [0], "")))
    return _answered(client, 80)


# Of a frame: the rule and what tries it; None: it is about what the connection holds already, or about nothing.
FRAME_RULES: Final[dict[Type, list[tuple[dict[str, tuple[bool, bool]], Probe]] | None]] = {
    Type.APPEND: [(OWN, _append), (OWN, _append_below)],
    Type.PUBLISH: [(OWN, _publish)],
    Type.STAGE: [(OWN, _stage)],
    Type.FETCH: [(OWN, _fetch)],
    Type.OPEN: [(OWN, _open), (OWN, _open_group)],
    Type.CALL: [(OWN, _call_topic)],
    Type.SNAPSHOT: [(ADMIN, _snapshot)],
    # Of a snapshot that the connection has begun.
    Type.READ: None,
    # Of a subscription that the connection has opened.
    Type.SETTLE: None,
    **dict.fromkeys((Type.CREDIT, Type.END, Type.HELLO, Type.HEARTBEAT, Type.DISCONNECT)),
    **dict.fromkeys((Type.ACK, Type.RESET_ACK, Type.READY_ACK)),
    # What only the server sends.
    **dict.fromkeys((Type.RESULT, Type.ERROR, Type.BATCHES, Type.MESSAGES, Type.ENDED, Type.BYTES)),
    # The Provider's, whose clients cannot authenticate: `test_the_provider_is_refused`.
    **dict.fromkeys((Type.DATA, Type.SUBSCRIBE, Type.COMMIT_OFFSET, Type.RESET, Type.READY)),
    **dict.fromkeys((Type.BATCH_HEADER, Type.BATCH_ACK)),
}


@pytest.mark.parametrize("kind", Type)
def test_binary_frames(server: Serve, kind: Type) -> None:
    ids = _topic_ids(server)
    for rule, probe in FRAME_RULES[kind] or ():
        for user in IDENTITIES:
            allowed = []
            for name in ("mine", "other"):
                with Frames(server, user=user, password=PASSWORD) as client:
                    allowed.append(_is_allowed(probe(client, name, ids[f"id of {name}"]), by_id=True))
            assert tuple(allowed) == rule[user], (probe.__name__, user)


@pytest.mark.parametrize("kind", [Type.DATA, Type.SUBSCRIBE, Type.COMMIT_OFFSET])
def test_the_provider_is_refused(server: Serve, kind: Type) -> None:
    with Raw(server.ports["quiet"]) as raw:
        raw.send(binary.json_frame(kind, 1, {"topic": "mine", "data": "x", "offset": 0}))
        assert "UNAUTHORIZED" in raw.rest()


# The text door.

# Of an event: its rule, the line, and what begins the answer to a refused one.
_PUBLISH = 'Permissions Violation for Publish to "%s"'
_SUBSCRIBE = 'Permissions Violation for Subscription to "%s"'
TEXT_RULES: Final[dict[str, tuple[dict[str, tuple[bool, bool]], str, str] | None]] = {
    "Run": (OWN, "PUB {topic}.x 1\r\nx\r\n", 'Permissions Violation for Publish to "{topic}.x"'),
    "Subscribe": (OWN, "SUB {topic}.x 1\r\n", 'Permissions Violation for Subscription to "{topic}.x"'),
    "Pull": (OWN, "PULL {topic}.x 1\r\n", DENIED),
    "Ack": (OWN, "ACK 1 {group}\r\n", DENIED),
    "Stats": (ADMIN, "STATS\r\n", DENIED),
    # It sends only what the user may read: `test_replay_sends_only_what_may_be_read`.
    "Replay": None,
    **dict.fromkeys(("Call", "Connect", "Unsubscribe", "FlowControl", "SimpleCommand", "Refused")),
}


@pytest.mark.parametrize("event", [kind.__name__ for kind in get_args(Event)])
def test_text_events(server: Serve, event: str) -> None:
    if (entry := TEXT_RULES[event]) is None:
        return
    rule, line, refusal = entry
    for user in IDENTITIES:
        allowed = []
        for topic, group in (("mine", "g1"), ("other", "x1")):
            answers = _say(server, user, line.format(topic=topic, group=group))
            allowed.append(not any(refusal.format(topic=topic) in answer for answer in answers))
        assert tuple(allowed) == rule[user], user


def _say(server: Serve, user: str, line: str) -> list[str]:
    """Return the answers to a line, up to the PONG: the connection stays."""
    with Raw(server.port) as raw:
        raw.line()
        options = {"user": user, "pass": PASSWORD, "verbose": False}
        raw.send(f"CONNECT {json.dumps(options)}\r\nPING\r\n")
        assert raw.line() == "PONG"
        raw.send(f"{line}PING\r\n")
        answers = []
        while (answer := raw.line()) != "PONG":
            answers.append(answer)
        return answers


def test_replay_sends_only_what_may_be_read(server: Serve) -> None:
    for user, topics in (("nobody", set()), ("little", {"mine"}), ("admin", {"mine", "other"})):
        answers = _say(server, user, "SUB mine.> 1\r\nSUB other.> 2\r\nREPLAY FIRST 100\r\n")
        assert {line.split()[1].partition(".")[0] for line in answers if line.startswith("MSG")} == topics


# Cursus.

# Of a verb: its rule, and the command.
CURSUS_RULES: Final[dict[str, tuple[dict[str, tuple[bool, bool]], str] | None]] = {
    "CREATE": (OWN, "CREATE {topic}"),
    "DELETE": (OWN, "DELETE {missing}"),
    "DESCRIBE": (OWN, "DESCRIBE {topic}"),
    "SUBSCRIBE": (OWN, "SUBSCRIBE topic={topic} group=s"),
    "PUBLISH": (OWN, "PUBLISH {topic} x"),
    "CONSUME": (OWN, "CONSUME topic={topic} partition=0 offset=0"),
    "STREAM": (OWN, "STREAM topic={topic} partition=0 offset=0"),
    "REGISTER_GROUP": (OWN, "REGISTER_GROUP topic={topic} group=r"),
    "JOIN_GROUP": (OWN, "JOIN_GROUP topic={topic} group=j member=m"),
    "SYNC_GROUP": (OWN, "SYNC_GROUP topic={topic} group=j member=m"),
    "LEAVE_GROUP": (OWN, "LEAVE_GROUP topic={topic} group=j member=m"),
    "HEARTBEAT": (OWN, "HEARTBEAT topic={topic} group=j member=m"),
    "COMMIT_OFFSET": (OWN, "COMMIT_OFFSET topic={topic} partition=0 group=c offset=0"),
    "FETCH_OFFSET": (OWN, "FETCH_OFFSET topic={topic} partition=0 group=c"),
    "BATCH_COMMIT": (OWN, "BATCH_COMMIT topic={topic} group=c member=m generation=0 offsets=P0:0"),
    "GROUP_STATUS": (OWN, "GROUP_STATUS group=c topic={topic}"),
    **dict.fromkeys(("LIST", "AUTH", "HELP", "EXIT")),
}


@pytest.mark.parametrize("verb", cursus.VERBS)
def test_cursus_verbs(server: Serve, verb: str) -> None:
    if (entry := CURSUS_RULES[verb]) is None:
        return
    rule, command = entry
    for user in IDENTITIES:
        allowed = []
        for topic in ("mine", "other"):
            # What `little` and the others may not delete is not there.
            missing = "missing" if topic == "other" else topic
            with Cursus(server) as client:
                assert client.ask(f"AUTH user={user} password={PASSWORD}") == "OK"
                client.command(command.format(topic=topic, missing=missing))
                while not (answer := client.frame()):
                    pass
            allowed.append(b"no permission" not in answer)
        if verb == "DELETE" and user != "nobody":
            _restore(server)
        assert tuple(allowed) == rule[user], user


def test_cursus_lists_only_what_may_be_known(server: Serve) -> None:
    for user, found in (("nobody", "(no topics)"), ("little", "mine")):
        with Cursus(server) as client:
            client.ask(f"AUTH user={user} password={PASSWORD}")
            assert client.ask("LIST") == found


# QB.

# Of a kind: its rule, and the properties of what is mine, and of what is another's.
QB_RULES: Final[dict[Kind, tuple[dict[str, tuple[bool, bool]], dict[str, str], dict[str, str]] | None]] = {
    Kind.CREATE_TOPIC: (OWN, {"topic": "mine"}, {"topic": "other2"}),
    Kind.CREATE_SUBSCRIPTION: (
        OWN,
        {"subscription_id": "g5", "topic": "mine"},
        {"subscription_id": "x5", "topic": "other"},
    ),
    Kind.DELETE_SUBSCRIPTION: (OWN, {"subscription_id": "g6"}, {"subscription_id": "x6"}),
    Kind.SUBSCRIBE: (
        OWN,
        {"subscription_id": "g5", "subscriber_id": "me"},
        {"subscription_id": "x1", "subscriber_id": "me"},
    ),
    Kind.PUBLISH: (OWN, {"topic": "mine", "client_id": "me"}, {"topic": "other", "client_id": "me"}),
    **dict.fromkeys((Kind.DATA, Kind.ACK, Kind.HEARTBEAT, Kind.UNSUBSCRIBE)),
}


@pytest.mark.parametrize("kind", Kind)
def test_qb_messages(server: Serve, kind: Kind) -> None:
    if (entry := QB_RULES[kind]) is None:
        return
    rule, mine, other = entry
    for user in IDENTITIES:
        allowed = []
        for asked in (mine, other):
            with Qb(server) as client:
                client.begin(Kind.HEARTBEAT, user=user, password=PASSWORD)
                allowed.append("no permission" not in client.ask(kind, b"x", **asked).get("error", ""))
        assert tuple(allowed) == rule[user], user
