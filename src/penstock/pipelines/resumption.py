"""Whether a run may begin where its state says.

A pipeline is known by its name. How far it is stands in its state (`home.py`), and is also known elsewhere: the broker
has its group and the numbers of its transactions, the sink has what was written. If one of them is further than the
state, then the state is not that of the last run: it was deleted, is an old copy, or lies in another directory. A run
would store rows a second time, or skip rows that the sink takes for ones it has. So it is refused, with the remedy.
`restart` discards the state and the groups; it does not touch what is in the sink.
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
from penstock.pipelines.pipeline import DeadLetterSettings, Pipeline, Sink, Source
from penstock.pipelines.state_directory import StateDirectory
from penstock.spark import connection, options
from penstock.spark.archive import Archive
from penstock.spark.catalogue import Catalogue, connect
from penstock.spark.manifest import starting_offsets
from penstock.spark.options import TopicPartition
from penstock.spark.source import group_of

_REMEDY: Final = (
    "If its state is in another directory, name that with --data; if the name belongs to another pipeline or consumer, "
    "give this one another name; --restart discards what is known of it and starts over"
)


def check(pipeline: Pipeline, home: StateDirectory) -> None:
    """Raise PenstockError if the broker or the sink is further than the state."""
    if isinstance(pipeline.settings, DeadLetterSettings):
        # Their table is written anew by each batch, and the broker redrives a letter once.
        return
    planned = home.planned()
    for known in _known(pipeline):
        _check_group(pipeline, home, known, planned)
    if home.has_begun:
        _check_transactions(pipeline, home)
    _check_sink(pipeline, home.batch("rows"))


def restart(pipeline: Pipeline, home: StateDirectory, say: Callable[[str], None]) -> None:
    """Discard the state and the groups, after saying so. Refused if the sink could not take the rows again."""
    _check_sink(pipeline, None)
    groups = list(_known(pipeline))
    for known in groups:
        if known.group.members or known.group.mode != "partitioned":
            raise PenstockError(
                f"group {known.group.name} at {known.servers} belongs to consumers, not to pipeline {pipeline.name}: "
                "give the pipeline another name"
            )
    say(_announcement(pipeline, home, groups))
    # In this order: what is left if it is interrupted is refused by the next run.
    home.discard()
    for known in groups:
        known.client.delete_group(known.group.name)


def _announcement(pipeline: Pipeline, home: StateDirectory, groups: list[_Known]) -> str:
    discarded = []
    if home.has_begun:
        discarded.append(f"its state in {home.directory}")
    discarded += [f"its group {known.group.name} at {known.servers} ({_reached(known)})" for known in groups]
    first = f"discarding {' and '.join(discarded)}; " if discarded else ""
    read = ", ".join(f"{_described(source)} from {source.start}" for source in pipeline.sources)
    stays = ""
    if pipeline.sink is not None and pipeline.sink.topic is not None:
        stays = f"; rows that it stored before stay in {pipeline.sink.topic}, and are stored there a second time"
    return f"restarting pipeline {pipeline.name}: {first}reading {read}{stays}"


def _described(source: Source) -> str:
    return source.topic or " ".join(source.topics) or f"all that match {source.pattern}"


# ---- what the broker knows


@dataclass(frozen=True, slots=True)
class _Known:
    """The group of a topic that the pipeline reads: how far each partition is, and where its log begins."""

    client: Client
    servers: str
    group: Group
    positions: Mapping[TopicPartition, int]
    starts: Mapping[TopicPartition, int]


def _known(pipeline: Pipeline) -> Iterator[_Known]:
    for source in pipeline.sources:
        read = _read(pipeline, source)
        if read.group is None:
            continue
        holdings = Catalogue(read).look(must_exist=False, at_archive=False)
        client = connect(read.broker)
        for topic in sorted({place.topic for place in holdings}):
            try:
                group = client.group(group_of(read, topic))
            except UnknownGroup:
                continue
            positions = {TopicPartition(each.topic, each.partition): each.committed for each in group.positions}
            starts = {place: held.start for place, held in holdings.items() if place.topic == topic}
            yield _Known(client, source.servers, group, positions, starts)


def _check_group(
    pipeline: Pipeline, home: StateDirectory, known: _Known, planned: Mapping[TopicPartition, int]
) -> None:
    for place, start in known.starts.items():
        # What is below the start of the log cannot be read again.
        end = max(planned.get(place, start), start)
        if known.positions.get(place, 0) <= end:
            continue
        what = f"group {known.group.name} at {known.servers} is further, at {_reached(known)}"
        if not home.has_begun:
            raise PenstockError(
                f"pipeline {pipeline.name} would start from scratch, with no state in {home.directory}, but it has run "
                f"before: {what}. {_REMEDY}"
            )
        raise PenstockError(
            f"the state of pipeline {pipeline.name} in {home.directory} ends at {place} offset {end}, but {what}: the "
            f"pipeline has run further with another state. {_REMEDY}"
        )


def _reached(known: _Known) -> str:
    return ", ".join(f"{place} offset {known.positions.get(place, 0)}" for place in known.starts)


def _check_transactions(pipeline: Pipeline, home: StateDirectory) -> None:
    """The broker takes a batch whose number it has stored for a repetition: other rows in it would be dropped."""
    for query, number in home.queries():
        # The sink names its transactions by the query; a batch that is written by itself adds a blank (see `sink`).
        for name in (f"spark:{query}", f"spark:{query} "):
            for client, servers in _brokers(pipeline):
                stored = client.last_transaction(name)
                if stored is not None and stored > number:
                    raise PenstockError(
                        f"the state of pipeline {pipeline.name} in {home.directory} ends with batch {number}, but the "
                        f"broker at {servers} has stored batch {stored}: this state is an old copy. {_REMEDY}"
                    )


def _brokers(pipeline: Pipeline) -> Iterator[tuple[Client, str]]:
    """All that it may write to: rows to that of the sink, dead letters to those of the sources."""
    for source in pipeline.sources:
        yield connect(_read(pipeline, source).broker), source.servers
    sink = pipeline.sink
    if sink is not None and sink.servers is not None:
        login = {name.lower(): value for name, value in sink.options.items() if name.lower() in queries.LOGIN}
        yield connection.client(sink.servers, connection.TIMEOUT_S, **login), sink.servers


def _read(pipeline: Pipeline, source: Source) -> options.ReadOptions:
    given = {name.lower(): value for name, value in queries.read_options(pipeline, source).items()}
    return options.read(given, is_stream=True)


# ---- what the sink knows


def _check_sink(pipeline: Pipeline, batch: int | None) -> None:
    """`batch`: the last one of the state, None if it has none."""
    sink = pipeline.sink
    if sink is None or isinstance(pipeline.settings, DeadLetterSettings):
        return
    if sink.parquet is not None:
        _check_parquet(pipeline, sink.parquet, -1 if batch is None else batch)
    if sink.archive is not None and batch is None:
        _check_archive(pipeline, sink)


def _check_parquet(pipeline: Pipeline, path: str, batch: int) -> None:
    """Spark skips batches whose numbers are in the directory already, whatever is in them."""
    log = Path(path) / "_spark_metadata"
    if "://" in path or not log.is_dir():
        return
    found = [re.match(r"\d+", each.name) for each in log.iterdir()]
    stored = max((int(number[0]) for number in found if number is not None), default=-1)
    if stored > batch:
        has = f"ends with batch {batch}" if batch >= 0 else "has none"
        raise PenstockError(
            f"{path} holds batches up to {stored} and the state of pipeline {pipeline.name} {has}: Spark would take "
            "new batches for those and drop them. Run it with the state that wrote them (--data), or remove that "
            "directory, or name another in [sink] parquet"
        )


def _check_archive(pipeline: Pipeline, sink: Sink) -> None:
    """An archive goes on where it ends, and takes nothing twice."""
    assert sink.archive is not None
    root = Path(sink.archive)
    if not (root / "_manifest").is_dir() and not (root / "_delta_log").is_dir():
        return
    archive = Archive(sink.archive)
    catalogue = Catalogue(_read(pipeline, pipeline.source))
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
                f"the archive {sink.archive} holds {place} up to offset {end - 1}, and pipeline {pipeline.name} would "
                f"start from scratch at {start}. Run it with the state that wrote it (--data); or set [source] options "
                f"= {{ startingOffsets = '{wanted}' }} and use --restart to go on where the archive ends; or name "
                "another directory in [sink] archive"
            )


def _keyed(starts: Mapping[TopicPartition, int]) -> dict[tuple[str, int], int]:
    return {(place.topic, place.partition): start for place, start in starts.items()}
