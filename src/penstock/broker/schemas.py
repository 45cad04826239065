"""The schemas of topics: versions 1, 2, 3 …, each compatible with the one before as the topic's policy asks.

In the state topic, until the topic is deleted:

    schema/<topic id>/<version>    {"text", "time_us"}
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple, Protocol

from penstock.broker.topic import ServedTopic, Topics
from penstock.broker.value_check import Check, NoSchema, ValueCheck, compiled, is_installed
from penstock.clock import Clock
from penstock.errors import BadSchema, SchemaConflict, TooManySchemas, UnknownSchema, UnknownTopic
from penstock.health import Usage
from penstock.log.policy import Policy, Topic
from penstock.store.meta import Change
from penstock.store.store import Store
from penstock.topic_schema.compatibility import Compatibility, incompatibility
from penstock.topic_schema.ddl import read_ddl
from penstock.topic_schema.json_schema import read_document, read_node, write_json_schema
from penstock.topic_schema.tree import TypeNode, is_json

# Of one topic: a schema that changes more often is generated, and belongs elsewhere.
VERSIONS_MAX: Final = 100
# Of all schemas together: they are kept in memory, with the rest of the state.
SCHEMAS_BYTES_MAX: Final = 64 << 20

_KIND: Final = "schema"


class SchemaVersion(NamedTuple):
    number: int
    text: str
    time_us: int


class SchemaVerdict(NamedTuple):
    """Whether a schema could be registered."""

    # The version that it was compared with; None if there is none.
    version: int | None
    # Why not.
    reason: str | None


class SchemasHost(Protocol):
    """The broker, as far as schemas need it."""

    clock: Clock
    store: Store
    topics: Topics


class TopicSchemas:
    def __init__(self, host: SchemasHost) -> None:
        self._host = host
        # By topic, oldest first.
        self._versions: dict[int, list[SchemaVersion]] = {}
        self._bytes = 0
        # Held while a version is written, so that two at once are compared with each other.
        self._writing = asyncio.Lock()
        for key, value in sorted(host.store.state.items(_KIND), key=lambda item: int(item[0].partition("/")[2])):
            topic_id, _, number = key.partition("/")
            self._add(int(topic_id), SchemaVersion(int(number), value["text"], value["time_us"]))

    def usage(self) -> dict[str, Usage]:
        return {
            "schema_bytes": Usage(self._bytes, SCHEMAS_BYTES_MAX),
            # Of the topic with most of them.
            "schema_versions": Usage(max(map(len, self._versions.values()), default=0), VERSIONS_MAX),
        }

    def versions(self, topic: ServedTopic) -> list[SchemaVersion]:
        return list(self._versions.get(topic.topic.id, ()))

    def version(self, topic: ServedTopic, number: int | None = None) -> SchemaVersion:
        """Return a version, or the newest. Raises UnknownSchema."""
        versions = self._versions.get(topic.topic.id, [])
        name = topic.topic.name
        if not versions:
            raise UnknownSchema(f"topic {name} has no schema: register one with penstock topic schema set {name} FILE")
        if number is None:
            return versions[-1]
        if not 1 <= number <= len(versions):
            raise UnknownSchema(f"unknown schema version {number}: topic {name} has 1 to {len(versions)}")
        return versions[number - 1]

    async def verdict(self, topic: ServedTopic, text: str, version: SchemaVersion | None = None) -> SchemaVerdict:
        """Return whether a schema is compatible with a version, by default the newest. Raises BadSchema if it is
        invalid."""
        versions = self._versions.get(topic.topic.id)
        newest = version or (versions[-1] if versions else None)
        wanted = topic.topic.policy.schema_compatibility
        # The largest schemas take a tenth of a second.
        reason = await asyncio.to_thread(_judge, text, None if newest is None else newest.text, wanted)
        return SchemaVerdict(None if newest is None else newest.number, reason)

    async def register(self, topic: ServedTopic, text: str) -> SchemaVersion:
        """Store a new version, unless the newest has the same text. Raises BadSchema or SchemaConflict."""
        topic_id, name = topic.topic.id, topic.topic.name
        async with self._writing:
            served = self._served(topic_id, name)
            versions = self._versions.get(topic_id, [])
            if versions and versions[-1].text == text:
                return versions[-1]
            found = await self.verdict(served, text)
            if found.reason is not None:
                raise SchemaConflict(
                    f"the schema is not compatible with version {found.version} of topic {name} "
                    f"({served.topic.policy.schema_compatibility}): {found.reason}"
                )
            self._check_room(name, len(versions), len(text.encode()))
            made = SchemaVersion(len(versions) + 1, text, self._host.clock.now_us())
            place = f"{topic_id}/{made.number}"
            await self._host.store.write_state([Change(_KIND, place, {"text": text, "time_us": made.time_us})])
            if self._host.topics.by_id(topic_id) is None:
                await self._host.store.write_state([Change(_KIND, place, None)])
            served = self._served(topic_id, name)
            self._add(topic_id, made)
            served.check = self.check(served.topic)
            return made

    def _served(self, topic_id: int, name: str) -> ServedTopic:
        """Return a topic as it is now: it may have been altered, or deleted."""
        served = self._host.topics.by_id(topic_id)
        if served is None:
            raise UnknownTopic(f"topic {name} was deleted meanwhile")
        return served

    def _check_room(self, name: str, versions: int, size: int) -> None:
        if versions >= VERSIONS_MAX:
            raise TooManySchemas(f"topic {name} has {versions} schema versions, the limit: continue with a new topic")
        if self._bytes + size > SCHEMAS_BYTES_MAX:
            raise TooManySchemas(
                f"all schemas have {self._bytes} bytes, and {SCHEMAS_BYTES_MAX} are allowed: delete topics"
            )

    def check(self, topic: Topic) -> Check | None:
        """Return what checks the values of a topic; None if its policy does not ask for that."""
        if not topic.policy.schema_enforced or topic.is_internal:
            return None
        versions = self._versions.get(topic.id)
        if not versions:
            return NoSchema(
                UnknownSchema(
                    f"topic {topic.name} enforces its schema and has none: register one with "
                    f"penstock topic schema set {topic.name} FILE"
                )
            )
        newest = versions[-1]
        try:
            return ValueCheck(topic.name, newest.number, compiled(_read(newest.text)[1]))
        except BadSchema as error:
            return NoSchema(BadSchema(f"topic {topic.name} cannot enforce its schema: {error}"))

    def check_policy(self, policy: Policy, topic: ServedTopic | None = None) -> None:
        """Raise BadSchema if a topic cannot enforce its schema."""
        if policy.schema_enforced:
            versions = None if topic is None else self._versions.get(topic.topic.id)
            compiled(_read(versions[-1].text)[1] if versions else {})

    def forget_topic(self, topic_id: int) -> None:
        """Forget the schemas of a deleted topic. The store removes them."""
        for each in self._versions.pop(topic_id, ()):
            self._bytes -= len(each.text.encode())

    def _add(self, topic_id: int, version: SchemaVersion) -> None:
        self._versions.setdefault(topic_id, []).append(version)
        self._bytes += len(version.text.encode())


def _judge(text: str, newest: str | None, wanted: Compatibility) -> str | None:
    """Return why a schema cannot follow the newest one. Raises BadSchema if it is invalid. For any thread."""
    node, document = _read(text)
    if is_installed():
        compiled(document)
    return None if newest is None else incompatibility(_read(newest)[0], node, wanted)


def _read(text: str) -> tuple[TypeNode, dict[str, Any]]:
    """Return what a schema says, and as JSON Schema without references. Raises BadSchema if it is invalid."""
    if is_json(text):
        document = read_document(text)
        return read_node(document), document
    node = read_ddl(text)
    return node, write_json_schema(node)
