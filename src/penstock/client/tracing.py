"""OpenTelemetry: spans for messages, and their context in headers.

    publish orders ─────┐            the publisher's span, until the message is stored
      receive orders    │            a reader took the message
      process orders ───┴────────    a consumer's function; messages that it publishes continue the trace

The context travels in the header `traceparent` (W3C Trace Context). Names and attributes follow OpenTelemetry's
conventions for messaging. The application configures OpenTelemetry's SDK, which samples and exports spans. Without an
SDK nothing is recorded, and an existing context is passed on.

This module never imports the library before the application does: programs that do not use it pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from penstock.client.values import Headers

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from penstock.client.message import Message

_NAME: Final = "penstock"
_HEADER: Final = "traceparent"
# The conventions want few names of spans, and every inbox has its own name.
_TEMPORARY: Final = "(temporary)"


def is_used() -> bool:
    """Return whether the application has imported OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules


def publishing(operation: str, subject: str, headers: Headers) -> AbstractContextManager[Headers]:
    """Return a span around publishing a message. It yields the headers to publish with."""
    return _publishing(operation, subject, headers) if is_used() else nullcontext(headers)


def created(subject: str, headers: Headers) -> Headers:
    """Return the headers of a message that is published in a batch or not waited for. Its span is `create`."""
    if not is_used() or not (_is_recorded() or _has_context()):
        return headers
    with _publishing("create", subject, headers) as made:
        return made


def received(messages: Sequence[Message]) -> None:
    """Record a span for each message with a context that a reader has taken."""
    if not is_used() or not _is_recorded():
        return
    for message in messages:
        if (context := _context_of(message)) is not None:
            _consuming("receive", message, context).end()


def processing(messages: Sequence[Message], group: str) -> AbstractContextManager[None]:
    """Return a span around the handling of messages: a child of a single message's span, or linked to those of many."""
    return _processing(messages, group) if is_used() else nullcontext()


@contextmanager
def _publishing(operation: str, subject: str, headers: Headers) -> Iterator[Headers]:
    from opentelemetry import trace

    kind = trace.SpanKind.CLIENT if operation == "request" else trace.SpanKind.PRODUCER
    named = f"{operation} {_destination(subject)}"
    attributes = _attributes("create" if operation == "create" else "send", operation, subject)
    with trace.get_tracer(_NAME).start_as_current_span(named, kind=kind, attributes=attributes):
        yield _with_context(headers)


@contextmanager
def _processing(messages: Sequence[Message], group: str) -> Iterator[None]:
    from opentelemetry import trace

    contexts = [context for message in messages if (context := _context_of(message)) is not None]
    if len(messages) == 1:
        span = _consuming("process", messages[0], contexts[0] if contexts else None)
    else:
        links = [trace.Link(trace.get_current_span(context).get_span_context()) for context in contexts]
        span = trace.get_tracer(_NAME).start_span(
            f"process {messages[0].topic}",
            kind=trace.SpanKind.CONSUMER,
            attributes=_attributes("process", "process", messages[0].topic),
            links=links,
        )
        span.set_attribute("messaging.batch.message_count", len(messages))
    span.set_attribute("messaging.consumer.group.name", group)
    with trace.use_span(span, end_on_exit=True):
        yield


def _consuming(operation: str, message: Message, context: Context | None) -> Span:
    from opentelemetry import trace

    attributes = _attributes(operation, operation, message.subject)
    attributes["messaging.destination.partition.id"] = str(message.partition)
    if (identity := message.message_id) is not None:
        attributes["messaging.message.id"] = identity
    named = f"{operation} {_destination(message.subject)}"
    return trace.get_tracer(_NAME).start_span(
        named, context=context, kind=trace.SpanKind.CONSUMER, attributes=attributes
    )


def _is_recorded() -> bool:
    """Return whether an SDK is configured. Checking is cheap; a span for each message that nobody records is not."""
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def _has_context() -> bool:
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().is_valid


def _with_context(headers: Headers) -> Headers:
    """Return headers with the current context. A context among the headers is kept."""
    from opentelemetry import propagate

    if headers is not None and any(isinstance(name, str) and name.lower() == _HEADER for name in headers):
        return headers
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return {**(headers or {}), **carrier} if carrier else headers


def _context_of(message: Message) -> Context | None:
    from opentelemetry import propagate

    headers = {name.lower(): text for name, text in message.headers.items()}
    return propagate.extract(headers) if _HEADER in headers else None


def _destination(subject: str) -> str:
    return _TEMPORARY if subject.startswith("_") else subject


def _attributes(kind: str, operation: str, subject: str) -> dict[str, str]:
    return {
        "messaging.system": _NAME,
        "messaging.operation.type": kind,
        "messaging.operation.name": operation,
        "messaging.destination.name": subject,
    }
