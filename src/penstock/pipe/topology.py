"""Where a broker stands in the tree: its role, whom it follows, and what flows between the two.

It comes as a JSON document from a registry, and is believed only as far as it can be checked. The readers below take
one value each, whoever wrote it: a registry's answer and a registry's file go through the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.errors import BadTopology
from penstock.subject import is_pattern

NODE_ID_CHARACTERS_MAX: Final = 256
URL_CHARACTERS_MAX: Final = 2048
PARENTS_MAX: Final = 16
TOPICS_MAX: Final = 10_000
VERSION_MAX: Final = (1 << 63) - 1

# No user and no password: they would be shown to everyone who asks where to go.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?P<path>(?:/[!$-;=@-Z_a-z~]*)?)"
)
_PORTS: Final = {"http": 80, "https": 443}
_PORT_MAX: Final = 65535
# So much of a wrong value is shown.
_SHOWN_CHARACTERS: Final = 80


class Role(StrEnum):
    ROOT = "ROOT"
    L2 = "L2"
    L3 = "L3"
    POS = "POS"
    LOCAL = "LOCAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    node_id: str
    role: Role
    # Base URLs of HTTP ports. The first is followed, the others are for when it does not answer; none: nobody is.
    parents: tuple[str, ...] = ()
    # What comes down to this node, names or patterns; empty: all that the parent has.
    topics: tuple[str, ...] = ()
    # What this node pushes to its parent.
    up: tuple[str, ...] = ()
    version: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "nodeId": self.node_id,
            "role": self.role.value,
            "requestToFollow": list(self.parents),
            "topologyVersion": self.version,
            "topics": list(self.topics),
            "up": list(self.up),
        }

    @classmethod
    def from_json(cls, value: object) -> Topology:
        """What it does not know is left alone: a newer registry may say more."""
        if not isinstance(value, dict):
            raise BadTopology(f"a topology must be a JSON object, not {shown(value)}")
        topics, up = (read_topics(name, value.get(name)) for name in ("topics", "up"))
        check_directions(topics, up)
        return cls(
            node_id=read_node_id("nodeId", value.get("nodeId")),
            role=read_role("role", value.get("role")),
            parents=read_urls("requestToFollow", value.get("requestToFollow")),
            topics=topics,
            up=up,
            version=_read_version("topologyVersion", value.get("topologyVersion")),
        )


def check_directions(topics: Collection[str], up: Collection[str]) -> None:
    if both := sorted({*topics} & {*up}):
        raise BadTopology(f"topics and up both have {both[0]}: what comes down cannot go up")


def read_node_id(name: str, value: object) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= NODE_ID_CHARACTERS_MAX
        or not value.isprintable()
        or value != value.strip()
    ):
        raise BadTopology(
            f"{name} is {shown(value)}: it must be printable text, up to {NODE_ID_CHARACTERS_MAX} characters, "
            "with no space at its ends"
        )
    return value


def read_role(name: str, value: object) -> Role:
    if isinstance(value, str) and value in Role.__members__:
        return Role(value)
    *most, last = Role
    raise BadTopology(f"{name} is {shown(value)}: it must be {', '.join(most)} or {last}")


def read_url(name: str, value: object) -> str:
    """The base of an HTTP port, spelled in one way: without a slash at its end, or the port that it has anyway."""
    found = _URL.fullmatch(value) if isinstance(value, str) and len(value) <= URL_CHARACTERS_MAX else None
    port = int(found["port"] or _PORTS[found["scheme"]]) if found else 0
    if found is None or not 0 < port <= _PORT_MAX:
        raise BadTopology(
            f"{name} is {shown(value)}: it must be a URL like http://host:8222, without user, password and query"
        )
    place = f"{found['scheme']}://{found['host'].lower()}"
    if port != _PORTS[found["scheme"]]:
        place += f":{port}"
    return place + found["path"].rstrip("/")


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL: who answers there, whatever the path. BadTopology if it is none."""
    found = _URL.fullmatch(read_url("parent", url))
    assert found is not None
    return f"{found['scheme']}://{found['host']}:{found['port'] or _PORTS[found['scheme']]}"


def read_urls(name: str, value: object) -> tuple[str, ...]:
    urls = _list(name, value, PARENTS_MAX)
    return tuple(dict.fromkeys(read_url(f"{name}[{at}]", url) for at, url in enumerate(urls)))


def read_topics(name: str, value: object) -> tuple[str, ...]:
    """Names or patterns; none if nothing is said."""
    topics = [] if value is None else _list(name, value, TOPICS_MAX)
    for at, topic in enumerate(topics):
        # What cannot be printed may be no Unicode, which has no bytes.
        if not isinstance(topic, str) or not topic.isprintable() or not is_pattern(topic.encode()):
            raise BadTopology(f"{name}[{at}] is {shown(topic)}: it must be the name of a topic, or a pattern")
    return tuple(dict.fromkeys(topics))


def shown(value: object) -> str:
    """Of what was sent, as much as fits into a sentence."""
    if value is None:
        return "not there"
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _list(name: str, value: object, count_max: int) -> list[Any]:
    if not isinstance(value, list):
        raise BadTopology(f"{name} is {shown(value)}: it must be a list")
    if len(value) > count_max:
        raise BadTopology(f"{name} has {len(value)} entries: it may have {count_max}")
    return value


def _read_version(name: str, value: object) -> int:
    """A registry that counts no versions is always at the same one; so is one whose version is text, like "1.0"."""
    if value is None or isinstance(value, str):
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= VERSION_MAX:
        raise BadTopology(f"{name} is {shown(value)}: it must be a whole number, from 0")
    return value
