"""Lets topics keep messages until a pipeline has archived them.

The policy `retain_for` of a topic names a group, and retention drops nothing that this group has not processed. The
group of an archive pipeline is never ahead of the archive: it moves when a batch is committed there. So the pipeline
names its group in the policy, and removes it from there if its file says so.
"""

from __future__ import annotations

import logging

from penstock.errors import ReadOnlyTopic
from penstock.pipelines import queries
from penstock.pipelines.pipeline import ArchiveSettings, Pipeline
from penstock.spark.catalogue import SourceCatalogue
from penstock.spark.source import group_of

logger = logging.getLogger(__name__)


def hold_retention(pipeline: Pipeline) -> None:
    """Set or remove the group of an archive pipeline in the policies of its topics."""
    if not isinstance(pipeline.settings, ArchiveSettings):
        return
    read = queries.parsed_options(pipeline, pipeline.source)
    if read.group is None:
        return
    client = read.broker.connect()
    for name in sorted({place.topic for place in SourceCatalogue(read).look(must_exist=False, at_archive=False)}):
        ours, theirs = group_of(read, name), client.topic(name).policy["retain_for"]
        wanted = ours if pipeline.settings.hold else None
        if theirs == wanted:
            continue
        if theirs not in (None, ours):
            if pipeline.settings.hold:
                logger.warning(
                    "pipeline %s: topic %s is retained for group %s, so it may drop messages that are not archived "
                    "yet: set retain_for of the topic to %s, or hold = false",
                    pipeline.name,
                    name,
                    theirs,
                    ours,
                )
            continue
        try:
            client.alter_topic(name, retain_for=wanted)
        except ReadOnlyTopic as error:
            logger.warning("pipeline %s: the retention of topic %s is not held: %s", pipeline.name, name, error)
