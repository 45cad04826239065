"""`penstock pipeline run`, `status` and `list`: what a run shows, and how it ends."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow.dataset
import pyarrow.parquet
import pytest

from penstock.cli.pipeline import line
from penstock.pipelines import failure
from penstock.pipelines.execution import run
from penstock.pipelines.failure import Failure
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.progress import PipelineProgress, Reports, begin
from penstock.pipelines.state_directory import StateDirectory, status
from tests.conftest import SparkBroker
from tests.support.pipeline_files import ORDERS, Example, of, penstock, publish, values
from tests.support.server import clean_environment

pandas = pytest.importorskip("pandas")

# Spark's start on a machine that has other things to do.
_PATIENCE_S: Final = 240.0


@of("transform")
def test_explain_shows_the_plan_and_runs_nothing(example: Example, broker: SparkBroker) -> None:
    done = penstock("run", example.path, "--servers", broker.servers, "--explain")

    assert done.code == 0
    assert done.out.startswith("== query rows ==\n")
    assert "StreamingRelationV2" in done.out
    assert re.search(r"Filter .*\(amount", done.out)
    assert not example.data.exists()


@of("aggregate")
def test_what_was_read_and_written_is_counted_once_by_several_queries(example: Example, broker: SparkBroker) -> None:
    example.change(
        ('topic = "revenue" # or: ', ""),
        ('key = "country"', ""),
        ('name = "revenue"', 'name = "counted"'),
        ('topic = "orders"', 'topic = "counted"\nsubjects = ["counted"]'),
    )
    publish(broker, "counted", *ORDERS)
    publish(broker, "counted.other", *ORDERS[:7])
    broker.publish("counted", b"no order")

    end = example.run("--flush").end
    shown = penstock("status", example.path)

    expected = pandas.DataFrame(ORDERS).groupby(["at", "country"])["amount"].sum()
    found = pyarrow.parquet.read_table(example.directory / "revenue").to_pandas()
    assert sorted(found["revenue"]) == sorted(expected.round(2))
    assert (end["rows"], end["rows_in"], end["dead_letters"]) == (108, 101, 1)
    assert (end["rows_out"], end["late_rows"]) == (len(expected), 0)
    assert "101: 7 offsets have another subject, are expired or compacted" in shown.out


@of("transform")
def test_a_run_goes_on_where_the_last_one_ended(example: Example, broker: SparkBroker) -> None:
    example.change(('"orders"', '"more-orders"'), ('"orders-clean"', '"more-clean"'), ('"clean-orders"', '"more"'))
    for number in range(2):
        publish(broker, "more-orders", {"id": f"m{number}", "amount": 5.0})

        end = example.run().end

        assert [order["id"] for order in values(broker, "more-clean")] == [f"m{each}" for each in range(number + 1)]
        assert (end["rows"], end["lag"], broker.lag("more")) == (1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("join", "an inner join writes rows as soon as they match"),
        ("archive", "a pipeline of kind archive holds no rows back"),
        ("sql", "only Spark knows which rows a query of kind sql holds back"),
    ],
)
def test_flush_is_refused_where_nothing_stays_open(kind: str, why: str, broker: SparkBroker, tmp_path: Path) -> None:
    done = Example(kind, tmp_path, broker).run("--flush")

    assert re.fullmatch(rf"error: pipeline \S+ (has nothing to|cannot be) flush(ed)?: {why}. Omit --flush\n", done.err)


# ---- what goes wrong while it runs


@of("transform")
def test_a_query_that_fails_is_told_in_one_sentence(example: Example) -> None:
    example.change(('topic = "orders"', 'topic = "ordres"'))

    done = example.run()
    verbose = example.run("--verbose")

    assert done.code == verbose.code == 1
    [sentence] = done.err.splitlines()
    assert re.fullmatch(
        r"error: pipeline clean-orders failed; the next run continues where it stopped: unknown topic "
        r"'ordres' at 127\.0\.0\.1:\d+: did you mean 'orders'\?",
        sentence,
    )
    assert "Traceback" in verbose.err
    shown = penstock("status", "clean-orders", "--data", example.data, "--json")
    assert json.loads(shown.out)["state"] == "failed"
    assert "unknown topic 'ordres'" in json.loads(shown.out)["reason"]


@of("archive")
def test_a_pipeline_runs_once_at_a_time(example: Example) -> None:
    directory = example.data / "pipelines/archive-orders"
    directory.mkdir(parents=True)
    with open(directory / "LOCK", "w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)

        done = example.run()

    assert done.err == "error: pipeline archive-orders is already running, in process 4711: stop that one first\n"


@of("transform")
def test_a_stop_ends_a_run_that_follows_and_the_next_goes_on(example: Example, broker: SparkBroker) -> None:
    example.change(('"orders"', '"endless"'), ('"orders-clean"', '"endless-clean"'), ('"clean-orders"', '"endless"'))
    publish(broker, "endless", {"id": "first", "amount": 5.0})
    stop = threading.Event()

    def tell(progress: PipelineProgress) -> None:
        if progress.rows:
            stop.set()

    done = run(load(example.path).at(broker.servers), data=example.data, follow=True, on_batch=tell, stop=stop)
    publish(broker, "endless", {"id": "second", "amount": 5.0})
    end = example.run().end

    assert (done.state, done.rows) == ("stopped", 1)
    assert (end["state"], end["rows"]) == ("done", 1)
    assert [order["id"] for order in values(broker, "endless-clean")] == ["first", "second"]


def test_in_a_process_of_its_own_it_follows_until_ctrl_c(broker: SparkBroker, tmp_path: Path) -> None:
    path = tmp_path / "replay.toml"
    penstock("init", "replay", path)
    text = path.read_text().replace("orders-replayed", "orders-followed")
    path.write_text(text.replace('"replay-orders"', '"follow-orders"'))
    command = (
        "run",
        path,
        "--follow",
        "--json",
        "--servers",
        broker.servers,
        "--data",
        tmp_path,
        "--master",
        "local[2]",
    )
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "pipeline", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None
        giving_up = threading.Timer(_PATIENCE_S, process.kill)
        giving_up.start()
        try:
            for line in process.stdout:
                if json.loads(line)["rows"] == 101:
                    break
            assert status("follow-orders", tmp_path).state == "running"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            giving_up.cancel()
            process.kill()

    assert process.returncode == 0, err.decode()
    end = json.loads(out.decode().splitlines()[-1])
    assert (end["event"], end["state"], end["lag"]) == ("end", "stopped", 0)
    assert len(list(broker.fetch("orders-followed", 0, 0))) == 101


@pytest.mark.parametrize(("flags", "code"), [((), 130), (("--follow",), 0)])
def test_a_run_that_was_stopped_is_done_only_if_it_would_not_have_ended(
    flags: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock("init", "replay", tmp_path / "replay.toml")
    stopped = replace(begin("replay-orders", "replay", tmp_path / "replay.toml", None), state="stopped")
    monkeypatch.setattr("penstock.pipelines.execution.run", lambda *_, **__: stopped)

    assert penstock("run", tmp_path / "replay.toml", *flags).code == code


def test_the_line_of_a_run_shows_what_moves(tmp_path: Path) -> None:
    begun = begin("revenue", "aggregate", tmp_path / "x.toml", None)
    later = replace(begun, batch=7, rows=123_456, rows_per_second=4567.8, lag=1000, watermark="12:42", late_rows=3)

    assert line(begun) == "revenue · batch - · 0 rows · 0 rows/s · lag -"
    assert line(later) == "revenue · batch 7 · 123,456 rows · 4,568 rows/s · lag 1,000 · watermark 12:42 · 3 late"


def test_list_and_status_show_how_far_pipelines_are(tmp_path: Path) -> None:
    for name, state in (("first", "done"), ("second", "running")):
        home = StateDirectory(tmp_path, name)
        home.directory.mkdir(parents=True)
        begun = begin(name, "replay", tmp_path / f"{name}.toml", None)
        home.save(replace(begun, state=state, rows=1234, batches=2, batch=7, lag=56))

    listed = penstock("list", "--data", tmp_path)
    found = json.loads(penstock("list", "--data", tmp_path, "--json").out)
    shown = penstock("status", "first", "--data", tmp_path)

    # Nobody runs the second one: it was killed.
    assert [(each["name"], each["state"]) for each in found] == [("first", "done"), ("second", "killed")]
    assert [line.split()[:5] for line in listed.out.splitlines()[2:]] == [
        ["first", "replay", "done", "7", "56"],
        ["second", "replay", "killed", "7", "56"],
    ]
    assert "1,234 in 2 batches" in shown.out


def test_progress_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path, "first")
    home.directory.mkdir(parents=True)
    (home.directory / "progress.json").write_text("{")

    done = penstock("list", "--data", tmp_path)

    assert done.err == f"error: {home.directory}/progress.json cannot be read: the next run replaces it\n"
    assert home.before() is None


def test_status_of_what_never_ran_says_what_did(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path, "first")
    home.directory.mkdir(parents=True)
    home.save(begin("first", "replay", tmp_path / "first.toml", None))

    done = penstock("status", "frist", "--data", tmp_path)

    assert done.err == (
        f"error: no pipeline 'frist' has run with the data directory {tmp_path}: there are first. "
        "Give its file instead of its name, or its data directory with --data\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            (
                "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `x` cannot be resolved. Did you mean [`y`]? "
                "SQLSTATE: 42703; line 3 pos 7;\n'Project ['x]\n+- Relation\n"
            ),
            Failure("A column with name `x` cannot be resolved. Did you mean [`y`]?", 3),
        ),
        (
            "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'FORM'. SQLSTATE: 42601 (line 2, pos 10)\n\n== SQL ==\n",
            Failure("Syntax error at or near 'FORM'.", 2),
        ),
        (
            (
                "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_ERROR] Failed: "
                'Traceback (most recent call last):\n  File "x.py", line 1, in y\n'
                "penstock.errors.NoBroker: nobody at x:1\n\n"
                "During handling of the above exception, another one occurred:\n\nTraceback (most recent call last):\n"
                "pyspark.errors.PySparkRuntimeError: [X] failed\n SQLSTATE: 38000"
            ),
            Failure("nobody at x:1"),
        ),
        (
            (
                'Job aborted due to stage failure: Traceback (most recent call last):\n  File "x.py", line 1, in y\n'
                "ValueError: a row of 'x' is wrong: make it right\n\n\tat org.apache.spark.X\n"
            ),
            Failure("a row of 'x' is wrong: make it right"),
        ),
        (
            (
                "Traceback (most recent call last):\nConnectionRefusedError: [Errno 111]\n\nThe above exception was "
                "the cause:\n\nTraceback (most recent call last):\npenstock.errors.NoBroker: nobody at x:1\n"
            ),
            Failure("nobody at x:1"),
        ),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n== SQL ==", Failure("Division by zero.")),
    ],
)
def test_of_what_spark_tells_one_sentence_is_left(text: str, reason: Failure) -> None:
    assert failure.parse(text) == reason


def test_a_batch_that_is_told_twice_counts_once(tmp_path: Path) -> None:
    def offsets(end: int) -> str:
        return json.dumps({"version": 1, "topics": {"orders": {"id": 1, "offsets": {"0": end}}}})

    source = {"startOffset": offsets(10), "endOffset": offsets(30), "latestOffset": offsets(35)}
    report = {
        "id": "a",
        "timestamp": "2030-01-31T12:00:00.000Z",
        "batchId": 4,
        "batchDuration": 500,
        "durationMs": {"addBatch": 400},
        "eventTime": {"watermark": "2030-01-31T11:00:00.000Z"},
        "stateOperators": [{"numRowsDroppedByWatermark": 3}],
        # Two looks at one topic.
        "sources": [source, source],
    }
    reports = Reports()
    begun = begin("x", "transform", tmp_path / "x.toml", None)

    found = reports.add(begun, report)

    assert found is not None
    assert reports.add(found, report) is None
    assert (found.batches, found.batch, found.rows, found.rows_per_second, found.lag) == (1, 4, 20, 40.0, 5)
    assert (found.late_rows, found.watermark) == (3, "2030-01-31T11:00:00.000Z")
