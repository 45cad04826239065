"""The text dialect for one connection: a match over its events, CONNECT, PING, errors and the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never

from penstock.broker.member import Member, Place
from penstock.doors.dialect import Codec, ConnectionType, Ending
from penstock.doors.replies import Reply
from penstock.doors.text import info
from penstock.doors.text.acknowledging import acknowledge, acknowledge_by_subject
from penstock.doors.text.input import Input
from penstock.doors.text.publisher import TextPublisher
from penstock.doors.text.reading import Reading
from penstock.errors import PenstockError, PermissionDenied, Unauthorized
from penstock.model.run import Run
from penstock.security.security import JWT_REFUSED
from penstock.wire import text
from penstock.wire.events import (
    Ack,
    Call,
    Connect,
    Event,
    FlowControl,
    Pull,
    Refused,
    Replay,
    SimpleCommand,
    Stats,
    Subscribe,
    Unsubscribe,
)

if TYPE_CHECKING:
    from penstock.doors.session import Session

# Where nats-server puts the clients of a server without accounts.
ACCOUNT: Final = "$G"
# With more subscriptions than this, others have a turn after each PING.
SUBSCRIPTIONS_FEW: Final = 1000
# PINGs that a client may leave unanswered.
UNANSWERED_MAX: Final = 2


class Text:
    type: ConnectionType = "nats"

    def __init__(self, session: Session, *, is_greeted: bool) -> None:
        self.session = session
        self._input = Input(session)
        self._parser = self._input.parser
        # Until the client has spoken, the door listens: it may speak another dialect. If it has begun to, it would not
        # understand a line of text.
        self.codec: Codec = self._input
        self.is_mute = False
        self._is_greeted = is_greeted
        self._publisher = TextPublisher(self)
        self._reading = Reading(self)
        session.at_lame_duck.append(self._tell_lame_duck)
        session.at_stop.append(self._input.take_pings)
        session.has_published = partial(session.call, self._publisher.has_published)
        # The options of CONNECT.
        self.is_verbose = True
        self.is_pedantic = False
        self.has_headers = True
        self.wants_no_responders = False
        # Whether INFO follows the first PONG, for clients that say they understand it; whether it did.
        self._wants_info = False
        self._takes_info = False
        self._pings_early = False

    def begin(self) -> Codec:
        """Return the codec of a client that speaks text, as its first bytes say."""
        self.codec = self._input
        return self.codec

    @property
    def is_nats(self) -> bool:
        return self._parser.is_nats

    # Events.

    def credentials(self, event: Event) -> Mapping[str, Any] | None:
        return event.options if isinstance(event, Connect) else None

    def admitted(self) -> None:
        """The parser itself insists on CONNECT."""

    def deny(self, _event: Event, error: PenstockError) -> None:
        # Clients look for the first two words.
        is_jwt = str(error) == JWT_REFUSED
        self._close(f"Authorization Violation: {error}" if is_jwt else "Authorization Violation")

    def do(self, events: deque[Event]) -> Coroutine[Any, Any, None] | None:
        event = events.popleft()
        match event:
            case Run():
                return self._publisher.publish(event)
            case SimpleCommand.PING:
                self._pong()
                if len(self.session.subscriptions) > SUBSCRIPTIONS_FEW:
                    return asyncio.sleep(0)  # each of them was asked whether it is behind
            case SimpleCommand.PONG:
                pass
            case Subscribe():
                return self._reading.subscribe(event)
            case Unsubscribe():
                self._reading.unsubscribe(event)
            case Ack():
                acknowledge(self, event)
            case Call():
                acknowledge_by_subject(self, event)
                self.ok()
            case Connect():
                self._connect(event)
            case SimpleCommand.INFO:
                if not self.is_nats:  # there it is the server's word
                    self.session.replies.send(text.info(info.fields(self.session)))
            case FlowControl():
                self._reading.control_flow(event)
            case Stats():
                self._reading.statistics(event)
            case Pull():
                return self._reading.pull(event)
            case Replay():
                return self._reading.replay(event)
            case SimpleCommand.MEMBERSHIP:
                self.session.replies.send(self.error_line("clustering not enabled"))
            case Refused():
                self._refuse_line(event)
            case _:
                assert_never(event)
        return None

    def _connect(self, event: Connect) -> None:
        options = event.options
        # As in nats-server, the first two and `echo` are on unless the client turns them off.
        self.is_verbose = options.get("verbose") is not False
        self.is_pedantic = options.get("pedantic") is not False
        self.session.echo = options.get("echo") is not False
        self.has_headers = options.get("headers") is True
        self.wants_no_responders = options.get("no_responders") is True
        if self.wants_no_responders and not self.has_headers:
            self._close("no responders requires headers support")
            return
        protocol = options.get("protocol")
        self._wants_info = isinstance(protocol, int) and protocol >= 1
        self.session.name = options.get("name")
        # nats-py; its verbose clients need replies in the order of their commands.
        self._pings_early = options.get("lang") == "python3" and not self.is_verbose
        self._input.moves_pings = self._pings_early and not self._wants_info
        self.ok()

    def _pong(self) -> None:
        self.session.replies.add(Reply(b"PONG\r\n", self._reading.hold_for_backlog))
        if self._wants_info:
            self._wants_info, self._takes_info = False, True
            self._input.moves_pings = self._pings_early
            fields = {**info.fields(self.session), "connect_info": True, "remote_account": ACCOUNT}
            self.session.replies.send(text.info(fields))

    def _refuse_line(self, event: Refused) -> None:
        self.session.shared.counters.protocol_errors += 1
        if event.publish:
            self.session.refused_publishes(event.publish, event.reason)
        if event.closes:
            self._close(event.reason, is_nats=self.is_nats)
        else:
            self.session.replies.send(self.error_line(event.reason))

    # From the broker.

    def send(self, member: Member, place: Place, run: Run, attempts: Mapping[int, int] | None) -> None:
        self._reading.send(member, place, run, attempts)

    def fail(self, member: Member, error: PenstockError) -> None:
        if isinstance(error, PermissionDenied) and self.is_nats:
            # As nats-server, after a change of the user: the connection stays.
            _, reader = self.session.subscriptions[member.sid]
            self.session.unsubscribe(member.sid)
            self.session.replies.send(text.violation("Subscription", reader.pattern))
        else:
            self._close(f"{error.code} {error}")

    # Keep-alive and the end.

    def keep_alive(self, _silent_s: float) -> float:
        if self.is_nats:
            if self.session.unanswered >= UNANSWERED_MAX:
                self.session.close_stale()
            else:
                self.session.unanswered += 1
                self.session.peer.write(b"PING\r\n")
        return self.session.shared.settings.heartbeat_s

    def _tell_lame_duck(self) -> None:
        if self._takes_info:
            self.session.replies.send(text.info(info.fields(self.session)))

    def disconnect(self, reason: Ending | PenstockError) -> None:
        peer = self.session.peer
        match reason:
            case Ending.STOPPED if self._is_greeted and self.codec is not self._input:
                # As by nats-server, a client that is about to connect gets no error: it would not come back.
                peer.close()
            case Ending.STOPPED if not self.is_nats:
                peer.answer(text.error("Server Shutdown", is_nats=False))
                peer.close()
            case Ending.STOPPED:
                if not self.session.shared.sessions.is_lame_duck:
                    peer.answer(text.info(info.fields(self.session)))
                peer.close()
            case Ending.FAULT:
                peer.write(text.error("Internal Error", is_nats=self.is_nats or self._is_greeted))
                peer.close()
            case Ending.STALE:
                self._close("Stale Connection")
            case Ending.PLAIN:
                # As in nats-server.
                self._close("Secure Connection - TLS Required")
            case Ending.UNAUTHORIZED:
                self._close("Authorization Violation")
            case Ending.EXPIRED:
                needs_auth = self.session.shared.gate.needs_auth
                self._close("Authentication Timeout" if needs_auth else "Connection Timeout")
            case Ending.TOO_MANY:
                self._close("maximum connections exceeded")
            case Unauthorized():
                self._close(str(reason))
            case PenstockError():
                self._close(f"{reason.code} {reason}")

    def _close(self, reason: str, *, is_nats: bool | None = None) -> None:
        """Say why, behind the replies that are due, and close."""
        line = text.error(reason, is_nats=self.is_nats or self._is_greeted if is_nats is None else is_nats)
        self.session.finish(lambda: self.session.peer.answer(b"" if self.is_mute else line))

    # Replies.

    def refuse(self, _event: Event, error: PenstockError) -> None:
        self.session.replies.send(self.error_line(f"{error.code} {error}"))

    def ok(self, more: str = "") -> None:
        self.session.replies.send(self.ok_line(more))

    def ok_line(self, more: str = "") -> bytes:
        if not self.is_verbose:
            return b""
        # NATS clients take no word behind it.
        return b"+OK\r\n" if self.is_nats or not more else f"+OK {more}\r\n".encode()

    def error_line(self, reason: str) -> bytes:
        return text.error(reason, is_nats=self.is_nats)
