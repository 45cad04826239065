"""Tools for tests: a disk that loses unsynced data, and a manual clock."""

from penstock.testing.clock import ManualClock
from penstock.testing.disk import FaultyFiles, PowerCut

__all__ = ["FaultyFiles", "ManualClock", "PowerCut"]
