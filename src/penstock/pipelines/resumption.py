"""Whether a run may resume from its state.

A pipeline is identified by its name. Its state says how far it is, and so do others: the broker has its group and the
numbers of its transactions, the sink has what was written. If one of them is ahead of the state, then the state is not
that of the last run: it was deleted, is an old copy, or is in another directory. A run would store rows twice, or skip
rows that the sink takes for duplicates. So it is refused, with the remedies. `restart` discards the state and the
groups, but leaves the sink alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.sync import Client
from penstock.client.values import Group
from penstock.errors import PenstockError, UnknownGroup
from penstock.pipelines import queries
from penstock.pipelines.pipeline import BridgeSettings, DeadLetterSettings, Pipeline, PipelineSink, PipelineSource
from penstock.pipelines.state_directory import StateDirectory
from penstock.spark.archive import Archive, format_of
from penstock.spark.archive_place import open_place
from penstock.spark.catalogue import SourceCatalogue
from penstock.spark.manifest import starting_offsets
from penstock.spark.options import TopicPartition
from penstock.spark.source import group_of

_REMEDY: Final = (
    "If its state is in another directory, give that with --data; if the name belongs to another pipeline or consumer, "
    "rename this one; --restart discards the state and the group, and starts over"
)


def check(pipeline: Pipeline, state: StateDirectory) -> None:
    """Raise PenstockError if the broker or the sink is ahead of the state."""
    if isinstance(pipeline.settings, DeadLetterSettings):
        # Each batch replaces their table, and the broker redrives a letter only once.
        return
    planned = state.planned()
    for known in _groups_of(pipeline):
        _check_group(pipeline, state, known, planned)
    if state.has_begun:
        _check_transactions(pipeline, state)
    _check_sink(pipeline, state.batch("rows"), state)


def restart(pipeline: Pipeline, state: StateDirectory, say: Callable[[str], None]) -> None:
    """Discard the state and the groups, after saying so. Refuse if the sink could not take the rows again."""
    _check_sink(pipeline, None)
    groups = list(_groups_of(pipeline))
    for known in groups:
        if known.group.members or known.group.mode != "partitioned":
            raise PenstockError(
                f"group {known.group.name} at {known.servers} belongs to consumers, not to pipeline {pipeline.name}: "
                "rename the pipeline"
            )
    say(_announcement(pipeline, state, groups))
    # In this order: if it is interrupted, the next run is refused because of the groups.
    state.discard()
    for known in groups:
        known.client.delete_group(known.group.name)


def _announcement(pipeline: Pipeline, state: StateDirectory, groups: list[_GroupProgress]) -> str:
    discarded = []
    if state.has_begun:
        discarded.append(f"its state in {state.directory}")
    discarded += [f"its group {known.group.name} at {known.servers} ({_reached(known)})" for known in groups]
    first = f"discarding {' and '.join(discarded)}; " if discarded else ""
    read = ", ".join(f"{_described(source)} from {source.start}" for source in pipeline.sources)
    stays = ""
    if pipeline.sink is not None and pipeline.sink.topic is not None:
        stays = f"; rows stored before stay in {pipeline.sink.topic}, and are stored there a second time"
    return f"restarting pipeline {pipeline.name}: {first}reading {read}{stays}"


def _described(source: PipelineSource) -> str:
    return source.topic or source.parquet or " ".join(source.topics) or f"all that match {source.pattern}"


# ---- the broker


@dataclass(frozen=True, slots=True)
class _GroupProgress:
    """The group for a topic that the pipeline reads: its offsets, and the starts of the logs."""

    client: Client
    servers: str
    group: Group
    positions: Mapping[TopicPartition, int]
    starts: Mapping[TopicPartition, int]


def _groups_of(pipeline: Pipeline) -> Iterator[_GroupProgress]:
    for source in pipeline.sources:
        if source.parquet is not None:
            continue
        read = queries.parsed_options(pipeline, source)
        if read.group is None:
            continue
        holdings = SourceCatalogue(read).look(must_exist=False, at_archive=False)
        client = read.broker.connect()
        for topic in sorted({place.topic for place in holdings}):
            try:
                group = client.group(group_of(read, topic))
            except UnknownGroup:
                continue
            positions = {TopicPartition(each.topic, each.partition): each.committed for each in group.positions}
            starts = {place: held.start for place, held in holdings.items() if place.topic == topic}
            yield _GroupProgress(client, source.servers, group, positions, starts)


def _check_group(
    pipeline: Pipeline, state: StateDirectory, known: _GroupProgress, planned: Mapping[TopicPartition, int]
) -> None:
    for place, start in known.starts.items():
        # Messages below the start of the log cannot be read again.
        end = max(planned.get(place, start), start)
        if known.positions.get(place, 0) <= end:
            continue
        what = f"group {known.group.name} at {known.servers} is ahead, at {_reached(known)}"
        if not state.has_begun:
            raise PenstockError(
                f"pipeline {pipeline.name} would start from scratch, with no state in {state.directory}, but it has "
                f"run before: {what}. {_REMEDY}"
            )
        raise PenstockError(
            f"the state of pipeline {pipeline.name} in {state.directory} ends at {place} offset {end}, but {what}: the "
            f"pipeline has run with another state since. {_REMEDY}"
        )


def _reached(known: _GroupProgress) -> str:
    return ", ".join(f"{place} offset {known.positions.get(place, 0)}" for place in known.starts)


def _check_transactions(pipeline: Pipeline, state: StateDirectory) -> None:
    """Refuse batch numbers that the broker has stored: it would take new rows for duplicates and drop them."""
    for query, number in state.queries():
        # The sink names its transactions after the query; batch writes add a blank (see `sink.writer`).
        for name in (f"spark:{query}", f"spark:{query} "):
            for client, servers in _brokers(pipeline):
                stored = client.last_transaction(name)
                if stored is not None and stored > number:
                    raise PenstockError(
                        f"the state of pipeline {pipeline.name} in {state.directory} ends with batch {number}, but the "
                        f"broker at {servers} has stored batch {stored}: this state is an old copy. {_REMEDY}"
                    )


def _brokers(pipeline: Pipeline) -> Iterator[tuple[Client, str]]:
    """Yield every broker that a pipeline writes to: the sources' for dead letters, the sink's for rows."""
    for source in pipeline.sources:
        yield queries.client_of(source.servers, source.options), source.servers
    sink = pipeline.sink
    if sink is not None and sink.servers is not None:
        yield queries.client_of(sink.servers, sink.options), sink.servers


# ---- the sink


def _check_sink(pipeline: Pipeline, batch: int | None, state: StateDirectory | None = None) -> None:
    """Check the sink against the last batch in the state, None if that has none. Without a state a run starts over."""
    sink = pipeline.sink
    if sink is None or isinstance(pipeline.settings, DeadLetterSettings):
        return
    if sink.parquet is not None and isinstance(pipeline.settings, BridgeSettings):
        _check_bridge(pipeline, sink.parquet, state)
    elif sink.parquet is not None:
        _check_parquet(pipeline, sink.parquet, -1 if batch is None else batch)
    if sink.delta is not None and state is not None:
        _check_delta(pipeline, sink.delta, state)
    if sink.archive is not None and batch is None:
        _check_archive(pipeline, sink)


def _check_parquet(pipeline: Pipeline, path: str, batch: int) -> None:
    """Refuse batch numbers that the directory has: Spark would skip such batches."""
    log = Path(path) / "_spark_metadata"
    if "://" in path or not log.is_dir():
        return
    found = [re.match(r"\d+", each.name) for each in log.iterdir()]
    stored = max((int(number[0]) for number in found if number is not None), default=-1)
    if stored > batch:
        has = f"ends with batch {batch}" if batch >= 0 else "has none"
        raise PenstockError(
            f"{path} holds batches up to {stored}, but the state of pipeline {pipeline.name} {has}: Spark would take "
            "new batches for duplicates and drop them. Run it with the state that wrote them (--data), or remove that "
            "directory, or set another one in [sink] parquet"
        )


def _check_bridge(pipeline: Pipeline, path: str, state: StateDirectory | None) -> None:
    """Refuse files of batches that the state does not have: their rows would be written a second time."""
    from penstock.spark.parquet_directory import ParquetDirectory

    file = ParquetDirectory(path, pipeline.name).unknown({} if state is None else dict(state.queries()))
    if file is not None:
        raise PenstockError(
            f"{path} has {file}, which the state of pipeline {pipeline.name} does not know: its rows would be written "
            "a second time. Run it with the state that wrote the file (--data), or remove the files of the pipeline, "
            "or set another directory in [sink] parquet"
        )


def _check_delta(pipeline: Pipeline, path: str, state: StateDirectory) -> None:
    """Refuse batch numbers that the table has: new rows would be taken for duplicates and dropped."""
    from penstock.spark.delta_table import UpsertTable

    for query, number in state.queries():
        stored = UpsertTable(path).last(query)
        if stored is not None and stored > number:
            raise PenstockError(
                f"{path} holds batches up to {stored}, but the state of pipeline {pipeline.name} ends with batch "
                f"{number}: this state is an old copy. {_REMEDY}"
            )


def _check_archive(pipeline: Pipeline, sink: PipelineSink) -> None:
    """Refuse a start below the end of the archive, which is only appended to."""
    assert sink.archive is not None
    if format_of(open_place(sink.archive)) is None:
        return
    archive = Archive(sink.archive)
    catalogue = SourceCatalogue(queries.parsed_options(pipeline, pipeline.source))
    holdings = catalogue.look(must_exist=False)
    starts = catalogue.starts(holdings)
    ends = {
        (topic, partition): end for topic in archive.topics() for partition, (_, end) in archive.ranges(topic).items()
    }
    for place, start in starts.items():
        end = ends.get((place.topic, place.partition), 0)
        if start < end:
            wanted = starting_offsets({key: ends.get(key, start) for key, start in _keyed(starts).items()})
            raise PenstockError(
                f"the archive {sink.archive} holds {place} up to offset {end - 1}, but pipeline {pipeline.name} would "
                f"start from scratch at {start}. Run it with the state that wrote it (--data); or set [source] options "
                f"= {{ startingOffsets = '{wanted}' }} and use --restart to continue where the archive ends; or set "
                "another directory in [sink] archive"
            )


def _keyed(starts: Mapping[TopicPartition, int]) -> dict[tuple[str, int], int]:
    return {(place.topic, place.partition): start for place, start in starts.items()}
