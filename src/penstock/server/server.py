"""The server: a store, a broker, and the doors to it, started and stopped together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from penstock.address import hosts, listed
from penstock.broker import broker as brokers
from penstock.broker.broker import Broker
from penstock.broker.flow import Flow, Overflow
from penstock.clock import Clock, SystemClock
from penstock.doors.arrivals import Arrivals
from penstock.doors.claims import Claims
from penstock.doors.counters import Counters
from penstock.doors.door import open_session
from penstock.doors.gate import Gate
from penstock.doors.journal import Journal
from penstock.doors.peer import Peer
from penstock.doors.sessions import Sessions
from penstock.doors.shared import DoorSettings, Node, Shared
from penstock.doors.tasks import Tasks
from penstock.doors.turns import Turns
from penstock.errors import DiskError
from penstock.health import Usage
from penstock.log.files import Files
from penstock.pipe.connector import Connect, find_connector
from penstock.pipe.down import OnGap
from penstock.pipe.parent import ParentCredentials
from penstock.pipe.pipes import Pipes, PipeSettings
from penstock.pipe.topology import (
    Role,
    Topology,
    check_directions,
    origin_of,
    read_node_id,
    read_topics,
    read_urls,
)
from penstock.plugins import find
from penstock.security.identity import Identity
from penstock.security.security import Security, SecuritySettings
from penstock.server import calls, websocket
from penstock.server.http import http_port
from penstock.server.memory import Memory
from penstock.server.network import Listen, Listener
from penstock.server.rows import Answers
from penstock.server.settings import Config, TopicConfig, certificate_files
from penstock.server.stalls import Stalls
from penstock.server.statistics import Statistics, addresses
from penstock.store.store import Store, StoreSettings
from penstock.tls.certificate import ServerCertificate
from penstock.tls.options import TlsOptions
from penstock.tls.port import ServerTls
from penstock.tls.transport import protocol_factory
from penstock.web.credentials import Credentials
from penstock.web.port import WebPort

logger = logging.getLogger(__name__)

_SWEEP_S: Final = 1.0
# In the data directory: the last topology that the registry told.
TOPOLOGY_NAME: Final = "topology.json"


class Server:
    def __init__(
        self, config: Config, *, listens: bool = True, settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Open the data directory, which may take a while after a crash. `listens`: whether to open ports.

        `settings`: the configuration as people may see it, each value with its origin.
        """
        self.config = config
        self.settings = settings or {}
        certificate = _certificate(config)
        self._listens = listens
        clock = SystemClock()
        self.security = Security(clock, _security_settings(config))
        # Before the data directory is touched: errors in the settings are reported first.
        connect, self._topology = find_connector(config.pipe.type), _topology(config)
        self._network: Listen = find("penstock.networks", "server.network", config.server.network).load()
        self.broker = _open_broker(config, clock, self.security)
        self.pipes = _pipes(config, self.broker, connect)
        self.journal = Journal(clock)
        self.tls = None if certificate is None else self._secure(certificate)
        self.stalls = Stalls(clock)
        self._memory = Memory()
        self._http: WebPort | None = None
        self.answers = Answers(lambda: 0 if self._http is None else self._http.unsent())
        self.shared = self._share(clock)
        self.sessions, self.counters = self.shared.sessions, self.shared.counters
        self.id, self.version, self.ports = self.shared.node.id, self.shared.node.version, self.shared.node.ports
        self.statistics = Statistics(self.shared, config.server.connections_max, self.stalls, self.usage)
        self._started = asyncio.Event()
        self._listeners: list[Listener] = []

    def _secure(self, certificate: ServerCertificate) -> ServerTls:
        tls = self.config.tls
        return ServerTls(
            certificate,
            required=tls.required,
            handshake_first=tls.handshake_first,
            handshake_s=tls.handshake_s,
            on_failure=self.journal.failed_handshake,
        )

    def _share(self, clock: Clock) -> Shared:
        """Return what the sessions share."""
        server, counters, journal, claims = self.config.server, Counters(), self.journal, Claims()
        gate = Gate(self.security, counters, journal, server.handshake_s, server.handshakes_max)
        arrivals = Arrivals(counters)
        sessions = Sessions(counters, gate, journal, arrivals, claims, server.connections_max, server.heartbeat_s)
        node = Node(
            id=secrets.token_hex(8),
            node_id=server.node_id,
            version=metadata.version("penstock"),
            hosts=hosts(server.host),
            ports={},
            tls=self.tls,
        )
        return Shared(
            broker=self.broker,
            security=self.security,
            settings=_door_settings(self.config),
            node=node,
            calls=_Calls(self),
            counters=counters,
            journal=journal,
            gate=gate,
            arrivals=arrivals,
            turns=Turns(),
            claims=claims,
            sessions=sessions,
            tasks=Tasks(self.broker.health),
        )

    # Start and stop.

    async def run(
        self, stop: asyncio.Event, ready: Callable[[Server], None], retire: asyncio.Event | None = None
    ) -> None:
        """Serve until `stop`, then finish what was begun: in the reverse order of the start, each step bounded.
        `retire` begins the lame duck mode, which ends in a stop."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self.shared.tasks.open(tasks)
                broker = tasks.create_task(self.broker.run(self._started))
                try:
                    await self._serve(tasks, stop, ready, retire or asyncio.Event())
                finally:
                    self._close_listeners()
                    if self._http is not None:
                        self._http.close()
                    self.broker.save()
                    broker.cancel()
        finally:
            self.broker.store.close()

    async def _serve(
        self, tasks: asyncio.TaskGroup, stop: asyncio.Event, ready: Callable[[Server], None], retire: asyncio.Event
    ) -> None:
        await self._started.wait()
        for name, topic in self.config.topics.items():
            try:
                await self._ensure_topic(name.encode(), topic)
            except DiskError as error:
                # Its messages can be read, and deleted to make room.
                self.broker.health.report(f"topic {name}", f"it is not as configured until the next start: {error}")
        if self._listens:
            await self._bind()
        spawn = self.shared.tasks.spawn
        pipes = spawn(self.pipes.run())
        if self._topology is not None:
            await self.pipes.follow(self._topology)
        web = None
        if self._http is not None:
            for listener in self._listeners:
                await listener.start()
            web = tasks.create_task(self._http.run())
        sweeper = tasks.create_task(self._sweep())
        watchers = [spawn(self._watch_registry()), spawn(self.security.watch())]
        if self.tls is not None:
            watchers.append(spawn(self.tls.watch()))
        self.stalls.start()
        ready(self)
        await self._until_stopped(stop, retire)
        self.stalls.stop()
        for watcher in watchers:
            watcher.cancel()
        sweeper.cancel()
        pipes.cancel()
        self.pipes.stop()
        self._close_listeners()
        await self.sessions.stop(self.config.server.stop_s)
        if self._http is not None and web is not None:
            self._http.stop()
            await web

    async def _watch_registry(self) -> None:
        url, poll_ms = self.config.registry.url, self.config.registry.poll_ms
        if url is not None:
            # An HTTP client takes as long to import as half of the rest: most brokers need none.
            from penstock.pipe.registry import watch

            path = Path(self.config.storage.data_dir) / TOPOLOGY_NAME
            await watch(url, self.config.server.node_id, poll_ms, path, self._follow, _pipe_tls(self.config))

    async def _follow(self, topology: Topology) -> None:
        """Take the place that a registry assigns. Topics in the settings take precedence."""
        topics, up = _piped_topics(self.config)
        await self.pipes.follow(replace(topology, topics=topics or topology.topics, up=up or topology.up))

    async def _ensure_topic(self, name: bytes, topic: TopicConfig) -> None:
        policy = topic.policy
        served = self.broker.topics.get(name)
        if served is None:
            await self.broker.changes.create(name, partitions=topic.partitions, policy=policy)
        elif served.is_piped:
            # It has as many partitions as at its origin, whatever the settings say.
            await self.broker.changes.alter(name, policy=policy)
        elif (served.topic.partitions, served.topic.policy) != (topic.partitions, policy):
            await self.broker.changes.alter(name, partitions=topic.partitions, policy=policy)

    async def _until_stopped(self, stop: asyncio.Event, retire: asyncio.Event) -> None:
        stopped, retired = asyncio.create_task(stop.wait()), asyncio.create_task(retire.wait())
        try:
            await asyncio.wait((stopped, retired), return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                self._close_listeners()
                server = self.config.server
                await self.sessions.retire(stopped, grace_s=server.lame_duck_grace_s, seconds=server.lame_duck_s)
        finally:
            stopped.cancel()
            retired.cancel()

    def inside(self) -> Identity | None:
        """Return the identity of a client in this process; None if no credentials are required."""
        return self.security.inside() if self.security.is_required else None

    # Ports.

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Where each port can be reached."""
        return addresses(self.shared.node)

    async def _bind(self) -> None:
        """Bind all ports, and accept no connections yet: if one port is taken, no client has been served."""
        server = self.config.server
        for name, port, greets in (("text", server.port, True), ("quiet", server.quiet_port, False)):
            await self._listen(name, port, greets=greets)
        self._http = http_port(self, [websocket.route(self.shared, server.websocket_origins)])
        self.ports["http"] = self._http.port
        if server.qb_port is not None and server.qb_port not in self.ports.values():
            await self._bind_qb(server.qb_port)

    async def _bind_qb(self, port: int) -> None:
        """Listen where the Python broker's clients look. If only the default says so, another program may have it."""
        try:
            await self._listen("qb", port, greets=False)
        except OSError as error:
            if self.settings.get("server.qb_port", {}).get("from") != "default":
                raise
            logger.warning("the default server.qb_port is not opened: %s; none turns it off", error)

    async def _listen(self, name: str, port: int, *, greets: bool) -> None:
        """Listen on a port. `greets`: whether the server speaks first, as NATS clients expect."""
        opened: Callable[[], asyncio.Protocol] = partial(open_session, self.shared, greets=greets)
        if self.tls is not None:
            opened = protocol_factory(self.tls, opened)
        listener = await self._network(opened, self.shared.node.hosts, port)
        self._listeners.append(listener)
        self.ports[name] = listener.port

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    # Watching over it.

    def reload(self) -> None:
        """Read the users and the files of the certificate again."""
        self.security.reload()
        if self.tls is not None:
            self.shared.tasks.spawn(self._reload(self.tls))

    async def _reload(self, tls: ServerTls) -> None:
        await tls.reload()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                now = asyncio.get_running_loop().time()
                self.sessions.sweep(now)
                self.security.sweep()
                if self._memory.is_due(now):
                    self.shared.tasks.spawn(self.shared.tasks.work(self._memory.give_back))
            except Exception as fault:  # noqa: BLE001 - it is done again a second later
                self.broker.health.fault("sweep", "connections", fault)

    def unhealthy_reason(self) -> str | None:
        """Return why the server cannot do what it should, or None if it can."""
        if self.sessions.is_stopping:
            return "stopping"
        if self.sessions.is_lame_duck:
            return f"lame duck mode: no new connections, {len(self.sessions)} are still to be closed"
        if self.broker.refused:
            return f"partitions that cannot be opened: {', '.join(self.broker.refused)}"
        if self.broker.failed:
            return f"restart, these topics take nothing more: {'; '.join(self.broker.failed)}"
        problems = self.broker.health.problems
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items()) or None

    def usage(self) -> dict[str, Usage]:
        """Return how full each limited cache, queue and table is, by name."""
        http = {} if self._http is None else {"http_connections": self._http.usage(), **self.answers.usage()}
        shared = self.shared
        parts = (shared.gate, self.security, shared.arrivals, shared.turns, self.pipes, self.broker, self.broker.store)
        usages = {name: each for part in parts for name, each in part.usage().items()}
        return {**self.sessions.usage(), **http, **usages}


class _Calls:
    """The calls, for the doors."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def call(self, fields: dict[str, Any], identity: Identity | None) -> dict[str, Any]:
        return await calls.call(self._server, fields, identity)

    async def answer(self, peer: Peer, fields: dict[str, Any], identity: Identity | None) -> bytes:
        return await self._server.answers.make_for(peer, await self.call(fields, identity))

    def statistics(self) -> dict[str, Any]:
        return self._server.statistics()


def _certificate(config: Config) -> ServerCertificate | None:
    files = certificate_files(asdict(config.tls))
    return None if files is None else ServerCertificate(files)


def _security_settings(config: Config) -> SecuritySettings:
    auth = config.auth
    return SecuritySettings(
        fixed=Credentials(user=auth.user, password=auth.password, token=auth.token),
        users=None if auth.users is None else Path(auth.users),
        failures_max=auth.failures_max,
        lockout_s=auth.lockout_s,
        audit=auth.audit,
        dead_letter_prefix=config.dlq.prefix.encode(),
    )


def _open_broker(config: Config, clock: Clock, security: Security) -> Broker:
    files: Files = find("penstock.files", "storage.files", config.storage.files).load()()
    store = Store(Path(config.storage.data_dir), settings=_store_settings(config), files=files, clock=clock)
    return Broker(store, clock=clock, settings=_broker_settings(config), security=security)


def _pipes(config: Config, broker: Broker, connect: Connect) -> Pipes:
    settings = PipeSettings(
        poll_ms=config.pipe.poll_ms,
        batch_size=config.pipe.batch_size,
        on_gap=OnGap(config.pipe.on_gap),
        credentials=_pipe_credentials(config),
        tls=_pipe_tls(config),
    )
    return Pipes(broker, node_id=config.server.node_id, connect=connect, settings=settings)


def _door_settings(config: Config) -> DoorSettings:
    server, flow = config.server, config.flow
    return DoorSettings(
        payload_bytes_max=server.payload_bytes_max,
        heartbeat_s=server.heartbeat_s,
        flow=Flow(rate=flow.rate, burst=flow.burst, buffer=flow.buffer, overflow=Overflow(flow.mode)),
        slow_threshold=flow.slow_threshold,
        session_timeout_ms=server.session_timeout_ms,
        ack_deadline_ms=config.topic.policy.ack_deadline_ms,
        provider_ready=server.provider_ready,
    )


def _topology(config: Config) -> Topology | None:
    """Where the settings alone put this broker in the tree, if they do."""
    topics, up = _piped_topics(config)
    if config.pipe.parent is None:
        return None
    return Topology(
        node_id=read_node_id("server.node_id", config.server.node_id),
        role=Role.LOCAL,
        parents=read_urls("pipe.parent", listed(config.pipe.parent)),
        topics=topics,
        up=up,
    )


def _piped_topics(config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the settings let come down and go up; BadTopology if they contradict each other."""
    topics = read_topics("pipe.topics", listed(config.pipe.topics))
    up = read_topics("pipe.up", listed(config.pipe.up))
    check_directions(topics, up)
    return topics, up


def _pipe_tls(config: Config) -> TlsOptions:
    return TlsOptions(ca=config.pipe.ca, cert=config.pipe.cert, key=config.pipe.key)


def _pipe_credentials(config: Config) -> ParentCredentials:
    pipe = config.pipe
    allowed = frozenset(map(origin_of, (*listed(pipe.parents), *listed(pipe.parent))))
    credentials = Credentials(user=pipe.user, password=pipe.password, token=pipe.token)
    return ParentCredentials(credentials.header, allowed)


def _store_settings(config: Config) -> StoreSettings:
    storage = config.storage
    return StoreSettings(
        reader=storage.reader,
        unflushed_bytes_max=storage.unflushed_bytes_max,
        tail_bytes_max=storage.tail_bytes_max,
        open_segments_max=storage.open_segments_max,
        partitions_max=storage.partitions_max,
        disk_reserve_bytes=storage.disk_reserve_bytes,
        flush_messages=storage.flush_messages,
        flush_ms=storage.flush_ms,
        upkeep_ms=storage.upkeep_ms,
        retain_bytes=storage.retain_bytes,
    )


def _broker_settings(config: Config) -> brokers.Settings:
    return brokers.Settings(
        auto_create=config.topic.auto_create,
        topics_max=config.topic.topics_max,
        dedup_ids_max=config.topic.dedup_ids_max,
        groups_max=config.server.groups_max,
        subscriptions_max=config.server.subscriptions_max,
        position_bytes_max=config.server.position_bytes_max,
        partitions=config.topic.partitions,
        policy=config.topic.policy,
        dead_letter_prefix=config.dlq.prefix,
    )
