"""The server: a store, a broker, and the doors to it, started and stopped together."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import random
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from penstock.address import hosts, join, listed
from penstock.broker import broker as brokers
from penstock.broker.broker import Broker
from penstock.broker.flow import Flow, Overflow
from penstock.clock import SystemClock
from penstock.errors import DiskError
from penstock.health import Usage
from penstock.pipe.connector import find_connector
from penstock.pipe.down import OnGap
from penstock.pipe.parent import ParentCredentials
from penstock.pipe.pipes import Pipes
from penstock.pipe.pipes import Settings as PipeSettings
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
from penstock.server.arrivals import Arrivals
from penstock.server.claims import Claims
from penstock.server.config import Config, TopicConfig
from penstock.server.connection import WEBSOCKET, Connection
from penstock.server.door import Door
from penstock.server.gate import Gate
from penstock.server.http import http_port
from penstock.server.journal import Journal
from penstock.server.memory import Memory, resident_bytes
from penstock.server.network import Listen, Listener
from penstock.server.peer import Traffic
from penstock.server.rows import Answers
from penstock.server.stalls import Stalls
from penstock.server.turns import Turns
from penstock.storage.files import Files
from penstock.storage.policy import Cleanup, Dedup, Durability, OnDamage, Policy
from penstock.storage.store import Settings, Store
from penstock.times import elapsed, iso
from penstock.web import Credentials, WebPort
from penstock.wire.binary import SCRATCH_BYTES

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_SWEEP_S: Final = 1.0
# In lame duck mode: between two batches of connections that are closed, at the most and at the least.
_CLOSE_S_MAX: Final = 1.0
_CLOSE_S_MIN: Final = 0.001
# Frames of clients that are opened in a thread at the same time.
WORKERS_MAX: Final = 2
# In the data directory: the last topology that the registry told.
TOPOLOGY_NAME: Final = "topology.json"


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    connections: int = 0
    refused: int = 0  # connections beyond the limit
    silent: int = 0  # closed, because they were not admitted in time
    stale: int = 0  # closed, because they did not answer PINGs
    slow: int = 0  # closed, because a large frame did not arrive, and others waited for its room
    unauthorized: int = 0
    protocol_errors: int = 0
    failed_publishes: int = 0  # messages that were not stored, and whose publisher was told
    unstored: int = 0  # messages that were delivered and not stored, because their subject or reply cannot be
    unread: int = 0  # times that a client was not read from, because it did not read its answers
    received_bytes: int = 0  # all that connections sent
    sent_bytes: int = 0  # all that connections were sent


class Came(NamedTuple):
    """From where a connection came, and when."""

    port: int
    time_us: int


class Server:
    def __init__(
        self, config: Config, *, listens: bool = True, settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Open the data directory, which may take a while after a crash. Without ports if it does not listen.

        `settings`: the configuration as people may see it, each value with where it came from.
        """
        self.config = config
        self.settings = settings or {}
        self.credentials = Credentials(**asdict(config.auth))
        self.hosts = hosts(config.server.host)
        self._listens = listens
        self.counters = Counters()
        self.flow = Flow(
            rate=config.flow.rate,
            burst=config.flow.burst,
            buffer=config.flow.buffer,
            overflow=Overflow(config.flow.mode),
        )
        clock = SystemClock()
        # Before the data directory is touched: what is wrong with it is told first.
        connect, topology = find_connector(config.pipe.type), _topology(config)
        self._network: Listen = find("penstock.networks", "server.network", config.server.network).load()
        files: Files = find("penstock.files", "storage.files", config.storage.files).load()()
        self._store = Store(Path(config.storage.data_dir), settings=_store_settings(config), files=files, clock=clock)
        self.broker = Broker(self._store, clock=clock, settings=_broker_settings(config))
        self.pipes = Pipes(
            self.broker,
            node_id=config.server.node_id,
            connect=connect,
            settings=PipeSettings(
                poll_ms=config.pipe.poll_ms,
                batch_size=config.pipe.batch_size,
                on_gap=OnGap(config.pipe.on_gap),
                credentials=_pipe_credentials(config),
            ),
        )
        self.stalls = Stalls(clock)
        self._memory = Memory()
        self.answers = Answers(lambda: 0 if self._http is None else self._http.unsent())
        self._topology = topology
        self.id = secrets.token_hex(8)
        self.version = metadata.version("penstock")
        self._start_us = clock.now_us()
        self._sessions: dict[Connection, None] = {}
        # By the number of the connection.
        self._came: dict[int, Came] = {}
        # What binary connections are read into: one at a time, since they are all of one loop.
        self.scratch = bytearray(SCRATCH_BYTES)
        self.journal = Journal(clock)
        self.gate = Gate(self)
        self.arrivals = Arrivals(self.counters)
        self.claims = Claims()
        self.turns = Turns()
        # Held while a large batch is opened and handed over: opened, it takes several times its size.
        self.large = asyncio.Lock()
        self._working = asyncio.Semaphore(WORKERS_MAX)
        self._last_id = 0
        # Of the connections that are gone.
        self.totals = Traffic()
        self._is_stopping = False
        # Whether it takes no more connections, and closes those that there are one by one.
        self.is_lame_duck = False
        self._started = asyncio.Event()
        self._all_gone = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._listeners: list[Listener] = []
        self.ports: dict[str, int] = {}
        self._http: WebPort | None = None

    # Its life.

    async def run(
        self, stop: asyncio.Event, ready: Callable[[Server], None], retire: asyncio.Event | None = None
    ) -> None:
        """Serve until `stop`, then finish what was begun. The reverse order of the start, each step bounded. `retire`
        begins the lame duck mode, which ends in a stop."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                broker = tasks.create_task(self.broker.run(self._started))
                try:
                    await self._serve(tasks, stop, ready, retire or asyncio.Event())
                finally:
                    for listener in self._listeners:
                        listener.close()
                    if self._http is not None:
                        self._http.close()
                    self.broker.save()
                    broker.cancel()
        finally:
            self._store.close()

    async def _serve(
        self, tasks: asyncio.TaskGroup, stop: asyncio.Event, ready: Callable[[Server], None], retire: asyncio.Event
    ) -> None:
        await self._started.wait()
        for name, topic in self.config.topics.items():
            try:
                await self._ensure_topic(name.encode(), topic)
            except DiskError as error:
                # What is there can be read, and deleted to make room.
                self.broker.health.report(f"topic {name}", f"it is not as configured until the next start: {error}")
        if self._listens:
            await self._bind()
        pipes = self.spawn(self.pipes.run())
        if self._topology is not None:
            await self.pipes.follow(self._topology)
        web = None
        if self._http is not None:
            for listener in self._listeners:
                await listener.start()
            web = tasks.create_task(self._http.run())
        sweeper = tasks.create_task(self._sweep())
        watcher = self.spawn(self._watch_registry())
        self.stalls.start()
        ready(self)
        await self._until_stopped(stop, retire)
        self.stalls.stop()
        watcher.cancel()
        sweeper.cancel()
        pipes.cancel()
        self.pipes.stop()
        await self._stop_sessions()
        if self._http is not None and web is not None:
            self._http.stop()
            await web

    async def _watch_registry(self) -> None:
        url, poll_ms = self.config.registry.url, self.config.registry.poll_ms
        if url is not None:
            # An HTTP client takes as long to import as half of the rest: most brokers need none.
            from penstock.pipe.registry import watch

            path = Path(self.config.storage.data_dir) / TOPOLOGY_NAME
            await watch(url, self.config.server.node_id, poll_ms, path, self._follow)

    async def _follow(self, topology: Topology) -> None:
        """Take the place that a registry assigns. What the settings say of topics takes precedence."""
        topics, up = _piped_topics(self.config)
        await self.pipes.follow(replace(topology, topics=topics or topology.topics, up=up or topology.up))

    async def _bind(self) -> None:
        """Listen on all ports, and take no connections yet: if one port cannot be had, nobody has been served."""
        server = self.config.server
        for name, port, greets in (("text", server.port, True), ("quiet", server.quiet_port, False)):
            listener = await self._network(partial(Door, self, greets=greets), self.hosts, port)
            self._listeners.append(listener)
            self.ports[name] = listener.port
        self._http = http_port(self)
        self.ports["http"] = self._http.port
        if server.qb_port is not None and server.qb_port not in self.ports.values():
            await self._bind_qb(server.qb_port)

    async def _bind_qb(self, port: int) -> None:
        """Listen where the Python broker's clients look. If nobody asked for it, another program may have the port."""
        try:
            listener = await self._network(partial(Door, self, greets=False), self.hosts, port)
        except OSError as error:
            if self.settings.get("server.qb_port", {}).get("from") != "default":
                raise
            logger.warning("the default server.qb_port is not opened: %s; none turns it off", error)
            return
        self._listeners.append(listener)
        self.ports["qb"] = listener.port

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Where each port can be reached."""
        return {name: [join(host, port) for host in self.hosts] for name, port in self.ports.items()}

    async def _until_stopped(self, stop: asyncio.Event, retire: asyncio.Event) -> None:
        stopped, retired = asyncio.create_task(stop.wait()), asyncio.create_task(retire.wait())
        try:
            await asyncio.wait((stopped, retired), return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await self._retire(stopped)
        finally:
            stopped.cancel()
            retired.cancel()

    async def _retire(self, stopped: asyncio.Task[Any]) -> None:
        """The lame duck mode: tell clients to go elsewhere, and close their connections one by one, as nats-server
        does. It ends early when it is to stop, or when nobody is left."""
        server = self.config.server
        logger.info(
            "lame duck mode: no new connections, %d are closed within %d s", len(self._sessions), server.lame_duck_s
        )
        self.is_lame_duck = True
        for listener in self._listeners:
            listener.close()
        for session in list(self._sessions):
            session.tell_lame_duck()
        gone = asyncio.create_task(self._all_gone.wait())
        ends = (stopped, gone)
        try:
            if self._sessions:
                await asyncio.wait(ends, timeout=server.lame_duck_grace_s, return_when=asyncio.FIRST_COMPLETED)
            sessions = list(self._sessions)
            pause_s, batch = _pace(len(sessions), server.lame_duck_s - server.lame_duck_grace_s)
            for begin in range(0, len(sessions), batch):
                for session in sessions[begin : begin + batch]:
                    session.stop()
                # Some of it at random, so that servers that retire together do not send clients away in step.
                await asyncio.wait(ends, timeout=pause_s * random.uniform(0.5, 1), return_when=asyncio.FIRST_COMPLETED)
                if stopped.done() or gone.done():
                    return
        finally:
            gone.cancel()

    async def _stop_sessions(self) -> None:
        """Take no more connections and commands, and let those that are there have their answers."""
        self._is_stopping = True
        self._all_gone.clear()
        for listener in self._listeners:
            listener.close()
        for session in list(self._sessions):
            session.stop()
        try:
            async with asyncio.timeout(self.config.server.stop_s):
                if self._sessions:
                    await self._all_gone.wait()
        except TimeoutError:
            logger.warning("%d connections did not end in time", len(self._sessions))
            for session in list(self._sessions):
                session.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._look_after_sessions(asyncio.get_running_loop().time())
            except Exception as fault:  # noqa: BLE001 - it is done again a second later
                self.broker.health.fault("sweep", "connections", fault)

    def _look_after_sessions(self, now: float) -> None:
        self.gate.sweep(now)
        self.journal.sweep(self._sessions)
        self.arrivals.sweep(now)
        for session in [session for session in self._sessions if session.ping_at <= now]:
            session.ping_at = now + self.config.server.heartbeat_s
            session.ping()
        if self._memory.is_due(now):
            self.spawn(self.work(self._memory.give_back))

    async def _ensure_topic(self, name: bytes, topic: TopicConfig) -> None:
        policy = _policy(topic)
        served = self.broker.topics.get(name)
        if served is None:
            await self.broker.create_topic(name, partitions=topic.partitions, policy=policy)
        elif served.is_piped:
            # It has as many partitions as at its origin, whatever is said here.
            await self.broker.alter_topic(name, policy=policy)
        elif (served.topic.partitions, served.topic.policy) != (topic.partitions, policy):
            await self.broker.alter_topic(name, partitions=topic.partitions, policy=policy)

    # For sessions.

    def add(self, session: Connection, port: int) -> str | None:
        """A new connection, from a port of its own; why it cannot stay, if it cannot."""
        self._last_id += 1
        session.id = self._last_id
        self._came[session.id] = Came(port, self.broker.clock.now_us())
        self.counters.connections += 1
        now = asyncio.get_running_loop().time()
        session.ping_at = now + self.config.server.heartbeat_s
        self._sessions[session] = None
        if len(self._sessions) > self.config.server.connections_max:
            self.counters.refused += 1
            return "maximum connections exceeded"
        self.gate.enter(session)
        return None

    def replace(self, door: Connection, session: Connection) -> None:
        """It has begun to speak, and is known for what it is."""
        del self._sessions[door]
        self._sessions[session] = None
        self.gate.replace(session)

    def remove(self, session: Connection) -> None:
        if session in self._sessions:
            del self._sessions[session]
            del self._came[session.id]
            self.totals += session.traffic
        self.gate.leave(session)
        self.claims.release(session)
        self.journal.resumed(session.peer)
        if self.is_leaving and not self._sessions:
            self._all_gone.set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task. An unexpected exception ends this task only."""
        assert self._tasks is not None, "it runs"
        return self._tasks.create_task(self.broker.health.supervise("task", coroutine))

    async def work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, and touches nothing of the broker, in a worker thread. Few at a time."""
        async with self._working:
            return await asyncio.to_thread(function, *args, **kwargs)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, callback)

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no more connections, and closes those that there are."""
        return self._is_stopping or self.is_lame_duck

    @property
    def needs_auth(self) -> bool:
        return bool(self.credentials)

    def authorizes(self, options: Mapping[str, Any]) -> bool:
        user, password, token = map(options.get, ("user", "pass", "auth_token"))
        return self.credentials.accepts(user=user, password=password, token=token)

    def info(self, session: Connection) -> dict[str, Any]:
        """Return the fields of INFO. What is not configured is absent, as in nats-server's: TLS, `nonce`, `cluster`,
        `connect_urls`, `domain`."""
        return {
            "server_id": self.id,
            "server_name": self.config.server.node_id,
            "version": f"2.10.0-penstock-{self.version}",
            "proto": 1,
            # Clients read these two as text.
            "git_commit": "",
            "go": f"python{platform.python_version()}",
            "host": self.hosts[0],
            "port": self.ports.get("http" if session.type == WEBSOCKET else "text", 0),
            "headers": True,
            "max_payload": self.config.server.payload_bytes_max,
            "client_id": session.id,
            "client_ip": session.address,
            "auth_required": self.needs_auth,
            "tls_required": False,
            "tls_available": False,
            "tls_verify": False,
            "jetstream": False,
            # The level of JetStream's API.
            "api_lvl": 0,
            # As Flux has it: a cluster of one.
            "cluster_id": "",
            "node_id": self.config.server.node_id,
            "leader": self.config.server.node_id,
            "is_leader": True,
            "raft_stats": {"state": "alone"},
            **({"ldm": True} if self.is_leaving else {}),
        }

    @property
    def sessions(self) -> list[Connection]:
        return list(self._sessions)

    def came(self, session: Connection) -> Came | None:
        """None: it is gone."""
        return self._came.get(session.id)

    def ill(self) -> str | None:
        """Why it cannot do what it should, if it cannot."""
        if self._is_stopping:
            return "stopping"
        if self.is_lame_duck:
            return f"lame duck mode: no new connections, {len(self._sessions)} are still to be closed"
        if self.broker.refused:
            return f"partitions that cannot be opened: {', '.join(self.broker.refused)}"
        if self.broker.failed:
            return f"restart, these topics take nothing more: {'; '.join(self.broker.failed)}"
        problems = self._store.health.problems
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items()) or None

    def usage(self) -> dict[str, Usage]:
        """How full each limited cache, queue and table is, by name."""
        connections = Usage(len(self._sessions), self.config.server.connections_max)
        http = {} if self._http is None else {"http_connections": self._http.usage(), **self.answers.usage()}
        parts = (self.gate, self.arrivals, self.turns, self.pipes, self.broker, self._store)
        return {"connections": connections, **http} | {
            name: each for part in parts for name, each in part.usage().items()
        }

    def statistics(self) -> dict[str, Any]:
        """All that is counted, under the names that nats-server has where it has the same."""
        totals = self.totals
        for session in self._sessions:
            totals += session.traffic
        server, now_us = self.config.server, self.broker.clock.now_us()
        return {
            "server_id": self.id,
            "server_name": server.node_id,
            "version": self.version,
            "host": self.hosts[0],
            "port": self.ports.get("text", 0),
            "addresses": self.addresses,
            "quiet_port": self.ports.get("quiet", 0),
            "http_port": self.ports.get("http", 0),
            "websocket": {
                "host": self.hosts[0],
                "port": self.ports.get("http", 0),
                "no_tls": True,
                "compression": True,
            },
            "max_connections": server.connections_max,
            "max_payload": server.payload_bytes_max,
            "auth_required": self.needs_auth,
            "start": iso(self._start_us),
            "now": iso(now_us),
            "uptime": elapsed(now_us - self._start_us),
            "mem": resident_bytes(),
            "cores": os.cpu_count() or 1,
            "connections": len(self._sessions),
            "total_connections": self.counters.connections,
            "subscriptions": sum(len(session.subscriptions) for session in self._sessions),
            "slow_consumers": self.broker.slow_readers,
            "dropped": self.broker.figures.dropped,
            "expired": self.broker.figures.expired,
            "topics": len(self.broker.topics),
            "groups": len(self.broker.groups),
            "delayed": len(self.broker.delays) if self.broker.delays is not None else 0,
            "store_bytes": self._store.maintenance.store_bytes,
            "unflushed_bytes": self._store.rounds.unflushed_bytes,
            "ids_checked": sum(topic.dedup.checked for topic in self.broker.topics if topic.dedup is not None),
            "ids_known": sum(len(topic.dedup) for topic in self.broker.topics if topic.dedup is not None),
            "duplicates": sum(topic.dedup.found for topic in self.broker.topics if topic.dedup is not None),
            "redelivered": sum(group.redelivered for group in self.broker.groups.values()),
            "dead_lettered": sum(group.dead_lettered for group in self.broker.groups.values()),
            "lost_to_retention": sum(group.lost for group in self.broker.groups.values()),
            **totals._asdict(),
            "since_start": asdict(self.counters),
            "limits": {name: usage._asdict() for name, usage in self.usage().items()},
            "faults": dict(self._store.health.faults),
            "loop_stalls": self.stalls.figures(),
        }


def _pace(connections: int, seconds: float) -> tuple[float, int]:
    """Return how long to wait between two batches of connections that are closed, and how many are in a batch."""
    pause_s = seconds / max(1, connections)
    return max(min(pause_s, _CLOSE_S_MAX), _CLOSE_S_MIN), max(1, math.ceil(_CLOSE_S_MIN / pause_s))


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


def _pipe_credentials(config: Config) -> ParentCredentials:
    pipe = config.pipe
    allowed = frozenset(map(origin_of, (*listed(pipe.parents), *listed(pipe.parent))))
    credentials = Credentials(user=pipe.user, password=pipe.password, token=pipe.token)
    return ParentCredentials(credentials.header, allowed)


def _store_settings(config: Config) -> Settings:
    storage = config.storage
    return Settings(
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
        policy=_policy(config.topic),
        dead_letter_prefix=config.dlq.prefix,
    )


def _policy(topic: TopicConfig) -> Policy:
    return Policy(
        durability=Durability(topic.durability),
        segment_bytes=topic.segment_bytes,
        cleanup=Cleanup(topic.cleanup),
        retain_ms=topic.retain_ms,
        retain_bytes=topic.retain_bytes,
        dedup=Dedup(topic.dedup),
        tombstone_ms=topic.tombstone_ms,
        dedup_window_ms=topic.dedup_window_ms,
        ack_deadline_ms=topic.ack_deadline_ms,
        deliveries_max=topic.deliveries_max,
        dead_letters=topic.dead_letters,
        refresh_wait_ms=topic.refresh_wait_ms,
        on_damage=OnDamage(topic.on_damage),
    )
