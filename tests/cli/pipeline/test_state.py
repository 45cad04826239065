"""The state of a pipeline: where a run continues, and when it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.pipelines.pipeline_file import load
from penstock.pipelines.progress import begin
from penstock.pipelines.state_directory import StateDirectory
from penstock.spark.archive_place import DirectoryPlace
from penstock.spark.manifest import ArchivedFile, ArchiveManifest, Entry
from penstock.spark.offsets import Offsets
from penstock.spark.options import TopicPartition
from tests.conftest import SparkBroker
from tests.support.pipeline_files import Example, of, penstock, publish, values


@of("aggregate")
def test_a_checkpoint_of_another_pipeline_is_refused(example: Example) -> None:
    home = StateDirectory(example.data, "revenue")
    home.directory.mkdir(parents=True)
    home.identify(load(example.path))
    (home.checkpoint / "rows/offsets").mkdir(parents=True)
    (home.checkpoint / "rows/offsets/0").touch()
    example.change(('window = "1 minute"', 'window = "5 minutes"'))

    done = example.run()

    assert done.code == 1
    assert done.err == (
        f"error: the checkpoint in {example.data}/pipelines/revenue belongs to another pipeline: its window is "
        '"1 minute", this one\'s is "5 minutes". Give this one another name, or use --restart to start over\n'
    )


@of("transform")
def test_a_file_finds_its_state_from_any_directory_and_restart_starts_over(
    example: Example, broker: SparkBroker, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.change(('"orders"', '"moving"'), ('"orders-clean"', '"moving-clean"'), ('"clean-orders"', '"moving"'))
    for number in range(2):
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        publish(broker, "moving", {"id": f"m{number}", "amount": 5.0})

        assert example.run().end["rows"] == 1
    shown = penstock("status", example.path, "--json")
    shutil.rmtree(example.data)
    refused = example.run()
    restarted = example.run("--restart")

    assert json.loads(shown.out)["state"] == "done"
    assert refused.err == (
        f"error: pipeline moving would start from scratch, with no state in {example.data}/pipelines/moving, but it "
        f"has run before: group moving at {broker.servers} is ahead, at moving/0 offset 2. If its state is in "
        "another directory, give that with --data; if the name belongs to another pipeline or consumer, rename "
        "this one; --restart discards the state and the group, and starts over\n"
    )
    assert restarted.err == (
        f"restarting pipeline moving: discarding its group moving at {broker.servers} (moving/0 offset 2); reading "
        "moving from earliest; rows stored before stay in moving-clean, and are stored there a second time\n"
    )
    assert [order["id"] for order in values(broker, "moving-clean")] == ["m0", "m1", "m0", "m1"]
    assert broker.lag("moving") == 0


def begun(home: StateDirectory, *, batch: int, place: TopicPartition, end: int, query: str = "q") -> None:
    """A state as Spark leaves it, up to a batch that ends there."""
    offsets = home.checkpoint / "rows/offsets"
    offsets.mkdir(parents=True)
    document = Offsets({place.topic: 1}, {place: end}).to_json()
    (offsets / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(document)}\n")
    (home.checkpoint / "rows/metadata").write_text(json.dumps({"id": query}))


@pytest.fixture
def stopped(broker: SparkBroker, tmp_path: Path) -> Iterator[Example]:
    """A pipeline whose state ends at batch 3, offset 5 of orders, as does its group."""
    example = Example("replay", tmp_path, broker)
    example.change(('"replay-orders"', '"halted"'))
    home = StateDirectory(example.data, "halted")
    home.directory.mkdir(parents=True)
    home.identify(load(example.path))
    begun(home, batch=3, place=TopicPartition("orders", 0), end=5)
    broker.create_group("halted", "orders", mode="partitioned", start="earliest")
    broker.commit("halted", "orders", 0, 5)
    yield example
    broker.delete_group("halted")


def test_a_state_behind_the_group_is_refused(stopped: Example, broker: SparkBroker) -> None:
    broker.commit("halted", "orders", 0, 7)

    done = stopped.run()

    assert done.err.startswith(
        f"error: the state of pipeline halted in {stopped.data}/pipelines/halted ends at orders/0 offset 5, "
        f"but group halted at {broker.servers} is ahead, at orders/0 offset 7: the pipeline has run "
        "with another state since. If its state is in another directory"
    )


def test_a_state_behind_its_transactions_is_refused(stopped: Example, broker: SparkBroker) -> None:
    with broker.transaction("spark:q", 4) as transaction:
        transaction.publish("somewhere", b"row")

    done = stopped.run()

    assert "ends with batch 3, but the broker at" in done.err
    assert "has stored batch 4: this state is an old copy" in done.err


def test_a_state_in_the_working_directory_is_named(
    stopped: Example, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    stopped.data.rename(elsewhere / "data")
    monkeypatch.chdir(elsewhere)

    done = stopped.run()

    assert done.err == (
        f"error: pipeline halted has its state in {elsewhere}/data/pipelines/halted, but the state is now kept "
        f"beside the file: move that directory to {stopped.data}/pipelines/halted, or use "
        f"--data {elsewhere}/data\n"
    )


def test_a_second_file_with_the_name_of_another_is_refused(stopped: Example) -> None:
    home = StateDirectory(stopped.data, "halted")
    home.save(begin("halted", "replay", stopped.path, None))
    second = stopped.directory / "second.toml"
    second.write_text(stopped.path.read_text().replace('"orders-replayed"', '"orders-elsewhere"'))

    done = penstock("run", second)
    home.refuse_namesake(load(stopped.path))
    stopped.path.unlink()
    home.refuse_namesake(load(second))

    assert done.err == (
        f"error: the state in {home.directory} belongs to {stopped.path}, a pipeline with the same name, "
        f"'halted', and another sink: give one of them another name, or remove {stopped.path}\n"
    )


def test_restart_leaves_the_group_of_consumers_alone(stopped: Example, broker: SparkBroker) -> None:
    with broker.subscribe("orders", group="halted", mode="partitioned"):
        done = stopped.run("--restart")

    assert done.err == (
        f"error: group halted at {broker.servers} belongs to consumers, not to pipeline halted: rename the pipeline\n"
    )
    assert StateDirectory(stopped.data, "halted").has_begun


@of("aggregate")
def test_parquet_that_spark_would_not_write_again_is_refused(example: Example) -> None:
    example.change(
        ('topic = "revenue" # or: ', ""), ('key = "country"', ""), ('name = "revenue"', 'name = "revenue-files"')
    )
    log = example.directory / "revenue/_spark_metadata"
    log.mkdir(parents=True)
    for name in ("9.compact", "10", ".10.crc"):
        (log / name).touch()

    for flags in ((), ("--restart",)):
        assert example.run(*flags).err == (
            f"error: {example.directory}/revenue holds batches up to 10, but the state of pipeline revenue-files has "
            "none: Spark would take new batches for duplicates and drop them. Run it with the state that wrote them "
            "(--data), or remove that directory, or set another one in [sink] parquet\n"
        )


@of("archive")
def test_an_archive_that_holds_what_would_be_read_is_refused(example: Example) -> None:
    example.change(('name = "archive-orders"', 'name = "archive-again"'))
    root = example.directory / "archive/orders"
    manifest = ArchiveManifest(DirectoryPlace(root))
    manifest.create()
    file = ArchivedFile("data/x.parquet", "orders", 0, 40, 1, 0, 39, 0, 0)
    manifest.commit(Entry("spark:lost", 7, ("topic",), (file,)))

    for flags in ((), ("--restart",)):
        assert example.run(*flags).err == (
            f"error: the archive {root} holds orders/0 up to offset 39, but pipeline archive-again would start from "
            "scratch at 0. Run it with the state that wrote it (--data); or set [source] options = { startingOffsets = "
            """'{"orders":{"0":40}}' } and use --restart to continue where the archive ends; or set another """
            "directory in [sink] archive\n"
        )


def test_a_checkpoint_binds_a_pipeline_from_its_first_batch_on(tmp_path: Path) -> None:
    penstock("init", "replay", tmp_path / "replay.toml")
    first = load(tmp_path / "replay.toml")
    second = replace(first, kind="archive")
    home = StateDirectory(tmp_path, first.name)
    home.directory.mkdir(parents=True)

    home.identify(first)
    home.identify(second)
    (home.checkpoint / "rows/offsets").mkdir(parents=True)
    home.identify(first)
    (home.checkpoint / "rows/offsets/0").touch()
    home.identify(first)
    with pytest.raises(PenstockError, match=r"another pipeline: its kind is \"replay\", this one's is \"archive\""):
        home.identify(second)
    (home.directory / "pipeline.json").unlink()
    with pytest.raises(PenstockError, match=r"pipeline.json is missing or damaged, .*: use --restart"):
        home.identify(first)
