"""Functions and classes that a pipeline file names as `module:name`. The directory of the file is searched first."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from penstock.errors import BadConfig
from penstock.pipelines.pipeline import Key, Pipeline


def load(pipeline: Pipeline, key: Key, code: str, *, what: str = "function") -> Any:
    """Import what `code` names, the value of a key of the file. Raise BadConfig if there is no such `what`."""
    where = pipeline.where(*key)
    module_name, _, name = code.partition(":")
    directory = str(pipeline.directory)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise BadConfig(
                [f"{where}: the module {module_name} needs {error.name!r}, which is not installed"]
            ) from error
        raise BadConfig([f"{where}: no module {module_name!r} in {directory} or on Python's path"]) from error
    except Exception as error:  # a user's module may raise anything when it is loaded
        raise BadConfig([f"{where}: the module {module_name} raised {type(error).__name__}: {error}"]) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadConfig([f"{where}: the module {module_name} has no {what} {name!r}"])
    return found


def pickle_by_value(directory: Path) -> None:
    """Let Spark send the code of the loaded modules in a directory to its processes, which cannot import them.

    Packages that are installed below the directory, such as in a virtual environment, are imported as usual.
    """
    from pyspark import cloudpickle

    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is not None and Path(path).resolve() in _files_of(directory, name):
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _files_of(directory: Path, name: str) -> tuple[Path, Path]:
    """Return the files that a module of this name may have in the directory."""
    base = directory.joinpath(*name.split("."))
    return base.with_name(f"{base.name}.py"), base / "__init__.py"
