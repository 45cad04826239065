"""`penstock topology`: show the tree of brokers and the health of each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import Json, TlsCa, TlsCert, TlsKey, read_tls
from penstock.cli.text import Document, safe
from penstock.errors import BadTopology, NoBroker, PenstockError
from penstock.pipe.topology import Topology, read_node_id, read_url
from penstock.schema import shown

if TYPE_CHECKING:
    import httpx
    from rich.text import Text
    from rich.tree import Tree

    from penstock.tls.options import TlsOptions

app = typer.Typer(add_completion=False)

HTTP: Final = "127.0.0.1:8222"
UNREACHABLE: Final = "UNREACHABLE"
# Limits of the replies for the whole tree, and for one node with its topics.
_TREE_BYTES_MAX: Final = 64 << 20
_STATUS_BYTES_MAX: Final = 16 << 20
_STATUS_S: Final = 5.0
_REQUESTS_MAX: Final = 64
# Show the topics with the largest lag; --json has all.
_TOPICS_SHOWN: Final = 6
_COLOURS: Final = {"HEALTHY": "green", "DEGRADED": "yellow", "UNHEALTHY": "red"}
_ARROWS: Final = {"down": "↓", "up": "↑"}


@app.command()
def topology(
    context: typer.Context,
    registry: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="PENSTOCK_REGISTRY_URL", help="Show all nodes of this registry."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Show one broker, its parent and its children; also a URL, as for https. \\[default: {HTTP}]",
        ),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json: Json = False,
) -> None:
    """Show the tree of brokers with the role, health, version and lag of each."""
    from penstock.cli import output

    if http is not None and registry is not None:
        # An explicit broker takes precedence over a registry from the environment.
        source = context.get_parameter_source("registry")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter("give --registry or --http, not both", param_hint="'--registry'")
        registry = None
    tls = read_tls(tls_ca, tls_cert, tls_key)
    if registry is not None:
        seen = asyncio.run(_ask_registry(_url(registry, "--registry"), tls))
    else:
        seen = asyncio.run(_ask_broker(_url(http or HTTP, "--http"), tls))
    if json:
        output.print_json(asdict(seen))
        return
    for tree in _draw(seen):
        output.console().print(tree)


def _url(text: str, option: str) -> str:
    try:
        return read_url("the URL", text if "://" in text else f"http://{text}")
    except BadTopology as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None


# ---- the nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    topic: str
    direction: str
    lag: int
    gaps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node and the status that it reports. None: unknown."""

    node: str
    role: str | None = None
    url: str | None = None
    # The node above it in the tree, and the URL that it follows now.
    parent: str | None = None
    follows: str | None = None
    version: int | None = None
    health: str | None = None
    reason: str = ""
    since: str | None = None
    topics: tuple[Lag, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStatus:
    """The status of all nodes; `version` is the registry's, if there is one."""

    registry: str | None = None
    version: int | None = None
    nodes: tuple[NodeStatus, ...]


async def _ask_registry(url: str, tls: TlsOptions | None) -> TreeStatus:
    from penstock.pipe.ask import http_client

    async with http_client(url, tls) as client:
        remedy = "start a registry with `penstock registry`, or use --registry"
        answer = await _ask(client, f"{url}/registry/nodes", _TREE_BYTES_MAX, remedy)
        version, nodes = _read_tree(answer)
        slots = asyncio.Semaphore(_REQUESTS_MAX)

        async def look(node: NodeStatus) -> NodeStatus:
            async with slots:
                return await _look(client, node)

        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(look(node)) for node in nodes]
    return TreeStatus(registry=url, version=version, nodes=tuple(task.result() for task in requests))


async def _ask_broker(url: str, tls: TlsOptions | None) -> TreeStatus:
    from penstock.pipe.ask import http_client

    async with http_client(url, tls) as client:
        remedy = "start a broker with `penstock serve`, or use --http"
        answer = await _ask(client, f"{url}/pipe/status", _STATUS_BYTES_MAX, remedy)
    status = _Status(answer)
    own = status.fill(NodeStatus(node=status.node, url=url, parent=status.parent))
    above = [NodeStatus(node=status.parent, url=status.parent)] if status.parent is not None else []
    below = [
        NodeStatus(node=child, url=address, parent=own.node, since=seen) for child, address, seen in status.children()
    ]
    return TreeStatus(nodes=(*above, own, *below))


async def _ask(client: httpx.AsyncClient, url: str, bytes_max: int, remedy: str) -> object:
    from penstock.pipe.ask import ask

    try:
        return await ask(client, url, bytes_max=bytes_max)
    except NoBroker as error:
        raise NoBroker(f"{error}: {remedy}") from None


async def _look(client: httpx.AsyncClient, node: NodeStatus) -> NodeStatus:
    """Return the node with the status that it reports."""
    from penstock.pipe.ask import ask

    if node.url is None:
        return replace(node, reason="the registry has no url for it")
    try:
        answer = await ask(client, f"{node.url}/pipe/status", bytes_max=_STATUS_BYTES_MAX, answer_s=_STATUS_S)
        status = _Status(answer)
        if status.node != node.node:
            raise BadTopology(f"{node.url} is node {status.node}, not {node.node}")
        return status.fill(node)
    except PenstockError as error:
        return replace(node, health=UNREACHABLE, reason=str(error))


# ---- parsing the replies


def _read_tree(answer: object) -> tuple[int, list[NodeStatus]]:
    if not isinstance(answer, dict) or not isinstance(answer.get("nodes"), list):
        raise BadTopology("the reply has no list of nodes: is it a registry?")
    nodes = []
    for entry in answer["nodes"]:
        topology = Topology.from_json(entry)
        url, parent = entry.get("url"), entry.get("parent")
        nodes.append(
            NodeStatus(
                node=topology.node_id,
                role=topology.role,
                url=None if url is None else read_url("url", url),
                parent=read_node_id("parent", parent) if parent is not None else next(iter(topology.parents), None),
            )
        )
    version = answer.get("topologyVersion")
    return version if isinstance(version, int) else 0, nodes


class _Status:
    """The reply of /pipe/status."""

    def __init__(self, answer: object) -> None:
        if not isinstance(answer, dict) or answer.get("health") not in _COLOURS:
            raise BadTopology("the reply has no health: is it a broker?")
        self._answer = answer
        self.node = read_node_id("node", answer.get("node"))
        self.parent = None if answer.get("parent") is None else read_url("parent", answer["parent"])

    def fill(self, node: NodeStatus) -> NodeStatus:
        answer = self._answer
        return replace(
            node,
            role=node.role or _text(answer, "role"),
            follows=self.parent,
            version=answer["version"] if isinstance(answer.get("version"), int) else None,
            health=answer["health"],
            reason=_text(answer, "reason") or "",
            since=_text(answer, "since"),
            topics=tuple(
                Lag(
                    topic=_text(each, "topic") or "?",
                    direction=_text(each, "direction") or "?",
                    lag=_count(each, "lag"),
                    gaps=_count(each, "gaps"),
                )
                for each in _objects(answer, "topics")
            ),
        )

    def children(self) -> Iterator[tuple[str, str | None, str | None]]:
        """Yield the ID of each child, its address, and when it was last seen."""
        for each in _objects(self._answer, "children"):
            yield read_node_id("node", each.get("node")), _text(each, "address"), _text(each, "seen")


def _text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    return value if isinstance(value, str) else None


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key, 0)
    if not isinstance(value, int):
        raise BadTopology(f"invalid {key} {shown(value)}: it must be an integer")
    return value


def _objects(answer: Document, key: str) -> list[Document]:
    found = answer.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadTopology(f"invalid {key} {shown(found)}: it must be a list of objects")
    return found


# ---- drawing


def _draw(seen: TreeStatus) -> Iterator[Tree | str]:
    if seen.registry is not None:
        yield f"{seen.registry}, version {seen.version}: {len(seen.nodes)} nodes"
    below: dict[str | None, list[NodeStatus]] = {}
    names = {node.node for node in seen.nodes}
    for node in sorted(seen.nodes, key=lambda each: each.node):
        below.setdefault(node.parent if node.parent in names else None, []).append(node)
    drawn: set[str] = set()
    for top in below.get(None, []):
        yield _branch(top, below, seen, drawn)
    # A registry may report a cycle, which has no top.
    for node in seen.nodes:
        if node.node not in drawn:
            yield _branch(node, below, seen, drawn)


def _branch(
    top: NodeStatus, below: Mapping[str | None, Sequence[NodeStatus]], seen: TreeStatus, drawn: set[str]
) -> Tree:
    from rich.tree import Tree

    root = Tree(_label(top, seen))
    drawn.add(top.node)
    waiting = [(top, root)]
    while waiting:
        node, branch = waiting.pop()
        for child in below.get(node.node, ()):
            if child.node not in drawn:
                drawn.add(child.node)
                waiting.append((child, branch.add(_label(child, seen))))
    return root


def _label(node: NodeStatus, seen: TreeStatus) -> Text:
    from rich.text import Text

    label = Text(safe(node.node), style="bold")
    plain = Text(style="not bold")
    for word in (node.role, node.url if node.url != node.node else None):
        if word is not None:
            plain.append(f"  {safe(word)}")
    if node.health is not None:
        plain.append(f"  {node.health}", style=_COLOURS.get(node.health, "red"))
    if node.version is not None:
        is_old = seen.version is not None and node.version != seen.version
        plain.append(f"  version {node.version}", style="yellow" if is_old else "dim")
    for line in _lines(node, seen.nodes):
        plain.append(f"\n{safe(line)}", style="dim")
    return label.append_text(plain)


def _lines(node: NodeStatus, nodes: Collection[NodeStatus]) -> Iterator[str]:
    """Yield the lines below the name of a node."""
    if node.reason and node.health != "HEALTHY":
        since = f", since {node.since}" if node.since and node.health in _COLOURS else ""
        yield f"{node.reason}{since}"
    elif node.health is None and node.since:
        yield f"last seen {node.since}"
    above = [each.url for each in nodes if each.node == node.parent]
    if node.parent is not None and not above:
        yield f"parent {node.parent}"
    if node.follows is not None and node.follows not in (*above, node.parent):
        yield f"follows {node.follows}"
    if node.topics:
        behind = sorted(node.topics, key=lambda each: (-each.lag, each.topic))
        words = [_lag(each) for each in behind[:_TOPICS_SHOWN]]
        more = len(behind) - len(words)
        yield f"lag: {', '.join(words)}{f', and {more} more' if more else ''}"


def _lag(topic: Lag) -> str:
    gaps = f" ({topic.gaps} gaps)" if topic.gaps else ""
    return f"{topic.topic} {_ARROWS.get(topic.direction, '?')} {topic.lag:,}{gaps}"
