"""`penstock topology`, run as its users run it: a real registry, and brokers that answer as a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.commands import Penstock, at_terminal
from tests.support.registries import Answer, Answers, Registry, as_json

NOBODY: Final = "http://127.0.0.1:1"
SINCE: Final = "2030-01-31T12:00:00Z"


def status(node: str, **more: object) -> dict[str, object]:
    return {
        "node": node,
        "role": "L2",
        "version": 1,
        "parent": None,
        "health": "HEALTHY",
        "reason": "",
        "since": SINCE,
        "topics": [],
        "children": [],
    } | more


def lag(topic: str, behind: int, direction: str = "down", **more: object) -> dict[str, object]:
    return {"topic": topic, "direction": direction, "lag": behind, "position": [0], "gaps": 0} | more


class Brokers:
    """HTTP servers that answer /pipe/status, by node."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.urls: dict[str, str] = {}

    def add(self, node: str, answer: Answer | None = None, **more: object) -> str:
        made = answer or as_json(status(node, **more))
        answers = self._stack.enter_context(Answers(lambda path: made if path == "/pipe/status" else Answer(b"", 404)))
        self.urls[node] = answers.url
        return answers.url

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    brokers = Brokers()
    yield brokers
    brokers.close()


@pytest.fixture
def penstock() -> Penstock:
    return Penstock(NOBODY)


@pytest.fixture
def tree(tmp_path: Path, brokers: Brokers) -> Iterator[Registry]:
    """A root; below it one that is behind and one that is away; a shop each below these, and a stranger."""
    root = brokers.add("root", role="ROOT")
    eu = brokers.add(
        "eu",
        parent=root,
        health="DEGRADED",
        reason="nothing came for 60 s",
        topics=[lag("prices", 0), lag("sales", 1234, "up"), lag("stock", 7, gaps=2)],
    )
    brokers.add("shop-1", role="POS", parent="http://spare:8222", health="UNHEALTHY", reason="eu does not answer")
    nodes: list[dict[str, Any]] = [
        {"id": "root", "role": "ROOT", "url": root},
        {"id": "eu", "role": "L2", "url": eu, "parent": "root"},
        {"id": "us", "role": "L2", "url": NOBODY, "parent": "root"},
        {"id": "shop-1", "role": "POS", "url": brokers.urls["shop-1"], "parents": ["eu", "http://spare:8222"]},
        {"id": "shop-2", "role": "POS", "parent": "us"},
        {"id": "island", "role": "LOCAL", "parent": "http://mainland:8222"},
    ]
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"nodes": nodes}))
    with Registry(path) as registry:
        yield registry


# ---- of a registry


def test_the_tree_is_drawn_with_the_health_and_lag_of_each(
    penstock: Penstock, tree: Registry, brokers: Brokers
) -> None:
    done = penstock("topology", "--registry", tree.url)

    eu, shop, root = (brokers.urls[node] for node in ("eu", "shop-1", "root"))
    assert done.lines == [
        f"{tree.url}, version {tree.version}: 6 nodes",
        "island  LOCAL",
        "the registry has no url for it",
        "parent http://mainland:8222",
        f"root  ROOT  {root}  HEALTHY  version 1",
        f"├── eu  L2  {eu}  DEGRADED  version 1",
        f"│   nothing came for 60 s, since {SINCE}",
        "│   lag: sales ↑ 1,234, stock ↓ 7 (2 gaps), prices ↓ 0",
        f"│   └── shop-1  POS  {shop}  UNHEALTHY  version 1",
        f"│       eu does not answer, since {SINCE}",
        "│       follows http://spare:8222",
        f"└── us  L2  {NOBODY}  UNREACHABLE",
        f"    no answer from {NOBODY}/pipe/status: All connection attempts failed",
        "    └── shop-2  POS",
        "        the registry has no url for it",
    ]


def test_programs_are_told_the_same(penstock: Penstock, tree: Registry, brokers: Brokers) -> None:
    document = penstock("topology", "--registry", tree.url, "--json").json

    assert (document["registry"], document["version"]) == (tree.url, tree.version)
    nodes = {each["node"]: each for each in document["nodes"]}
    assert {node: (each["parent"], each["health"]) for node, each in nodes.items()} == {
        "root": (None, "HEALTHY"),
        "eu": ("root", "DEGRADED"),
        "us": ("root", "UNREACHABLE"),
        "shop-1": ("eu", "UNHEALTHY"),
        "shop-2": ("us", None),
        "island": ("http://mainland:8222", None),
    }
    assert nodes["eu"] == {
        "node": "eu",
        "role": "L2",
        "url": brokers.urls["eu"],
        "parent": "root",
        "follows": brokers.urls["root"],
        "version": 1,
        "health": "DEGRADED",
        "reason": "nothing came for 60 s",
        "since": SINCE,
        "topics": [
            {"topic": "prices", "direction": "down", "lag": 0, "gaps": 0},
            {"topic": "sales", "direction": "up", "lag": 1234, "gaps": 0},
            {"topic": "stock", "direction": "down", "lag": 7, "gaps": 2},
        ],
    }


def test_health_is_coloured_in_a_terminal(penstock: Penstock, tree: Registry) -> None:
    shown = at_terminal(penstock, "topology", "--registry", tree.url).out

    for colour, health in [(32, "HEALTHY"), (33, "DEGRADED"), (31, "UNHEALTHY"), (31, "UNREACHABLE")]:
        assert f"\x1b[{colour}m  {health}\x1b[0m" in shown


JUNK: Final = {
    "page": (Answer(b"<html>"), "URL/pipe/status replied with invalid JSON"),
    "nothing": (Answer(b"", 404), "URL/pipe/status replied with status 404"),
    "list": (as_json([]), "the reply has no health: is it a broker?"),
    "fine": (as_json(status("fine", health="FINE")), "the reply has no health: is it a broker?"),
    "other": (as_json(status("another")), "URL is node another"),
    "number": (as_json(status("number", topics=5)), "invalid topics 5: it must be a list of objects"),
    "many": (as_json(status("many", topics=[lag("x", 0, lag="y")])), "invalid lag 'y': it must be an integer"),
    "nowhere": (as_json(status("nowhere", parent="nowhere")), "parent is 'nowhere': it must be "),
    "stopping": (as_json({"code": "CLOSED", "text": "it is stopping"}, 503), "it is stopping"),
}


def test_nodes_that_answer_junk_are_unreachable(penstock: Penstock, brokers: Brokers, tmp_path: Path) -> None:
    urls = {node: brokers.add(node, answer) for node, (answer, _) in JUNK.items()}
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"nodes": [{"id": node, "role": "L2", "url": url} for node, url in urls.items()]}))
    with Registry(path) as registry:
        nodes = {
            each["node"]: each for each in penstock("topology", "--registry", registry.url, "--json").json["nodes"]
        }

    assert nodes.keys() == JUNK.keys()
    for node, (_, reason) in JUNK.items():
        assert nodes[node]["health"] == "UNREACHABLE"
        assert nodes[node]["reason"].startswith(reason.replace("URL", urls[node]))


def test_many_topics_are_told_by_those_that_are_furthest_behind(
    penstock: Penstock, brokers: Brokers, tmp_path: Path
) -> None:
    url = brokers.add("a", topics=[lag(f"t{number}", number) for number in range(9)])

    shown = penstock("topology", "--http", url).lines

    assert shown[1] == "lag: t8 ↓ 8, t7 ↓ 7, t6 ↓ 6, t5 ↓ 5, t4 ↓ 4, t3 ↓ 3, and 3 more"


def test_names_cannot_write_into_the_terminal(penstock: Penstock, brokers: Brokers, tmp_path: Path) -> None:
    url = brokers.add("a", health="UNHEALTHY", reason="\x1b[2J[red]", topics=[lag("[bold]x\n", 1)])

    shown = penstock("topology", "--http", url).out

    assert r"'\x1b[2J[red], since 2030-01-31T12:00:00Z'" in shown
    assert r"'lag: [bold]x\n ↓ 1'" in shown


def test_a_registry_that_tells_of_a_cycle_is_drawn_all_the_same(penstock: Penstock) -> None:
    nodes: list[dict[str, Any]] = [
        {"nodeId": one, "role": "L2", "requestToFollow": [], "url": None, "parent": other}
        for one, other in [("a", "b"), ("b", "a"), ("c", "a")]
    ]
    with Answers(lambda _: as_json({"topologyVersion": 1, "nodes": nodes})) as answers:
        lines = penstock("topology", "--registry", answers.url).lines

    assert [word for line in lines[1:] for word in line.split() if word in "abc"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (as_json({"nodes": 5}), "the reply has no list of nodes: is it a registry?"),
        (as_json({"nodes": [{"nodeId": "a"}]}), "role is missing: it must be ROOT, L2, L3, POS or LOCAL"),
        (Answer(b"x"), "URL/registry/nodes replied with invalid JSON"),
    ],
)
def test_a_registry_that_answers_junk_is_an_error(answer: Answer, reason: str, penstock: Penstock) -> None:
    with Answers(lambda _: answer) as answers:
        done = penstock("topology", "--registry", answers.url)

    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: {reason.replace('URL', answers.url)}\n"


# ---- of one broker


def test_one_broker_tells_of_its_parent_and_its_children(penstock: Penstock, brokers: Brokers) -> None:
    url = brokers.add(
        "eu",
        parent="http://root:8222",
        topics=[lag("prices", 3)],
        children=[
            {"node": "shop-1", "address": "10.0.0.1:5000", "seen": SINCE},
            {"node": "shop-2", "address": "10.0.0.2:5000", "seen": SINCE},
        ],
    )

    assert penstock("topology", "--http", url.removeprefix("http://")).lines == [
        "http://root:8222",
        f"└── eu  L2  {url}  HEALTHY  version 1",
        "    lag: prices ↓ 3",
        "    ├── shop-1  10.0.0.1:5000",
        f"    │   last seen {SINCE}",
        "    └── shop-2  10.0.0.2:5000",
        f"        last seen {SINCE}",
    ]
    nodes = penstock("topology", "--http", url, "--json").json["nodes"]
    assert [(each["node"], each["parent"]) for each in nodes] == [
        ("http://root:8222", None),
        ("eu", "http://root:8222"),
        ("shop-1", "eu"),
        ("shop-2", "eu"),
    ]


def test_a_broker_alone_has_nobody_around_it(penstock: Penstock, brokers: Brokers) -> None:
    url = brokers.add("alone", role=None, version=0)

    assert penstock("topology", "--http", url).lines == [f"alone  {url}  HEALTHY  version 0"]


def test_a_broker_is_asked_before_the_registry_of_the_environment(brokers: Brokers) -> None:
    penstock = Penstock(NOBODY, PENSTOCK_REGISTRY_URL=NOBODY)
    url = brokers.add("a", role=None)

    assert penstock("topology", "--http", url).lines[0].startswith("a ")
    assert penstock("topology").code == 1


# ---- asked the wrong way


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--registry", NOBODY, "--http", "127.0.0.1:1"], "give --registry or --http, not both"),
        (["--registry", "ftp://x"], "it must be a URL such as http://host:8222"),
        (["--http", "a b"], "it must be a URL such as http://host:8222"),
    ],
)
def test_it_is_asked_the_wrong_way(options: list[str], reason: str, penstock: Penstock) -> None:
    done = penstock("topology", *options)

    assert (done.code, done.out) == (2, "")
    assert reason in " ".join(done.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("option", "what"),
    [("--registry", "start a registry with `penstock registry`"), ("--http", "start a broker with `penstock serve`")],
)
def test_nobody_answers(option: str, what: str, penstock: Penstock) -> None:
    done = penstock("topology", option, NOBODY)

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: no answer from {NOBODY}/")
    assert what in done.err
