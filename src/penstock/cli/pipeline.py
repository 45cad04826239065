"""`penstock pipeline`: process topics with Spark as a file describes."""

from __future__ import annotations

import json as json_text
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli.options import Json, JsonLines, options
from penstock.cli.text import counted, iso, safe
from penstock.errors import BadConfig, PenstockError

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.pipelines.pipeline import Pipeline
    from penstock.pipelines.progress import PipelineProgress

app = typer.Typer(no_args_is_help=True, add_completion=False)

_PANEL: Final = "Broker"

File = Annotated[Path, typer.Argument(metavar="FILE", help="A pipeline file: `penstock pipeline init` writes one.")]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="PENSTOCK_STORAGE_DATA_DIR",
        help="Keep the state below pipelines/ in this directory. \\[default: data, beside FILE]",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBroker:
    """A broker other than the one in the file, and the credentials for it."""

    servers: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT[,…]",
            envvar="PENSTOCK_SERVERS",
            help="Use this broker instead of the one in FILE.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    user: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_AUTH_USER", help="User name.", rich_help_panel=_PANEL)
    ] = None
    password: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_AUTH_PASSWORD", help="Password.", rich_help_panel=_PANEL)
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_AUTH_TOKEN", help="Token, instead of a user and a password.", rich_help_panel=_PANEL
        ),
    ] = None

    def of(self, pipeline: Pipeline) -> Pipeline:
        from penstock.client.servers import BrokerAddress

        try:
            for server in self.servers.split(",") if self.servers is not None else ():
                BrokerAddress.read(server.strip())
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--servers'") from None
        return pipeline.at(self.servers, user=self.user, password=self.password, token=self.token)


@app.command("init")
@options
def init(
    kind: Annotated[
        Literal["archive", "transform", "aggregate", "deduplicate", "replay", "dead_letters", "join"],
        typer.Argument(
            metavar="KIND", help="archive, transform, aggregate, deduplicate, replay, dead_letters or join."
        ),
    ],
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The file to write. \\[default: KIND.toml]")
    ] = None,
) -> None:
    """Write an example pipeline file, with comments, for you to edit. An existing file is not overwritten."""
    path = path or Path(f"{kind}.toml")
    example = resources.files("penstock.pipelines").joinpath("examples", f"{kind}.toml").read_text()
    try:
        with path.open("x") as file:
            file.write(example)
    except FileExistsError:
        raise PenstockError(f"{path} exists already: choose another name, or remove it first") from None
    print(f"wrote {safe(str(path))}: edit it, then `penstock pipeline run {safe(str(path))}`")


@app.command("validate")
@options
def validate(
    path: File,
    *,
    json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log of Spark.")] = False,
) -> None:
    """Check a pipeline file: its keys, and with Spark its schema, SQL, columns and function. No broker is needed."""
    with _problems_printed():
        pipeline = _load(path)
        from penstock.pipelines.execution import opened
        from penstock.pipelines.validation import check

        with (
            _showing("starting Spark …", shown=not json),
            opened(pipeline.name, config=spark_logging(verbose)) as spark,
        ):
            check(spark, pipeline)
    if json:
        from penstock.cli import output

        output.print_json({"name": pipeline.name, "kind": pipeline.kind, "file": str(path)})
    else:
        print(safe(f"{path} is valid: {pipeline.name}, of kind {pipeline.kind}"))


# Long only by its options.
@app.command("run")
@options
def run(
    path: File,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new messages until Ctrl-C.")] = False,
    flush: Annotated[
        bool,
        typer.Option(
            "--flush", help="At the end, close and write open windows. Rows that come later for them are dropped."
        ),
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A Spark master, such as spark://host:7077. \\[default: local\\[*]]"),
    ] = None,
    data: Data = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard the state and start over: rows in the sink are stored a second time."),
    ] = False,
    json: JsonLines = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the log of Spark, and the stack trace of an error.")
    ] = False,
    at: OtherBroker,
) -> None:
    """Run a pipeline until it has processed all messages, or with --follow until Ctrl-C.

    It continues where the last run ended, even after an error or a crash: no row is lost, and none is stored twice.
    It refuses to run if the broker or the sink is ahead of its state.
    """
    if flush and follow:
        raise typer.BadParameter("a run with --follow has no end: use only one of them", param_hint="'--flush'")
    with _problems_printed():
        pipeline = at.of(_load(path))
        from penstock.pipelines.execution import run as run_pipeline

        try:
            with _reporting(json) as on_batch:
                done = run_pipeline(
                    pipeline,
                    data=data,
                    restart=restart,
                    master=master,
                    follow=follow,
                    flush=flush,
                    config=spark_logging(verbose),
                    on_batch=on_batch,
                    show=_print_rows if json else _print_table,
                    warn=lambda what: print(safe(what), file=sys.stderr),
                )
        except BadConfig:
            raise
        except PenstockError:
            if verbose:
                traceback.print_exc()
            raise
    _show_end(done, as_json=json)
    if done.state == "stopped" and not follow:
        raise typer.Exit(130)


@app.command("status")
@options
def status(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="The pipeline file, or the name in it.")],
    *,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="PENSTOCK_STORAGE_DATA_DIR",
            help="The directory with the state. \\[default: data, beside FILE or here]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the progress of a pipeline, and how its last run ended."""
    from penstock.cli import output
    from penstock.pipelines.state_directory import DATA, state_of
    from penstock.pipelines.state_directory import status as status_of

    if Path(name).is_file():
        with _problems_printed():
            home = state_of(_loaded(Path(name)), data)
        found = status_of(home.name, home.data)
    else:
        found = status_of(name, data or DATA)
    if json:
        output.print_json(found.document())
    else:
        output.console().print(_table(found))


@app.command("list")
@options
def list_pipelines(
    *,
    data: Annotated[
        Path, typer.Option(metavar="DIR", envvar="PENSTOCK_STORAGE_DATA_DIR", help="The directory with their state.")
    ] = Path("data"),
    json: Json = False,
) -> None:
    """Show all pipelines with state in a data directory."""
    from penstock.cli import output
    from penstock.pipelines.state_directory import statuses

    found = statuses(data)
    if json:
        output.print_json([each.document() for each in found])
        return
    rows = [
        (each.name, each.kind, each.state, _or_dash(each.batch), _or_dash(each.lag), iso(each.updated_us), each.file)
        for each in found
    ]
    names = ("pipeline", "kind", "state", "batch", "lag", "updated", "file")
    output.console().print(output.table(names, rows, numbers=("batch", "lag")))


def _loaded(path: Path) -> Pipeline:
    from penstock.pipelines.pipeline_file import load

    return load(path)


def _load(path: Path) -> Pipeline:
    pipeline = _loaded(path)
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise PenstockError("Spark is not installed: pip install 'penstock[spark]'")
    return pipeline


def spark_logging(verbose: bool) -> dict[str, str]:
    """Return the Spark settings for logging. Errors are printed by this command, not by Spark."""
    from pyspark.logger import PySparkLogger

    # PySpark logs errors in SQL besides raising them.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.WARNING if verbose else logging.CRITICAL + 1)
    return {"spark.log.level": "WARN" if verbose else "OFF", "spark.ui.showConsoleProgress": "false"}


@contextmanager
def _problems_printed() -> Iterator[None]:
    """Print the problems of a file, one per line."""
    try:
        yield
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None


# ---- output


@contextmanager
def _reporting(as_json: bool) -> Iterator[Callable[[PipelineProgress], None]]:
    """Report progress: a changing line on a terminal, or a JSON document for each batch."""
    if as_json:
        yield _print_batch
        return
    with _showing("starting Spark …", shown=True) as show:
        yield lambda progress: show(line(progress))


def _print_batch(progress: PipelineProgress) -> None:
    print(json_text.dumps({"event": "batch", **progress.document()}), flush=True)


def _print_rows(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    for row in rows:
        document = {name: str(cell) for name, cell in zip(names, row, strict=True)}
        print(json_text.dumps({"event": "row", **document}), flush=True)


def _print_table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from penstock.cli import output

    output.console().print(output.table(names, rows, numbers=("letters",)))


@contextmanager
def _showing(text: str, *, shown: bool) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        # As Text: a name must not be read as markup.
        yield lambda text: status.update(Text(text))


def line(progress: PipelineProgress) -> str:
    """Return the line that is shown during a run."""
    parts = [
        safe(progress.name),
        f"batch {_or_dash(progress.batch)}",
        counted(progress.rows, "row"),
        f"{progress.rows_per_second:,.0f} rows/s",
        f"lag {_with_commas(progress.lag)}",
    ]
    if progress.watermark is not None:
        parts.append(f"watermark {progress.watermark}")
    if progress.late_rows:
        parts.append(f"{progress.late_rows:,} late")
    return " · ".join(parts)


def _show_end(done: PipelineProgress, *, as_json: bool) -> None:
    if as_json:
        print(json_text.dumps({"event": "end", **done.document()}), flush=True)
        return
    from penstock.cli import output

    output.console().print(_table(done))


def _table(progress: PipelineProgress) -> Table:
    from penstock.cli import output

    rate = progress.rows / progress.seconds if progress.seconds else 0.0
    rows: list[tuple[str, Any]] = [
        ("pipeline", progress.name),
        ("kind", progress.kind),
        ("state", progress.state),
        ("rows", f"{progress.rows:,} in {counted(progress.batches, 'batch').replace('batchs', 'batches')}"),
        ("time", f"{progress.seconds:.1f} s, {rate:,.0f} rows/s"),
        ("last batch", _or_dash(progress.batch)),
        ("late rows", f"{progress.late_rows:,}"),
        ("lag", _with_commas(progress.lag)),
        ("watermark", progress.watermark or "-"),
        ("updated", iso(progress.updated_us)),
        ("file", progress.file),
    ]
    if progress.reason is not None:
        rows.append(("reason", progress.reason))
    return output.table(("field", "value"), rows)


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _with_commas(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
