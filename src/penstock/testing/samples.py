"""Pipelines in tests: run a pipeline file on a sample of messages, without a broker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipelines.sample import Sample, SampleOutput


def run_pipeline(path: str | Path, *samples: Iterable[Sample], spark: SparkSession | None = None) -> SampleOutput:
    """Run a pipeline file on messages, one sample for each of its topics, and return what it would write.

    A message is its value as bytes or text, a mapping, which becomes JSON, or an `Outgoing` with a key and headers.
    `rows` of the result has the rows for the sink, `values` only their values, and `dead_letters` what did not match
    the schema, with the reason. Without `spark` a session is opened, which takes seconds. Raise BadConfig if the file
    is invalid.
    """
    from penstock.pipelines import sample
    from penstock.pipelines.execution import opened
    from penstock.pipelines.pipeline_file import load

    pipeline = load(path)
    if spark is not None:
        return sample.run(spark, pipeline, *samples)
    with opened(pipeline.name, config=sample.CONFIG) as session:
        return sample.run(session, pipeline, *samples)
