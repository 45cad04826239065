"""The checks of nats.js in a browser: a page that runs `checks.mjs` with nats.ws and sends back what it found."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Final

import pytest

from tests.nats.test_clients import install_nats_js
from tests.support.process import PATIENCE_S

NATS_WS: Final = "nats.ws@1.30.3"
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox, because root has none. It asks no other machine for anything.
_FLAGS: Final = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# checks.mjs is written for node: the page gives it the arguments, and takes what it prints.
_PAGE: Final = """<!doctype html>
<script type="importmap">{"imports": {"nats.ws": "/nats.js"}}</script>
<script>
  const send = (text) => fetch("/found", {method: "POST", body: text});
  addEventListener("error", (event) => send(JSON.stringify(event.message)));
  addEventListener("unhandledrejection", (event) => send(JSON.stringify(`${event.reason}`)));
  globalThis.process = {argv: ["node", "checks.mjs", "nats.ws", ...location.hash.slice(1).split(",")], exit() {}};
  console.log = send;
</script>
<script type="module" src="/checks.mjs"></script>
"""


class Page:
    """A page that a server on loopback shows, and a browser to open it with."""

    def __init__(self, browser: str, origin: str, found: Queue[Any]) -> None:
        self.origin = origin
        self._browser = browser
        self._found = found

    def run_checks(self, url: str, subject: str) -> dict[str, Any]:
        """Open the page in a new browser; return what the checks found on the server with this URL."""
        with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [self._browser, *_FLAGS, f"--user-data-dir={profile}", f"{self.origin}/#{url},{subject}"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                try:
                    found = self._found.get(timeout=2 * PATIENCE_S)
                finally:
                    process.terminate()
        assert isinstance(found, dict), found
        return {f"nats.js {name}": value for name, value in found.items()}


@contextmanager
def serve_page(directory: Path) -> Iterator[Page]:
    """Install nats.ws in a directory and serve the page; skip the test if there is no browser."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip("nats.ws is not tested in a browser: install chromium")
    install_nats_js(directory, NATS_WS)
    files = {
        "/": ("text/html", _PAGE.encode()),
        "/checks.mjs": ("text/javascript", (directory / "checks.mjs").read_bytes()),
        "/nats.js": ("text/javascript", (directory / "node_modules/nats.ws/esm/nats.js").read_bytes()),
    }
    found: Queue[Any] = Queue()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, files, found)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Page(browser, f"http://127.0.0.1:{server.server_port}", found)
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, files: dict[str, tuple[str, bytes]], found: Queue[Any], *arguments: Any) -> None:
        self._files = files
        self._found = found
        super().__init__(*arguments)

    def do_GET(self) -> None:
        kind, content = self._files.get(self.path, ("", b""))
        self.send_response(200 if kind else 404)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self._found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass
