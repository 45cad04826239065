"""Topics whose files are not as a real server left them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock import Client
from tests.server import Serve


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def segment_with(server: Serve, value: bytes) -> Path:
    [found] = [path for path in server.data.glob("topics/*/*/*.log") if value in path.read_bytes()]
    return found


def test_a_topic_that_cannot_be_opened_says_why_when_it_is_fetched(tmp_path: Path) -> None:
    with Serve(tmp_path / "serve") as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            client.publish("orders", b"alone")
        server.stop()
        stray = segment_with(server, b"alone").with_name("notes.txt")
        stray.touch()
        server.restart()
        result = penstock("fetch", "orders", "--servers", f"127.0.0.1:{server.port}")
        assert result.returncode == 1
        assert f"orders cannot be read: {stray} is not a file of a log" in result.stderr
