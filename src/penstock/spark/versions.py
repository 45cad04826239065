"""The versions of PySpark that Penstock supports, and what the older ones lack.

4.0   no stream writer for Arrow, no filter pushdown, no read limits, stateful processors only with pandas
4.1   no read limits
4.2   everything
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import pyspark

__all__ = ["OLDEST", "StreamArrowWriter", "check", "has_read_limits", "has_row_processors"]

OLDEST: Final = (4, 0)

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter


def check(version: str = pyspark.__version__) -> None:
    """Raise ImportError if PySpark is too old."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST:
        raise ImportError(
            f"PySpark {version} is too old: Penstock needs 4.0 or newer, which has Python data sources. "
            "Install pyspark>=4.0 on the driver and on the cluster"
        )


def has_read_limits() -> bool:
    """Return whether Spark asks a stream for an end from a given start on."""
    return find_spec("pyspark.sql.streaming.datasource") is not None


def has_row_processors() -> bool:
    """Return whether a stateful processor may take rows. Before 4.1 it takes only DataFrames of pandas."""
    from pyspark.sql import GroupedData

    return hasattr(GroupedData, "transformWithState")


if not TYPE_CHECKING:
    check()
    try:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    except ImportError:
        from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter

        class StreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):
            """PySpark 4.0 passes Arrow batches to a stream writer that is also a batch writer for Arrow."""
