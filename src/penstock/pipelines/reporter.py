"""Report the state of pipelines to their brokers every few seconds, so that the broker can show them.

A broker that is not reached costs nothing but the report: pipelines never wait for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.pipelines.pipeline import Pipeline
from penstock.pipelines.progress import PipelineProgress

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
# How long one attempt to reach a broker may take.
_TIMEOUT_S: Final = 5.0
# The broker takes this many characters of a reason.
_REASON_MAX: Final = 2000

Report = dict[str, Any]
# The addresses of a broker, and the options that hold the credentials for it.
_Broker = tuple[str, tuple[tuple[str, str], ...]]


class Reporter:
    """Reports in a thread of its own, for the time of a `with` block."""

    def __init__(self) -> None:
        self._runner = f"{socket.gethostname()}:{os.getpid()}"
        self._reports: dict[str, tuple[_Broker, Report]] = {}
        self._ending: set[str] = set()
        self._lock = threading.Lock()
        self._unreachable: set[_Broker] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeline reports", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2 * _TIMEOUT_S)

    def put(
        self, pipeline: Pipeline, progress: PipelineProgress, *, state: str, reason: str | None, failures: int
    ) -> None:
        """Replace what is reported of a pipeline."""
        source = pipeline.source
        broker = (source.servers, tuple(sorted(source.options.items())))
        report = progress.document() | {
            "state": state,
            "reason": None if reason is None else reason[:_REASON_MAX],
            "runner": self._runner,
            "failures": failures,
        }
        del report["seconds"]
        with self._lock:
            self._reports[pipeline.name] = broker, report

    def end(self, name: str) -> None:
        """Report what is known of a pipeline once more, and then no more."""
        with self._lock:
            self._ending.add(name)

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._send()
        self._send()

    def _send(self) -> None:
        by_broker: dict[_Broker, list[Report]] = {}
        with self._lock:
            for broker, report in self._reports.values():
                by_broker.setdefault(broker, []).append(report)
            for name in self._ending:
                self._reports.pop(name, None)
            self._ending.clear()
        for broker, reports in by_broker.items():
            try:
                _report(broker, reports)
                self._unreachable.discard(broker)
            except PenstockError as error:
                if broker not in self._unreachable:
                    self._unreachable.add(broker)
                    logger.warning("cannot report pipelines to %s: %s", broker[0], error)


def _report(broker: _Broker, reports: list[Report]) -> None:
    from penstock.pipelines.queries import client_of

    servers, given = broker
    client = client_of(servers, dict(given), _TIMEOUT_S)
    for report in reports:
        client.report_pipeline(**report)
