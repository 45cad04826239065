"""The binary dialect for one connection: a match over its frames, HELLO, OPEN, CREDIT, CALL, and deliveries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.flow import Flow
from penstock.broker.group import Group
from penstock.broker.group_state import Mode
from penstock.broker.member import Deliveries, Member, Place, RefreshNotice
from penstock.broker.subscription import Subscription
from penstock.broker.topic import is_reserved
from penstock.doors.binary.frames import Frames, error_fields
from penstock.doors.binary.producing import Producing
from penstock.doors.binary.reading import StoredReading
from penstock.doors.binary.settling import settle
from penstock.doors.dialect import ConnectionType, Ending
from penstock.doors.gate import credentials
from penstock.doors.requests import OpenSubscription, begin, read
from penstock.errors import BadFrame, BadRequest, BadSubject, GroupConflict, PenstockError
from penstock.model.batch import BATCH_BYTES_MAX
from penstock.model.run import Run, split
from penstock.model.subject import is_readable
from penstock.wire import binary
from penstock.wire.binary import Frame, Type

if TYPE_CHECKING:
    from penstock.doors.session import Session

VERSION: Final = 1
# Messages on the way to one subscription.
CREDIT_MAX: Final = 1_000_000


class Binary:
    type: ConnectionType = "binary"

    def __init__(self, session: Session, codec: Frames | None = None) -> None:
        """`codec`: that of a client that said HELLO late."""
        self.session = session
        self.codec = codec or Frames(session)
        self._broker = session.broker
        self._producing = Producing(self)
        self._reading = StoredReading(self)
        # Whether the client has said HELLO.
        self._is_open = False
        self._fetches: set[asyncio.Task[None]] = set()
        # What members were told of a refresh and have not answered, by the number of the frame; and the last number.
        self._notices: dict[int, tuple[Member, RefreshNotice]] = {}
        self._last_notice = 0
        session.at_end.append(self._end)

    # Frames.

    def credentials(self, event: Frame) -> Mapping[str, Any] | None:
        return credentials(binary.read_request(event.payload)) if event.type == Type.HELLO else None

    def admitted(self) -> None:
        self.codec.admitted()

    def deny(self, event: Frame, error: PenstockError) -> None:
        if event.type != Type.HELLO:
            self.disconnect(Ending.UNAUTHORIZED)
            return
        self._is_open = True
        self.answer_error(event.id, error)
        self.session.peer.close()

    def do(self, events: deque[Frame]) -> Coroutine[Any, Any, None] | None:
        frame = events.popleft()
        kind, number, payload = frame
        if not self._is_open and kind > Type.HELLO:
            self.disconnect(BadFrame("say HELLO first"))
            return None
        match kind:
            case Type.APPEND:
                return self._producing.append(number, payload)
            case Type.PUBLISH:
                return self._producing.publish(number, payload)
            case Type.STAGE:
                return self._producing.stage(number, payload)
            case Type.FETCH:
                fetch = self.session.inbox.begin(frame, self._reading.fetch(number, binary.read_fetch(payload)))
                self._fetches.add(fetch)
                fetch.add_done_callback(self._fetches.discard)
            case Type.CREDIT:
                self._credit(*binary.read_credit(payload))
            case Type.SETTLE:
                settle(self, number, binary.read_settle(payload))
            case Type.OPEN:
                return self._open(number, binary.read_request(payload))
            case Type.END:
                self._unsubscribe(binary.read_end(payload))
                self.answer(number, {})
            case Type.CALL:
                self.session.inbox.begin(frame, self._call(number, binary.read_request(payload)))
            case Type.SNAPSHOT:
                self.session.inbox.begin(frame, self._reading.snapshot(number, binary.read_request(payload)))
            case Type.READ:
                self.session.inbox.begin(frame, self._reading.read(number, binary.read_read(payload)))
            case Type.HELLO:
                self._hello(number, binary.read_request(payload))
            case Type.HEARTBEAT:
                if number:
                    self.codec.answer(binary.frame(Type.HEARTBEAT, number))
            case Type.DISCONNECT:
                self.session.peer.close()
            case Type.ACK | Type.RESET_ACK | Type.READY_ACK:
                self._notice_answered(number)
            case _:
                self.disconnect(BadFrame(f"a frame of type {kind:#04x}, which a client does not send"))
        return None

    def _hello(self, number: int, options: dict[str, Any]) -> None:
        if options.get("version") != VERSION:
            raise BadRequest(f"version {options.get('version')!r} of the protocol is not known here, {VERSION} is")
        self._is_open = True
        self.codec.allow_batches()
        self.session.name = options.get("name")
        shared = self.session.shared
        if "claim" in options:
            shared.claims.take(self.session, options["claim"], options.get("owner"))
        self.answer(
            number,
            {
                "server_id": shared.node.id,
                "version": shared.node.version,
                "node_id": shared.node.node_id,
                "payload_bytes_max": shared.settings.payload_bytes_max,
                "heartbeat_s": shared.settings.heartbeat_s,
            },
        )

    async def _call(self, number: int, fields: dict[str, Any]) -> None:
        data = await self.session.shared.calls.answer(self.session.peer, fields, self.session.identity)
        self.codec.answer(binary.frame(Type.RESULT, number, data))

    # Subscriptions.

    async def _open(self, number: int, options: dict[str, Any]) -> None:
        asked, session = read(OpenSubscription, options), self.session
        subscription, pattern, credit = asked.subscription, asked.pattern.encode(), asked.credit
        group = None if asked.group is None else asked.group.encode()
        if not is_readable(pattern) or is_reserved(pattern):
            raise BadSubject(f"{asked.pattern!r} is not a pattern that can be read")
        if subscription in session.subscriptions:
            raise GroupConflict(f"there is a subscription {subscription} already")
        flow = Flow(rate=0, burst=1, buffer=max(session.shared.settings.flow.buffer, min(credit, CREDIT_MAX)))
        member = Member(b"%d" % subscription, session, flow)
        member.credit = min(credit, CREDIT_MAX)
        if asked.refresh:
            if group is None:
                raise BadRequest("only members of a group are told of a refresh: name a group")
            member.on_refresh = session.guard(partial(self._notify, member))
        start = begin("start", asked.start, self._broker.clock.now_us())
        if asked.deliveries_max is not None and (group is None or asked.mode is not Mode.SHARED):
            raise BadRequest("deliveries_max is for shared groups: only they count deliveries")
        member.deliveries = Deliveries(asked.deliveries_max)
        if group is None:
            session.restrict(member, pattern)
        else:
            session.authorize_join(group, pattern)
        hint = await self._broker.subscriptions.hint(pattern)
        reader: Subscription | Group
        if group is None:
            reader = await self._broker.subscriptions.subscribe_from(pattern, member, start)
            answer: dict[str, Any] = {"positions": self._broker.subscriptions.positions(reader), "generation": 0}
        else:
            reader = await self._broker.groups.join(group, pattern, member, asked.mode, start=start)
            answer = {"positions": [], "generation": reader.state.generation}
        if hint is not None:
            answer["hint"] = hint
        session.subscriptions[subscription] = (member, reader)
        if not session.is_connected:
            self._unsubscribe(subscription)
        self.answer(number, answer)

    def _credit(self, subscription: int, messages: int) -> None:
        held = self.session.subscriptions.get(subscription)
        if held is None:
            return  # it ended meanwhile
        member, reader = held
        # Credit for no messages takes back what the client has given.
        member.credit = min((member.credit or 0) + messages, CREDIT_MAX) if messages else 0
        reader.wake()

    def _unsubscribe(self, subscription: int) -> None:
        held = self.session.subscriptions.get(subscription)
        if held is not None:
            self._notices = {key: each for key, each in self._notices.items() if each[0] is not held[0]}
            self.session.unsubscribe(subscription)

    def _notify(self, member: Member, notice: RefreshNotice) -> None:
        """Tell the client of a refresh. It answers under the number of the frame."""
        self._last_notice += 1
        self._notices[self._last_notice] = (member, notice)
        fields = {"subscription": int(member.sid), "topic": notice.topic.decode()}
        self.codec.write(binary.json_frame(Type[notice.signal], self._last_notice, fields))

    def _notice_answered(self, number: int) -> None:
        if not 0 < number <= self._last_notice:
            self.disconnect(BadFrame(f"an answer to {number}, which was not asked"))
        # It is absent if its subscription has ended meanwhile.
        if (found := self._notices.pop(number, None)) is not None:
            found[1].answered()

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        number = int(member.sid)
        checked = self.session.checked
        if checked is not None and run.replies and checked.replies_to_requests:
            for reply in run.replies.values():
                checked.expect_reply(reply)
        held = self.session.subscriptions.get(number)
        generation = held[1].state.generation if held is not None and isinstance(held[1], Group) else 0
        self.session.send_in_turn(run, partial(self._write_messages, number, generation, place, run, attempts))

    def _write_messages(
        self, number: int, generation: int, place: Place, run: Run, attempts: Mapping[int, int] | None
    ) -> None:
        topic_id = place.topic_id if place.keeps else 0
        first = 0
        # Messages that are chosen from a stored batch carry their offsets, and may need more room than the batch.
        for part in [run] if run.batch is not None else split(run, BATCH_BYTES_MAX):
            tries = {at - first: count for at, count in (attempts or {}).items() if 0 <= at - first < len(part)}
            batch = part.stored(place.name)
            self.session.peer.count_sent(len(part), len(batch))
            messages = binary.Messages(topic_id, place.number, generation, place.name, tries, batch)
            self.codec.write(binary.messages_frame(number, messages))
            first += len(part)

    def fail(self, member: Member, error: PenstockError) -> None:
        number = int(member.sid)
        self._unsubscribe(number)
        self.codec.write(binary.json_frame(Type.ENDED, number, error_fields(error)))

    # Keep-alive and the end.

    def keep_alive(self, silent_s: float) -> float:
        return self.codec.keep_alive(silent_s, must_answer=self._is_open)

    def _end(self) -> None:
        # Requests that change something are carried out.
        for fetch in self._fetches:
            fetch.cancel()
        self._reading.end()

    def disconnect(self, reason: Ending | PenstockError) -> None:
        self.codec.disconnect(reason)

    # Replies.

    def refuse(self, event: Frame | None, error: PenstockError) -> None:
        self.answer_error(0 if event is None else event.id, error)

    def answer(self, number: int, value: dict[str, Any]) -> None:
        self.codec.answer(binary.json_frame(Type.RESULT, number, value))

    def answer_error(self, number: int, error: PenstockError) -> None:
        if self._is_open:
            self.codec.answer(binary.json_frame(Type.ERROR, number, error_fields(error)))
        else:
            self.disconnect(error)

    def settle(self, number: int, fields: dict[str, Any], error: PenstockError | None) -> None:
        """Answer a request whose outcome is settled."""
        if error is None:
            self.answer(number, fields)
        else:
            self.answer_error(number, error)
