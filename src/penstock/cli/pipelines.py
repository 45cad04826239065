"""`penstock pipelines`: run a directory of pipelines as a service, and show the pipelines of a broker."""

from __future__ import annotations

import json as json_text
import logging
import threading
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import ConnectionOptions, Json, JsonLines, options
from penstock.cli.text import iso, safe
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.pipelines.service import Job

app = typer.Typer(no_args_is_help=True, add_completion=False)

logger = logging.getLogger(__name__)

Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="PENSTOCK_STORAGE_DATA_DIR",
        help="Keep the state in this directory. \\[default: data, beside the files]",
    ),
]


@app.command("serve")
@options
def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The directory with the pipeline files.")
    ],
    *,
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A Spark master, such as spark://host:7077. \\[default: local\\[*]]"),
    ] = None,
    data: Data = None,
    json: JsonLines = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log of Spark.")] = False,
) -> None:
    """Run all pipeline files (*.toml) of a directory in one Spark session until SIGTERM or Ctrl-C.

    A new file starts a pipeline, a changed one restarts it, a removed one stops it. A pipeline that fails is tried
    again with growing delays, and given up after five failures in a row; the others continue.
    """
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise PenstockError("Spark is not installed: pip install 'penstock[spark]'")
    from penstock.cli import logs
    from penstock.cli.pipeline import spark_logging
    from penstock.pipelines.execution import opened, until_signal
    from penstock.pipelines.service import Service

    logs.configure()
    # It logs each thread that ends.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stop = threading.Event()
    service = Service(directory, data=data, on_change=_print_change if json else _log_change)
    config = spark_logging(verbose) | {"spark.scheduler.mode": "FAIR"}
    with opened("pipelines", master=master, config=config) as spark, until_signal(stop):
        logger.info("Spark %s started: looking for pipeline files in %s", spark.version, directory)
        service.run(spark, stop)


@app.command("list")
@options
def list_pipelines(*, json: Json = False, at: ConnectionOptions) -> None:
    """List the pipelines that report to a broker, with their state and progress."""
    with at.client() as client:
        found = client.pipelines()
    from penstock.cli import output

    if json:
        output.print_json([asdict(each) for each in found])
        return
    rows = [
        (
            each.name,
            each.kind,
            each.state,
            f"{each.rows:,}",
            f"{each.rows_per_second:,.0f}",
            "-" if each.lag is None else f"{each.lag:,}",
            "-" if each.dead_letters is None else f"{each.dead_letters:,}",
            f"{each.late_rows:,}",
            each.watermark or "-",
            iso(each.updated_us),
            each.runner,
            each.reason or "",
        )
        for each in found
    ]
    names = (
        "pipeline",
        "kind",
        "state",
        "rows",
        "rows/s",
        "lag",
        "dead",
        "late",
        "watermark",
        "updated",
        "runner",
        "reason",
    )
    output.console().print(output.table(names, rows, numbers=("rows", "rows/s", "lag", "dead", "late")))


@app.command("rollback")
@options
def roll_back(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file that `penstock pipelines serve` runs.")],
    *,
    data: Data = None,
) -> None:
    """Restore the last version of a pipeline file that processed a batch.

    If the file is that version, the one before it is restored. The replaced version is kept as FILE.rejected.
    """
    from penstock.pipelines.versions import FileVersions

    kept = FileVersions.of(path, data).roll_back()
    print(safe(f"restored {path}; the version that it replaces is in {kept}"))


def _log_change(job: Job) -> None:
    name = job.path.name if job.pipeline is None else f"{job.pipeline.name} ({job.path.name})"
    if job.reason is None:
        logger.info("%s: %s", name, job.state)
    else:
        logger.warning("%s: %s: %s", name, job.state, job.reason)


def _print_change(job: Job) -> None:
    document = {
        "file": str(job.path),
        "name": None if job.pipeline is None else job.pipeline.name,
        "state": job.state,
        "reason": job.reason,
        "failures": job.failures,
    }
    print(json_text.dumps(document), flush=True)
