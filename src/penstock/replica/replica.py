"""Start and stop a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.replica.config import ReplicaConfig
from penstock.replica.copies import Copies
from penstock.replica.follower import Follower
from penstock.replica.http import Queries
from penstock.replica.writer import CopyWriter
from penstock.web.credentials import Credentials

logger = logging.getLogger(__name__)


class Replica:
    def __init__(
        self,
        config: ReplicaConfig,
        *,
        version: str,
        delay_s: Callable[[int], float | None],
        credentials: Credentials | None = None,
    ) -> None:
        """`credentials` are for the broker."""
        self.config = config
        self.version = version
        self.port = 0
        self._delay_s = delay_s
        self._credentials = credentials or Credentials()

    async def run(self, stop: asyncio.Event, ready: Callable[[Replica], None]) -> None:
        """Run until `stop`. Queries are answered all the time, with or without a broker.

        Raises if the configuration, the directory or the group is invalid.
        """
        loop = asyncio.get_running_loop()
        copies = await loop.run_in_executor(None, self._open)
        try:
            writer = CopyWriter(copies, on_error=self.config.on_error, delay_s=self._delay_s, stop=stop)
            follower = Follower(self.config, copies, writer=writer, credentials=self._credentials, stop=stop)
            wanted = self.config.credentials(self._credentials)
            queries = Queries(self.config, copies, writer, follower, version=self.version, credentials=wanted)
            http = queries.port()
            self.port = http.port
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(http.run())
                answering.add_done_callback(lambda _: queries.close())
                try:
                    ready(self)
                    await follower.run()
                    logger.info("stopping")
                finally:
                    http.stop()
                    await asyncio.wait([answering])
        finally:
            await loop.run_in_executor(None, copies.close)

    def _open(self) -> Copies:
        return Copies(Path(self.config.data_dir), self.config.topic, segment_bytes_max=self.config.segment_bytes_max)
