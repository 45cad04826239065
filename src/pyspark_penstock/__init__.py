"""Where Spark finds `format("penstock")` by itself: it imports every `pyspark_*` module and looks for `DefaultSource`.

An exception here would also hide the sources of all other packages, so importing never raises. Errors are reported when
the format is used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = ["DefaultSource"]

_NEEDS = (
    "Penstock's source and sink need pyarrow 18 or newer, and PySpark 4.0 or newer: pip install 'penstock[spark]', or"
)
_NEEDS += " 'penstock[connector]' where PySpark is there already"

try:
    if find_spec("pyarrow") is None:
        raise ModuleNotFoundError("No module named 'pyarrow'")
    from penstock.spark.datasource import PenstockDataSource as DefaultSource
except Exception as error:  # noqa: BLE001  sources of other packages must still be found
    _reason = f"{_NEEDS} ({error})"
    try:
        from pyspark.sql.datasource import DataSource
    except Exception:  # noqa: BLE001  without PySpark 4 there are no sources
        pass
    else:

        class DefaultSource(DataSource):  # type: ignore[no-redef]
            """A placeholder that says why the source cannot be used."""

            def __init__(self, options: Any) -> None:
                raise RuntimeError(_reason)

            @classmethod
            def name(cls) -> str:
                return "penstock"
