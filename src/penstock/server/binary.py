"""A connection at the binary door: frames to the broker, and what the broker says back to frames.

Requests are answered as soon as their answer is known, in whatever order; only what is published keeps its order. A
client that says HELLO has all of the protocol. One that does not is a client of the Provider: it is told of a failure
by DISCONNECT, because its protocol has no other word for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock import headers
from penstock.batch import BATCH_BYTES_MAX, HEADER_BYTES, Batch, Buffer, accept_columns
from penstock.broker.flow import Flow
from penstock.broker.group import Group, Mode, Saved
from penstock.broker.intake import Receipt, Refusals, Stored
from penstock.broker.member import Deliveries, Member, Notice, Place
from penstock.broker.partition import Partition
from penstock.broker.subscription import Subscription
from penstock.broker.topic import RESERVED, ServedTopic, check_lines
from penstock.errors import (
    BadFrame,
    BadHeader,
    BadRequest,
    BadSubject,
    BatchTooLarge,
    Closed,
    GroupConflict,
    LogDamaged,
    NoResponders,
    OffsetOutOfRange,
    PeerError,
    PenstockError,
    Unauthorized,
    UnknownTopic,
)
from penstock.run import Run, open_batch, split
from penstock.server import calls, provider
from penstock.server.connection import INTERNAL_ERROR, TURN_S, Connection
from penstock.server.gate import HANDSHAKE_BYTES_MAX, credentials
from penstock.server.pending_replies import SLICE_MESSAGES, PendingReplies
from penstock.storage.snapshot import Snapshot
from penstock.subject import is_readable, is_subject
from penstock.wire import binary
from penstock.wire.binary import Frame, FrameReader, Type, Verb

if TYPE_CHECKING:
    from penstock.server.server import Server

VERSION: Final = 1
# Requests of one connection that wait for something at once; then it is not read from.
REQUESTS_MAX: Final = 256
# What one FETCH gives, however much it asks for; a batch that is larger is given whole.
FETCH_BYTES_MAX: Final = 16 << 20
FETCH_WAIT_MS_MAX: Final = 60_000
# What one READ gives.
READ_BYTES_MAX: Final = 4 << 20
# Memory for a frame that is only announced.
AHEAD_BYTES: Final = 4 << 20
# Frames that are parsed at once; then others have a turn.
TURN_FRAMES: Final = 1024
# A batch that is larger is checked in a worker.
INLINE_BYTES_MAX: Final = 1 << 20
INLINE_MESSAGES_MAX: Final = 4096
PUBLISH_MESSAGES_MAX: Final = 1 << 17
# Messages on the way to one subscription.
CREDIT_MAX: Final = 1_000_000

_SAY_HELLO: Final = Unauthorized("say HELLO first, with a user and a password or a token")


class _Checked(NamedTuple):
    """A batch that is sound, and its messages if they are needed."""

    batch: Batch
    run: Run | None = None


class BinarySession(Connection, asyncio.BufferedProtocol):
    type = "binary"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.unanswered = 0
        self.subscriptions: dict[int, tuple[Member, Subscription | Group]] = {}
        self.is_hello = False
        self._provider = provider.Provider(self)
        # A message of the Provider's is JSON, in which a byte may take several.
        json_bytes_max = max(binary.JSON_BYTES_MAX, 2 * server.config.server.payload_bytes_max + (64 << 10))
        bytes_max = HANDSHAKE_BYTES_MAX if server.gate.needs_auth else json_bytes_max
        self._reader = FrameReader(
            server.scratch,
            bytes_max,
            ahead_bytes=AHEAD_BYTES,
            json_bytes_max=min(json_bytes_max, binary.FRAME_BYTES_MAX),
            frames_max=1,
        )
        # Frames that wait for what is published before them; None: none is waited for.
        self._waiting: deque[Frame] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._fetches: set[asyncio.Task[None]] = set()
        # One at a time reads and sends: what they have in memory waits for the client.
        self._fetching = asyncio.Lock()
        # Those that it has begun, by number. Nobody else reads them, and they end with the connection.
        self._snapshots: dict[int, Snapshot] = {}
        self._last_snapshot = 0
        self._pending_replies = PendingReplies(self, lambda: self._disconnect(Closed("the server stops")))
        # What members were told of a refresh and have not answered, by the number of the frame; and the last number.
        self._notices: dict[int, tuple[Member, Notice]] = {}
        self._last_notice = 0

    # From the transport.

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, count: int) -> None:
        self._read(count, lambda: self._reader.filled(count))

    def data_received(self, data: bytes) -> None:
        """What came before it was known that this is the binary door."""
        self._read(len(data), lambda: self._reader.feed(data))

    def pause_writing(self) -> None:
        self.peer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.read_on()
        for _, reader in list(self.subscriptions.values()):
            reader.wake()

    def end(self) -> Iterator[None]:
        self._reader.clear()
        # What changes something is done to its end.
        for fetch in self._fetches:
            fetch.cancel()
        for number in list(self._snapshots):
            self.spawn(self._end_snapshot(number))
        for number in list(self.subscriptions):
            self.call(self.unsubscribe, number)
            yield

    def tell_fault(self) -> None:
        self._disconnect(INTERNAL_ERROR)

    def _read(self, count: int, frames: Callable[[], list[Frame]]) -> None:
        self.received(count)
        self.unanswered = 0
        if self.peer.is_closing:
            return
        try:
            self._take(frames())
            self._reader.check()
        except BadFrame as error:
            self._disconnect(error)
        if not self.is_admitted and not self.peer.is_closing and not self.server.gate.received(self, count):
            self._disconnect(_SAY_HELLO)
        if self._waiting is None:
            self.expect(self._reader.expected, is_next=False)

    def _take(self, frames: list[Frame]) -> None:
        if not frames or self.peer.is_closing:
            return
        if self._waiting is not None:
            self._waiting.extend(frames)
        else:
            self._handle(deque(frames))

    def read_on(self) -> None:
        is_busy = self._waiting is not None or self._pending_replies.is_stopping or len(self._requests) >= REQUESTS_MAX
        if not is_busy:
            self.peer.read_on()

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        number = int(member.sid)
        held = self.subscriptions.get(number)
        generation = held[1].generation if held is not None and isinstance(held[1], Group) else 0
        if self.is_hello:
            self.send_in_turn(run, partial(self._write_messages, number, generation, place, run, attempts))
        else:
            self.send_in_turn(run, partial(self._provider.write_messages, number, generation, place, run))

    def _write_messages(
        self, number: int, generation: int, place: Place, run: Run, attempts: Mapping[int, int] | None
    ) -> None:
        topic_id = place.topic_id if place.keeps else 0
        first = 0
        # What is chosen from a stored batch says the offset of each message, and may need more room than the batch.
        for part in [run] if run.batch is not None else split(run, BATCH_BYTES_MAX):
            tries = {at - first: count for at, count in (attempts or {}).items() if 0 <= at - first < len(part)}
            batch = part.stored(place.name)
            self.peer.count_sent(len(part), len(batch))
            messages = binary.Messages(topic_id, place.number, generation, place.name, tries, batch)
            self.write(binary.messages_frame(number, messages))
            first += len(part)

    def has_published(self, place: Place, offset: int) -> bool:
        return False  # it hears itself

    def fail(self, member: Member, error: PenstockError) -> None:
        number = int(member.sid)
        self.unsubscribe(number)
        if self.is_hello:
            self.write(binary.json_frame(Type.ENDED, number, _told(error)))
        else:
            self._disconnect(error)

    # For the server.

    def ping(self) -> None:
        if self.is_hello and self.unanswered >= 2:
            self.server.counters.stale += 1
            self._disconnect(BadRequest("nothing was heard for too long"))
            return
        self.unanswered += 1
        self.write(binary.frame(Type.HEARTBEAT, 0))

    def expire(self) -> None:
        self.server.counters.silent += 1
        self._disconnect(BadRequest("no whole frame came in time"))

    def stop(self) -> None:
        """The server stops: no more requests, but the answers to what was published."""
        if self.peer.is_connected and not self._pending_replies.is_stopping:
            self.peer.hold()
            self._pending_replies.stop()

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "unanswered": len(self._requests)}

    # Frames.

    def _handle(self, frames: deque[Frame]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + TURN_S
        while frames and not (self.peer.is_closing or self._pending_replies.is_stopping):
            frame = frames.popleft()
            waits: Coroutine[Any, Any, None] | None = None
            try:
                waits = self._do(frame)
            except PenstockError as error:
                self.answer_error(frame.id, error)
            if waits is None and frames and loop.time() > until:
                # Let the others have a turn.
                waits = asyncio.sleep(0)
            if waits is not None:
                self._waiting = frames
                self.peer.hold()
                self.spawn(self._wait(frame.id, waits))
                return
        if self._reader.has_more and not self.peer.is_closing:
            self._waiting = frames
            self.peer.hold()
            self.spawn(self._wait(0, asyncio.sleep(0)))

    async def _wait(self, number: int, waits: Coroutine[Any, Any, None]) -> None:
        """Let something take its time; what comes behind it waits."""
        await self._answer_later(number, waits)
        frames, self._waiting = self._waiting or deque(), None
        if not self.peer.is_closing:
            try:
                if not frames and self._reader.has_more:
                    frames.extend(self._reader.more())
                self._handle(frames)
                self._reader.check()
            except BadFrame as error:
                self._disconnect(error)
            if self._waiting is None:
                self.expect(self._reader.expected, is_next=True)
            self.read_on()

    def _do(self, frame: Frame) -> Coroutine[Any, Any, None] | None:
        """One frame; what those behind it must wait for, if they must."""
        kind, number, payload = frame
        if not self.is_admitted:
            options = credentials(binary.read_request(payload)) if kind == Type.HELLO else None
            if not self.server.gate.admit(self, options):
                self._deny(frame)
                return None
            self._reader.frames_max = TURN_FRAMES
        if not self.is_hello and kind > Type.HELLO:
            self._disconnect(BadFrame("say HELLO first"))
            return None
        match kind:
            case Type.APPEND:
                return self._append(number, payload)
            case Type.PUBLISH:
                return self._publish_batch(number, payload)
            case Type.STAGE:
                return self._stage(number, payload)
            case Type.FETCH:
                fetch = self._begin(number, self._fetch(number, binary.read_fetch(payload)))
                self._fetches.add(fetch)
                fetch.add_done_callback(self._fetches.discard)
            case Type.CREDIT:
                self._credit(*binary.read_credit(payload))
            case Type.SETTLE:
                self._settle(number, binary.read_settle(payload))
            case Type.OPEN:
                return self._open(number, binary.read_request(payload))
            case Type.END:
                self.unsubscribe(binary.read_end(payload))
                self.answer(number, {})
            case Type.CALL:
                self._begin(number, self._call(number, binary.read_request(payload)))
            case Type.SNAPSHOT:
                self._begin(number, self._snapshot(number, binary.read_request(payload)))
            case Type.READ:
                self._begin(number, self._read_snapshot(number, binary.read_read(payload)))
            case Type.HELLO:
                self._hello(number, binary.read_request(payload))
            case Type.HEARTBEAT:
                if number:
                    self.answer_frame(binary.frame(Type.HEARTBEAT, number))
            case Type.DISCONNECT:
                self.peer.close()
            case _ if not self.is_hello and kind in provider.TYPES:
                return self._provider.do(frame)
            case Type.ACK | Type.RESET_ACK | Type.READY_ACK:
                self._heard(number)
            case _:
                self._disconnect(BadFrame(f"a frame of type {kind:#04x}, which a client does not send"))
        return None

    def _begin(self, number: int, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A request that others do not wait for."""
        task = self.spawn(self._answer_later(number, coroutine))
        self._requests.add(task)
        task.add_done_callback(self._end_request)
        if len(self._requests) >= REQUESTS_MAX:
            self.peer.hold()
        return task

    def _end_request(self, task: asyncio.Task[None]) -> None:
        was_busy = len(self._requests) >= REQUESTS_MAX
        self._requests.discard(task)
        if was_busy:
            self.read_on()

    async def _answer_later(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except PenstockError as error:
            self.answer_error(number, error)

    def _deny(self, frame: Frame) -> None:
        """Close a connection whose first frame does not admit it."""
        if frame.type != Type.HELLO:
            self._disconnect(_SAY_HELLO)
            return
        self.is_hello = True
        self.answer_error(frame.id, Unauthorized("the broker does not know this user or token"))
        self.peer.close()

    def _hello(self, number: int, options: dict[str, Any]) -> None:
        if options.get("version") != VERSION:
            raise BadRequest(f"version {options.get('version')!r} of the protocol is not known here, {VERSION} is")
        self.is_hello = True
        self._reader.bytes_max = binary.FRAME_BYTES_MAX
        self.name = options.get("name")
        if "claim" in options:
            self.server.claims.take(self, options["claim"], options.get("owner"))
        config = self.server.config.server
        self.answer(
            number,
            {
                "server_id": self.server.id,
                "version": self.server.version,
                "node_id": config.node_id,
                "payload_bytes_max": config.payload_bytes_max,
                "heartbeat_s": config.heartbeat_s,
            },
        )

    # In.

    def _append(self, number: int, payload: bytes | bytearray) -> Coroutine[Any, Any, None] | None:
        to, data = binary.read_append(payload)
        topic = self.broker.public_topic(to.topic_id)
        return self._check(data, topic, lambda checked: self._append_checked(number, to, checked))

    def _append_checked(self, number: int, to: binary.Append, checked: _Checked) -> Coroutine[Any, Any, None] | None:
        batch, run = checked
        if run is not None:
            return self._publish_run(run, lambda receipt: self._tell_appended(number, receipt))
        if self.broker.store.rounds.is_crowded:
            return self._append_later(number, to, batch)
        self._append_batch(number, to, batch)
        return None

    def _check(
        self,
        data: Buffer,
        topic: ServedTopic | None,
        then: Callable[[_Checked], Coroutine[Any, Any, None] | None],
        *,
        is_staged: bool = False,
    ) -> Coroutine[Any, Any, None] | None:
        """Check a producer's batch, and go on with it: at once, or in a worker if it is large."""
        if len(data) > INLINE_BYTES_MAX or (len(data) >= HEADER_BYTES and _is_large(Batch(data))):
            return self._check_later(data, topic, then, is_staged=is_staged)
        return then(self._checked(data, topic, is_staged=is_staged))

    async def _check_later(
        self,
        data: Buffer,
        topic: ServedTopic | None,
        then: Callable[[_Checked], Coroutine[Any, Any, None] | None],
        *,
        is_staged: bool,
    ) -> None:
        async with self.server.large:
            waits = then(await self.server.work(self._checked, data, topic, is_staged=is_staged))
            if waits is not None:
                await waits

    def _checked(self, data: Buffer, topic: ServedTopic | None, *, is_staged: bool) -> _Checked:
        """Return a batch that is sound, and its messages if somebody must look at them."""
        batch, columns = accept_columns(data)
        if batch.plain_length > self.server.config.server.payload_bytes_max:
            self.check_size(columns.largest())
        check_lines(batch, None if topic is None else topic.name, columns)
        if topic is None:
            if batch.count > PUBLISH_MESSAGES_MAX:
                raise BatchTooLarge(f"{batch.count} messages in one PUBLISH, {PUBLISH_MESSAGES_MAX} are allowed")
            return _Checked(batch, open_batch(batch, b"", columns=columns))
        now_us = self.broker.clock.now_us()
        asked = [headers.read(block, now_us) for block in columns.distinct("headers")] if batch.asks else []
        if is_staged:
            if any(each.due_us for each in asked):
                raise BadHeader("a delayed message cannot be part of a transaction")
            return _Checked(batch)
        # A TTL is for readers: the batch is stored as it came.
        asks_more = any(each.identity is not None or each.due_us is not None for each in asked)
        if topic.takes_opaque(asks=asks_more):
            return _Checked(batch)
        if asks_more and batch.producer:
            raise BadRequest("a batch whose messages ask for something has no producer: their ids tell repetitions")
        run = open_batch(batch, topic.name, columns=columns)
        for block in run.headers.values():
            headers.read(block, now_us)
        return _Checked(batch, run)

    async def _append_later(self, number: int, to: binary.Append, batch: Batch) -> None:
        await self.broker.store.rounds.room()
        self._append_batch(number, to, batch)

    def _append_batch(self, number: int, to: binary.Append, batch: Batch) -> None:
        # Only what is there already is answered before `append` returns.
        was_there = True

        def done(offset: int, error: PenstockError | None) -> None:
            if error is None:
                self.answer(number, {"offset": offset, "duplicate": was_there})
            else:
                self.answer_error(number, error)
            self._pending_replies.end(0 if error is None else batch.count, error)

        self._pending_replies.begin(batch.count, len(batch.data))
        try:
            was_there = self.broker.append(*to, batch, self.guard(done))
        except PenstockError as error:
            done(0, error)

    def _stage(self, number: int, payload: bytes | bytearray) -> Coroutine[Any, Any, None] | None:
        stage, data = binary.read_stage(payload)
        topic = self.broker.public_topic(stage.to.topic_id)
        return self._check(
            data, topic, lambda checked: self._stage_checked(number, stage, checked.batch), is_staged=True
        )

    def _stage_checked(self, number: int, stage: binary.Stage, batch: Batch) -> Coroutine[Any, Any, None] | None:
        if self.broker.transactions is None or self.broker.store.rounds.is_crowded:
            return self._stage_later(number, stage, batch)
        self._stage_batch(number, stage, batch)
        return None

    async def _stage_later(self, number: int, stage: binary.Stage, batch: Batch) -> None:
        await self.broker.open_transactions()
        await self.broker.store.rounds.room()
        self._stage_batch(number, stage, batch)

    def _stage_batch(self, number: int, stage: binary.Stage, batch: Batch) -> None:
        def done(offset: int, error: PenstockError | None) -> None:
            if error is None:
                self.answer(number, {"offset": offset})
            else:
                self.answer_error(number, error)
            self._pending_replies.end(0 if error is None else batch.count, error)

        self._pending_replies.begin(batch.count, len(batch.data))
        try:
            self.broker.stage(*stage, batch, self.guard(done))
        except PenstockError as error:
            done(0, error)

    def _publish_batch(self, number: int, payload: bytes | bytearray) -> Coroutine[Any, Any, None] | None:
        def then(checked: _Checked) -> Coroutine[Any, Any, None] | None:
            assert checked.run is not None, "it is opened"
            if checked.run.replies and len(checked.run) == 1:
                # A request. Those among other messages are not looked at: for each, every group would be.
                self._check_served(checked.run.subjects[0])
            return self._publish_run(checked.run, lambda receipt: self._tell_published(number, receipt))

        return self._check(payload, None, then)

    def _check_served(self, subject: bytes) -> None:
        if not _refusal(subject) and not self.broker.is_served(subject):
            raise NoResponders(f"nobody is subscribed to {subject.decode(errors='replace')!r}: nothing was published")

    def publish(self, run: Run, told: Callable[[Receipt], None]) -> Coroutine[Any, Any, None] | None:
        """A single message that did not come as a batch."""
        self.check_size(len(run.values[0]), len(run.keys.get(0, b"")))
        return self._publish_run(run, told)

    def _publish_run(self, run: Run, told: Callable[[Receipt], None]) -> Coroutine[Any, Any, None] | None:
        """Now, or when there is a topic and room for it; `told` is called when it is decided."""
        refusals: Refusals = {subject: error for subject in set(run.subjects) if (error := _refusal(subject))}
        return self._pending_replies.publish(run, told, refusals)

    def _tell_published(self, number: int, receipt: Receipt) -> None:
        if receipt.count <= SLICE_MESSAGES:
            self.answer(number, {"receipts": list(map(_receipt, receipt.stored()))})
            return
        self._pending_replies.begin(0)
        self.spawn(self._tell_slowly(number, receipt.stored()))

    async def _tell_slowly(self, number: int, outcomes: list[Stored | PenstockError]) -> None:
        """Answer a PUBLISH of many messages: writing the receipts takes a while."""
        parts = []
        for begin in range(0, len(outcomes), SLICE_MESSAGES):
            receipts = list(map(_receipt, outcomes[begin : begin + SLICE_MESSAGES]))
            parts.append(json.dumps(receipts, separators=(",", ":"))[1:-1])
            await asyncio.sleep(0)
        self.answer_frame(binary.frame(Type.RESULT, number, f'{{"receipts":[{",".join(parts)}]}}'.encode()))
        self._pending_replies.end()

    def _tell_appended(self, number: int, receipt: Receipt) -> None:
        if receipt.error is not None:
            self.answer_error(number, receipt.error)
            return
        stored = [each for each in receipt.stored() if isinstance(each, Stored)]
        duplicates = sum(each.is_duplicate for each in stored)
        is_duplicate = duplicates == len(stored)
        self.answer(number, {"offset": stored[0].offset, "duplicate": is_duplicate, "duplicates": duplicates})

    # Out.

    async def _fetch(self, number: int, fetch: binary.Fetch) -> None:
        topic = self.broker.public_topic(fetch.topic_id)
        if topic.refusal is not None:
            raise topic.refusal
        if fetch.partition >= len(topic.partitions):
            raise UnknownTopic(f"{topic.topic.name} has no partition {fetch.partition}")
        partition = topic.partitions[fetch.partition]
        log, bytes_max = partition.log, min(fetch.bytes_max, FETCH_BYTES_MAX)
        async with self._fetching:
            await self.peer.drained()
            # What comes while it is read has come behind this.
            served = partition.served
            batches = await self.broker.store.read(log, fetch.offset, bytes_max)
            if batches or not fetch.wait_ms:
                self._send_batches(number, fetch, partition, batches)
                return
        try:
            async with asyncio.timeout(min(fetch.wait_ms, FETCH_WAIT_MS_MAX) / 1000):
                await partition.grown(max(fetch.offset, served))
        except TimeoutError:
            pass
        async with self._fetching:
            await self.peer.drained()
            batches = await self.broker.store.read(log, fetch.offset, bytes_max)
            self._send_batches(number, fetch, partition, batches)

    def _send_batches(self, number: int, fetch: binary.Fetch, partition: Partition, batches: list[Batch]) -> None:
        log = partition.log
        parts = [batch.data for batch in batches if not fetch.end or batch.base_offset < fetch.end]
        count = sum(batch.count for batch in batches[: len(parts)])
        partition.sent += count
        length = sum(map(len, parts))
        self.peer.count_sent(count, length)
        self.peer.write_parts([binary.batches_head(number, log.start, log.committed, length), *parts])

    # Snapshots.

    async def _snapshot(self, number: int, options: dict[str, Any]) -> None:
        if options.get("end") is not None:
            await self._end_snapshot(calls.Request(options).number("end"))
            self.answer(number, {})
            return
        snapshot = await self.broker.store.snapshot()
        self._last_snapshot += 1
        self._snapshots[self._last_snapshot] = snapshot
        if not self.peer.is_connected:
            await self._end_snapshot(self._last_snapshot)
            return
        file, size = snapshot.listing
        self.answer(number, {"snapshot": self._last_snapshot, "file": file, "bytes": size})

    async def _end_snapshot(self, snapshot: int) -> None:
        if (found := self._snapshots.pop(snapshot, None)) is not None:
            await self.server.work(self.broker.store.snapshots.end, found)

    async def _read_snapshot(self, number: int, read: binary.Read) -> None:
        snapshot = self._snapshots.get(read.snapshot)
        if snapshot is None:
            raise BadRequest(f"this connection has no snapshot {read.snapshot}: it may have been lost meanwhile")
        async with self._fetching:
            await self.peer.drained()
            now_us = self.broker.clock.monotonic_us()
            length = min(read.bytes_max, READ_BYTES_MAX)
            data = await self.server.work(snapshot.read, read.file, read.position, length, now_us)
            self.peer.write_parts([binary.head(Type.BYTES, number, len(data)), data])

    async def _open(self, number: int, options: dict[str, Any]) -> None:
        request = calls.Request(options)
        subscription, pattern = request.number("subscription"), request.name("pattern")
        group, credit = request.name_or_none("group"), request.number("credit", default=100)
        if not is_readable(pattern) or pattern.startswith(RESERVED):
            raise BadSubject(f"{request.text('pattern')!r} is not a pattern that can be read")
        if subscription in self.subscriptions:
            raise GroupConflict(f"there is a subscription {subscription} already")
        flow = Flow(rate=0, burst=1, buffer=max(self.server.flow.buffer, min(credit, CREDIT_MAX)))
        member = Member(b"%d" % subscription, self, flow)
        member.credit = min(credit, CREDIT_MAX)
        if request.flag("refresh"):
            if group is None:
                raise BadRequest("only members of a group are told of a refresh: name a group")
            member.hears = self.guard(partial(self._tell, member))
        start = request.start(self.broker.clock.now_us())
        deliveries_max = request.number_or_none("deliveries_max")
        if deliveries_max is not None and (group is None or request.mode() is not Mode.SHARED):
            raise BadRequest("deliveries_max is for shared groups: only they count deliveries")
        member.deliveries = Deliveries(deliveries_max)
        hint = await self.broker.hint(pattern)
        reader: Subscription | Group
        if group is None:
            reader = await self.broker.subscribe_from(pattern, member, start)
            answer: dict[str, Any] = {"positions": self.broker.positions(reader), "generation": 0}
        else:
            reader = await self.broker.join(group, pattern, member, request.mode(), start=start)
            answer = {"positions": [], "generation": reader.generation}
        if hint is not None:
            answer["hint"] = hint
        self.subscriptions[subscription] = (member, reader)
        if not self.peer.is_connected:
            self.unsubscribe(subscription)
        self.answer(number, answer)

    def _credit(self, subscription: int, messages: int) -> None:
        held = self.subscriptions.get(subscription)
        if held is None:
            return  # it ended meanwhile
        member, reader = held
        member.credit = min((member.credit or 0) + messages, CREDIT_MAX)
        reader.wake()

    def unsubscribe(self, number: int) -> None:
        held = self.subscriptions.pop(number, None)
        if held is None:
            return
        member, reader = held
        self._notices = {key: told for key, told in self._notices.items() if told[0] is not member}
        if isinstance(reader, Group):
            self.broker.leave(reader, member)
        else:
            self.broker.unsubscribe(reader, member)

    def _tell(self, member: Member, notice: Notice) -> None:
        """A word of a refresh; the client answers under the number of the frame."""
        self._last_notice += 1
        self._notices[self._last_notice] = (member, notice)
        fields = {"subscription": int(member.sid), "topic": notice.topic.decode()}
        self.write(binary.json_frame(Type[notice.word], self._last_notice, fields))

    def _heard(self, number: int) -> None:
        if not 0 < number <= self._last_notice:
            self._disconnect(BadFrame(f"an answer to {number}, which was not asked"))
        # Or its subscription has ended meanwhile.
        if (told := self._notices.pop(number, None)) is not None:
            told[1].answered()

    def _settle(self, number: int, settle: binary.Settle) -> None:
        held = self.subscriptions.get(settle.subscription)
        if held is None or not isinstance(held[1], Group):
            raise BadRequest(f"there is no subscription {settle.subscription} of a group")
        member, group = held[0], held[1]
        place, offsets = (settle.topic_id, settle.partition), settle.offsets
        if settle.verb != Verb.COMMIT and group.is_stale(place, settle.generation):
            # These were delivered before the group was reset, and come again: what is said now is not of those.
            self.answer(number, {"refused": list(offsets)})
            return
        match Verb(settle.verb):
            case Verb.ACK:
                self._ack(number, group, place, offsets)
            case Verb.COMMIT:
                group.commit(place, offsets[-1], settle.generation, self._when_saved(number, ()))
            case Verb.NACK:
                delay_us = min(settle.delay_us, headers.DELAY_US_MAX)
                self._each(
                    number,
                    offsets,
                    lambda offset, saved: group.nack(place, offset, delay_us, member, saved, settle.reason),
                )
            case Verb.EXTEND:
                refused = [offset for offset in offsets if not group.extend(place, offset, member)]
                self.answer(number, {"refused": refused})
            case Verb.RELEASE:
                refused = [offset for offset in offsets if not group.untake(place, offset, member)]
                self.answer(number, {"refused": refused})
            case Verb.REJECT:
                self._each(
                    number, offsets, lambda offset, saved: group.kill(place, offset, member, saved, settle.reason)
                )

    def _ack(self, number: int, group: Group, place: tuple[int, int], offsets: Sequence[int]) -> None:
        # It may be called before `ack_many` has returned, but not if that refuses anything.
        refused: list[int] = []
        saved = self._when_saved(number, refused)
        refused += group.ack_many(place, offsets, saved)
        if len(refused) == len(offsets):
            saved(None)

    def _each(self, number: int, offsets: Sequence[int], settle: Callable[[int, Saved], bool]) -> None:
        """What is said of one message after the other; the answer comes when all of it is stored."""
        refused: list[int] = []
        answer = self._when_saved(number, refused)
        left, failure = len(offsets), None

        def saved(error: PenstockError | None) -> None:
            nonlocal left, failure
            left, failure = left - 1, failure or error
            if not left:
                answer(failure)

        for offset in offsets:
            if not settle(offset, saved):
                refused.append(offset)
                saved(None)

    def _when_saved(self, number: int, refused: Sequence[int]) -> Callable[[PenstockError | None], None]:
        def saved(error: PenstockError | None) -> None:
            if error is None:
                self.answer(number, {"refused": list(refused)})
            else:
                self.answer_error(number, error)

        return self.guard(saved)

    async def _call(self, number: int, fields: dict[str, Any]) -> None:
        document = await calls.call(self.server, fields)
        data = await self.server.answers.make_for(self.peer, document)
        self.answer_frame(binary.frame(Type.RESULT, number, data))

    # Answers.

    def answer(self, number: int, value: dict[str, Any]) -> None:
        self.answer_frame(binary.json_frame(Type.RESULT, number, value))

    def answer_error(self, number: int, error: PenstockError) -> None:
        if self.is_hello:
            self.answer_frame(binary.json_frame(Type.ERROR, number, _told(error)))
        else:
            self._disconnect(error)

    def answer_frame(self, data: bytes) -> None:
        self.peer.answer(data)

    def write(self, data: bytes) -> None:
        self.peer.write(data)

    def _disconnect(self, error: PenstockError) -> None:
        """Say why, and close."""
        if isinstance(error, PeerError):
            self.server.counters.protocol_errors += 1
        self.write(binary.json_frame(Type.DISCONNECT, 0, _told(error)))
        self.peer.close()


def _is_large(batch: Batch) -> bool:
    """Return whether it takes long to check a batch, as far as its header can be believed."""
    return batch.count > INLINE_MESSAGES_MAX or batch.plain_length > INLINE_BYTES_MAX


def _receipt(stored: Stored | PenstockError) -> object:
    if isinstance(stored, Stored):
        return [stored.topic.decode(), stored.partition, stored.offset, stored.is_duplicate]
    return _told(stored)


def _told(error: PenstockError) -> dict[str, Any]:
    """An error as a peer is told of it."""
    told: dict[str, Any] = {"code": error.code, "text": str(error)}
    if isinstance(error, OffsetOutOfRange):
        told |= {"offset": error.offset, "start": error.start, "end": error.end}
    if isinstance(error, LogDamaged):
        where = {"path": str(error.path), "position": error.position, "first": error.first, "last": error.last}
        told |= where | {"reason": error.reason}
    return told


def _refusal(subject: bytes) -> PenstockError | None:
    if is_subject(subject) and not subject.startswith(RESERVED):
        return None
    return BadSubject(f"nothing can be published to {subject.decode(errors='replace')!r}")
