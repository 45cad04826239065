"""Generate scenarios: some connections that subscribe, publish, ask and leave, in any order.

What the protocol leaves open is not generated: a queue subscription with a maximum, a reply that two subscriptions of
its sender match, and anything after an error that ends a connection, whose subscriptions the server may still have.
While a scenario is in DIFFERENCES, nothing is generated that leads to its difference.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.nats.differences import DIFFERENCES
from tests.nats.run import NO_PONG, Peer, nats_server, penstock, run_both

# After so many, `soak` starts both servers anew.
CHUNK: Final = 500

_SUBJECTS: Final = ["~.x", "~.y", "~.x.y", "~.x.y.z", "^", "^.x"]
_PATTERNS: Final = [*_SUBJECTS, "~.*", "~.>", "~.*.y", "~.x.*", "~.x.>", "^.>", "~.*.*.z"]
_OTHER_TOPICS: Final = ["~b.x", "~c.x"]
_OVER_TOPICS: Final = ["*.#.x", "*.#.>", "*.*.x"]
_WRONG_PATTERNS: Final = ["~..x", "~.", ".~", "~.>.x"]
_WRONG_SUBJECTS: Final = ["~.*", "~..x", "~.", "~.>", "~.x*", "~." + "x" * 1100]
_WRONG_REPLIES: Final = ["~.*", "~..y", "~."]
_HEADERS: Final = ["", "A: 1", "A: 1; A: 2; a: 3", "A:1", "A:", "Long: " + "x" * 300]
_PAYLOADS: Final = ["", "", "", "", "", "", "", "", "", "x*5000", "x*70000"]
_ENDS: Final = ["NONSENSE", "PUB ~.x =x*1048577", "HPUB ~.x {A: 1} =x*1048576", "RAW SUB ~." + "x" * 5000 + r" 1\r\n"]
_TRIES: Final = 3
# Scenarios that show in which order a connection receives messages and answers.
_ORDERS: Final = ["order between subscriptions", "a pong follows the messages it covers", "verbose to oneself"]


def _is_same(name: str) -> bool:
    return name not in DIFFERENCES


class _Connection:
    def __init__(self, name: str, options: dict[str, bool]) -> None:
        self.name = name
        self.options = options
        # sid -> whether it is of a queue group.
        self.subscriptions: dict[int, bool] = {}
        self.sids = 0
        self.has_inbox = False
        self.is_paused = False


@st.composite
def scenarios(draw: st.DrawFn) -> str:
    """Draw the text of a scenario."""
    connections = [_Connection(name, draw(_options())) for name in "abcd"[: draw(st.integers(1, 4))]]
    lines = [f"{connection.name} OPEN {json.dumps(connection.options)}" for connection in connections]
    payloads = iter(range(1 << 30))
    for _ in range(draw(st.integers(1, 12))):
        connection = draw(st.sampled_from(connections))
        kind = draw(st.sampled_from(["write"] * 12 + ["pause", "kill"]))
        if connection.is_paused:
            lines.append(f"{connection.name} RESUME")
            connection.is_paused = False
        elif kind == "write":
            commands = [draw(_command(connection, payloads)) for _ in range(draw(st.integers(1, 6)))]
            lines += (f"{' ' if at else connection.name} {command}" for at, command in enumerate(commands))
        elif kind == "pause" and len(connections) > 1 and not any(connection.subscriptions.values()):
            # Of a queue group either member may be chosen: it shows if one of them does not read.
            lines.append(f"{connection.name} PAUSE")
            connection.is_paused = True
        elif kind == "kill" and len(connections) > 1 and not any(other.is_paused for other in connections):
            lines.append(f"{connection.name} KILL")
            connections.remove(connection)
    lines += (f"{connection.name} RESUME" for connection in connections if connection.is_paused)
    if draw(st.integers(0, 9)) == 0:
        last = connections[0]
        ends = [end for end in _ENDS if last.options.get("headers", True) or not end.startswith("HPUB")]
        lines.append(f"{last.name} {draw(st.sampled_from(ends))}")
    return "\n".join(lines) + "\n"


def compare(peers: tuple[Peer, Peer], text: str) -> None:
    """Fail if a scenario's transcripts differ."""
    for _ in range(_TRIES):
        real, ours = run_both(peers, text, is_relaxed=not all(map(_is_same, _ORDERS)))
        if NO_PONG not in "".join(real):
            break
        # Once in thousands of scenarios nats-server keeps a connection open that it told of a protocol error.
    if ours != real:
        raise AssertionError("\n".join([text, *difflib.ndiff(real, ours)]))


def soak(first_seed: int, count: int) -> Iterator[int]:
    """Compare so many scenarios, and yield how many are done. A failure prints its scenario."""
    done = 0
    for chunk in range(first_seed, first_seed + -(-count // CHUNK)):
        size = min(CHUNK, count - done)
        with (
            tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory,
            nats_server() as real,
            penstock(Path(directory)) as ours,
        ):
            _compare_many((real, ours), chunk, size)
        done += size
        yield done


def _compare_many(peers: tuple[Peer, Peer], first_seed: int, count: int) -> None:
    @seed(first_seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(scenarios())
    def compare_one(text: str) -> None:
        compare(peers, text)

    compare_one()


@st.composite
def _options(draw: st.DrawFn) -> dict[str, bool]:
    options = {}
    if draw(st.integers(0, 3)) == 0:
        options["echo"] = False
    if draw(st.integers(0, 3)) == 0 or (options and not _is_same("no responders but oneself")):
        options["no_responders"] = False
        if draw(st.booleans()):
            options["headers"] = False
    if draw(st.integers(0, 3)) == 0:
        options["verbose"] = True
    # Not pedantic: nats-server complains of a subject once more for each read that a message takes.
    return options


@st.composite
def _command(draw: st.DrawFn, connection: _Connection, payloads: Iterator[int]) -> str:
    # A connection that publishes to itself shows how PONGs and its messages are ordered.
    may_publish = _is_same("publish to oneself") or connection.name == "a"
    may_subscribe = _is_same("publish to oneself") or connection.name != "a"
    kinds = ["PUB"] * 6 * may_publish + ["SUB"] * 4 * may_subscribe
    if connection.subscriptions:
        kinds += ["UNSUB", "UNSUB"]
        if _is_same("no responders once a max is reached"):
            kinds.append("MAX")
    if _is_same("publish to oneself"):
        kinds.append("PING")
    match draw(st.sampled_from(kinds)):
        case "SUB":
            return draw(_subscribe(connection))
        case "UNSUB":
            sid = draw(st.sampled_from(sorted(connection.subscriptions)))
            del connection.subscriptions[sid]
            return f"UNSUB {sid}"
        case "MAX":
            sid = draw(st.sampled_from(sorted(connection.subscriptions)))
            if connection.subscriptions[sid]:
                return "PONG"
            return f"UNSUB {sid} {draw(st.integers(0, 5))}"
        case "PING":
            return "PING"
        case _:
            return draw(_publish(next(payloads), connection.options.get("headers", True)))


@st.composite
def _subscribe(draw: st.DrawFn, connection: _Connection) -> str:
    connection.sids += 1
    sid = connection.sids
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return f"SUB {draw(st.sampled_from(_WRONG_PATTERNS))} {sid}"
    if kind < 4 and not connection.has_inbox:
        connection.has_inbox = True
        connection.subscriptions[sid] = False
        return f"SUB _INBOX.#.{draw(st.sampled_from([connection.name, '>', '*']))} {sid}"
    patterns = [*_PATTERNS, *_OTHER_TOPICS]
    if _is_same("order over topics on one subscription"):
        patterns += _OVER_TOPICS
    pattern = draw(st.sampled_from(patterns))
    # Of a queue group either member may be chosen: it shows if one of them gets no headers.
    is_queue = draw(st.integers(0, 2)) == 0 and connection.options.get("headers", True)
    connection.subscriptions[sid] = is_queue
    if not is_queue:
        return f"SUB {pattern} {sid}"
    queue = draw(st.sampled_from(["v#", "w#"]))
    if not _is_same("one queue name on overlapping patterns"):
        queue += f"-{patterns.index(pattern)}"
    return f"SUB {pattern} {queue} {sid}"


@st.composite
def _publish(draw: st.DrawFn, number: int, has_headers: bool) -> str:
    subjects = [*_SUBJECTS * 2, *_OTHER_TOPICS, *(f"_INBOX.#.{name}" for name in "abc")]
    if _is_same("publish to a wildcard") and draw(st.integers(0, 9)) == 0:
        subjects = _WRONG_SUBJECTS
    subject = draw(st.sampled_from(subjects))
    reply = ""
    if draw(st.integers(0, 2)) == 0:
        reply = f"_INBOX.#.{draw(st.sampled_from('abcd'))} "
        if _is_same("odd reply subjects") and draw(st.integers(0, 9)) == 0:
            reply = draw(st.sampled_from(_WRONG_REPLIES)) + " "
    payload = draw(st.sampled_from(_PAYLOADS)) or f"p{number}"
    if has_headers and draw(st.integers(0, 3)) == 0:
        return f"HPUB {subject} {reply}{{{draw(st.sampled_from(_HEADERS))}}} ={payload}"
    if payload.startswith("p") and draw(st.integers(0, 5)) == 0:
        return f"{draw(st.integers(2, 30))}x PUB {subject} {reply}={payload}.%d"
    return f"PUB {subject} {reply}={payload}"
