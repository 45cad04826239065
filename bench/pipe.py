"""A message through two pipes, from a root to a broker two levels below it, against one that stays at the root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Final, NamedTuple

from bench import peers
from bench.load import Connection, Worker, block_messages, run_paced
from bench.measure import Bench, Line
from bench.peers import Peer

_SIZE: Final = 100
_RATE: Final = 100
# What comes down. Topics of the root alone cost the others nothing.
_PIPED: Final = ("warm", "piped", "slow")


class _Tree(NamedTuple):
    root: Peer
    leaf: Peer


def measure(bench: Bench) -> Iterator[Line]:
    with _tree(bench) as tree:
        yield _latency(bench, tree)
        yield _throughput(bench, tree)


@contextmanager
def _tree(bench: Bench) -> Iterator[_Tree]:
    with ExitStack() as stack:
        parent: Peer | None = None
        found: list[Peer] = []
        for name in ("root", "middle", "leaf"):
            environment = {"PENSTOCK_SERVER_NODE_ID": name}
            if parent is not None:
                environment["PENSTOCK_PIPE_PARENT"] = f"http://127.0.0.1:{parent.http_port}"
                environment["PENSTOCK_PIPE_TOPICS"] = ",".join(_PIPED)
            parent = stack.enter_context(peers.penstock(bench.directory / name, "flush", **environment))
            found.append(parent)
        tree = _Tree(found[0], found[-1])
        for topic in _PIPED:
            _wait_for_copy(tree, topic)
        yield tree


def _wait_for_copy(tree: _Tree, topic: str) -> None:
    """Until what is published to a topic at the root comes to a subscriber of the leaf."""
    with Connection(tree.root.port) as publisher, Connection(tree.leaf.port) as subscriber:
        subscriber.subscribe(topic)
        run_paced(publisher, subscriber, topic, 1, rate=_RATE)


def _latency(bench: Bench, tree: _Tree) -> Line:
    what = f"through two pipes, {_RATE} msg/s, flush, p50"
    count = bench.choose(100, 5)
    with (
        Connection(tree.root.port) as publisher,
        Connection(tree.leaf.port) as far,
        Connection(tree.root.port) as near,
    ):
        far.subscribe("slow")
        near.subscribe("quick")
        through: list[float] = []
        direct: list[float] = []
        for _ in range(bench.choose(10, 1)):
            bench.progress(what)
            through += run_paced(publisher, far, "slow", count, rate=_RATE)
            direct += run_paced(publisher, near, "quick", count, rate=_RATE)
    return Line(
        section="pipe",
        what=what,
        against="a subscriber at the root, p50",
        unit="ms",
        penstock=median(through) * 1000,
        limit=median(direct) * 1000,
        ratio_of="time",
        target=50,
        target_of="figure",
    )


def _throughput(bench: Bench, tree: _Tree) -> Line:
    what = f"through two pipes, 1 → 1, {_SIZE} B, flush"
    blocks = max(1, bench.choose(240_000, 1) // block_messages(_SIZE))
    messages = blocks * block_messages(_SIZE)
    with (
        _pair(tree.root, tree.leaf, "piped", blocks) as through,
        _pair(tree.root, tree.root, "direct", blocks) as direct,
    ):
        our_seconds, their_seconds = bench.processor(what, through, direct, bench.choose(10, 1))
    return Line(
        section="pipe",
        what=what,
        against="a subscriber at the root",
        unit="msg/s",
        penstock=messages / our_seconds,
        limit=messages / their_seconds,
        ratio_of="speed",
        target=0.3,
    )


@contextmanager
def _pair(source: Peer, target: Peer, subject: str, blocks: int) -> Iterator[Callable[[], float]]:
    """A publisher at one broker and a subscriber at another. A round lasts until the last message is there."""
    with (
        Worker("subscribe", target.port, subject, _SIZE) as subscriber,
        Worker("publish", source.port, subject, _SIZE) as publisher,
    ):
        for worker in (subscriber, publisher):
            worker.wait_until_ready()

        def run() -> float:
            subscriber.begin(blocks)
            publisher.begin(blocks)
            begun, sent = publisher.end()
            _, received = subscriber.end()
            return max(sent, received) - begun

        yield run
