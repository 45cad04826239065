"""The schemas of topics, for pipelines whose files name none."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import BadConfig, BadSchema, NoBroker, PenstockError, TimedOut, UnknownSchema, UnknownTopic
from penstock.pipelines.pipeline import Key, Pipeline, PipelineSource
from penstock.pipelines.queries import client_of


def with_schemas(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with the newest schema of each topic whose columns the file does not name. Raise BadConfig if
    a topic has none that can be used."""
    if not pipeline.is_typed or all(source.schema is not None for source in pipeline.sources):
        return pipeline
    sources, problems = [], []
    for key, source in zip(pipeline.source_keys, pipeline.sources, strict=True):
        try:
            sources.append(source if source.schema is not None else replace(source, schema=_schema_of(source)))
        except (UnknownSchema, UnknownTopic, BadSchema, NoBroker, TimedOut) as error:
            problems.append(_problem(pipeline, key, source, error))
    if problems:
        raise BadConfig(problems)
    return replace(pipeline, sources=tuple(sources))


def _schema_of(source: PipelineSource) -> str:
    assert source.topic is not None, "the file is valid"
    return client_of(source.servers, source.options).schema(source.topic).to_ddl()


def _problem(pipeline: Pipeline, key: Key, source: PipelineSource, error: PenstockError) -> str:
    where = pipeline.where(*key, "schema")
    return f"{where} is missing, and that of topic {source.topic} at {source.servers} cannot be used: {error}"
