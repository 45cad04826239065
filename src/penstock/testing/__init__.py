"""Shipped for tests: a disk that loses what was not synced, a clock that is turned by hand."""

from penstock.testing.clock import ManualClock
from penstock.testing.disk import FaultyFiles, PowerCut

__all__ = ["FaultyFiles", "ManualClock", "PowerCut"]
