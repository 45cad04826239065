"""x"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pipes import Tree, broker


@pytest.fixture(scope="package")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """Three brokers for many tests: each has topics of its own, and leaves the tree as it found it."""
    directory = tmp_path_factory.mktemp("tree")
    with (
        broker(directory, "root") as root,
        broker(directory, "l2", root, pipe_up="sales,returns") as l2,
        broker(directory, "l3", l2) as l3,
    ):
        yield Tree(root, l2, l3)
