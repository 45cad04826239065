"""Poll a registry for the topology of this broker.

A reply is checked before it is used. The last valid topology is stored on disk, so that a broker keeps its place if
the registry is down at its start or fails later.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from penstock.errors import BadTopology, PenstockError
from penstock.pipe import json_file
from penstock.pipe.ask import ask, http_client
from penstock.pipe.topology import Topology
from penstock.tls.options import TlsOptions

logger = logging.getLogger(__name__)

Follow = Callable[[Topology], Awaitable[None]]

PATH: Final = "/registry/topology"
# So that brokers which were started together do not poll together.
JITTER: Final = 0.1
# After a failure, retry soon in case the registry is restarting, then less and less often.
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 300.0


async def watch(
    url: str, node_id: str, poll_ms: int, path: Path, follow: Follow, tls: TlsOptions | None = None
) -> None:
    """Poll the registry at `url` for this node's topology every `poll_ms`, until cancelled.

    Call `follow` once a topology is known, and again when it changes. `path` is the file of the last valid one.
    """
    watcher = _Watcher(url.rstrip("/"), node_id, path, follow)
    failures = 0
    async with http_client(url, tls) as client:
        while True:
            failures = 0 if await watcher.ask(client) else failures + 1
            await asyncio.sleep(delay_s(poll_ms / 1000, failures, random.random()))


def delay_s(poll_s: float, failures: int, chance: float) -> float:
    """Return the seconds until the next poll. `chance` is a random number from 0 to 1."""
    wait = poll_s
    if failures:
        # Limit the exponent: a week of failures would overflow.
        wait = min(min(poll_s, _RETRY_S) * 2.0 ** min(failures - 1, 32), _RETRY_MAX_S)
    return wait * (1 + JITTER * (2 * chance - 1))


class _StoredTopology(NamedTuple):
    registry: str
    topology: Topology


class _Watcher:
    def __init__(self, url: str, node_id: str, path: Path, follow: Follow) -> None:
        self._url = url
        self._node_id = node_id
        self._path = path
        self._follow = follow
        # The topology in use; None before the first reply or failure.
        self._current: Topology | None = None
        # The last valid topology, as on disk.
        self._stored = self._load()
        self._reason: str | None = None

    async def ask(self, client: httpx.AsyncClient) -> bool:
        """Poll once; return whether the reply was valid."""
        try:
            try:
                topology = self._check(await ask(client, self._url + PATH, params={"nodeId": self._node_id}))
            except PenstockError:
                if self._current is None and self._stored is not None:
                    await self._begin(self._stored.topology)
                raise
            await self._save(topology)
            if topology != self._current:
                await self._begin(topology)
        except PenstockError as error:
            self._warn(str(error))
            return False
        if self._reason is not None:
            self._reason = None
            logger.info("the registry answers again")
        return True

    def _check(self, answer: object) -> Topology:
        topology = Topology.from_json(answer)
        if topology.node_id != self._node_id:
            raise BadTopology(
                f"the registry replied to {self._node_id} with the topology of {topology.node_id}: ignored"
            )
        # Each registry has its own versions.
        known = self._stored.topology.version if self._stored is not None and self._stored.registry == self._url else 0
        if topology.version < known:
            raise BadTopology(
                f"the registry replied with version {topology.version}, which is older than {known}: ignored; "
                f"if it is right, remove {self._path} and restart this broker"
            )
        return topology

    async def _begin(self, topology: Topology) -> None:
        await self._follow(topology)
        self._current = topology
        logger.info(
            "topology, version %d: %s, follows %s",
            topology.version,
            topology.role,
            ", else ".join(topology.parents) or "no broker",
        )

    async def _save(self, topology: Topology) -> None:
        """Store the topology before it is followed, so that the next start uses it in any case."""
        if self._stored == (found := _StoredTopology(self._url, topology)):
            return
        self._stored = found
        try:
            await asyncio.to_thread(json_file.save, self._path, {"registry": self._url} | topology.to_json())
        except OSError as error:
            logger.warning("cannot store the topology in %s: %s", self._path, error.strerror)

    def _load(self) -> _StoredTopology | None:
        try:
            document = json_file.load(self._path)
            if document is None:
                return None
            topology = Topology.from_json(document)
        except (OSError, ValueError, BadTopology) as error:
            logger.warning("the stored topology is invalid: %s: %s", self._path, error)
            return None
        if topology.node_id != self._node_id:
            logger.warning("ignoring the topology in %s: it is of node %s", self._path, topology.node_id)
            return None
        return _StoredTopology(str(document.get("registry")), topology)

    def _warn(self, reason: str) -> None:
        """Log a reason once, however often it occurs."""
        if reason != self._reason:
            self._reason = reason
            suffix = "" if self._current is None and self._stored is None else "; keeping the last topology"
            logger.warning("no valid topology from the registry: %s%s", reason, suffix)
