"""What is logged and in which form. Only commands configure logging; the library leaves that to the program."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock import Broker, Client
from penstock.cli.logs import JsonFormatter, TextFormatter
from penstock.doors.journal import INTERVAL_US, LINES_MAX, SLOW_US, Journal
from penstock.doors.session import Session
from penstock.errors import NoBroker, PenstockError, Unauthorized
from penstock.testing import ManualClock
from tests.support.process import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.server import Serve

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) .+")


def connection(**fields: Any) -> Session:
    return cast(Session, SimpleNamespace(**{"id": 7, "name": "till", "address": "10.0.0.1", "peer": object()} | fields))


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """As they were logged, whatever formats them: PySpark changes what the root logger does."""
    return [record.getMessage() for record in caplog.records]


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.01)


# ---- the form


def record(text: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("penstock.x", logging.WARNING, __file__, 1, text, args, info)


def test_what_a_client_sent_cannot_begin_a_line() -> None:
    line = TextFormatter().format(record("from %s", "ann\n2026-01-01 INFO all is well\r\x1b[2J\u2028"))
    assert len(line.splitlines()) == 1
    assert line.endswith(r"WARNING from ann\n2026-01-01 INFO all is well\r\x1b[2J\u2028")


def test_a_record_is_one_object_in_json() -> None:
    [line] = JsonFormatter().format(record("from %s", "a\nb", error=ValueError("x"))).splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "warning", "logger": "penstock.x", "message": "from a\nb", "exception": "ValueError: x"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_whole_process_logs_in_one_form(tmp_path: Path, form: str) -> None:
    with Serve(tmp_path, log_format=form, auth_token="secret", topic_auto_create="false") as server:
        with pytest.raises(Unauthorized), Client(f"127.0.0.1:{server.port}", token="no-such-token"):
            pass
        with Client(f"127.0.0.1:{server.port}", token="secret") as client, pytest.raises(PenstockError):
            client.publish("nowhere", b"")
        with socket.create_connection(("127.0.0.1", server.ports["http"])) as http:
            http.sendall(b"nonsense\r\n\r\n")
            assert http.recv(100).startswith(b"HTTP/1.1 400")
        lines = server.stop().stderr.splitlines()
    wanted = ["login failed: binary client 127.0.0.1", "publish refused: connection", "invalid HTTP request: client 12"]
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert {"penstock.doors.journal"} <= {each["logger"] for each in found}
        lines = [each["message"] for each in found]
    else:
        assert all(LINE.fullmatch(line) for line in lines), lines
    for text in wanted:
        assert any(text in line for line in lines), lines
    assert "no-such-token" not in str(lines)


def test_a_form_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli import logs; logs.configure(environ={logs.VARIABLE: 'xml'})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "error: invalid PENSTOCK_LOG_FORMAT 'xml': it must be text or json\n")


def test_the_library_configures_nothing() -> None:
    program = """
import logging
from penstock import Broker
with Broker(listen="127.0.0.1:0") as broker:
    broker.publish("orders", b"x")
names = ["", *logging.root.manager.loggerDict]
print([name for name in names if logging.getLogger(name).handlers and not name.startswith("concurrent")])
print(logging.getLogger().level == logging.WARNING, logging.getLogger("penstock").level)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nTrue 0\n"


# ---- what clients cause


def test_lines_of_a_kind_are_limited_and_those_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    journal = Journal(clock)
    with caplog.at_level(logging.INFO, "penstock"):
        for number in range(LINES_MAX + 5):
            journal.failed_login("HTTP", f"10.0.0.{number}")
        journal.refused_publish(connection(), 3, "too large")
        assert len(caplog.records) == LINES_MAX + 1
        clock.advance(INTERVAL_US)
        journal.failed_login("HTTP", "10.0.0.99")
    assert messages(caplog)[-3:] == [
        "publish refused: connection 7 (till, 10.0.0.1), 3 messages: too large",
        "5 more lines like the last one were left out",
        "login failed: HTTP client 10.0.0.99",
    ]


def test_a_consumer_that_does_not_read_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    journal = Journal(clock)
    slow, quick = connection(), connection(id=8)
    with caplog.at_level(logging.INFO, "penstock"):
        for each in (slow, quick):
            journal.paused(each.peer)
        clock.advance(SLOW_US - 1)
        journal.sweep([slow, quick])
        journal.resumed(quick.peer)
        assert not caplog.records
        clock.advance(1)
        for _ in range(2):
            journal.sweep([slow, quick])
        journal.resumed(slow.peer)
        journal.paused(slow.peer)
        journal.sweep([slow, quick])
    assert messages(caplog) == [
        "slow consumer: connection 7 (till, 10.0.0.1) has not read for 5 s; what it subscribed to waits on the disk",
        "a slow consumer reads again, or is gone, after 5.0 s",
    ]


def test_a_login_at_the_http_port_is_logged_without_what_was_sent(tmp_path: Path) -> None:
    with Serve(tmp_path, auth_token="secret") as server:
        for _ in range(LINES_MAX + 5):
            with socket.create_connection(("127.0.0.1", server.ports["http"])) as http:
                http.sendall(b"GET /admin/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer guess\r\n\r\n")
                assert http.recv(100).startswith(b"HTTP/1.1 401")
        stderr = server.stop().stderr
    assert 0 < stderr.count("login failed: HTTP client 127.0.0.1:") <= 2 * LINES_MAX
    assert "guess" not in stderr


# ---- connections of clients, and upkeep


def test_a_client_logs_that_it_lost_its_connection_and_has_it_again(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "penstock.client"),
        Broker(listen="127.0.0.1:0") as broker,
        Proxy(int((broker.address or "").rpartition(":")[2])) as proxy,
        Client(f"127.0.0.1:{proxy.port}") as client,
    ):
        proxy.cut()
        wait_for(lambda: any(text.startswith("reconnected to") for text in messages(caplog)))
        client.topics()
    lines = [text for text in messages(caplog) if f"127.0.0.1:{proxy.port}" in text]
    assert lines[0].startswith(f"the connection to 127.0.0.1:{proxy.port} was lost")
    assert lines[0].endswith("; reconnecting")
    assert f"reconnected to 127.0.0.1:{proxy.port}" in lines


def test_a_client_that_never_connected_or_is_closed_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.client"), Broker() as broker:
        Client(broker).close()
        with Client(broker):
            pass
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            client = Client(f"127.0.0.1:{bound.getsockname()[1]}")
            with pytest.raises(NoBroker):
                client.connect()
    assert [text for text in messages(caplog) if "connect" in text] == []


def test_retention_is_logged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"topic_segment_bytes": 4096, "topic_retain_bytes": 4096, "storage_upkeep_ms": 50}
    with Serve(tmp_path, **settings) as server, Client(f"127.0.0.1:{server.port}") as client:
        for _ in range(10):
            client.publish("orders", bytes(2000))
        wait_for(lambda: "retention dropped" in server.stderr)
    assert re.search(r"INFO .*topics/\d+/0: retention dropped \d+ segments, it begins at offset \d+", server.stderr)
