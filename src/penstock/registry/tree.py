"""All nodes of a tree, and what each of them is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnknownNode
from penstock.pipe.topology import Role, Topology, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: str
    role: Role
    # Its HTTP port; one that nobody follows may have none.
    url: str | None = None
    # Whom it follows, in turn: URLs, and the node that the first of them is of, if it is in this tree.
    parents: tuple[str, ...] = ()
    parent: str | None = None
    topics: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    # Handed on to brokers that ask for them; Penstock's do not.
    cloud_data_url: str = ""
    cloud_data_url_fallback: str = ""

    def document(self, version: int) -> dict[str, Any]:
        """What the node is told."""
        topology = Topology(
            node_id=self.id,
            role=self.role,
            parents=self.parents,
            topics=self.topics,
            up=self.up,
            version=version,
        )
        return topology.to_json() | {
            "cloudDataUrl": self.cloud_data_url,
            "cloudDataUrlFallback": self.cloud_data_url_fallback,
        }


@dataclass(frozen=True, slots=True)
class Tree:
    nodes: Mapping[str, Node]

    def document(self, node_id: str, version: int) -> dict[str, Any]:
        node = self.nodes.get(node_id)
        if node is None:
            raise UnknownNode(f"there is no node {shown(node_id)}: add it to the registry's file")
        return node.document(version)

    def documents(self, version: int) -> list[dict[str, Any]]:
        """All of them, with where each is."""
        return [
            node.document(version) | {"url": node.url, "parent": node.parent} for _, node in sorted(self.nodes.items())
        ]

    def digest(self) -> str:
        """The same for two trees that say the same, in whatever order and layout."""
        return hashlib.sha256(json.dumps(self.documents(0), sort_keys=True).encode()).hexdigest()
