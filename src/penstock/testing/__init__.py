"""Tools for tests: pipelines on a sample of messages, a disk that loses unsynced data, and a manual clock."""

from penstock.testing.clock import ManualClock
from penstock.testing.disk import FaultyFiles, PowerCut
from penstock.testing.samples import run_pipeline

__all__ = ["FaultyFiles", "ManualClock", "PowerCut", "run_pipeline"]
