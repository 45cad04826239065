"""The endpoints that fill topics: off unless configured, and never further than they are allowed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.client.sync import Client
from tests.support.server import Serve
from tests.support.web import Answer, ask, get

PRICES = [("AAPL", 1), ("GOOGL", 2), ("MSFT", 3), ("TSLA", 4), ("AMZN", 5)]


def make(path: Path, *, table: str = "messages", columns: str = "msg_key, event_type, data, created_at") -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    quoted = table.replace('"', '""')
    connection.execute(f'CREATE TABLE "{quoted}" ({columns})')
    return connection


def load(server: Serve, path: str, **more: Any) -> Answer:
    return ask(server, "POST", "/test/load-from-sqlite", {"sqliteFilePath": path, "topic": "prices", **more})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


@pytest.fixture
def server(tmp_path: Path, files: Path) -> Any:
    with Serve(tmp_path / "server", server_test_endpoints=True, server_test_data_dir=files) as started:
        yield started


def test_they_are_not_there_unless_configured(tmp_path: Path) -> None:
    with Serve(tmp_path) as server:
        for method, path in (("POST", "load-from-sqlite"), ("POST", "inject-messages"), ("GET", "stats")):
            assert ask(server, method, f"/test/{path}", {}).status == 404
        assert not [path for path in get(server, "/openapi.json").json["paths"] if path.startswith("/test")]


def test_the_rows_of_a_file_are_messages(server: Serve, files: Path) -> None:
    with make(files / "prices.db") as connection:
        rows = [(name, "MESSAGE", f'{{"price": {price}}}', "2026-01-01T00:00:00Z") for name, price in PRICES]
        connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", [*rows, ("TSLA", "DELETE", None, None)])
    connection.close()

    answer = load(server, "prices.db")
    with Client(f"127.0.0.1:{server.port}") as client:
        found = list(client.fetch("prices"))

    assert (answer.status, answer.json) == (200, {"topic": "prices", "count": 6})
    assert [message.key for message in found] == [*(name.encode() for name, _ in PRICES), b"TSLA"]
    assert [message.offset for message in found] == list(range(6))
    assert found[0].json() == {"price": 1}
    assert found[0].headers["Created-At"] == "2026-01-01T00:00:00Z"
    assert [message.deleted for message in found] == [False] * 5 + [True]
    [row] = get(server, "/test/stats").json["topics"]
    assert (row["topic"], row["messages"], row["segments"]) == ("prices", 6, 1)


def test_a_large_table_comes_whole_and_in_order(server: Serve, files: Path) -> None:
    count = 12_345
    with make(files / "many.db", table='odd "name"; --', columns="data") as connection:
        connection.executemany('INSERT INTO "odd ""name""; --" VALUES (?)', [(number,) for number in range(count)])
    connection.close()

    answer = load(server, "many.db", tableName='odd "name"; --')
    with Client(f"127.0.0.1:{server.port}") as client:
        found = [int(message.value) for message in client.fetch("prices")]

    assert answer.json["count"] == count
    assert found == list(range(count))


def test_a_file_outside_is_as_if_it_were_not_there(server: Serve, files: Path, tmp_path: Path) -> None:
    with make(tmp_path / "secret.db") as connection:
        connection.execute("INSERT INTO messages (data) VALUES ('secret')")
    connection.close()
    (files / "link.db").symlink_to(tmp_path / "secret.db")
    (files / "directory").mkdir()
    outside = ["../secret.db", str(tmp_path / "secret.db"), "link.db", "/etc/passwd", "directory", "none.db", "."]

    for name in outside:
        answer = load(server, name)
        assert (answer.status, answer.code) == (400, "BAD_REQUEST")
        assert answer.json["text"].startswith("no file")
    assert get(server, "/test/stats").json["topics"] == []


def test_without_a_directory_no_file_is_read(tmp_path: Path) -> None:
    make(tmp_path / "data" / "prices.db").close()
    with Serve(tmp_path, server_test_endpoints=True) as server:
        answer = load(server, str(tmp_path / "data" / "prices.db"))

    assert answer.status == 400
    assert "server.test_data_dir" in answer.json["text"]


@pytest.mark.parametrize(
    ("rows", "stored", "word"),
    [
        ([("a", "MESSAGE", "x", None), (None, "DELETE", "x", None)], 0, "msg_key"),
        ([("a", "ODD", "x", None)], 0, "event_type"),
        ([("a", None, "x", "a\nb: c")], 0, "created_at"),
        ([*[("a", None, "x", None)] * 501, ("a", None, "x" * (2 << 20), None)], 500, "too large"),
    ],
    ids=["delete", "event", "time", "size"],
)
def test_a_row_that_is_wrong_ends_it_and_says_what_was_stored(
    server: Serve, files: Path, rows: list[tuple[Any, ...]], stored: int, word: str
) -> None:
    with make(files / "bad.db") as connection:
        connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)
    connection.close()

    answer = load(server, "bad.db")

    assert answer.status in (400, 413)
    assert word in answer.json["text"]
    assert f"{stored} messages were stored before" in answer.json["text"]
    assert get(server, "/test/stats").json["topics"][0]["messages"] == stored


def test_what_is_no_table_of_messages_is_refused(server: Serve, files: Path) -> None:
    (files / "text.db").write_text("not a database, but long enough to be looked at as if it were one" * 100)
    with make(files / "other.db", columns="value") as connection:
        # What a view is made of is the file's to say, not ours to run.
        connection.execute("CREATE VIEW shown AS SELECT value AS data FROM messages")
    connection.close()

    for name, table in (
        ("text.db", "messages"),
        ("other.db", "messages"),
        ("other.db", "messages; DROP TABLE messages"),
        ("other.db", "sqlite_master"),
        ("other.db", "shown"),
    ):
        answer = load(server, name, tableName=table)
        assert (answer.status, answer.code) == (400, "BAD_REQUEST")
    assert "other.db" in [path.name for path in files.iterdir()]


def test_messages_are_injected(server: Serve) -> None:
    first = ask(server, "POST", "/test/inject-messages", {"topic": "prices"})
    second = ask(server, "POST", "/test/inject-messages", {"topic": "prices", "count": 1200, "prefix": "X"})
    with Client(f"127.0.0.1:{server.port}") as client:
        found = [message.value.decode() for message in client.fetch("prices")]

    assert (first.json, second.json) == ({"topic": "prices", "count": 10}, {"topic": "prices", "count": 1200})
    assert found == [*(f"TEST-{n}" for n in range(1, 11)), *(f"X-{n}" for n in range(1, 1201))]


def test_what_cannot_be_injected_is_refused(server: Serve) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"topic": "a b"},
        {"topic": "$x"},
        {"topic": "_x"},
        {"topic": "x", "count": -1},
        {"topic": "x", "count": 10**9},
        {"topic": "x", "count": "10"},
        {"topic": "x", "prefix": ""},
    ]
    for body in wrong:
        assert ask(server, "POST", "/test/inject-messages", body).status == 400, body


def test_they_need_a_user_where_there_is_one(tmp_path: Path) -> None:
    with Serve(tmp_path, server_test_endpoints=True, auth_token="t0ken") as server:
        refused = ask(server, "POST", "/test/inject-messages", {"topic": "x"})
        allowed = ask(
            server, "POST", "/test/inject-messages", {"topic": "x"}, headers={"Authorization": "Bearer t0ken"}
        )

    assert (refused.status, allowed.status) == (401, 200)
