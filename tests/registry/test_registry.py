"""The registry: what its file says, what it answers, and what happens when the file changes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock.errors import BadConfig, UnknownNode
from penstock.pipe import json_file
from penstock.pipe.topology import Role, Topology
from penstock.registry.file import read
from penstock.registry.tree import Tree
from penstock.registry.watched_file import WatchedFile
from penstock.testing import FaultyFiles, ManualClock, PowerCut
from tests.docs import DOCS, blocks
from tests.support.registries import Registry, get, until
from tests.support.server import clean_environment

TREE: Final = """\
# Prices go down, sales go up.
[[nodes]]
id = "root"
role = "ROOT"
url = "http://root.example.com:8222/"

[[nodes]]
id = "l2-eu"
role = "L2"
url = "http://eu.example.com:8222"
parent = "root"

[[nodes]]
id = "shop-1"
role = "POS"
parents = ["l2-eu", "http://spare.example.com:8222"]
topics = ["prices", "stock.*"]
up = ["sales"]
cloud_data_url = "https://cloud.example.com"
"""
JSON_TREE: Final = {
    "nodes": [
        {
            "up": ["sales"],
            "id": "shop-1",
            "role": "POS",
            "parents": ["http://eu.example.com:8222/", "http://spare.example.com:8222"],
            "topics": ["prices", "stock.*"],
            "cloud_data_url": "https://cloud.example.com/",
        },
        {"id": "l2-eu", "role": "L2", "url": "http://EU.example.com:8222", "parents": ["root"]},
        {"id": "root", "role": "ROOT", "url": "http://root.example.com:8222"},
    ]
}
YAML_TREE: Final = """\
nodes:
  - id: root
    role: ROOT
    url: http://root.example.com:8222
  - id: l2-eu
    role: L2
    url: http://eu.example.com:8222
    parent: http://root.example.com:8222
  - {id: shop-1, role: POS, parents: [l2-eu, "http://spare.example.com:8222"], topics: [prices, stock.*],
     up: [sales], cloud_data_url: "https://cloud.example.com"}
"""


def tree_of(text: str, name: str = "tree.toml") -> Tree:
    return read(Path(name), text.encode())


def problems_in(text: str, name: str = "tree.toml") -> list[str]:
    with pytest.raises(BadConfig) as refused:
        tree_of(text, name)
    return refused.value.problems


def node(**keys: object) -> str:
    """A table of the file."""
    return "[[nodes]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


# ---- what the file says


def test_a_node_is_told_its_role_and_whom_to_follow() -> None:
    tree = tree_of(TREE)

    assert tree.document("shop-1", 7) == {
        "nodeId": "shop-1",
        "role": "POS",
        "requestToFollow": ["http://eu.example.com:8222", "http://spare.example.com:8222"],
        "cloudDataUrl": "https://cloud.example.com",
        "cloudDataUrlFallback": "",
        "topologyVersion": 7,
        "topics": ["prices", "stock.*"],
        "up": ["sales"],
    }
    assert tree.document("root", 7)["requestToFollow"] == []
    assert Topology.from_json(tree.document("l2-eu", 7)) == Topology(
        node_id="l2-eu", role=Role.L2, parents=("http://root.example.com:8222",), version=7
    )


def test_the_parent_of_a_node_is_known_by_id_or_by_url() -> None:
    documents = {each["nodeId"]: each for each in tree_of(YAML_TREE, "tree.yaml").documents(1)}

    assert {node_id: each["parent"] for node_id, each in documents.items()} == {
        "root": None,
        "l2-eu": "root",
        "shop-1": "l2-eu",
    }
    assert documents["shop-1"]["url"] is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tree.json", json.dumps(JSON_TREE)),
        ("tree.JSON", json.dumps(JSON_TREE, indent="\t")),
        ("tree.yaml", YAML_TREE),
        ("tree.yml", YAML_TREE),
    ],
)
def test_every_format_says_the_same(name: str, text: str) -> None:
    assert tree_of(text, name) == tree_of(TREE)
    assert tree_of(text, name).digest() == tree_of(TREE).digest()


def test_the_file_and_the_answer_of_the_page_are_right() -> None:
    file, _, answer, *_ = [block.text for block in blocks((DOCS / "tree.md").read_text()) if block.language == "text"]

    document = json.loads(answer)

    assert tree_of(file).document("shop-1", document["topologyVersion"]) == document


def test_an_unknown_node_is_told_nothing() -> None:
    with pytest.raises(UnknownNode, match="unknown node 'shop-9': add it to the registry's file"):
        tree_of(TREE).document("shop-9", 1)


# ---- what is wrong in it


def test_all_that_is_wrong_is_told_at_once_with_its_line() -> None:
    text = (
        node(id="root", role="ROOT", url="http://a", parent="l2")  # from line 1
        + node(id="l2", role="L4", parent="nobody", ulr="http://b")  # from line 6
        + node(id="l3", role="L3", url="http://a/", parent="l2")  # from line 11
        + node(id="l3", role="L3")  # from line 16
        + node(role="POS", up=["a..b"])  # from line 19
        + node(id="x", role="L2", url="http://x", parent="y")  # from line 22
        + node(id="y", role="L3", url="http://y", parents=["root", "http://x"])  # from line 27
    )

    keys = "there are id, role, url, parent, parents, topics, up, cloud_data_url, cloud_data_url_fallback"
    assert problems_in(text) == [
        "tree.toml:8: node l2: role is 'L4': it must be ROOT, L2, L3, POS or LOCAL",
        f"tree.toml:10: node l2: 'ulr' is unknown (did you mean url?): {keys}",
        "tree.toml:19: node 5 of the file: id is missing",
        "tree.toml:21: node 5 of the file: up[0] is 'a..b': it must be a topic, or a pattern",
        "tree.toml:17: node l3: id l3 is also that of node l3, line 11",
        "tree.toml:14: node l3: url http://a is also that of node root, line 1",
        "tree.toml:5: node root: a ROOT has no parent, but this one has l2",
        "tree.toml:5: node root: its parent l2 has no url",
        "tree.toml:9: node l2: unknown parent nobody: it must be a node of this file, or a URL",
        "tree.toml:15: node l3: its parent l2 has no url",
        "tree.toml:26: node x: is in a cycle, x → y → x: a node cannot be its own ancestor",
    ]


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([{"id": "a", "role": "L2", "url": "http://a", "parent": "a"}], "node a: is in a cycle, a → a"),
        (
            [
                {"id": "a", "role": "L2", "url": "http://a", "parents": ["r", "c"]},
                {"id": "b", "role": "L2", "url": "http://b", "parents": ["r", "a"]},
                {"id": "c", "role": "L2", "url": "http://c", "parents": ["r", "b"]},
                {"id": "r", "role": "ROOT", "url": "http://r"},
            ],
            "node a: is in a cycle, a → b → c → a",
        ),
        (
            [{"id": "a", "role": "L2", "parent": "b", "parents": ["b"]}, {"id": "b", "role": "L2", "url": "http://b"}],
            "node a: parent and parents contradict each other: keep one of them",
        ),
        ([{"id": "a", "role": "L2", "parent": 5}], "node a: parent is 5: it must be printable text"),
        (
            [{"id": "a", "role": "L2", "parents": "b"}],
            "node a: parents is 'b': it must be a list, each of it an ID or a URL",
        ),
        ([{"id": "a", "role": "L2", "parent": "ftp://b"}], "node a: parent is 'ftp://b': it must be a URL such as"),
        (
            [{"id": "a", "role": "L2", "topics": ["x"], "up": ["x"]}],
            "node a: topics and up both have x: a topic is piped down or up, not both",
        ),
        ([{"id": "a", "role": "L2", "url": None}], "node a: url is null: it must be a URL such as"),
        (["a"], "node 1 of the file: is 'a': it must be a table"),
    ],
)
def test_what_cannot_be_a_tree_is_refused(nodes: list[object], problem: str) -> None:
    [found, *_] = problems_in(json.dumps({"nodes": nodes}, indent=1), "tree.json")

    assert re.fullmatch(rf"tree\.json:\d+: {re.escape(problem)}.*", found)


def test_two_cycles_are_told_both() -> None:
    text = "".join(
        node(id=one, role="L2", url=f"http://{one}", parent=other)
        for one, other in [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c"), ("below", "a")]
    )

    assert [re.findall(r"cycle, (.*):", problem) for problem in problems_in(text)] == [["a → b → a"], ["c → d → c"]]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tree.toml", "[[nodes]]\nid = \n", "tree.toml:2: invalid TOML: Invalid value"),
        ("tree.json", '{\n"nodes": [}', "tree.json:2: invalid JSON: Expecting value"),
        ("tree.yaml", "nodes:\n  - id: [\n", "tree.yaml:3: invalid YAML: expected the node content, .*"),
        ("tree.json", "[" * 100_000, "tree.json: too many nested tables"),
        ("tree.toml", "", "tree.toml: the file needs a list of nodes, with at least one: .*"),
        ("tree.yaml", "nodes: []", "tree.yaml: the file needs a list of nodes, with at least one: .*"),
        ("tree.json", '{"nodes": {"id": "a"}}', "tree.json: the file needs a list of nodes, with at least one: .*"),
        ("tree.ini", "x", "tree.ini: unknown format: the name must end with .toml, .json, .yaml, .yml"),
    ],
)
def test_what_is_no_file_of_nodes_is_refused(name: str, text: str, problem: str) -> None:
    [found] = problems_in(text, name)

    assert found == problem or re.fullmatch(problem, found)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadConfig, match="not UTF-8 text"):
        read(Path("tree.toml"), b"\xff")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tree.yaml", "nodes:\n  - id: a\n    role: L2\n    role: L3\n"),
        ("tree.json", '{"nodes": [\n{"id": "a",\n"role": "L2",\n"role": "L3"}]}'),
    ],
)
def test_what_is_said_twice_is_refused(name: str, text: str) -> None:
    assert problems_in(text, name) == [f"{name}:4: 'role' is repeated: keep one of them"]


def test_nodes_in_an_inline_list_have_lines() -> None:
    problems = problems_in(
        'nodes = [\n  1,\n  { id = "a", role = "ROOT", url = "http://a" },\n  { id = "b", rloe = "L2" },\n]\n'
    )

    assert [problem.partition(": ")[0] for problem in problems] == [
        "tree.toml:1",
        *["tree.toml:4"] * (len(problems) - 1),
    ]
    assert any("'rloe' is unknown" in problem for problem in problems)


def test_a_key_beside_the_nodes_is_refused() -> None:
    assert problems_in('node = 1\n[[nodes]]\nid = "a"\nrole = "L2"\n') == [
        "tree.toml: 'node' is unknown: there is only nodes"
    ]


# ---- the file as it changes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tree.toml"
    path.write_text(TREE)
    return path


NOW_S: Final = ManualClock().now_us() // 1_000_000


def look_twice(watched: WatchedFile) -> None:
    watched.look()
    watched.look()


def test_a_change_is_taken_when_it_was_seen_twice(path: Path) -> None:
    watched = WatchedFile(path, clock=ManualClock())
    before = watched.served

    # Half of it, which is a right file too.
    path.write_text(TREE[: TREE.index('[[nodes]]\nid = "shop-1"')])
    watched.look()
    assert watched.served is before
    path.write_text(TREE + node(id="shop-2", role="POS", parent="l2-eu"))
    watched.look()
    assert watched.served is before
    watched.look()

    assert watched.served.tree.nodes.keys() == {"root", "l2-eu", "shop-1", "shop-2"}
    assert watched.served.version == before.version + 1


def test_a_change_that_changes_nothing_has_no_version(path: Path) -> None:
    watched = WatchedFile(path, clock=ManualClock())
    before = watched.served

    path.write_text(TREE.replace("# Prices", "# Other prices"))
    look_twice(watched)

    assert watched.served.version == before.version


def test_a_file_that_becomes_wrong_changes_nothing_until_it_is_right(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watched = WatchedFile(path, clock=ManualClock())
    before = watched.served

    path.write_text(TREE.replace('"POS"', '"SHOP"'))
    look_twice(watched)
    look_twice(watched)
    assert watched.served is before
    assert watched.problems == (f"{path}:15: node shop-1: role is 'SHOP': it must be ROOT, L2, L3, POS or LOCAL",)
    assert caplog.messages == [*watched.problems, f"{path} is invalid: still serving version {NOW_S}"]

    path.unlink()
    look_twice(watched)
    assert watched.problems == (f"{path}: No such file or directory",)
    assert watched.served is before

    path.write_text(TREE)
    look_twice(watched)
    assert not watched.problems
    assert watched.served == before


def test_a_version_is_the_same_after_a_restart_and_goes_up_with_a_change(path: Path) -> None:
    clock = ManualClock()
    assert WatchedFile(path, clock=clock).served.version == NOW_S

    clock.advance(3600 * 1_000_000)
    assert WatchedFile(path, clock=clock).served.version == NOW_S
    path.write_text(TREE + node(id="shop-2", role="POS", parent="l2-eu"))
    assert WatchedFile(path, clock=clock).served.version == NOW_S + 3600
    # Back to what it was before is a change as well; and the clock may go back.
    clock.set_wall(0)
    path.write_text(TREE)
    assert WatchedFile(path, clock=clock).served.version == NOW_S + 3601


@pytest.mark.parametrize("state", [None, b"", b"[]", b'{"version": "1"}', b"\xff" * 100])
def test_a_version_does_not_go_back_when_the_last_one_is_lost(path: Path, state: bytes | None) -> None:
    clock = ManualClock()
    before = WatchedFile(path, clock=clock).served.version
    beside = path.with_name("tree.toml.version")
    beside.unlink()
    if state is not None:
        beside.write_bytes(state)

    clock.advance(1_000_000)

    assert WatchedFile(path, clock=clock).served.version > before


def test_a_registry_works_where_it_cannot_write(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A directory stands where the new state would be written.
    path.with_name("tree.toml.version.new").mkdir()

    watched = WatchedFile(path, clock=ManualClock())

    assert watched.served.version == NOW_S
    assert caplog.messages == [f"cannot store version {NOW_S} in {path}.version: Is a directory"]


# ---- what is kept


def test_a_document_is_there_whole_after_every_power_cut() -> None:
    path, old, new = Path("/data/topology.json"), {"a": "x" * 5000}, {"b": "y" * 9000}
    seen = set()
    for seed in range(60):
        for cut_after in range(6):
            disk = FaultyFiles(seed=seed)
            disk.make_directory(path.parent)
            json_file.save(path, old, files=disk)
            disk.cut_after = disk.calls + cut_after
            done = True
            try:
                json_file.save(path, new, files=disk)
            except PowerCut:
                done = False
            found = json_file.load(path, files=disk.power_cut())
            assert found in ((new,) if done else (old, new)), f"seed {seed}, cut after {cut_after}"
            seen.add((done, found == new))
    assert seen == {(False, False), (False, True), (True, True)}


# ---- a real one


@pytest.fixture
def registry(path: Path) -> Iterator[Registry]:
    with Registry(path) as registry:
        yield registry


def test_it_answers_each_node(registry: Registry) -> None:
    tree = tree_of(TREE)

    assert registry.nodes == 3
    for node_id in ("root", "l2-eu", "shop-1"):
        assert registry.topology(node_id) == tree.document(node_id, registry.version)
    assert get(f"{registry.url}/registry/nodes").json() == {
        "topologyVersion": registry.version,
        "nodes": tree.documents(registry.version),
    }
    assert get(f"{registry.url}/health").json() == {
        "status": "ok",
        "topologyVersion": registry.version,
        "nodes": 3,
        "problems": [],
    }


def test_what_it_cannot_answer_is_an_error_with_a_code(registry: Registry) -> None:
    import httpx

    def answered(answer: httpx.Response) -> tuple[int, str, str]:
        document = answer.json()
        assert document.keys() == {"code", "text"}
        return answer.status_code, document["code"], document["text"]

    asked = "nodeId is missing: /registry/topology?nodeId=…"
    assert answered(get(f"{registry.url}/registry/topology")) == (400, "BAD_REQUEST", asked)
    assert answered(get(f"{registry.url}/registry/topology", nodeId="")) == (400, "BAD_REQUEST", asked)
    status, code, text = answered(get(f"{registry.url}/registry/topology", nodeId="x" * 5000))
    assert (status, code) == (404, "UNKNOWN_NODE")
    assert len(text) < 200
    assert answered(get(f"{registry.url}/nodes"))[:2] == (404, "BAD_REQUEST")
    assert answered(httpx.post(f"{registry.url}/registry/nodes"))[:2] == (405, "BAD_REQUEST")


def test_a_change_of_the_file_is_served(registry: Registry, path: Path) -> None:
    path.write_text(TREE.replace('parent = "root"', 'parent = "http://other.example.com"'))
    changed = until(
        lambda: [found for found in [registry.topology("l2-eu")] if found["topologyVersion"] > registry.version]
    )

    assert changed[0]["requestToFollow"] == ["http://other.example.com"]


def test_a_wrong_file_is_told_on_stderr_and_the_last_one_stays(registry: Registry, path: Path) -> None:
    path.write_text(TREE.replace('"l2-eu", ', '"l2-us", '))

    until(lambda: get(f"{registry.url}/health").json()["problems"])
    assert registry.topology("shop-1")["topologyVersion"] == registry.version
    assert (
        f"ERROR {path}:16: node shop-1: unknown parent l2-us: it must be a node of this file, or a URL\n"
        in registry.stderr
    )

    path.write_text(TREE.replace('"POS"', '"LOCAL"'))
    until(lambda: registry.topology("shop-1")["role"] == "LOCAL")
    assert get(f"{registry.url}/health").json()["problems"] == []


def test_a_killed_registry_goes_on_with_its_version(registry: Registry) -> None:
    before = registry.version
    registry.kill()

    registry.start()

    assert registry.version == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(path: Path, number: signal.Signals) -> None:
    with Registry(path) as registry:
        ended = registry.stop(number)

    assert (ended.code, ended.stderr) == (0, "")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "registry", *map(str, arguments)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wrong_file_is_refused_at_the_start(path: Path) -> None:
    path.write_text(node(id="a", role="A") + node(id="b", role="B"))

    done = run(path)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "".join(
        f"error: {path}:{line}: node {name.lower()}: role is '{name}': it must be ROOT, L2, L3, POS or LOCAL\n"
        for line, name in [(3, "A"), (6, "B")]
    )


def test_a_missing_file_and_a_taken_port_are_told_in_a_line(path: Path) -> None:
    missing = run(path.with_name("none.toml"))
    assert (missing.returncode, missing.stderr) == (
        1,
        f"error: {path.with_name('none.toml')}: No such file or directory\n",
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(path, "--port", taken.getsockname()[1])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
