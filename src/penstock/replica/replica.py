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
from penstock.tls.certificate import CertificateFiles, ServerCertificate
from penstock.tls.options import TlsOptions
from penstock.tls.port import ServerTls
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
        tls: TlsOptions | None = None,
    ) -> None:
        """`credentials` and `tls` are for the broker. Raise BadConfig if the HTTP port has an invalid one."""
        self.config = config
        self.version = version
        self.port = 0
        self._delay_s = delay_s
        self._credentials = credentials or Credentials()
        self._tls = tls
        self._own_tls = _own_tls(config)

    async def run(self, stop: asyncio.Event, ready: Callable[[Replica], None]) -> None:
        """Run until `stop`. Queries are answered all the time, with or without a broker.

        Raises if the configuration, the directory or the group is invalid.
        """
        loop = asyncio.get_running_loop()
        copies = await loop.run_in_executor(None, self._open)
        try:
            writer = CopyWriter(copies, on_error=self.config.on_error, delay_s=self._delay_s, stop=stop)
            follower = Follower(
                self.config, copies, writer=writer, credentials=self._credentials, stop=stop, tls=self._tls
            )
            wanted = self.config.credentials(self._credentials)
            queries = Queries(self.config, copies, writer, follower, version=self.version, credentials=wanted)
            http = queries.port(self._own_tls)
            self.port = http.port
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(http.run())
                answering.add_done_callback(lambda _: queries.close())
                watching = None if self._own_tls is None else tasks.create_task(self._own_tls.watch())
                try:
                    ready(self)
                    await follower.run()
                    logger.info("stopping")
                finally:
                    if watching is not None:
                        watching.cancel()
                    http.stop()
                    await asyncio.wait([answering])
        finally:
            await loop.run_in_executor(None, copies.close)

    def _open(self) -> Copies:
        return Copies(Path(self.config.data_dir), self.config.topic, segment_bytes_max=self.config.segment_bytes_max)


def _own_tls(config: ReplicaConfig) -> ServerTls | None:
    """Return TLS for the HTTP port, if it has a certificate."""
    if config.http_tls_cert is None:
        return None
    return ServerTls(ServerCertificate(CertificateFiles(cert=config.http_tls_cert, key=config.http_tls_key)))
