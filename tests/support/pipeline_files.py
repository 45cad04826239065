"""The example pipelines, run by `penstock pipeline` in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import PenstockError
from tests.conftest import SparkBroker


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        assert (self.code, self.err) == (0, "")
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def end(self) -> dict[str, Any]:
        return self.documents[-1]


def penstock(*arguments: object) -> Done:
    """In this process, where Spark runs already."""
    done = CliRunner().invoke(app, ["pipeline", *map(str, arguments)], env={"COLUMNS": "200"})
    err = done.stderr
    if isinstance(done.exception, PenstockError):
        # As `main` does it.
        err += f"error: {done.exception}\n"
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, err)


ORDERS: Final = [
    {
        "id": f"o{number % 90}",
        "customer": "ann",
        "country": "de" if number % 2 else "fr",
        "amount": number % 90 / 2,
        "at": f"2030-01-31T12:{number % 90 // 2:02}:00Z",
    }
    for number in range(100)
]
# One in three is paid, each second of these too late.
PAYMENTS: Final = [
    {"id": f"o{number}", "method": "card", "paid_at": f"2030-01-31T{13 if number % 2 else 12}:{number // 2 + 5:02}:00Z"}
    for number in range(0, 90, 3)
]


class Example:
    """One of the files that `init` writes, in a directory with its data."""

    def __init__(self, kind: str, directory: Path, broker: SparkBroker) -> None:
        self.directory = directory
        self.path = directory / f"{kind}.toml"
        self.data = directory / "data"
        self._broker = broker
        assert penstock("init", kind, self.path).code == 0

    def run(self, *flags: str) -> Done:
        return penstock("run", self.path, "--servers", self._broker.servers, "--json", *flags)

    def change(self, *pairs: tuple[str, str]) -> None:
        text = self.path.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        self.path.write_text(text)


def of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [kind], indirect=True)


def publish(broker: SparkBroker, topic: str, *documents: Mapping[str, object]) -> None:
    broker.publish_many([(topic, json.dumps(document).encode()) for document in documents])


def values(broker: SparkBroker, topic: str) -> list[dict[str, Any]]:
    return [message.json() for message in broker.fetch(topic, 0, 0)]
