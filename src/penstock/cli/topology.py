"""`penstock topology`: the tree of brokers, and how each of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.options import Json
from penstock.cli.text import Document, safe
from penstock.errors import BadTopology, NoBroker, PenstockError
from penstock.pipe.topology import Topology, read_node_id, read_url, shown

if TYPE_CHECKING:
    import httpx
    from rich.text import Text
    from rich.tree import Tree

app = typer.Typer(add_completion=False)

HTTP: Final = "127.0.0.1:8222"
UNREACHABLE: Final = "UNREACHABLE"
# Of the whole tree, and of one node with its topics.
_TREE_BYTES_MAX: Final = 64 << 20
_STATUS_BYTES_MAX: Final = 16 << 20
_STATUS_S: Final = 5.0
_ASKED_AT_ONCE: Final = 64
# Those that are furthest behind; the others are for programs.
_TOPICS_SHOWN: Final = 6
_COLOURS: Final = {"HEALTHY": "green", "DEGRADED": "yellow", "UNHEALTHY": "red"}
_ARROWS: Final = {"down": "↓", "up": "↑"}


@app.command()
def topology(
    context: typer.Context,
    registry: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="PENSTOCK_REGISTRY_URL", help="All nodes that this registry knows."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"One broker, its parent and its children.  [default: {HTTP}]"),
    ] = None,
    json: Json = False,
) -> None:
    """Draw the tree of brokers: the role, the health, the version and the lag of each."""
    from penstock.cli import output

    if http is not None and registry is not None:
        # Who names a broker does not mean the registry of the environment.
        source = context.get_parameter_source("registry")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter("give this or --http: one of them", param_hint="'--registry'")
        registry = None
    if registry is not None:
        seen = asyncio.run(_ask_registry(_url(registry, "--registry")))
    else:
        seen = asyncio.run(_ask_broker(_url(http or HTTP, "--http")))
    if json:
        output.print_json(asdict(seen))
        return
    for tree in _draw(seen):
        output.console().print(tree)


def _url(text: str, option: str) -> str:
    try:
        return read_url("it", text if "://" in text else f"http://{text}")
    except BadTopology as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None


# ---- what there is to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    topic: str
    direction: str
    lag: int
    gaps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A node, as it tells of itself. None: nobody knows."""

    node: str
    role: str | None = None
    url: str | None = None
    # The node above it, and the URL that it follows at this time.
    parent: str | None = None
    follows: str | None = None
    version: int | None = None
    health: str | None = None
    reason: str = ""
    since: str | None = None
    topics: tuple[Lag, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class All:
    """`version` is that of the registry, if one was asked."""

    registry: str | None = None
    version: int | None = None
    nodes: tuple[Seen, ...]


async def _ask_registry(url: str) -> All:
    from penstock.pipe.ask import ask, http_client

    async with http_client() as client:
        try:
            answer = await ask(client, f"{url}/registry/nodes", bytes_max=_TREE_BYTES_MAX)
        except NoBroker as error:
            raise NoBroker(f"{error}: start a registry with `penstock registry`, or name another") from None
        version, told = _read_tree(answer)
        places = asyncio.Semaphore(_ASKED_AT_ONCE)

        async def look(node: Seen) -> Seen:
            async with places:
                return await _look(client, node)

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(look(node)) for node in told]
    return All(registry=url, version=version, nodes=tuple(task.result() for task in asked))


async def _ask_broker(url: str) -> All:
    from penstock.pipe.ask import ask, http_client

    async with http_client() as client:
        try:
            answer = await ask(client, f"{url}/pipe/status", bytes_max=_STATUS_BYTES_MAX)
        except NoBroker as error:
            raise NoBroker(f"{error}: start a broker with `penstock serve`, or name another") from None
    status = _Status(answer)
    own = status.fill(Seen(node=status.node, url=url, parent=status.parent))
    above = [Seen(node=status.parent, url=status.parent)] if status.parent is not None else []
    below = [Seen(node=child, url=address, parent=own.node, since=seen) for child, address, seen in status.children()]
    return All(nodes=(*above, own, *below))


async def _look(client: httpx.AsyncClient, node: Seen) -> Seen:
    """The node with what it tells of itself."""
    from penstock.pipe.ask import ask

    if node.url is None:
        return replace(node, reason="the registry has no url of it")
    try:
        answer = await ask(client, f"{node.url}/pipe/status", bytes_max=_STATUS_BYTES_MAX, answer_s=_STATUS_S)
        status = _Status(answer)
        if status.node != node.node:
            raise BadTopology(f"{node.url} is node {status.node}")
        return status.fill(node)
    except PenstockError as error:
        return replace(node, health=UNREACHABLE, reason=str(error))


# ---- what is answered, checked


def _read_tree(answer: object) -> tuple[int, list[Seen]]:
    if not isinstance(answer, dict) or not isinstance(answer.get("nodes"), list):
        raise BadTopology("the registry does not tell its nodes: is it a registry?")
    nodes = []
    for entry in answer["nodes"]:
        told = Topology.from_json(entry)
        url, parent = entry.get("url"), entry.get("parent")
        nodes.append(
            Seen(
                node=told.node_id,
                role=told.role,
                url=None if url is None else read_url("url", url),
                parent=read_node_id("parent", parent) if parent is not None else next(iter(told.parents), None),
            )
        )
    version = answer.get("topologyVersion")
    return version if isinstance(version, int) else 0, nodes


class _Status:
    """What /pipe/status answers."""

    def __init__(self, answer: object) -> None:
        if not isinstance(answer, dict) or answer.get("health") not in _COLOURS:
            raise BadTopology("it does not tell its health: is it a broker?")
        self._answer = answer
        self.node = read_node_id("node", answer.get("node"))
        self.parent = None if answer.get("parent") is None else read_url("parent", answer["parent"])

    def fill(self, node: Seen) -> Seen:
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
        """The id, the address, and when each was last seen."""
        for each in _objects(self._answer, "children"):
            yield read_node_id("node", each.get("node")), _text(each, "address"), _text(each, "seen")


def _text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    return value if isinstance(value, str) else None


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key, 0)
    if not isinstance(value, int):
        raise BadTopology(f"{key} is {shown(value)}: it must be a whole number")
    return value


def _objects(answer: Document, key: str) -> list[Document]:
    found = answer.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadTopology(f"{key} is {shown(found)}: it must be a list of objects")
    return found


# ---- as it is drawn


def _draw(seen: All) -> Iterator[Tree | str]:
    if seen.registry is not None:
        yield f"{seen.registry}, version {seen.version}: {len(seen.nodes)} nodes"
    below: dict[str | None, list[Seen]] = {}
    names = {node.node for node in seen.nodes}
    for node in sorted(seen.nodes, key=lambda each: each.node):
        below.setdefault(node.parent if node.parent in names else None, []).append(node)
    drawn: set[str] = set()
    for top in below.get(None, []):
        yield _branch(top, below, seen, drawn)
    # What a registry tells may have a cycle, and nothing is at the top of one.
    for node in seen.nodes:
        if node.node not in drawn:
            yield _branch(node, below, seen, drawn)


def _branch(top: Seen, below: Mapping[str | None, Sequence[Seen]], seen: All, drawn: set[str]) -> Tree:
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


def _label(node: Seen, seen: All) -> Text:
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


def _lines(node: Seen, nodes: Collection[Seen]) -> Iterator[str]:
    """What there is to say below its name."""
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
