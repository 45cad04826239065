"""A siege: hostile clients at one door of a real server, mixed by a seed, under the eyes of the oracle.

An attack is a generator of *steps* for one connection: bytes to send, or seconds to wait. The runner connects, says
who it is if it may, and takes the steps; it reads what comes back, unless the attack is one of those that never read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.hostile.oracle import PASSWORD, USER, Figures, Oracle
from tests.support.certificates import Certificates
from tests.support.frames import Frames
from tests.support.server import Serve
from tests.support.users import write_users

# What hostile clients publish to, if nothing else is said.
TOPIC: Final = "hostile"
SUBJECT: Final = b"hostile.x"

# So many attacks at a time, and so many connections beside the largest of them: this process has limits, too.
LANES: Final = 4
CONNECTIONS_BESIDE: Final = 500
# How long one may take, how long a step may wait for the server to take it, and how long to wait for the last answer.
ATTACK_S: Final = 3.0
# Ten thousand at once take a while to connect.
CONNECT_S: Final = 30.0
STEP_S: Final = 1.0
LINGER_S: Final = 0.3

Step = bytes | float


class Target(NamedTuple):
    """What an attack must know of the server."""

    # Of TOPIC.
    topic_id: int
    # Its HTTP port as a Host header names it, and what an authenticated request says there.
    host: bytes


class Attack(NamedTuple):
    steps: Callable[[random.Random, Target], Iterator[Step]]
    # At the same time; a small siege has fewer.
    connections: int = 1
    reads: bool = True


class Door(NamedTuple):
    name: str
    # Of the ready line: `text`, `quiet`, `http`.
    port: str
    attacks: tuple[Attack, ...]
    # What makes a connection an authenticated one; none: this protocol has no word for it.
    login: bytes | None
    # Whether the server asks for credentials. A protocol without a login would see nothing but the gate.
    guarded: bool = True
    # What every connection sends first.
    opening: bytes = b""

    def named(self, name: str) -> tuple[Attack, ...]:
        return tuple(attack for attack in self.attacks if attack.steps.__name__ == name)


class Scale(NamedTuple):
    """How large a siege is."""

    # At least so long, and until every attack was made, with a login and without.
    seconds: float
    connections_max: int = 200
    topics_max: int = 50


class Siege:
    def __init__(
        self, door: Door, server: Serve, target: Target, seed: int, scale: Scale, tls: ssl.SSLContext | None = None
    ) -> None:
        self._door = door
        self._server = server
        self._target = target
        self._seed = seed
        self._scale = scale
        self._tls = tls
        self._slots = asyncio.Semaphore(scale.connections_max + CONNECTIONS_BESIDE)
        self.attacks = 0
        self.connections = 0

    async def run(self) -> None:
        plan = self._plan()
        until = asyncio.get_running_loop().time() + self._scale.seconds
        await asyncio.gather(*(self._lane(plan, until) for _ in range(LANES)))

    def _plan(self) -> Iterator[tuple[bool, Attack, bool, random.Random]]:
        """Each attack, with a login and without, in the order of the seed; again and again. Whether it is of the
        first round, which is made in any case."""
        logins = (False,) if self._door.login is None else (False, True)
        for number in itertools.count():
            every = list(itertools.product(self._door.attacks, logins))
            random.Random(f"{self._seed}/{self._door.name}/{number}").shuffle(every)
            for attack, logs_in in every:
                name = f"{self._seed}/{self._door.name}/{number}/{attack.steps.__name__}/{logs_in}"
                yield number == 0, attack, logs_in, random.Random(name)

    async def _lane(self, plan: Iterator[tuple[bool, Attack, bool, random.Random]], until: float) -> None:
        loop = asyncio.get_running_loop()
        for is_first, attack, logs_in, source in plan:
            if not is_first and loop.time() > until:
                return
            if self._server.process.poll() is not None:
                return
            self.attacks += 1
            count = min(attack.connections, self._scale.connections_max)
            sources = [random.Random(source.random()) for _ in range(count)]
            await asyncio.gather(*(self._attack(attack, logs_in, each) for each in sources))

    async def _attack(self, attack: Attack, logs_in: bool, source: random.Random) -> None:
        async with self._slots:
            await self._attack_once(attack, logs_in, source)

    async def _attack_once(self, attack: Attack, logs_in: bool, source: random.Random) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self._connect()
        except (OSError, TimeoutError):
            return  # refused, which is its right
        self.connections += 1
        drain = asyncio.create_task(_drain(reader)) if attack.reads else None
        try:
            async with asyncio.timeout(ATTACK_S):
                await self._take_steps(attack, logs_in, source, writer)
                if drain is not None:
                    await asyncio.wait([drain], timeout=LINGER_S)
                else:
                    await asyncio.sleep(LINGER_S)
        except (OSError, TimeoutError):
            pass
        finally:
            if drain is not None:
                drain.cancel()
            # Some say goodbye, if that is taken, and others vanish.
            if source.random() < 0.5:
                await _close(writer)
            else:
                writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._tls is None:
            return await asyncio.open_connection("127.0.0.1", self._server.ports[self._door.port])
        # Where the server does not speak first, in plain.
        port = self._server.ports["quiet" if self._door.port == "text" else self._door.port]
        return await asyncio.open_connection("127.0.0.1", port, ssl=self._tls, server_hostname="localhost")

    async def _take_steps(
        self, attack: Attack, logs_in: bool, source: random.Random, writer: asyncio.StreamWriter
    ) -> None:
        steps = attack.steps(source, self._target)
        login = self._door.login if logs_in else None
        steps = itertools.chain([self._door.opening + (login or b"")], steps)
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                async with asyncio.timeout(STEP_S):
                    await writer.drain()
            else:
                await asyncio.sleep(step)


async def _close(writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        # It may be closed by now, without anybody told: then asyncio (3.11) stumbles.
        with contextlib.suppress(AttributeError):
            writer.transport.abort()
    except OSError:
        pass


async def _drain(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 20):
            pass
    except OSError:
        pass


def besiege(
    directory: Path,
    door: Door,
    seed: int,
    scale: Scale,
    certificates: Certificates | None = None,
    user: str | None = None,
) -> Figures:
    """Start a server, attack one of its doors, and judge. What it stored goes when all is well. With certificates, the
    attacks use TLS, and the bystander does not. `user`: one of USERS that the attackers log in as; None: they are
    administrators."""
    tls = None if certificates is None else certificates.context()
    settings: dict[str, Any] = {} if certificates is None else certificates.settings(required=False)
    if user is not None:
        assert door.login is not None
        settings["auth_users"] = write_users(directory / "users.toml", USERS)
        # Of the same length, so that the lengths in frames stay right.
        door = door._replace(login=door.login.replace(USER.encode(), user.encode()))
    guarded = door.guarded and user is None
    try:
        with start(directory, guarded=guarded, topics_max=scale.topics_max, **settings) as server:
            with Frames(server, user=USER, password=PASSWORD) as client:
                topic_id = client.topic_id(TOPIC, partitions=2)
            target = Target(topic_id, b"127.0.0.1:%d" % server.ports["http"])
            with Oracle(server) as oracle:
                siege = Siege(door, server, target, seed, scale, tls)
                asyncio.run(siege.run())
                figures = oracle.judge(door.name, siege.attacks, siege.connections)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {door.name}: {error}") from None
    shutil.rmtree(directory)
    return figures


# One who may do nothing, and one who may do little. The password is that of the tests.
NOBODY: Final = "nobody-at"
LITTLE: Final = "little-at"
USERS: Final = f"""
[users.{USER}]
password = "{{password}}"
admin = true
[users.{NOBODY}]
password = "{{password}}"
[users.{LITTLE}]
password = "{{password}}"
publish = ["little.>", "{TOPIC}"]
subscribe = {{ allow = [">"], deny = ["*.secret", "{TOPIC}.>"] }}
groups = {{ join = ["little*"] }}
quotas = {{ connections = 50, subscriptions = 500, bytes_in_s = "1MiB" }}
"""


def start(directory: Path, *, guarded: bool = True, topics_max: int = 50, **settings: object) -> Serve:
    """A server with the limits that it ships with, but for how much it may store and keep in memory of that."""
    known = {"auth_user": USER, "auth_password": PASSWORD} if guarded else {}
    stored: dict[str, Any] = {
        "topic_topics_max": topics_max,
        "topic_segment_bytes": 16 << 20,
        "topic_retain_bytes": 64 << 20,
        "storage_upkeep_ms": 500,
        "storage_tail_bytes_max": 4 << 20,
        "storage_open_segments_max": 32,
    }
    return Serve(directory, **(stored | known | settings))
