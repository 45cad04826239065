"""Parts of a broker that a setting selects by name: included ones, and those that packages add with entry points.

penstock.files        storage.files   `Files`: the calls to the disk            (log/files.py)
penstock.networks     server.network  `Listen`: accepts connections             (server/network.py)
penstock.pipes        pipe.type       `Connect`: the transport of a pipe        (pipe/connector.py)
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from penstock.errors import BadConfig

# Available even if the package is not installed: a source tree has no entry points.
_SHIPPED: Final = {
    "penstock.files": {"os": "penstock.log.files:OsFiles"},
    "penstock.networks": {"tcp": "penstock.server.network:listen"},
    "penstock.pipes": {"http": "penstock.pipe.http:connect"},
}


def find(group: str, setting: str, name: str) -> EntryPoint:
    """Return the entry point with that name, not loaded yet. Raise BadConfig if there is none."""
    entries = {name: EntryPoint(name, value, group) for name, value in _SHIPPED[group].items()}
    entries |= {entry.name: entry for entry in entry_points(group=group)}
    if name not in entries:
        known = ", ".join(sorted(entries))
        raise BadConfig([f"{setting} is {name!r}: it must be an installed one: {known}"])
    return entries[name]
