"""`penstock bench`: measure a broker from this machine, on a temporary topic."""

from __future__ import annotations

import secrets
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

from penstock.cli import output
from penstock.cli.options import ConnectionOptions, Json, options, parse
from penstock.cli.text import counted

if TYPE_CHECKING:
    from penstock.client.sync import Client
    from penstock.client.values import Topic

app = typer.Typer(add_completion=False)

# Latency is measured over this many messages, or as many as fit into this time.
SAMPLES: Final = 1000
SAMPLING_S: Final = 10.0
# Give up on a message after this long.
PATIENCE_S: Final = 30.0

_BUFFER: Final = 10_000
_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_BARS: Final = 12
_BAR_WIDTH: Final = 40


@app.command()
@options
def bench(
    *,
    messages: Annotated[int, typer.Option(min=1, help="Number of messages to publish and consume.")] = 100_000,
    size: Annotated[str, typer.Option(metavar="BYTES", help="Size of each message, such as 100 or 1KiB.")] = "100",
    topic: Annotated[
        str | None, typer.Option(help="Name of the temporary topic; it must not exist. \\[default: bench-…]")
    ] = None,
    durability: Annotated[
        Literal["fsync", "flush"] | None, typer.Option(help="Durability of the topic. \\[default: the server's]")
    ] = None,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Measure a broker: publish through a producer, consume, then time single publishes.

    The temporary topic is deleted at the end, also after Ctrl-C.
    """
    from penstock import schema

    value = b"." * parse(schema.field("size_bytes", schema.NonNegative), size, "--size")
    name = topic or f"bench-{secrets.token_hex(4)}"
    with at.client() as client, _made(client, name, durability) as made:
        steps = _measure(client, name, value, messages)
        if json:
            about = {"messages": messages, "size": len(value), "durability": made.policy["durability"]}
            output.print_json(about | {step.name: step.document() for step in steps})
        else:
            of = f"{counted(messages, 'message')} of {counted(len(value), 'byte')}"
            print(f"{of}, durability {made.policy['durability']}")
            for step in steps:
                print(step, flush=True)


@contextmanager
def _made(client: Client, name: str, durability: str | None) -> Iterator[Topic]:
    """Create a topic, and delete it at the end, even if a signal arrives during its creation."""
    policy: dict[str, Any] = {} if durability is None else {"durability": durability}
    early: list[int] = []
    _on_signal(early.append)
    topic = client.create_topic(name, **policy)
    try:
        _on_signal(lambda number: sys.exit(128 + number))
        if early:
            sys.exit(128 + early[0])
        yield topic
    finally:
        client.delete_topic(name)


def _on_signal(act: Callable[[int], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: act(number))


class Throughput(NamedTuple):
    name: str
    messages: int
    bytes: int
    seconds: float

    def document(self) -> dict[str, float]:
        return {
            "seconds": self.seconds,
            "messages_per_second": self.messages / self.seconds,
            "bytes_per_second": self.bytes / self.seconds,
        }

    def __str__(self) -> str:
        return f"{self.name}  {output.rate(self.messages, self.seconds)}, {self.bytes / self.seconds / 1e6:,.1f} MB/s"


class Latency(NamedTuple):
    name: str
    # In ms, sorted.
    times: Sequence[float]

    def document(self) -> dict[str, float]:
        return {"samples": len(self.times)} | {f"{name}_ms": ms for name, ms in self._percentiles()}

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self._percentiles())
        return "\n".join([f"{self.name}  {shares}, of {len(self.times):,} one by one\n", *histogram(self.times)])

    def _percentiles(self) -> list[tuple[str, float]]:
        return [(name, self.times[ceil(share * len(self.times)) - 1]) for name, share in _SHARES.items()]


def _measure(client: Client, topic: str, value: bytes, messages: int) -> Iterator[Throughput | Latency]:
    for name, step in (("publish", _publish), ("consume", _consume)):
        started = time.perf_counter()
        with output.moving(name, messages) as advance:
            step(client, topic, value, messages, advance)
        yield Throughput(name, messages, messages * len(value), time.perf_counter() - started)
    with output.moving("latency", SAMPLES) as advance:
        times = sorted(_time_each(client, topic, value, advance))
    yield Latency("latency", times)


def _publish(client: Client, topic: str, value: bytes, messages: int, advance: Callable[[int], None]) -> None:
    with client.producer() as producer:
        for _ in range(messages):
            producer.publish(topic, value)
            advance(1)


def _consume(client: Client, topic: str, value: bytes, messages: int, advance: Callable[[int], None]) -> None:
    received = 0
    with client.subscribe(topic, start="earliest", buffer=_BUFFER) as subscription:
        while received < messages:
            # Reading the values is part of consuming.
            count = [message.value for message in subscription.get_many(_BUFFER, PATIENCE_S)].count(value)
            received += count
            advance(count)


def _time_each(client: Client, topic: str, value: bytes, advance: Callable[[int], None]) -> Iterator[float]:
    end = time.perf_counter() + SAMPLING_S
    for _ in range(SAMPLES):
        started = time.perf_counter()
        client.publish(topic, value)
        done = time.perf_counter()
        yield (done - started) * 1000
        advance(1)
        if done > end:
            return


def histogram(times: Sequence[float]) -> Iterator[str]:
    """Yield a bar for each range of the sorted times. Ranges grow by a factor, as most times are near the minimum."""
    low, high = times[0], times[-1]
    edges = [low * (high / low) ** (step / _BARS) for step in range(_BARS)] + [high]
    counts = [bisect_left(times, end) - bisect_left(times, begin) for begin, end in pairwise(edges)]
    # The last range includes its end.
    counts[-1] += len(times) - sum(counts)
    for (begin, end), count in zip(pairwise(edges), counts, strict=True):
        # A range that is not empty has a visible bar.
        bar = "█" * max(bool(count), round(_BAR_WIDTH * count / max(counts)))
        yield f"{begin:9.2f} to {end:8.2f} ms  {bar:{_BAR_WIDTH}}  {count:,}"
