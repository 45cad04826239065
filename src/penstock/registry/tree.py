"""The nodes of a tree, and the topology of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnknownNode
from penstock.pipe.topology import Role, Topology
from penstock.schema import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: str
    role: Role
    # The URL of its HTTP port; optional for a node without children.
    url: str | None = None
    # The URLs of its parents, in order, and the ID of the first one if it is in this tree.
    parents: tuple[str, ...] = ()
    parent: str | None = None
    topics: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    # Passed to brokers that use them; Penstock does not.
    cloud_data_url: str = ""
    cloud_data_url_fallback: str = ""

    def document(self, version: int) -> dict[str, Any]:
        """Return the topology of the node as JSON."""
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
            raise UnknownNode(f"unknown node {shown(node_id)}: add it to the registry's file")
        return node.document(version)

    def documents(self, version: int) -> list[dict[str, Any]]:
        """Return the topologies of all nodes, each with its URL and parent."""
        return [
            node.document(version) | {"url": node.url, "parent": node.parent} for _, node in sorted(self.nodes.items())
        ]

    def digest(self) -> str:
        """Return a hash that does not depend on the order and layout of the file."""
        return hashlib.sha256(json.dumps(self.documents(0), sort_keys=True).encode()).hexdigest()
