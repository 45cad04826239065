"""A client of the HTTP port that sends exactly what a test says, and reads what comes."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.process import PATIENCE_S
from tests.support.server import Serve


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error."""
        found: str = self.json["code"]
        assert self.json.keys() >= {"code", "text"}
        return found


def ask(server: Serve, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Answer:
    """`body` is sent as JSON, unless it is bytes."""
    sent = dict(headers or {})
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def get(server: Serve, path: str, **headers: str) -> Answer:
    return ask(server, "GET", path, headers=headers)


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def metrics(server: Serve) -> dict[str, float]:
    """The value of each series: `name{label="value"}`, labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(get(server, "/metrics").body.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
