"""Delta tables of rows, read and written with `deltalake`: no jar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import BadDirectory, PenstockError

if TYPE_CHECKING:
    import pyarrow

try:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError
except ImportError:
    raise PenstockError("Delta tables need deltalake: pip install 'penstock[delta]'") from None


def read(path: str) -> pyarrow.Table:
    """Return all rows of a table."""
    return _table(path).to_pyarrow_table()


def _table(path: str) -> DeltaTable:
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        raise BadDirectory(f"{path} is not a Delta table") from None
