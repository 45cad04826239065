"""kill -9 of brokers in a tree while messages flow down and up, judged by their logs.

Three real brokers: a root, one below it, and one below that, which changes its parent between the two whenever it
starts again. Publishers that send each message once (they number their batches) work at the root and at the middle one.
At moments that the seed decides, one, two or all three brokers are killed and started again. In the end the publishers
come to their end in peace, the pipes catch up, and the judge reads the logs:

- every message is at the root once, and in each copy at the same offset, with the same key and headers, and nothing
  else is;
- what went up is at the root once, in the order in which it stands at its origin;
- no gap was recorded, and all bytes of all logs are sound.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from penstock import Client
from penstock.model.run import open_batch
from penstock.store.store import Store
from tests.support.server import Serve
from tests.support.trees import get, status_of, url

# Both policies, few and many partitions, segments that are sealed often.
CONFIG: Final = """
[storage]
upkeep_ms = 200
[pipe]
poll_ms = 50
[topic]
segment_bytes = "64KiB"
[topics.{one}]
partitions = 3
[topics.{two}]
durability = "flush"
"""
DOWN: Final = ("alpha", "beta")
UP: Final = ("sales", "tills")
PATIENCE_S: Final = 60.0

Row = tuple[int, bytes | None, bytes, bytes]  # offset, key, value, headers
Rows = dict[int, list[Row]]  # by partition


class PipeFigures(NamedTuple):
    kills: int
    down: int
    up: int

    def __str__(self) -> str:
        return f"{self.kills} kills of brokers in a tree, {self.down} messages down two pipes and {self.up} up one"


class Publisher:
    """Publishes to a broker until it is told to end, whatever happens to the broker."""

    def __init__(self, name: str, port: int, topics: tuple[str, ...], seed: int) -> None:
        self.sent: dict[str, list[bytes]] = {topic: [] for topic in topics}
        # Messages that it was told are stored.
        self.stored = 0
        self.failure: BaseException | None = None
        self._name = name
        self._topics = topics
        self._random = Random(f"{seed} {name}")
        self._client = Client(f"127.0.0.1:{port}", timeout=PATIENCE_S)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        self._client.close()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            with self._client.producer(timeout=PATIENCE_S) as producer:
                while not self._ends.is_set():
                    for _ in range(self._random.choice((1, 5, 30))):
                        topic = self._random.choice(self._topics)
                        value = f"{self._name}/{len(self.sent[topic])}/".encode()
                        value += b"x" * self._random.choice((0, 10, 100, 1000, 8000))
                        key = f"k{self._random.randrange(9)}" if self._random.random() < 0.5 else None
                        headers = {"Number": str(len(self.sent[topic]))} if self._random.random() < 0.2 else None
                        self.sent[topic].append(value)
                        producer.publish(topic, value, key=key, headers=headers)
                    # So that the pipes keep up.
                    self._ends.wait(self._random.uniform(0, 0.06))
                    self.stored = producer.stored
                producer.flush()
        except BaseException as error:  # noqa: BLE001 - the judge raises it
            self.failure = error


class PipeJudge:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.random = Random(seed)
        self.kills = 0
        down, up = (CONFIG.format(one=one, two=two) for one, two in (DOWN, UP))
        with self._told():
            self.root = Serve(directory / "root", config=down, server_node_id="root")
            self.middle = Serve(
                directory / "middle",
                config=up,
                server_node_id="middle",
                pipe_parent=url(self.root),
                pipe_topics=",".join(DOWN),
                pipe_up=",".join(UP),
            )
            self.leaf = Serve(
                directory / "leaf",
                config=CONFIG.format(one="other", two="another"),
                server_node_id="leaf",
                pipe_parent=url(self.middle),
                pipe_topics=",".join(DOWN),
            )
            self._publishers = [
                Publisher("cloud", self.root.port, DOWN, seed),
                Publisher("shop", self.middle.port, UP, seed),
            ]

    @property
    def figures(self) -> PipeFigures:
        down, up = (sum(map(len, publisher.sent.values())) for publisher in self._publishers)
        return PipeFigures(self.kills, down, up)

    def kill_one(self) -> None:
        """When some more was stored: one of the brokers, or several at once."""
        with self._told():
            self._wait_stored(self.random.choice((10, 100, 500)) * self.random.randint(1, 3))
            brokers = [self.root, self.middle, self.leaf]
            victims = self.random.sample(brokers, self.random.choice((1, 1, 1, 2, 3)))
            for victim in victims:
                victim.kill()
                assert "Traceback" not in victim.stderr, victim.stderr
            self.kills += len(victims)
            for victim in self.random.sample(victims, len(victims)):
                if victim is self.leaf:
                    victim.restart(pipe_parent=url(self.random.choice((self.root, self.middle))))
                else:
                    victim.restart()

    def finish(self) -> None:
        """In peace to the end, and judge."""
        with self._told():
            for publisher in self._publishers:
                publisher.end()
            self._wait_caught_up()
            for broker in (self.leaf, self.middle, self.root):
                status = status_of(broker)
                assert not any(topic["gaps"] for topic in status["topics"]), status
                ended = broker.stop()
                assert ended.code == 0, ended.stderr
                assert "Traceback" not in ended.stderr, ended.stderr
            self._judge()

    def _judge(self) -> None:
        cloud, shop = self._publishers
        root, middle, leaf = (read_logs(broker.data) for broker in (self.root, self.middle, self.leaf))
        for topic in DOWN:
            values = [value for rows in root[topic].values() for _, _, value, _ in rows]
            assert sorted(values) == sorted(cloud.sent[topic]), f"{topic} at the root is not what was published"
            _check_same(f"{topic} in the middle", middle[topic], root[topic])
            _check_same(f"{topic} in the leaf", leaf[topic], root[topic])
        for topic in UP:
            values = [value for rows in middle[topic].values() for _, _, value, _ in rows]
            assert sorted(values) == sorted(shop.sent[topic]), f"{topic} in the middle is not what was published"
            for partition, rows in middle[topic].items():
                origin = [row[1:] for row in rows]
                arrived = [row[1:] for row in root[topic][partition]]
                assert arrived == origin, f"partition {partition} of {topic} went up, and is not the same at the root"

    def _wait_stored(self, count: int) -> None:
        """Until so many more are stored, of each publisher some."""
        until = time.monotonic() + PATIENCE_S
        before = [publisher.stored for publisher in self._publishers]
        while True:
            more = [publisher.stored - then for publisher, then in zip(self._publishers, before, strict=True)]
            if min(more) and sum(more) >= count:
                return
            for publisher in self._publishers:
                if publisher.failure is not None:
                    raise publisher.failure
            assert time.monotonic() < until, f"{count} more messages are not stored within {PATIENCE_S} s: {more}"
            time.sleep(0.005)

    def _wait_caught_up(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            held = {topic: _held(self.root, topic) for topic in DOWN}
            missing = [
                f"{topic} in {broker.directory.name}: {_held(broker, topic)} of {held[topic]}"
                for topic in DOWN
                for broker in (self.middle, self.leaf)
                if _held(broker, topic) != held[topic]
            ]
            status = status_of(self.middle)
            ups = [topic for topic in status["topics"] if topic["direction"] == "up"]
            if not missing and len(ups) == len(UP) and not any(topic["lag"] for topic in ups):
                return
            assert time.monotonic() < until, f"not caught up within {PATIENCE_S} s: {missing} {status}"
            time.sleep(0.02)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note(f"seed {self.seed}, in {self.directory}")
            for publisher in getattr(self, "_publishers", []):
                publisher._ends.set()
            for name in ("root", "middle", "leaf"):
                broker: Serve | None = getattr(self, name, None)
                if broker is not None and broker.process.returncode is None:
                    error.add_note(f"--- {name}\n{broker.stderr[-3000:]}")
                    broker.kill()
            raise


def run(seed: int, kills: int) -> PipeFigures:
    """At least so many kills, then the judgement. A failure leaves the directory behind, and names it."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-pipes-"))
    judge = PipeJudge(directory, seed)
    while judge.kills < kills:
        judge.kill_one()
    judge.finish()
    shutil.rmtree(directory)
    return judge.figures


def read_logs(data: Path) -> dict[str, Rows]:
    """What the data directory of a broker holds: its topics by name."""
    found: dict[str, Rows] = {}
    with Store(data) as store:
        for topic in store.topics:
            rows = found[topic.name] = {}
            for number in range(topic.partitions):
                log = store.log(topic.id, number)
                assert not log.verify().damage
                rows[number] = []
                offset = log.start
                while batches := log.read(offset, 1 << 20):
                    for batch in batches:
                        run = open_batch(batch, topic.name.encode())
                        rows[number] += [
                            (run.offset(at), run.keys.get(at), run.values[at], run.headers.get(at, b""))
                            for at in range(len(run))
                        ]
                    offset = batches[-1].end
    return found


def _check_same(what: str, copy: Rows, origin: Rows) -> None:
    assert copy.keys() == origin.keys(), what
    for partition, rows in origin.items():
        there = copy[partition]
        assert [row[0] for row in there] == [row[0] for row in rows], f"{what}: other offsets in partition {partition}"
        assert there == rows, f"{what}: other messages in partition {partition}"


def _held(broker: Serve, name: str) -> list[int] | None:
    """The offset behind the last message of each partition."""
    _, found = get(broker, "/pipe/topics")
    for topic in found["topics"]:
        if topic["name"] == name:
            return [partition["committed"] for partition in topic["partitions"]]
    return None
