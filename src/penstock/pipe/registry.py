"""A broker asks a registry where it stands: again and again, for as long as it runs.

What is answered is checked before it counts. The last good topology is kept on disk, so that a broker starts where it
was when the registry does not answer; and whatever goes wrong later, it stays where it is.
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

logger = logging.getLogger(__name__)

Follow = Callable[[Topology], Awaitable[None]]

PATH: Final = "/registry/topology"
# Many brokers that were started together should not ask together.
JITTER: Final = 0.1
# After a failure the registry is asked again soon, in case it just restarts; then less and less often.
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 300.0


async def watch(url: str, node_id: str, poll_ms: int, path: Path, follow: Follow) -> None:
    """Ask the registry at `url` for this node's topology, every `poll_ms`, until it is cancelled.

    `follow` is called once at the start, as soon as a topology is known, and then when it changed. `path` is the file
    of the last good one.
    """
    watcher = _Watcher(url.rstrip("/"), node_id, path, follow)
    failures = 0
    async with http_client() as client:
        while True:
            failures = 0 if await watcher.ask(client) else failures + 1
            await asyncio.sleep(delay_s(poll_ms / 1000, failures, random.random()))


def delay_s(poll_s: float, failures: int, chance: float) -> float:
    """How long to wait until the registry is asked again. `chance` is from 0 to 1."""
    wait = poll_s
    if failures:
        # Bounded before it is raised: what fails for a week makes a large power.
        wait = min(min(poll_s, _RETRY_S) * 2.0 ** min(failures - 1, 32), _RETRY_MAX_S)
    return wait * (1 + JITTER * (2 * chance - 1))


class _Kept(NamedTuple):
    registry: str
    topology: Topology


class _Watcher:
    def __init__(self, url: str, node_id: str, path: Path, follow: Follow) -> None:
        self._url = url
        self._node_id = node_id
        self._path = path
        self._follow = follow
        # What is followed; nothing before the first answer, or the first failure.
        self._current: Topology | None = None
        # The last one that was good, as it is on disk.
        self._kept = self._load()
        self._reason: str | None = None

    async def ask(self, client: httpx.AsyncClient) -> bool:
        """Whether it answered as it should."""
        try:
            try:
                topology = self._check(await ask(client, self._url + PATH, params={"nodeId": self._node_id}))
            except PenstockError:
                if self._current is None and self._kept is not None:
                    await self._begin(self._kept.topology)
                raise
            await self._keep(topology)
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
            raise BadTopology(f"the registry tells {self._node_id} what {topology.node_id} is: it is not taken")
        # Another registry counts its versions by itself.
        known = self._kept.topology.version if self._kept is not None and self._kept.registry == self._url else 0
        if topology.version < known:
            raise BadTopology(
                f"the registry answers with version {topology.version}, and version {known} is known: it is not taken; "
                f"if it is right, remove {self._path} and start this broker again"
            )
        return topology

    async def _begin(self, topology: Topology) -> None:
        await self._follow(topology)
        self._current = topology
        logger.info(
            "topology, version %d: %s, follows %s",
            topology.version,
            topology.role,
            ", else ".join(topology.parents) or "nobody",
        )

    async def _keep(self, topology: Topology) -> None:
        """Before it is followed: whatever happens then, the next start begins with it."""
        if self._kept == (found := _Kept(self._url, topology)):
            return
        self._kept = found
        try:
            await asyncio.to_thread(json_file.save, self._path, {"registry": self._url} | topology.to_json())
        except OSError as error:
            logger.warning("the topology is not kept in %s: %s", self._path, error.strerror)

    def _load(self) -> _Kept | None:
        try:
            document = json_file.load(self._path)
            if document is None:
                return None
            topology = Topology.from_json(document)
        except (OSError, ValueError, BadTopology) as error:
            logger.warning("the topology that was kept is of no use: %s: %s", self._path, error)
            return None
        if topology.node_id != self._node_id:
            logger.warning("the topology in %s is of node %s: it is not used", self._path, topology.node_id)
            return None
        return _Kept(str(document.get("registry")), topology)

    def _warn(self, reason: str) -> None:
        """Once, however often it happens."""
        if reason != self._reason:
            self._reason = reason
            stays = "" if self._current is None and self._kept is None else "; the last topology stays"
            logger.warning("the registry is of no help: %s%s", reason, stays)
