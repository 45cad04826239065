"""kill -9 of a real `penstock serve` that our own clients use, and cuts of their connections: they go on by themselves.

The clients are made once and live through all blows: the server is killed or stopped and started again on the same data
and ports, or a proxy through which half of the clients talk cuts their connections, at moments that the seed decides.
Then they may finish, and the judge compares what they were told with what `fetch` and `penstock log dump` find.

- What a producer took is stored once when it is flushed, and what one thread gave it is in each partition in its order.
- `publish` with an id stores once. Without one a receipt says where it is, and ConnectionLost that it may be there.
- A plain subscription, and a `fetch` that follows, bring each message once, in the order of its partition.
- A shared group handles each message, or it is a dead letter, once: because it was rejected, or failed too often.
- In a partitioned group a partition has one owner at a time, who is given its messages in order and without a gap.
- What `flush` said is acknowledged, rejected or committed never comes again, and no position of a group moves back.

How "again" is told from what was on its way already: each message of a group says by which generation of the group it
came. Generations ascend with every member that comes or goes, and begin with the time when the server starts. So what
came by a higher one than the group had when `flush` returned was given out after that.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.app import App, Retry
from penstock.client.aio import AsyncClient
from penstock.client.message import Message
from penstock.client.sync import Client
from penstock.model.subject import matches, owns
from penstock.store.store import Store
from tests.support.client_crew import (
    Crew,
    Member,
    attend,
    attend_async,
    follow,
    produce,
    produce_async,
    publish_each,
    publish_each_async,
    read,
    read_async,
    watch,
)
from tests.support.client_journal import (
    ATTEMPTS_MAX,
    At,
    Author,
    ClientFigures,
    Journal,
    Log,
    PartitionedGroup,
    Place,
    Reader,
    Sent,
    SharedGroup,
    Stored,
    is_poison,
)
from tests.support.proxy import Proxy
from tests.support.serve_kill import check_stderr, read_positions, verify
from tests.support.server import Serve

# Only what is poison, or was rejected, can have been delivered so often that it becomes a dead letter.
DELIVERIES_MAX: Final = 30
CONFIG: Final = f"""
[storage]
upkeep_ms = 200
[topic]
segment_bytes = "256KiB"
[topics.one]
durability = "fsync"
[topics.four]
durability = "flush"
partitions = 4
[topics.jobs]
durability = "fsync"
partitions = 2
ack_deadline_ms = 2000
deliveries_max = {DELIVERIES_MAX}
"""
DEAD_LETTERS: Final = "DLQ"
# How long clients wait. Blows may come faster than one of them comes back.
TIMEOUT_S: Final = 600.0


class Blow(Enum):
    KILL = "kill -9"
    STOP = "stop"
    CUT = "cut"
    MANY_CUTS = "many cuts"


# How often each is dealt.
WEIGHTS: Final = {Blow.KILL: 6, Blow.STOP: 1, Blow.CUT: 2, Blow.MANY_CUTS: 1}


class ClientLog:
    """What the clients log goes to a file: failures of handlers are meant, and whoever looks for others finds them."""

    def __init__(self, path: Path) -> None:
        self._logger = logging.getLogger("penstock")
        self._handler = logging.FileHandler(path)
        self._logger.addHandler(self._handler)
        self._logger.propagate = False

    def close(self) -> None:
        self._logger.propagate = True
        self._logger.removeHandler(self._handler)
        self._handler.close()


class ClientJudge:
    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.random = Random(seed)
        self.journal = Journal()
        self.blows: Counter[Blow] = Counter()
        self._workers = SharedGroup(self.journal)
        self._keepers = PartitionedGroup(self.journal)
        self._letters = 0
        self._log = ClientLog(directory / "clients.log")
        self._server = Serve(directory, config=CONFIG)
        self._proxy = Proxy(self._server.port)
        self._crew = Crew(self.journal)
        self._app = App(self._proxy.address)
        self._running = ExitStack()
        with self._told():
            self._begin()

    @property
    def figures(self) -> ClientFigures:
        sent = self.journal.sent.values()
        deliveries = self._workers.deliveries + self._keepers.deliveries
        firsts = len(self._workers.delivered) + sum(
            len(set().union(*rows.values())) for rows in self._keepers.rows.values()
        )
        return ClientFigures(
            kills=self.blows[Blow.KILL],
            stops=self.blows[Blow.STOP],
            cuts=self.blows[Blow.CUT] + self.blows[Blow.MANY_CUTS],
            published=sum(each.is_certain for each in sent),
            in_doubt=sum(not each.is_certain for each in sent),
            delivered=deliveries,
            again=deliveries - firsts,
            confirmed=len(self._workers.confirmed) + sum(map(len, self._keepers.commits.values())),
            dead_letters=self._letters,
        )

    def strike(self, blow: Blow | None = None) -> None:
        """When the clients have been at work for a while: once more."""
        with self._told():
            self._wait_count(self.random.choice((1, 10, 100, 500, 1500)) * self.random.randint(1, 3))
            blow = blow or self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            self.blows[blow] += 1
            match blow:
                case Blow.KILL:
                    self._server.kill()
                    check_stderr(self._server.stderr)
                    self._server.restart()
                case Blow.STOP:
                    ended = self._server.stop()
                    assert ended.code == 0, ended.stderr
                    check_stderr(ended.stderr)
                    self._server.restart()
                case Blow.CUT:
                    self._proxy.cut()
                case Blow.MANY_CUTS:
                    self._proxy.rage(self.random.randrange(1 << 32))
                    self._proxy.cut()
                    self._wait_count(1000)
                    self._proxy.calm()

    def finish(self) -> None:
        """The clients come to their end in peace; then judge what they were told."""
        with self._told():
            self.journal.hush()
            self._crew.join(self._publishing)
            self._wait_stored()
            stored, letters = self._fetch_all()
            self._wait_read(stored)
            self._end()
            ended = self._server.stop()
            assert ended.code == 0, ended.stderr
            check_stderr(ended.stderr)
            self._judge(stored, letters)

    # The clients.

    def _begin(self) -> None:
        direct, through = f"127.0.0.1:{self._server.port}", self._proxy.address
        self._clients = [Client(where, timeout=TIMEOUT_S) for where in (direct, through, direct, through)]
        first, second, third, fourth = self._clients
        for client in self._clients:
            client.connect()
        self._async_clients = [
            self._crew.loop.run(_connected(AsyncClient(where, timeout=TIMEOUT_S))) for where in (direct, through)
        ]
        self._begin_reading(first, second, third, *self._async_clients)
        self._begin_groups(second, fourth)
        self._begin_publishing(first, second, third, fourth)

    def _begin_reading(self, first: Client, second: Client, third: Client, *others: AsyncClient) -> None:
        journal, crew, seed = self.journal, self._crew, self.seed
        self._readers = [
            Reader("all of it", journal, seed, partial(matches, b">")),
            Reader("all of it, in asyncio", journal, seed, partial(matches, b">")),
            Reader("four.>", journal, seed, partial(matches, b"four.>")),
            Reader("fetch of one", journal, seed, partial(owns, b"one")),
        ]
        whole, whole_async, part, followed = self._readers
        subscription = crew.loop.run(others[1].subscribe(">", start="earliest", buffer=20))
        self._reading = [
            crew.start(read, first.subscribe(">", start="earliest"), whole),
            crew.start_async(read_async, subscription, whole_async),
            crew.start(read, second.subscribe("four.>", start="earliest", buffer=7), part),
            crew.start(follow, third, "one", followed),
        ]

    def _begin_groups(self, second: Client, fourth: Client) -> None:
        journal, crew, seed = self.journal, self._crew, self.seed
        workers, keepers = self._workers, self._keepers
        random = Random(f"{seed} app")
        retry = Retry.exponential(initial=0.01, maximum=0.05, attempts=ATTEMPTS_MAX)

        @self._app.consumer(workers.pattern, group=workers.name, retry=retry, concurrency=2, buffer=30)
        def handle(message: Message) -> None:
            workers.handle(message, random)

        # They must be there before they are watched.
        for group in (workers, keepers):
            fourth.create_group(group.name, group.pattern, mode=group.mode, start="earliest")
        direct, through_proxy = self._async_clients
        self._attending = [
            crew.start(watch, fourth, workers),
            crew.start(watch, fourth, keepers),
            crew.start(attend, fourth, Member("worker", journal, workers, seed)),
            crew.start_async(attend_async, direct, Member("async worker", journal, workers, seed)),
            crew.start(attend, second, Member("keeper", journal, keepers, seed)),
            crew.start_async(attend_async, through_proxy, Member("async keeper", journal, keepers, seed)),
        ]
        self._running.enter_context(self._app.running())

    def _begin_publishing(self, first: Client, second: Client, third: Client, fourth: Client) -> None:
        crew = self._crew
        shared = first.producer(timeout=TIMEOUT_S, batch_bytes=4096)
        packed = second.producer(timeout=TIMEOUT_S, compression="lz4", buffer_bytes=100_000)
        other = self._async_clients[0].producer(timeout=TIMEOUT_S, compression="zstd", linger=0.02)
        direct, through = self._async_clients
        self._publishing = [
            crew.start(produce, shared, self._author("p1")),
            crew.start(produce, shared, self._author("p2")),
            crew.start(produce, packed, self._author("p3", has_ids=False)),
            crew.start_async(produce_async, other, self._author("p4")),
            crew.start(publish_each, third, self._author("i1", has_ids=True)),
            crew.start(publish_each, fourth, self._author("i2", has_ids=True)),
            crew.start(publish_each, third, self._author("n1", has_ids=False)),
            crew.start(publish_each, fourth, self._author("n2", has_ids=False)),
            crew.start_async(publish_each_async, direct, self._author("i3", has_ids=True)),
            crew.start_async(publish_each_async, through, self._author("n3", has_ids=False)),
        ]

    def _author(self, name: str, *, has_ids: bool | None = None) -> Author:
        return Author(name, self.journal, self.seed, has_ids=has_ids)

    def _wait_count(self, more: int) -> None:
        wanted = self.journal.count + more
        self.journal.wait(f"{more} more receipts and deliveries", lambda: self.journal.count >= wanted)

    def _wait_stored(self) -> None:
        """What is delayed must have come, and groups must have done with everything."""
        journal, seen = self.journal, self._readers[0].values
        lacking = [value for value, sent in journal.sent.items() if sent.is_certain]

        def has_all() -> bool:
            lacking[:] = [value for value in lacking if value not in seen]
            return not lacking

        journal.wait("all that is stored comes", has_all, lambda: [journal.sent[value] for value in lacking[:3]])
        with journal.changed:
            journal.lags.clear()
        groups = {self._workers.name, self._keepers.name}
        journal.wait(
            "groups have done all",
            lambda: {name for name, lag in journal.lags.items() if not lag} == groups,
            lambda: journal.lags,
        )

    def _wait_read(self, stored: Log) -> None:
        for reader in self._readers:
            for place, row in reader.wanted(stored).items():
                self._wait_row(reader, place, row[-1])

    def _wait_row(self, reader: Reader, place: Place, last: tuple[int, bytes]) -> None:
        row = reader.rows[place]
        what = f"{reader.name} reads {place} to {last!r:.80}"
        self.journal.wait(what, lambda: row[-1:] == [last], lambda: f"{row[-1:]!r:.80}")

    def _fetch_all(self) -> tuple[Log, list[At]]:
        client = self._clients[0]
        stored = {
            topic.name: [
                Stored(partition, each.offset, each.subject, each.key, each.value)
                for partition in range(topic.partitions)
                for each in client.fetch(topic.name, partition)
            ]
            for topic in client.topics()
        }
        letters = client.fetch(DEAD_LETTERS) if DEAD_LETTERS in stored else ()
        return stored, [_origin(each) for each in letters]

    def _end(self) -> None:
        self.journal.end()
        self._crew.join(self._attending)
        self._running.close()
        for client in self._clients:
            client.close()
        for other in self._async_clients:
            self._crew.loop.run(other.close())
        self._crew.join(self._reading)
        self._crew.loop.close()
        self._proxy.close()
        self._log.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note(
                f"seed {self.seed}, {self.directory}: python -m tests.soak --seed {self.seed} "
                f"--cuts 0 --kills 0 --serves 0 --fuzz 0 --clients {max(1, self.blows.total())}"
            )
            self.journal.hush()
            self.journal.end()
            self._app.stop()
            self._log.close()
            if self._server.process.poll() is None:
                self._server.kill()
            raise

    # The judge.

    def _judge(self, stored: Log, letters: list[At]) -> None:
        verify(self.directory / "data")
        for topic, messages in stored.items():
            dumped = [_dumped(topic, document) for document in self._server.dump(topic)]
            compare(f"the log of {topic}, by fetch and by dump", messages, dumped)
        published = {topic: messages for topic, messages in stored.items() if topic != DEAD_LETTERS}
        self._judge_publishes(published)
        self._judge_order(published)
        for reader in self._readers:
            wanted = reader.wanted(stored)
            compare(f"{reader.name}: partitions", sorted(reader.rows), sorted(wanted))
            for place, row in wanted.items():
                compare(f"{reader.name}: {place}", reader.rows[place], row)
        self._judge_shared(stored, letters)
        self._judge_partitioned(stored)
        self._judge_positions()
        self._letters = len(letters)

    def _judge_publishes(self, stored: Log) -> None:
        found: dict[bytes, list[tuple[str, Stored]]] = defaultdict(list)
        for topic, messages in stored.items():
            for each in messages:
                found[each.value].append((topic, each))
        unknown = found.keys() - self.journal.sent.keys()
        assert not unknown, f"nobody published {[found[value] for value in list(unknown)[:3]]}"
        keys: dict[tuple[str, str], int] = {}
        for value, sent in self.journal.sent.items():
            places = found[value]
            low = 1 if sent.is_certain else 0
            assert low <= len(places) <= 1, f"{sent} is stored {len(places)} times: {places!r:.500}"
            for topic, each in places:
                key = None if sent.key is None else sent.key.encode()
                assert (each.subject, each.key) == (sent.subject, key), f"{sent} is stored as {each}"
                self._judge_receipt(sent, topic, each)
                if sent.key is not None:
                    partition = keys.setdefault((topic, sent.key), each.partition)
                    assert partition == each.partition, f"{sent} is in {each.partition}, its key in {partition}"

    def _judge_receipt(self, sent: Sent, topic: str, stored: Stored) -> None:
        receipt = sent.receipt
        if receipt is None:
            return
        told = (receipt.topic, receipt.partition, receipt.offset)
        is_later = sent.delay is not None and told[1:] == (-1, -1)
        assert is_later or told == (topic, stored.partition, stored.offset), f"{sent} is at {topic}, {stored}"
        assert sent.message_id is not None or not receipt.duplicate, f"{sent} repeats nothing"

    def _judge_order(self, stored: Log) -> None:
        rows: dict[tuple[str, str, int], list[Sent]] = defaultdict(list)
        for topic, messages in stored.items():
            for each in messages:
                sent = self.journal.sent[each.value]
                if sent.keeps_order:
                    rows[sent.author, topic, each.partition].append(sent)
        for row, several in rows.items():
            for one, other in pairwise(several):
                assert one.number < other.number, f"{row}: {other} comes behind {one}"

    def _judge_shared(self, stored: Log, letters: list[At]) -> None:
        group = self._workers
        buried = set(letters)
        twice = [at for at, times in Counter(letters).items() if times > 1]
        assert not twice, f"{group.name}: dead letters more than once: {twice[:3]}"
        jobs = {("jobs", each.partition, each.offset): each for each in stored["jobs"]}
        poison = {at for at, each in jobs.items() if is_poison(each.value)}
        blameless = buried - poison - group.rejected
        assert not blameless, f"{group.name}: {[jobs.get(at) for at in sorted(blameless)[:3]]} became dead letters"
        missing = (poison | group.rejections) - buried
        assert not missing, f"{group.name}: {[jobs[at] for at in sorted(missing)[:3]]} are no dead letters"
        for at, each in jobs.items():
            assert at in group.done or at in buried, f"{group.name}: {at}, {each!r:.200}, was never handled"
        for at, value in group.values.items():
            assert jobs[at].value == value, f"{group.name}: {value!r} was delivered as {at}, where {jobs[at]} is"

    def _judge_partitioned(self, stored: Log) -> None:
        group = self._keepers
        wanted: dict[Place, list[int]] = defaultdict(list)
        for each in stored["four"]:
            if matches(group.pattern.encode(), each.subject.encode()):
                wanted["four", each.partition].append(each.offset)
        assert wanted.keys() == group.rows.keys(), f"{group.name}: {group.rows.keys()}, not {wanted.keys()}"
        for place, offsets in wanted.items():
            index_of = {offset: index for index, offset in enumerate(offsets)}
            reached = 0
            for generation, row in sorted(group.rows[place].items()):
                first = index_of[row[0]]
                compare(f"{group.name}: {place} by {generation}", row, offsets[first : first + len(row)])
                assert first <= reached, f"{group.name}: {place} skips {offsets[reached:first]} by {generation}"
                done = max((offset for bound, offset in group.commits[place] if bound < generation), default=0)
                assert row[0] >= done, f"{group.name}: {place} is at {row[0]} by {generation}, {done} was committed"
                reached = max(reached, first + len(row))
            assert reached == len(offsets), f"{group.name}: {place} ends at {offsets[reached]}"

    def _judge_positions(self) -> None:
        with Store(self.directory / "data") as store:
            positions = read_positions(store)
        for key, rows in positions.items():
            for one, other in pairwise(rows):
                assert one["floor"] <= other["floor"], f"{key} goes back: {one['floor']}, {other['floor']}"


def compare(what: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Raise the first difference, with what is around it."""
    if found == wanted:
        return
    at = next((i for i, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
    at = min(len(found), len(wanted)) if at is None else at
    around = slice(max(0, at - 2), at + 3)
    shown = [[f"{each!r:.120}" for each in row[around]] for row in (found, wanted)]
    raise AssertionError(
        f"{what}: {len(found)} and {len(wanted)}, the first difference is at {at}:\n"
        f"  found  {shown[0]}\n  wanted {shown[1]}"
    )


def _origin(letter: Message) -> At:
    topic, partition, offset = (letter.headers[f"Dead-Letter-{name}"] for name in ("Topic", "Partition", "Offset"))
    return topic, int(partition), int(offset)


async def _connected(client: AsyncClient) -> AsyncClient:
    await client.connect()
    return client


def _dumped(topic: str, document: dict[str, Any]) -> Stored:
    return Stored(
        document["partition"],
        document["offset"],
        document.get("subject", topic),
        document["key"].encode() if "key" in document else None,
        document["value"].encode(),
    )
