"""The schemas of topics in the style of Confluent's Schema Registry, for tools that know its endpoints.

The subject `orders-value` is the schema of the topic `orders`. An ID is made of the topic's ID and the version, so
nothing else is stored, and the same schema of two topics has two IDs. All schemas are JSON Schema: one in DDL is shown
as that.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.broker.broker import Broker
from penstock.broker.schemas import VERSIONS_MAX, SchemaVersion
from penstock.broker.topic import ServedTopic, visible_topics
from penstock.errors import BadRequest, BadSchema, PenstockError, SchemaConflict, UnknownSchema, UnknownTopic
from penstock.schema import Positive, about
from penstock.security.identity import Identity, authorize
from penstock.security.permissions import Action
from penstock.server import requests
from penstock.server.calls import run
from penstock.server.http_identity import identity_of
from penstock.topic_schema.compatibility import Compatibility
from penstock.topic_schema.ddl import read_ddl
from penstock.topic_schema.json_schema import write_json_schema
from penstock.topic_schema.tree import is_json
from penstock.web.endpoints import Endpoint, Nothing, status_of

PREFIX: Final = "/schema-registry"
MEDIA: Final = "application/vnd.schemaregistry.v1+json"
_VALUE: Final = "-value"
_JSON: Final = "JSON"
# More than VERSIONS_MAX.
_STRIDE: Final = 1 << 7
assert VERSIONS_MAX < _STRIDE

_Subject = Annotated[str, about("a topic, followed by -value")]
_Version = Annotated[str, Meta(pattern=r"^(latest|-1|[1-9]\d{0,5})$"), about("a version, or latest")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfSubject:
    subject: _Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfVersion:
    subject: _Subject
    version: _Version


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfId:
    id: Annotated[Positive, about("the ID of a schema")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """A schema in a request. Clients send more than we use."""

    schema: Annotated[str, about("JSON Schema, as text")]
    schemaType: Annotated[str | None, about("JSON")] = None  # noqa: N815 - the name in requests
    references: Annotated[Any, about("none: references to other schemas are not supported")] = None
    metadata: Annotated[Any, about("ignored")] = None
    ruleSet: Annotated[Any, about("ignored")] = None  # noqa: N815
    id: Annotated[Any, about("ignored")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given(_Text):
    subject: _Subject
    version: Annotated[Any, about("ignored")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared(_Text):
    subject: _Subject
    version: _Version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    subject: _Subject
    compatibility: Annotated[str, about("BACKWARD, FORWARD, FULL or NONE")]


class _Refused(BadRequest):
    """An error with a code of the registry."""

    def __init__(self, status: int, code: int, text: str) -> None:
        super().__init__(text)
        self.status, self.number = status, code


def endpoints(broker: Broker) -> list[Endpoint]:
    """Return the table of the registry's endpoints, which is why this is long."""

    def endpoint(
        method: Any,
        path: str,
        text: str,
        answer: Callable[[_Registry, Any], Awaitable[object]],
        asks: type[Any] = Nothing,
    ) -> Endpoint:
        async def answered(asked: Any, request: Request) -> Response:
            try:
                return _response(await answer(_Registry(broker, identity_of(request)), asked), 200)
            except PenstockError as error:
                status, number = _code_of(error)
                return _response({"error_code": number, "message": str(error)}, status)

        return Endpoint(
            method=method,
            path=PREFIX + path,
            about=text,
            answer=answered,
            parameters=asks,
            media=MEDIA,
            guarded=True,
            ignores_unknown=True,
        )

    versions = "/subjects/{subject}/versions"
    return [
        endpoint("GET", "/subjects", "The topics that have a schema, each with -value", _Registry.subjects),
        endpoint("GET", versions, "The versions of a schema", _Registry.versions, _OfSubject),
        endpoint("GET", versions + "/{version}", "A version of a schema", _Registry.version, _OfVersion),
        endpoint("POST", versions, "Register a schema, as its next version", _Registry.register, _Given),
        endpoint("POST", "/subjects/{subject}", "The version that has this schema", _Registry.find, _Given),
        endpoint(
            "POST",
            "/compatibility" + versions + "/{version}",
            "Whether a schema could follow a version",
            _Registry.compare,
            _Compared,
        ),
        endpoint(
            "POST",
            "/compatibility" + versions,
            "Whether a schema could follow each version",
            _Registry.compare_all,
            _Given,
        ),
        endpoint("GET", "/schemas/ids/{id}", "The schema with an ID", _Registry.by_id, _OfId),
        endpoint("GET", "/schemas/types", "The types of schemas", _Registry.types),
        endpoint("GET", "/config", "The compatibility that new topics ask for", _Registry.level),
        endpoint("GET", "/config/{subject}", "The compatibility that a topic asks for", _Registry.level_of, _OfSubject),
        endpoint("PUT", "/config/{subject}", "Change the compatibility of a topic", _Registry.set_level, _Level),
    ]


class _Registry:
    """The registry as one client sees it."""

    def __init__(self, broker: Broker, identity: Identity | None) -> None:
        self._broker = broker
        self._identity = identity

    async def subjects(self, _asked: Nothing) -> list[str]:
        visible = visible_topics(self._broker.topics, self._identity)
        return [f"{topic.topic.name}{_VALUE}" for topic in visible if self._broker.schemas.versions(topic)]

    async def types(self, _asked: Nothing) -> list[str]:
        return [_JSON]

    async def versions(self, asked: _OfSubject) -> list[int]:
        return [each.number for each in self._known(asked.subject)[1]]

    async def version(self, asked: _OfVersion) -> dict[str, Any]:
        topic, known = self._known(asked.subject)
        return _described(topic, _chosen(known, asked.version))

    async def register(self, asked: _Given) -> dict[str, int]:
        topic, text = self._topic(asked.subject, Action.TOPIC_ALTER), _text_of(asked)
        for each in self._broker.schemas.versions(topic):
            if _is_same(each, text):
                return {"id": _id_of(topic, each)}
        return {"id": _id_of(topic, await self._broker.to_its_end(self._broker.schemas.register(topic, text)))}

    async def find(self, asked: _Given) -> dict[str, Any]:
        topic, known = self._known(asked.subject)
        text = _text_of(asked)
        for each in known:
            if _is_same(each, text):
                return _described(topic, each)
        raise _Refused(404, 40403, f"{asked.subject} has no version with this schema")

    async def compare(self, asked: _Compared) -> dict[str, Any]:
        topic, known = self._known(asked.subject)
        return await self._verdict(topic, _text_of(asked), [_chosen(known, asked.version)])

    async def compare_all(self, asked: _Given) -> dict[str, Any]:
        topic, known = self._known(asked.subject)
        return await self._verdict(topic, _text_of(asked), known)

    async def by_id(self, asked: _OfId) -> dict[str, str]:
        topic = self._broker.topics.by_id(asked.id // _STRIDE)
        if topic is not None and self._identity is not None and not self._identity.shows_topic(topic.name):
            topic = None
        known = [] if topic is None else self._broker.schemas.versions(topic)
        if not 0 < asked.id % _STRIDE <= len(known):
            raise _Refused(404, 40403, f"there is no schema with ID {asked.id}")
        return {"schemaType": _JSON, "schema": _json_text(known[asked.id % _STRIDE - 1])}

    async def level(self, _asked: Nothing) -> dict[str, str]:
        return {"compatibilityLevel": self._broker.settings.policy.schema_compatibility.upper()}

    async def level_of(self, asked: _OfSubject) -> dict[str, str]:
        return {"compatibilityLevel": self._topic(asked.subject).topic.policy.schema_compatibility.upper()}

    async def set_level(self, asked: _Level) -> dict[str, str]:
        topic = self._topic(asked.subject, Action.TOPIC_ALTER)
        levels = {each.upper(): each for each in Compatibility}
        if asked.compatibility.upper() not in levels:
            raise _Refused(
                422, 42203, f"invalid compatibility {asked.compatibility!r}: it must be one of {', '.join(levels)}"
            )
        policy = {"schema_compatibility": levels[asked.compatibility.upper()].value}
        await run(
            self._broker, "alter_topic", requests.AlterTopic(name=topic.topic.name, policy=policy), self._identity
        )
        return {"compatibility": asked.compatibility.upper()}

    async def _verdict(self, topic: ServedTopic, text: str, versions: list[SchemaVersion]) -> dict[str, Any]:
        schemas = self._broker.schemas
        reasons = [(await schemas.verdict(topic, text, version)).reason for version in versions]
        messages = [reason for reason in reasons if reason is not None]
        return {"is_compatible": not messages, "messages": messages}

    def _topic(self, subject: str, action: Action | None = None) -> ServedTopic:
        """Return the topic of a subject, if the client may know of it and do this."""
        name = subject.removesuffix(_VALUE)
        if self._identity is not None and not self._identity.shows_topic(name.encode()):
            raise self._identity.refuse(Action.SUBSCRIBE, name.encode())
        if action is not None:
            authorize(self._identity, action, name.encode())
        try:
            if name == subject:
                raise UnknownTopic(subject)
            return self._broker.topics.named(name.encode())
        except UnknownTopic as error:
            problem = (
                f"there is no topic for the subject {subject!r}: it must be an existing topic, followed by {_VALUE}"
            )
            raise _Refused(404, 40401, problem) from error

    def _known(self, subject: str) -> tuple[ServedTopic, list[SchemaVersion]]:
        topic = self._topic(subject)
        known = self._broker.schemas.versions(topic)
        if not known:
            raise _Refused(404, 40401, f"the topic of the subject {subject!r} has no schema yet")
        return topic, known


def _chosen(known: list[SchemaVersion], version: str) -> SchemaVersion:
    number = len(known) if version in ("latest", "-1") else int(version)
    if number > len(known):
        raise _Refused(404, 40402, f"there is no version {number}: there are 1 to {len(known)}")
    return known[number - 1]


def _text_of(asked: _Text) -> str:
    if asked.references:
        raise _Refused(422, 42201, "references to other schemas are not supported: write them into the schema")
    if asked.schemaType != _JSON or not is_json(asked.schema):
        raise _Refused(422, 42201, f"invalid schemaType {asked.schemaType or 'AVRO'!r}: only {_JSON} is supported")
    return asked.schema


def _is_same(version: SchemaVersion, text: str) -> bool:
    try:
        return _canonical(_json_text(version)) == _canonical(text)
    except ValueError:
        return False


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True)


def _described(topic: ServedTopic, version: SchemaVersion) -> dict[str, Any]:
    return {
        "subject": f"{topic.topic.name}{_VALUE}",
        "id": _id_of(topic, version),
        "version": version.number,
        "schemaType": _JSON,
        "schema": _json_text(version),
    }


def _id_of(topic: ServedTopic, version: SchemaVersion) -> int:
    return topic.topic.id * _STRIDE + version.number


def _json_text(version: SchemaVersion) -> str:
    return version.text if is_json(version.text) else json.dumps(write_json_schema(read_ddl(version.text)))


def _code_of(error: PenstockError) -> tuple[int, int]:
    """Return the status of an error, and its code in the registry."""
    match error:
        case _Refused():
            return error.status, error.number
        case BadSchema():
            return 422, 42201
        case SchemaConflict():
            return 409, 409
        case UnknownSchema():
            return 404, 40401
    status = status_of(error)
    return status, status * 100 + 1


def _response(document: object, status: int) -> Response:
    return Response(json.dumps(document), status, media_type=MEDIA)
