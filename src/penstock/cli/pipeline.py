"""`penstock pipeline`: process topics with Spark as a file describes."""

from __future__ import annotations

import json as json_text
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from penstock.cli.options import BROKER_PANEL, Json, JsonLines, Password, TlsCa, TlsCert, TlsKey, Token, User, options
from penstock.cli.text import counted, iso, safe
from penstock.errors import BadConfig, PenstockError
from penstock.pipelines.kind import Kind

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.pipelines.pipeline import Pipeline
    from penstock.pipelines.progress import PipelineProgress
    from penstock.pipelines.sample import SampleRow

_KINDS: Final = get_args(Kind)
# The Python modules of the example files.
_MODULES: Final = {"python": ("unpaid.py",)}

app = typer.Typer(no_args_is_help=True, add_completion=False)


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
            rich_help_panel=BROKER_PANEL,
        ),
    ] = None
    user: User = None
    password: Password = None
    token: Token = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    def of(self, pipeline: Pipeline) -> Pipeline:
        from penstock.client.servers import BrokerAddress

        try:
            for server in self.servers.split(",") if self.servers is not None else ():
                BrokerAddress.read(server.strip())
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="'--servers'") from None
        tls = {"tlsCa": self.tls_ca, "tlsCert": self.tls_cert, "tlsKey": self.tls_key}
        return pipeline.at(self.servers, user=self.user, password=self.password, token=self.token, **tls)


@app.command("init")
@options
def init(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help=f"{', '.join(_KINDS[:-1])} or {_KINDS[-1]}.")],
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The file to write. \\[default: KIND.toml]")
    ] = None,
) -> None:
    """Write an example pipeline file, with comments, for you to edit. An existing file is not overwritten."""
    path = path or Path(f"{kind}.toml")
    examples = resources.files("penstock.pipelines").joinpath("examples")
    files = {path: f"{kind}.toml"} | {path.with_name(name): f"{name}.txt" for name in _MODULES.get(kind, ())}
    for each in files:
        if each.exists():
            raise PenstockError(f"{each} exists already: choose another name, or remove it first")
    for each, example in files.items():
        each.write_text(examples.joinpath(example).read_text())
    wrote = " and ".join(safe(str(each)) for each in files)
    print(f"wrote {wrote}: edit {'it' if len(files) == 1 else 'them'}, then `penstock pipeline run {safe(str(path))}`")


@app.command("validate")
@options
def validate(
    path: File,
    *,
    json: Json = False,
    no_spark: Annotated[
        bool, typer.Option("--no-spark", help="Check only keys and values, which takes less than a second.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log of Spark.")] = False,
) -> None:
    """Check a pipeline file. A broker is needed only for the schema of a topic, if the file names none.

    Keys and values are checked at once. Spark then checks schema, SQL, columns and function, if the file has any.
    """
    checked, skipped = ["keys and values"], None
    with _problems_printed():
        pipeline = _loaded(path)
        needing = pipeline.checked_by_spark
        if not needing:
            pass
        elif no_spark or not _has_spark():
            skipped = f"not checked without Spark: {', '.join(needing)}"
        else:
            _print_progress(f"keys and values are valid; checking {', '.join(needing)} with Spark …", shown=not json)
            _check_with_spark(pipeline, verbose)
            checked += needing
    if json:
        from penstock.cli import output

        document = {"name": pipeline.name, "kind": pipeline.kind, "file": str(path), "checked": checked}
        output.print_json(document | {"not_checked": needing if skipped else []})
        return
    print(safe(f"{path} is valid: {pipeline.name}, of kind {pipeline.kind}"))
    print(safe(f"checked: {', '.join(checked)}"))
    if skipped is not None:
        print(safe(skipped))


@app.command("test")
@options
def run_on_sample(
    path: File,
    *,
    samples: Annotated[
        list[Path],
        typer.Option(
            "--input", metavar="SAMPLE", help="Messages, a value per line. Repeat it for each topic of the file."
        ),
    ],
    json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the log of Spark.")] = False,
) -> None:
    """Run a pipeline on a sample, without a broker, and print the rows it would write and its dead letters."""
    with _problems_printed():
        pipeline = _load(path)
        from penstock.pipelines import sample
        from penstock.pipelines.execution import opened

        messages = [sample.read(each) for each in samples]
        config = spark_logging(verbose) | sample.CONFIG
        with _showing("starting Spark …", shown=not json), opened(pipeline.name, config=config, is_brief=True) as spark:
            found = sample.run(spark, pipeline, *messages)
    from penstock.cli import output

    if json:
        output.print_json(asdict(found))
        return
    _print_sample(f"{counted(len(found.rows), 'row')}", [_sample_cells(row) for row in found.rows])
    _print_sample(f"{counted(len(found.dead_letters), 'dead letter')}", [asdict(each) for each in found.dead_letters])


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
    explain: Annotated[
        bool, typer.Option("--explain", help="Print Spark's plan of the pipeline instead of running it.")
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
        if explain:
            return _explain(pipeline, master, verbose)
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
    if not _has_spark():
        raise PenstockError("Spark is not installed: pip install 'penstock[spark]'")
    return pipeline


def _has_spark() -> bool:
    return find_spec("pyspark") is not None and find_spec("pyarrow") is not None


def _check_with_spark(pipeline: Pipeline, verbose: bool) -> None:
    from penstock.pipelines.execution import opened
    from penstock.pipelines.topic_schemas import with_schemas
    from penstock.pipelines.validation import check

    pipeline = with_schemas(pipeline)
    with opened(pipeline.name, config=spark_logging(verbose), is_brief=True) as spark:
        check(spark, pipeline)


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


def _print_progress(text: str, *, shown: bool) -> None:
    """Print a line for people who wait."""
    if shown and sys.stderr.isatty():
        print(safe(text), file=sys.stderr)


def _sample_cells(row: SampleRow) -> dict[str, Any]:
    """Return a row of a sample as cells: the fields of its value, then what else it has."""
    fields = row.value if isinstance(row.value, dict) else {"value": row.value}
    rest = {"_subject": row.subject, "_key": row.key, "_headers": row.headers or None}
    return {**fields, **{name: cell for name, cell in rest.items() if cell is not None}}


def _explain(pipeline: Pipeline, master: str | None, verbose: bool) -> None:
    from penstock.pipelines.execution import opened
    from penstock.pipelines.queries import explain
    from penstock.pipelines.topic_schemas import with_schemas
    from penstock.pipelines.validation import check

    pipeline = with_schemas(pipeline)
    with opened(pipeline.name, master=master, config=spark_logging(verbose), is_brief=True) as spark:
        check(spark, pipeline)
        for name, plan in explain(spark, pipeline).items():
            print(f"== query {name} ==\n{plan}\n")


def _print_sample(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from penstock.cli import output

    print(title)
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [["-" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
        output.console().print(output.table(names, cells))


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
        ("offsets", f"{progress.rows:,} in {counted(progress.batches, 'batch').replace('batchs', 'batches')}"),
        ("rows in", _rows_in(progress)),
        ("rows out", _with_commas(progress.rows_out)),
        ("dead letters", _with_commas(progress.dead_letters)),
        ("late rows", f"{progress.late_rows:,}"),
        ("time", f"{progress.seconds:.1f} s, {rate:,.0f} rows/s"),
        ("last batch", _or_dash(progress.batch)),
        ("lag", _with_commas(progress.lag)),
        ("watermark", progress.watermark or "-"),
        ("updated", iso(progress.updated_us)),
        ("file", progress.file),
    ]
    if progress.reason is not None:
        rows.append(("reason", progress.reason))
    return output.table(("field", "value"), rows)


def _rows_in(progress: PipelineProgress) -> str:
    """Compare the rows that were read with the offsets of the source."""
    if progress.rows_in is None or progress.rows_in == progress.rows:
        return _with_commas(progress.rows_in)
    fewer = progress.rows - progress.rows_in
    return f"{progress.rows_in:,}: {fewer:,} offsets have another subject, are expired or compacted"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _with_commas(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
