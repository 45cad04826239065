"""OpenTelemetry with its real SDK: which spans there are, and that their contexts go with the messages."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock import App, Broker, Client, Message, Outgoing, Retry
from tests.support.process import PATIENCE_S
from tests.support.shells import SHELLS, shell_of

_NUMBERS: Final = count()


class Spans:
    """Those that ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """A provider for one test: the library itself takes one for the life of the process."""
    made = Spans()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made.provider)
    return made


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture(params=SHELLS)
def client(request: pytest.FixtureRequest, broker: Broker) -> Iterator[Client]:
    with shell_of(request.param) as made:
        yield made.client(broker)


@pytest.fixture
def subject() -> str:
    return f"traced{next(_NUMBERS)}.eu"


def is_below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert span.parent is not None
    assert parent.context is not None
    return (span.parent.trace_id, span.parent.span_id) == (parent.context.trace_id, parent.context.span_id)


def context_of(message: Message) -> tuple[int, int]:
    found = trace.get_current_span(propagate.extract(message.headers)).get_span_context()
    return found.trace_id, found.span_id


def identity(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_publish_and_receive_are_spans_of_one_trace(client: Client, spans: Spans, subject: str) -> None:
    with client.subscribe(subject) as subscription:
        client.publish(subject, b"x", headers={"Kept": "1"}, message_id="m1")
        message = subscription.get(timeout=PATIENCE_S)

    published, received = spans.one(f"publish {subject}"), spans.one(f"receive {subject}")
    assert is_below(received, published)
    assert (published.kind, received.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(published.attributes or {}) == {
        "messaging.system": "penstock",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": subject,
    }
    assert (received.attributes or {})["messaging.message.id"] == "m1"
    assert message.headers["Kept"] == "1"
    assert context_of(message) == identity(published)


def test_a_publish_goes_on_from_the_span_that_is_current(broker: Broker, spans: Spans, subject: str) -> None:
    with spans.tracer.start_as_current_span("checkout"):
        broker.publish(subject, b"x")

    assert is_below(spans.one(f"publish {subject}"), spans.one("checkout"))


def test_a_context_that_the_caller_gives_is_left_alone(broker: Broker, spans: Spans, subject: str) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    broker.publish(subject, b"x", headers={"Traceparent": given})

    [message] = broker.fetch(subject.partition(".")[0])
    assert message.headers == {"Traceparent": given}


def test_each_message_of_a_producer_and_a_transaction_has_a_context(client: Client, spans: Spans, subject: str) -> None:
    with client.producer() as producer:
        producer.publish(subject, b"a")
    client.publish_many([(subject, b"b"), Outgoing(subject, b"c", headers={"Kept": "1"})])
    with client.transaction() as transaction:
        transaction.publish(subject, b"d")

    messages = list(client.fetch(subject.partition(".")[0]))
    assert [message.value for message in messages] == [b"a", b"b", b"c", b"d"]
    created = spans.named(f"create {subject}")
    assert [context_of(message) for message in messages] == [identity(span) for span in created]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_consumer_goes_on_from_the_message_and_what_it_publishes_from_it(
    is_async: bool, broker: Broker, spans: Spans, subject: str
) -> None:
    app = App(broker)
    seen = threading.Event()

    def bill(message: Message) -> None:
        broker.publish(f"{subject}.bill", b"bill")
        seen.set()

    async def bill_async(message: Message) -> None:
        bill_now = spans.tracer.start_span("inside")
        bill_now.end()
        seen.set()

    app.consumer(subject, group=f"billing-{subject}")(bill_async if is_async else bill)
    with app.running():
        broker.publish(subject, b"x")
        assert seen.wait(PATIENCE_S)

    processed = spans.one(f"process {subject}")
    assert is_below(processed, spans.one(f"publish {subject}"))
    assert is_below(spans.one("inside" if is_async else f"publish {subject}.bill"), processed)
    assert (processed.attributes or {})["messaging.consumer.group.name"] == f"billing-{subject}"


def test_a_batch_is_linked_with_its_messages(broker: Broker, spans: Spans, subject: str) -> None:
    app = App(broker)
    group = f"batches-{subject}"
    broker.create_group(group, subject, start="earliest")
    broker.publish_many([(subject, b"a"), (subject, b"b")])
    seen = threading.Event()

    @app.consumer(subject, group=group, batch=10)
    def take(messages: list[Message]) -> None:
        if len(messages) == 2:
            seen.set()

    with app.running():
        assert seen.wait(PATIENCE_S)

    processed = spans.one(f"process {subject.partition('.')[0]}")
    assert processed.parent is None
    linked = {(link.context.trace_id, link.context.span_id) for link in processed.links}
    assert linked == {identity(span) for span in spans.named(f"create {subject}")}


def test_what_fails_is_an_error_in_its_span(broker: Broker, spans: Spans, subject: str) -> None:
    app = App(broker)
    failed = threading.Event()

    def note(message: Message, error: Exception) -> None:
        failed.set()

    @app.consumer(subject, group=f"failing-{subject}", retry=Retry.skip(), on_error=note)
    def fail(message: Message) -> None:
        raise RuntimeError("no stock")

    with app.running():
        broker.publish(subject, b"x")
        assert failed.wait(PATIENCE_S)

    processed = spans.one(f"process {subject}")
    assert processed.status.status_code is StatusCode.ERROR
    assert [event.name for event in processed.events] == ["exception"]


def test_a_request_and_its_reply_are_one_trace(broker: Broker, spans: Spans, subject: str) -> None:
    app = App(broker)

    @app.consumer(subject, group=f"service-{subject}")
    def serve(message: Message) -> None:
        message.respond(b"done")

    with app.running():
        broker.request(subject, b"do", timeout=PATIENCE_S)

    asked = spans.one(f"request {subject}")
    assert asked.kind is SpanKind.CLIENT
    assert is_below(spans.one(f"process {subject}"), asked)
    assert is_below(spans.one("create (temporary)"), spans.one(f"process {subject}"))
    assert is_below(spans.one("receive (temporary)"), spans.one("create (temporary)"))


def test_without_an_sdk_a_context_is_passed_on_and_nothing_else_is_added(broker: Broker, subject: str) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    topic = subject.partition(".")[0]
    with broker.producer() as producer:
        broker.publish(subject, b"plain")
        producer.publish(subject, b"plain")
        token = trace.use_span(trace.get_current_span(propagate.extract({"traceparent": parent})))
        with token:
            broker.publish(subject, b"traced")
            producer.publish(subject, b"traced")

    found = sorted((message.value, message.headers.get("traceparent")) for message in broker.fetch(topic))
    assert [value for value, header in found if header is None] == [b"plain", b"plain"]
    assert [header for value, header in found if value == b"traced"] == [parent, parent]


def test_whoever_does_not_use_it_does_not_import_it() -> None:
    code = "import sys, penstock; penstock.Client; penstock.App; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
