"""The place of a broker in the tree: its role, its parents, and the topics that are piped.

A registry sends it as a JSON document. A registry's file has the same types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from penstock import schema
from penstock.errors import BadTopology
from penstock.model.subject import is_pattern
from penstock.schema import Form, Invalid, NonNegative, shown

NODE_ID_CHARACTERS_MAX: Final = 256
URL_CHARACTERS_MAX: Final = 2048
PARENTS_MAX: Final = 16
TOPICS_MAX: Final = 10_000

# No user and no password: the registry would show them to everyone.
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?P<path>(?:/[!$-;=@-Z_a-z~]*)?)"
)
_PORTS: Final = {"http": 80, "https": 443}
_PORT_MAX: Final = 65535


class Role(StrEnum):
    ROOT = "ROOT"
    L2 = "L2"
    L3 = "L3"
    POS = "POS"
    LOCAL = "LOCAL"


def _node_id(value: Any) -> str:
    is_valid = (
        isinstance(value, str)
        and 0 < len(value) <= NODE_ID_CHARACTERS_MAX
        and value.isprintable()
        and value == value.strip()
    )
    if not is_valid:
        raise ValueError(value)
    return str(value)


def _url(value: Any) -> str:
    """Return the base URL of an HTTP port in one spelling: without a final slash, and without the default port."""
    found = _URL.fullmatch(value) if isinstance(value, str) and len(value) <= URL_CHARACTERS_MAX else None
    port = int(found["port"] or _PORTS[found["scheme"]]) if found else 0
    if found is None or not 0 < port <= _PORT_MAX:
        raise ValueError(value)
    place = f"{found['scheme']}://{found['host'].lower()}"
    if port != _PORTS[found["scheme"]]:
        place += f":{port}"
    return place + found["path"].rstrip("/")


def _topic(value: Any) -> str:
    # Text that is not printable may have lone surrogates, which cannot be encoded.
    if not isinstance(value, str) or not value.isprintable() or not is_pattern(value.encode()):
        raise ValueError(value)
    return value


def _version(value: Any) -> Any:
    """A registry without versions is always at the same one; so is one whose version is text, like "1.0"."""
    return 0 if value is None or isinstance(value, str) else value


def each_of(read: Callable[[Any], str], count_max: int, allowed: str, *, may_be_null: bool = False) -> Form:
    """Return the form of a list. Duplicates are dropped."""

    def read_all(value: Any) -> tuple[str, ...]:
        value = [] if value is None and may_be_null else value
        if not isinstance(value, list):
            raise ValueError(value)
        if len(value) > count_max:
            raise Invalid(f"has {len(value)} entries: at most {count_max} are allowed")
        found: dict[str, None] = {}
        for at, each in enumerate(value):
            try:
                found[read(each)] = None
            except Invalid as problem:
                raise Invalid(str(problem), f"[{at}]") from None
            except ValueError:
                raise Invalid(f"is {shown(each)}: it must be {allowed}", f"[{at}]") from None
        return tuple(found)

    return Form(read=read_all, allowed=f"a list, each of it {allowed}")


_A_URL: Final = "a URL such as http://host:8222, without user, password and query"
NodeId = Annotated[
    str,
    Form(
        read=_node_id,
        allowed=f"printable text of at most {NODE_ID_CHARACTERS_MAX} characters without surrounding spaces",
    ),
]
Url = Annotated[str, Form(read=_url, allowed=_A_URL)]
Urls = Annotated[tuple[str, ...], each_of(_url, PARENTS_MAX, _A_URL)]
Topics = Annotated[tuple[str, ...], each_of(_topic, TOPICS_MAX, "a topic, or a pattern", may_be_null=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    node_id: Annotated[NodeId, Form(name="nodeId")]
    role: Role
    # Base URLs of HTTP ports. The first is followed, the others are fallbacks; empty: there is no parent.
    parents: Annotated[Urls, Form(name="requestToFollow")] = ()
    # Topics that this node pulls, names or patterns; empty: all topics of the parent.
    topics: Topics = ()
    # Topics that this node pushes to its parent.
    up: Topics = ()
    version: Annotated[NonNegative, Form(name="topologyVersion", read=_version)] = 0

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, name) for name, field in schema.declared(Topology).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, value: object) -> Topology:
        """Unknown fields are ignored: a newer registry may send more."""
        if not isinstance(value, dict):
            raise BadTopology(f"a topology must be a JSON object, not {shown(value)}")
        try:
            topology = schema.build(cls, {"requestToFollow": None, **value}, ignores_unknown=True)
        except ValueError as error:
            raise BadTopology(str(error)) from None
        check_directions(topology.topics, topology.up)
        return topology


def check_directions(topics: Collection[str], up: Collection[str]) -> None:
    if both := sorted({*topics} & {*up}):
        raise BadTopology(f"topics and up both have {both[0]}: a topic is piped down or up, not both")


def _reader(hint: Any) -> Callable[[str, object], Any]:
    def read(name: str, value: object) -> Any:
        try:
            return schema.field(name, hint).read(value)
        except Invalid as problem:
            raise BadTopology(problem.of(name)) from None

    return read


# Each reads one value, and raises BadTopology with its name.
read_node_id: Final[Callable[[str, object], str]] = _reader(NodeId)
read_url: Final[Callable[[str, object], str]] = _reader(Url)
read_urls: Final[Callable[[str, object], tuple[str, ...]]] = _reader(Urls)
read_topics: Final[Callable[[str, object], tuple[str, ...]]] = _reader(Topics)


def origin_of(url: str) -> str:
    """Return the scheme, host and port of a URL. Raise BadTopology if it is invalid."""
    found = _URL.fullmatch(read_url("parent", url))
    assert found is not None
    return f"{found['scheme']}://{found['host']}:{found['port'] or _PORTS[found['scheme']]}"
