"""The topology of a node: what a document says, and all that is refused."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadTopology
from penstock.pipe.topology import PARENTS_MAX, TOPICS_MAX, Role, Topology, read_url

DOCUMENT: Final[dict[str, Any]] = {
    "nodeId": "shop-1",
    "role": "POS",
    "requestToFollow": ["http://l3.example.com:8222", "https://l2.example.com/broker"],
    "cloudDataUrl": "",
    "cloudDataUrlFallback": "",
    "topologyVersion": 7,
    "topics": ["prices", "stock.*.eu"],
    "up": ["sales.>"],
}


def refusal(document: object) -> str:
    with pytest.raises(BadTopology) as refused:
        Topology.from_json(document)
    return str(refused.value)


# ---- what it says


def test_a_document_is_read() -> None:
    assert Topology.from_json(DOCUMENT) == Topology(
        node_id="shop-1",
        role=Role.POS,
        parents=("http://l3.example.com:8222", "https://l2.example.com/broker"),
        topics=("prices", "stock.*.eu"),
        up=("sales.>",),
        version=7,
    )


def test_what_may_be_left_out_is_nothing() -> None:
    topology = Topology.from_json({"nodeId": "root", "role": "ROOT", "requestToFollow": []})

    assert topology == Topology(node_id="root", role=Role.ROOT)
    assert (topology.parents, topology.topics, topology.up, topology.version) == ((), (), (), 0)


def test_a_document_is_written_by_the_names_that_it_is_read_by() -> None:
    written = Topology.from_json(DOCUMENT).to_json()

    assert written == {name: value for name, value in DOCUMENT.items() if not name.startswith("cloud")}


NAMES: Final = st.from_regex(r"[a-z0-9_-]{1,8}(\.[a-z0-9_-]{1,8}){0,3}", fullmatch=True)


@given(
    st.builds(
        Topology,
        node_id=st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20),
        role=st.sampled_from(Role),
        parents=st.lists(NAMES.map(lambda host: f"http://{host}:8222"), unique=True, max_size=3).map(tuple),
        topics=st.lists(NAMES.map(lambda name: f"down.{name}"), unique=True, max_size=3).map(tuple),
        up=st.lists(NAMES.map(lambda name: f"up.{name}"), unique=True, max_size=3).map(tuple),
        version=st.integers(0, (1 << 63) - 1),
    )
)
def test_what_is_written_is_read_again(topology: Topology) -> None:
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


def test_every_role_of_the_tree_is_known() -> None:
    assert [Topology.from_json(DOCUMENT | {"role": role}).role for role in ("ROOT", "L2", "L3", "POS", "LOCAL")] == [
        *Role
    ]


def test_a_parent_that_is_named_twice_is_one() -> None:
    document = DOCUMENT | {"requestToFollow": ["http://a:80/", "HTTP://b".lower(), "http://A"]}

    assert Topology.from_json(document).parents == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://host", "http://host"),
        ("http://host/", "http://host"),
        ("http://Host.Example.COM:80/", "http://host.example.com"),
        ("https://host:443", "https://host"),
        ("https://host:80", "https://host:80"),
        ("http://127.0.0.1:8222", "http://127.0.0.1:8222"),
        ("http://[::1]:8222/", "http://[::1]:8222"),
        ("http://host:8222/Brokers/eu/", "http://host:8222/Brokers/eu"),
    ],
)
def test_a_url_is_spelled_in_one_way(url: str, meant: str) -> None:
    assert read_url("url", url) == meant
    assert read_url("url", meant) == meant


# ---- what is refused


@pytest.mark.parametrize("junk", [None, 1, "text", [], [DOCUMENT], True, 1.5])
def test_what_is_no_object_is_refused(junk: object) -> None:
    assert refusal(junk).startswith("a topology must be a JSON object, not ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"nodeId": ""},
            "nodeId is '': it must be printable text of at most 256 characters without surrounding spaces",
        ),
        ({"nodeId": None}, "nodeId is null: it must be printable text"),
        ({"nodeId": 5}, "nodeId is 5: it must be printable text"),
        ({"nodeId": "a\nb"}, r"nodeId is 'a\nb': it must be printable text"),
        ({"nodeId": "\ud800"}, r"nodeId is '\ud800': it must be printable text"),
        ({"nodeId": " a"}, "nodeId is ' a': it must be printable text"),
        ({"nodeId": "n" * 257}, "nodeId is 'nnnn"),
        ({"role": "L4"}, "role is 'L4': it must be ROOT, L2, L3, POS or LOCAL"),
        ({"role": "root"}, "role is 'root': it must be ROOT, L2, L3, POS or LOCAL"),
        ({"role": ["L2"]}, "role is ['L2']: it must be ROOT"),
        ({"role": None}, "role is null: it must be ROOT"),
        ({"requestToFollow": None}, "requestToFollow is null: it must be a list"),
        ({"requestToFollow": "http://a"}, "requestToFollow is 'http://a': it must be a list"),
        ({"requestToFollow": ["http://a", 5]}, "requestToFollow[1] is 5: it must be a URL such as http://host:8222"),
        (
            {"requestToFollow": ["http://a"] * (PARENTS_MAX + 1)},
            "requestToFollow has 17 entries: at most 16 are allowed",
        ),
        ({"topics": "prices"}, "topics is 'prices': it must be a list"),
        ({"topics": ["a", "b..c"]}, "topics[1] is 'b..c': it must be a topic, or a pattern"),
        ({"topics": ["\ud800"]}, r"topics[0] is '\ud800': it must be a topic, or a pattern"),
        ({"topics": [None]}, "topics[0] is null: it must be a topic, or a pattern"),
        ({"topics": ["a"] * (TOPICS_MAX + 1)}, "topics has 10001 entries: at most 10000 are allowed"),
        ({"up": [">.a"]}, "up[0] is '>.a': it must be a topic, or a pattern"),
        ({"topics": ["a", "b"], "up": ["c", "b"]}, "topics and up both have b: a topic is piped down or up, not both"),
        ({"topologyVersion": -1}, "topologyVersion is -1: it must be a non-negative integer"),
        ({"topologyVersion": True}, "topologyVersion is true: it must be a non-negative integer"),
        ({"topologyVersion": 1.5}, "topologyVersion is 1.5: it must be a non-negative integer"),
        ({"topologyVersion": 1 << 63}, "topologyVersion is 9223372036854775808: it must be a non-negative integer"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(change: dict[str, Any], problem: str) -> None:
    assert refusal(DOCUMENT | change).startswith(problem)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8222",
        "//host",
        "ftp://host",
        "file:///etc/passwd",
        "http://",
        "http://:8222",
        "http://host:0",
        "http://host:65536",
        "http://host:x",
        "http://ho st",
        "http://host/a b",
        "http://host/a\n",
        "http://host\r\nX: y",
        "http://user:secret@host",
        "http://host?x=1",
        "http://host/#x",
        "http://[::1",
        "http://höst",
        "http://host/" + "a" * 2048,
    ],
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(BadTopology, match="it must be a URL such as"):
        read_url("url", url)


def test_a_long_value_is_not_repeated_whole() -> None:
    assert len(refusal(DOCUMENT | {"nodeId": "n" * 1_000_000})) < 300
