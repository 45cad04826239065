"""Pipeline files: what is read from them, and that whatever is wrong is told with its line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.pipelines.key_types import seconds
from penstock.pipelines.pipeline import (
    KINDS,
    AggregateSettings,
    JoinSettings,
    Pipeline,
    PipelineSink,
    PipelineSource,
)
from penstock.pipelines.pipeline_file import load
from penstock.times import PLACE_FORMS
from penstock.toml_lines import Key, scan

EXAMPLES = Path(__file__).parents[2] / "src/penstock/pipelines/examples"

TRANSFORM = """\
name = "clean"
kind = "transform"
[source]
topic = "orders"
schema = "id string"
[transform]
sql = "SELECT id FROM source"
[sink]
topic = "clean"
"""
AGGREGATE = """\
name = "totals"
kind = "aggregate"
[source]
topic = "orders"
schema = "amount double, at timestamp"
[aggregate]
time = "at"
window = "1 minute"
watermark = "1 hour 30 minutes"
measures = { total = "sum(amount)" }
[sink]
topic = "totals"
"""
ARCHIVE = """\
name = "keep"
kind = "archive"
[source]
topic = "orders"
[sink]
archive = "kept"
"""
REPLAY = """\
name = "again"
kind = "replay"
[source]
topic = "orders"
[sink]
topic = "again"
"""
SQL = """\
name = "both"
kind = "sql"
[sources.orders]
topic = "orders"
schema = "id string, at timestamp"
[sources.refunds]
topic = "refunds"
schema = "id string"
[sql]
query = "SELECT id FROM orders UNION ALL SELECT id FROM refunds"
[sink]
topic = "both"
"""
ENRICH = """\
name = "more"
kind = "enrich"
[source]
topic = "orders"
schema = "id string, customer string"
[lookup]
topic = "customers"
schema = "customer string, name string"
[enrich]
on = ["customer"]
[sink]
topic = "more"
"""
UPSERT = """\
name = "latest"
kind = "upsert"
[source]
topic = "orders"
schema = "id string"
[upsert]
key = "id"
[sink]
delta = "table"
"""


def read(directory: Path, text: str) -> Pipeline:
    path = directory / "pipeline.toml"
    path.write_bytes(text.encode())
    return load(path)


def refused(directory: Path, text: str) -> list[str]:
    """The problems, without the directory."""
    with pytest.raises(BadConfig) as error:
        read(directory, text)
    return [problem.removeprefix(f"{directory}/") for problem in error.value.problems]


# ---- what is read


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_an_example_that_is_right(kind: str) -> None:
    pipeline = load(EXAMPLES / f"{kind}.toml")

    assert pipeline.kind == kind
    assert type(pipeline.settings) is KINDS[kind].settings


def test_a_file_is_read_into_what_it_says(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        """
        name = "totals"
        kind = "aggregate"
        [source]
        servers = "one:4222, two:4222"
        topics = ["orders", "refunds"]
        subjects = ["orders.eu.*"]
        start = 2030-01-31T12:00:00Z
        schema = "amount double, at timestamp"
        archive = "old/orders"
        options = { maxOffsetsPerTrigger = 1000, failOnDataLoss = false }
        [aggregate]
        time = "at"
        window = "1 minute"
        watermark = "1 hour 30 minutes"
        by = "country"
        measures.total = "sum(amount)"
        mode = "update"
        [sink]
        topic = "totals"
        key = "country"
        [trigger]
        interval = "5 seconds"
        """,
    )

    assert pipeline.source == PipelineSource(
        servers="one:4222,two:4222",
        topics=("orders", "refunds"),
        subjects=("orders.eu.*",),
        start=datetime(2030, 1, 31, 12, tzinfo=UTC),
        schema="amount double, at timestamp",
        archive=str(tmp_path / "old/orders"),
        options={"maxOffsetsPerTrigger": "1000", "failOnDataLoss": "false"},
    )
    assert pipeline.settings == AggregateSettings(
        time="at",
        window="1 minute",
        watermark="1 hour 30 minutes",
        by=("country",),
        measures={"total": "sum(amount)"},
        mode="update",
    )
    assert pipeline.sink == PipelineSink(topic="totals", key="country")
    assert pipeline.trigger.interval == "5 seconds"


def test_a_join_has_two_sources() -> None:
    pipeline = load(EXAMPLES / "join.toml")

    assert [source.topic for source in pipeline.sources] == ["orders", "payments"]
    assert isinstance(pipeline.settings, JoinSettings)


def test_sql_has_a_source_for_each_view(tmp_path: Path) -> None:
    pipeline = read(tmp_path, SQL)

    assert [source.topic for source in pipeline.sources] == ["orders", "refunds"]
    assert pipeline.source_names == ("orders", "refunds")
    assert pipeline.where("sources", "refunds", "topic") == f"{tmp_path}/pipeline.toml:7: [sources.refunds] topic"


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ('"earliest"', "earliest"),
        ('"latest"', "latest"),
        ("17", 17),
        ('"2030-01-31"', datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("2030-01-31 12:00:00", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ('"2030-01-31T12:00:00+02:00"', datetime(2030, 1, 31, 10, tzinfo=UTC)),
    ],
)
def test_a_place_may_be_written_in_many_ways(tmp_path: Path, written: str, place: object) -> None:
    text = REPLAY.replace('topic = "orders"', f'topic = "orders"\nstart = {written}')

    assert read(tmp_path, text).source.start == place


def test_dead_letters_need_neither_a_topic_nor_a_sink(tmp_path: Path) -> None:
    pipeline = read(tmp_path, 'name = "letters"\nkind = "dead_letters"\n')

    assert pipeline.source.topic == "DLQ"
    assert pipeline.sink is None


def test_another_broker_takes_the_place_of_all_that_are_not_named_for_the_sink(tmp_path: Path) -> None:
    here = read(tmp_path, TRANSFORM).at("other:4222", user="ann", password=None)
    elsewhere = read(tmp_path, TRANSFORM + 'servers = "sink:4222"\n').at("other:4222", user="ann")

    assert here.source.servers == elsewhere.source.servers == "other:4222"
    assert here.source.options == {"user": "ann"}
    assert here.sink == PipelineSink(topic="clean", options={"user": "ann"})
    assert elsewhere.sink == PipelineSink(topic="clean", servers="sink:4222")
    lookup = read(tmp_path, ENRICH).at("other:4222", user="ann").lookup
    assert lookup is not None
    assert lookup.options == {"user": "ann"}


def test_a_path_with_a_scheme_is_left_as_it_is(tmp_path: Path) -> None:
    pipeline = read(tmp_path, ARCHIVE.replace('"kept"', '"s3://bucket/kept"'))

    assert pipeline.sink == PipelineSink(archive="s3://bucket/kept")


# ---- what is refused

_A_TOPIC = "a topic name in quotes, without blanks, wildcards and empty parts between dots"
_A_KIND = " or ".join(", ".join(KINDS).rsplit(", ", 1))
_SOURCE_KEYS = ", ".join(each.name for each in fields(PipelineSource))


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        # Keys.
        (
            TRANSFORM.replace('topic = "orders"', 'tpoic = "orders"'),
            (
                "3: [source] needs one of topic, topics, pattern\n"
                f"4: [source] tpoic is unknown (did you mean topic?): it has {_SOURCE_KEYS}"
            ),
        ),
        (
            TRANSFORM + "[snik]\n",
            (
                "10: [snik] is unknown (did you mean sink?): a pipeline of kind transform has name, "
                "kind, source, transform, sink, trigger"
            ),
        ),
        (
            TRANSFORM + "[join]\n",
            (
                "10: [join] does not belong here: a pipeline of kind transform has name, kind, source, "
                "transform, sink, trigger"
            ),
        ),
        (ARCHIVE + "[archive]\nx = 1\n", "8: [archive] x is unknown: it has hold, flatten"),
        # What is missing.
        ('kind = "archive"\n' + ARCHIVE.split("\n", 2)[2], "1: name is missing: the name of the pipeline"),
        (
            TRANSFORM.replace('schema = "id string"\n', "").replace('topic = "orders"', 'topics = ["orders"]', 1),
            (
                "3: [source] schema is missing: the columns of the JSON values: "
                "`id string, amount double`; by default the topic's schema"
            ),
        ),
        (
            TRANSFORM.replace('sql = "SELECT id FROM source"\n', ""),
            "6: [transform] needs one of sql, python",
        ),
        (TRANSFORM.partition("[sink]")[0], "1: [sink] topic is missing: a topic, or a subject of one"),
        (
            AGGREGATE.replace('time = "at"\n', ""),
            "6: [aggregate] time is missing: the column with the time of the event",
        ),
        # Kinds.
        (
            TRANSFORM.replace('"transform"', '"transfrom"'),
            (f"2: kind is 'transfrom' (did you mean transform?): it must be {_A_KIND}"),
        ),
        (
            'name = "x"',
            f"1: kind is missing: it must be {_A_KIND}",
        ),
        # Types.
        (TRANSFORM.replace('"orders"', "7"), f"4: [source] topic is 7: it must be {_A_TOPIC}"),
        (TRANSFORM.replace('"orders"', '""'), f"4: [source] topic is '': it must be {_A_TOPIC}"),
        (
            "transform = 1\n" + TRANSFORM.replace('[transform]\nsql = "SELECT id FROM source"\n', ""),
            (
                "1: [transform] is a table: write [transform], and its keys below\n"
                "1: [transform] needs one of sql, python"
            ),
        ),
        (
            TRANSFORM.replace('name = "clean"', 'name = "../up"'),
            (
                "1: name is '../up': it must be 1 to 100 letters, digits, '.', '_' or '-', and begin with a letter or "
                "digit"
            ),
        ),
        (
            TRANSFORM.replace('"orders"', '"orders.>"'),
            f"4: [source] topic is 'orders.>': it must be {_A_TOPIC}",
        ),
        (
            TRANSFORM.replace('"orders"', '"orders"\nservers = "nowhere"'),
            ("5: [source] servers is 'nowhere': it must be like '127.0.0.1:4222', or several separated by commas"),
        ),
        (
            TRANSFORM.replace('"orders"', '"orders"\nstart = "soon"'),
            f"5: [source] start is 'soon': it must be {PLACE_FORMS}",
        ),
        (
            TRANSFORM.replace('"orders"', '"orders"\nstart = -1'),
            f"5: [source] start is -1: it must be {PLACE_FORMS}",
        ),
        (
            TRANSFORM.replace('"orders"', '"orders"\nstart = "1h"'),
            "5: [source] start is '1h': it is in the future, use a minus for the past, such as -5m",
        ),
        (
            REPLAY.replace('"orders"', '"orders"\nend = "-1h"'),
            "5: [source] end is '-1h', which would change with every run: give an offset or an absolute time",
        ),
        (
            TRANSFORM.replace('topic = "orders"', 'pattern = "orders("'),
            (
                "4: [source] pattern is 'orders(', which is not a regular expression: missing ), unterminated "
                "subpattern at position 6"
            ),
        ),
        (
            TRANSFORM.replace('"orders"', '"orders"\noptions = { x = [1] }'),
            (
                "5: [source] options is {'x': [1]}: it must be a table of text, numbers and booleans, such as "
                "{ maxOffsetsPerTrigger = 100000 }"
            ),
        ),
        (
            AGGREGATE.replace('"1 minute"', '"1m"'),
            "8: [aggregate] window is '1m': it must be like '10 minutes', or '1 hour 30 minutes'",
        ),
        (
            AGGREGATE.replace("measures = { total", "by = [1]\nmeasures = { total"),
            "10: [aggregate] by is [1]: it must be a list of texts, such as ['id', 'country']",
        ),
        (
            AGGREGATE.replace('{ total = "sum(amount)" }', "{}"),
            (
                "10: [aggregate] measures is {}: it must be a table of names and SQL, at least one, such as "
                '{ rows = "count(*)" }'
            ),
        ),
        (
            REPLAY.replace("[sink]", "[replay]\nrate = 0\n[sink]"),
            "6: [replay] rate is 0: it must be a positive integer",
        ),
        (
            ARCHIVE + 'format = "detla"\n',
            "7: [sink] format is 'detla' (did you mean delta?): it must be parquet or delta",
        ),
        (
            TRANSFORM.replace('sql = "SELECT id FROM source"', 'python = "clean.py"'),
            ("7: [transform] python is 'clean.py': it must be module:function, such as shop.orders:clean"),
        ),
        # Sources with names.
        (
            SQL.replace('topic = "refunds"', "topic = 7").replace('"id string, at timestamp"', '"id string"\nend = 5'),
            (
                "6: [sources.orders] end is only for kind replay: a pipeline of kind sql has no end\n"
                f"8: [sources.refunds] topic is 7: it must be {_A_TOPIC}"
            ),
        ),
        (
            SQL.replace('topic = "refunds"\n', "").replace('schema = "id string"\n', ""),
            (
                "6: [sources.refunds] needs one of topic, topics, pattern\n"
                "6: [sources.refunds] schema is missing: the columns of the JSON values: "
                "`id string, amount double`; by default the topic's schema"
            ),
        ),
        (
            SQL.replace("[sources.orders]", "[sources.'my orders']"),
            "3: [sources.my orders] is not a name for a view: use letters, digits and _",
        ),
        (
            SQL.replace("[sources.orders]", "[source]").replace("[sources.refunds]", "[sources]"),
            (
                "3: [source] does not belong here: a pipeline of kind sql has name, kind, sources, sql, sink, trigger\n"
                "7: [sources.topic] is a table: write [sources.topic], and its keys below\n"
                "7: [sources.topic] needs one of topic, topics, pattern\n"
                "7: [sources.topic] schema is missing: the columns of the JSON values: "
                "`id string, amount double`; by default the topic's schema\n"
                "8: [sources.schema] is a table: write [sources.schema], and its keys below\n"
                "8: [sources.schema] needs one of topic, topics, pattern\n"
                "8: [sources.schema] schema is missing: the columns of the JSON values: "
                "`id string, amount double`; by default the topic's schema"
            ),
        ),
        (
            'name = "x"\nkind = "sql"\n[sql]\nquery = "SELECT 1"\n[sink]\ntopic = "y"\n',
            "1: [sources] has no table: write one for each view, such as [sources.orders]",
        ),
        (
            SQL.replace('at timestamp"', 'at timestamp"\ntime = "at"'),
            "6: [sources.orders] time needs watermark",
        ),
        (
            TRANSFORM.replace('"id string"', '"id string"\nwatermark = "1 hour"'),
            "6: [source] watermark is only for kind sql: a pipeline of kind transform has it in [transform]",
        ),
        (
            SQL.replace('topic = "both"', 'parquet = "both"').replace("[sink]", 'mode = "update"\n[sink]'),
            "11: [sql] mode is 'update', which needs a topic as sink: Parquet files are only appended to",
        ),
        # Lookups.
        (
            ENRICH.replace('topic = "customers"', 'parquet = "customers"'),
            "8: [lookup] schema is only for a topic as lookup",
        ),
        (
            ENRICH.replace('schema = "customer string, name string"', 'delta = "customers"'),
            (
                "6: [lookup] schema is missing: for a topic: the columns of the JSON values\n"
                "8: [lookup] delta contradicts topic: give one of topic, parquet, delta"
            ),
        ),
        (
            ENRICH.replace("[lookup]", "[look]").replace("[enrich]", '[enrich]\nmissing = "drop"'),
            (
                "1: [lookup] needs one of topic, parquet, delta\n"
                "6: [look] is unknown (did you mean lookup?): a pipeline of kind enrich has name, kind, source, "
                "lookup, enrich, sink, trigger\n"
                "10: [enrich] missing is 'drop': it must be null or dead_letter"
            ),
        ),
        (
            ENRICH.replace("[sink]", 'lookup_on = ["a", "b"]\n[sink]'),
            "11: [enrich] lookup_on has 2 columns, but on has 1: name as many",
        ),
        (
            TRANSFORM + "[lookup]\n",
            (
                "10: [lookup] does not belong here: a pipeline of kind transform has name, kind, source, transform, "
                "sink, trigger"
            ),
        ),
        # Tables.
        (
            UPSERT.replace('"table"', '"s3://bucket/table"\noptions = { x = 1 }'),
            (
                "9: [sink] delta is 's3://bucket/table': it must be a directory, not a URL\n"
                "10: [sink] options is not for a Delta table, which Spark does not write"
            ),
        ),
        (
            UPSERT.replace("delta =", "topic ="),
            (
                "8: [sink] delta is missing: the directory of a Delta table\n"
                "9: [sink] topic is not for kind upsert, which writes to delta"
            ),
        ),
        (
            AGGREGATE.replace('topic = "totals"', 'delta = "table"'),
            (
                "11: [sink] needs one of topic, parquet\n"
                "12: [sink] delta is not for kind aggregate, which writes to topic or parquet"
            ),
        ),
        # Contradictions.
        (
            TRANSFORM.replace('"orders"', '"orders"\npattern = "o.*"'),
            "5: [source] pattern contradicts topic: give one of topic, topics, pattern",
        ),
        (
            TRANSFORM.replace('sql = "SELECT id FROM source"', 'python = "a:b"\nsql = "SELECT id FROM source"'),
            "7: [transform] python contradicts sql: give one of sql, python",
        ),
        (
            TRANSFORM + 'parquet = "there"\n',
            "10: [sink] parquet is not for kind transform, which writes to topic",
        ),
        (
            AGGREGATE + 'parquet = "there"\n',
            "13: [sink] parquet contradicts topic: give one of topic, parquet",
        ),
        (
            AGGREGATE.replace('topic = "totals"', 'parquet = "there"\nkey = "country"'),
            "13: [sink] key is only for a topic as sink",
        ),
        (
            AGGREGATE.replace('topic = "totals"', 'parquet = "there"').replace("time =", 'mode = "update"\ntime ='),
            "7: [aggregate] mode is 'update', which needs a topic as sink: Parquet files are only appended to",
        ),
        (
            TRANSFORM + 'partition = "day"\n',
            "10: [sink] partition is only for an archive as sink",
        ),
        (
            ARCHIVE.replace('"orders"', '"orders"\nschema = "id string"'),
            "5: [source] schema is only used with flatten = true in [archive]",
        ),
        (
            ARCHIVE.replace('"orders"', '"orders"\nend = 5'),
            "5: [source] end is only for kind replay: a pipeline of kind archive has no end",
        ),
        (
            REPLAY.replace('"orders"', '"orders"\nstart = 9\nend = 5'),
            "6: [source] end is below start",
        ),
        (
            TRANSFORM.replace('"clean"\n', '"orders.clean"\n').replace('name = "orders.clean"', 'name = "clean"'),
            "9: [sink] topic is 'orders.clean', in the topic 'orders' that the pipeline reads: write to another topic",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, problems: str) -> None:
    assert refused(tmp_path, text) == [f"pipeline.toml:{problem}" for problem in problems.splitlines()]


def test_all_that_is_wrong_is_told_at_once_from_top_to_bottom(tmp_path: Path) -> None:
    text = AGGREGATE.replace('"1 minute"', "5").replace('name = "totals"', "name = 1").replace("topic =", "tpic =")

    assert [problem.split(":")[1] for problem in refused(tmp_path, text)] == ["1", "3", "4", "8", "11", "12"]


@pytest.mark.parametrize(
    ("text", "line"),
    [("name = \n", 1), ('name = "x"\nkind 1\n', 2), ('name = "x\n', 1), ('a = 1\n\n[x]\nb = """\nopen', 5)],
)
def test_what_is_no_toml_is_told_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    [problem] = refused(tmp_path, text)

    assert problem.startswith(f"pipeline.toml:{line}: invalid TOML: ")


def test_a_file_that_is_not_there_and_one_that_is_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(BadConfig, match=r"none\.toml: no such file; `penstock pipeline init` writes one"):
        load(tmp_path / "none.toml")
    with pytest.raises(BadConfig, match=r"binary\.toml: not UTF-8 text"):
        load(tmp_path / "binary.toml")


def test_a_file_may_be_yaml_or_json(tmp_path: Path) -> None:
    tables = tomllib.loads(AGGREGATE)
    (tmp_path / "pipeline.json").write_text(json.dumps(tables))
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(tables))
    (tmp_path / "wrong.yaml").write_text("name: x\nkind: archive\nname: y\nsource:\n  topic: 7\nsink:\n  archive: z\n")

    assert load(tmp_path / "pipeline.json").settings == read(tmp_path, AGGREGATE).settings
    assert load(tmp_path / "pipeline.yaml").settings == read(tmp_path, AGGREGATE).settings
    with pytest.raises(BadConfig) as error:
        load(tmp_path / "wrong.yaml")
    assert error.value.problems == [
        f"{tmp_path}/wrong.yaml:3: 'name' is repeated: keep one of them",
        f"{tmp_path}/wrong.yaml:5: [source] topic is 7: it must be {_A_TOPIC}",
    ]


# ---- what a checkpoint belongs to


@pytest.mark.parametrize(
    ("text", "old", "new", "is_same"),
    [
        (AGGREGATE, 'topic = "totals"', 'topic = "sums"', True),
        (AGGREGATE, 'topic = "orders"', 'topic = "orders"\nservers = "b:1"', True),
        (AGGREGATE, '"1 minute"', '"2 minutes"', False),
        (AGGREGATE, "sum(amount)", "max(amount)", False),
        (AGGREGATE, 'topic = "orders"', 'topic = "refunds"', False),
        (TRANSFORM, "SELECT id", "SELECT upper(id)", True),
        (REPLAY, 'topic = "orders"', 'topic = "orders"\nstart = 5', False),
        (REPLAY, "[sink]", "[replay]\nrate = 5\n[sink]", True),
        (UPSERT, 'key = "id"', 'key = "ident"', False),
        (ENRICH, 'topic = "customers"', 'topic = "people"', True),
        (SQL, 'topic = "both"', 'topic = "all"', True),
        (SQL, "SELECT id FROM orders UNION ALL SELECT id FROM refunds", "SELECT id FROM refunds, orders", False),
        (SQL, "[sources.refunds]", "[sources.returns]", False),
    ],
)
def test_a_change_keeps_the_checkpoint_or_does_not(
    tmp_path: Path, text: str, old: str, new: str, is_same: bool
) -> None:
    assert old in text

    assert (read(tmp_path, text).identity == read(tmp_path, text.replace(old, new)).identity) == is_same


# ---- lines


def test_lines_of_keys_are_found_whatever_stands_around_them() -> None:
    lines = scan(
        """\
# name = "not this"
a.b . "c.d" = 1 # e = 2
text = '''
name = "nor this"
[sink]
'''
quoted = "x = 1 \\" # y = 2"
inline = { one = { two = [ "three = 3", 4 ] }, five = 6 }
list = [
    # six = 6
    "seven = 7",
    { eight = 8 },
]

[ sink ]
topic = 'it # is'
when = 2030-01-31 12:00:00Z
[sink.options]
[[many]]
nine = 9
[[many]]
ten = 10
[many.below]
eleven = 11
"""
    )

    assert {".".join(map(str, key)): line for key, line in lines.keys.items()} == {
        "a": 2,
        "a.b": 2,
        "a.b.c.d": 2,
        "text": 3,
        "quoted": 7,
        "inline": 8,
        "inline.one": 8,
        "inline.one.two": 8,
        "inline.five": 8,
        "list": 9,
        "list.1": 12,
        "list.1.eight": 12,
        "sink": 15,
        "sink.topic": 16,
        "sink.when": 17,
        "sink.options": 18,
        "many": 19,
        "many.0": 19,
        "many.0.nine": 20,
        "many.1": 21,
        "many.1.ten": 22,
        "many.1.below": 23,
        "many.1.below.eleven": 24,
    }
    assert lines.texts[("text",)] == 4
    assert lines.texts[("quoted",)] == 7


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_long_string_may_end_in_quotes(quote: str) -> None:
    lines = scan(f"one = {3 * quote}x = 1{5 * quote}\ntwo = {3 * quote}{4 * quote}\nthree = 3\n")

    assert lines.keys == {("one",): 1, ("two",): 2, ("three",): 3}


def test_a_key_that_is_not_there_has_the_line_of_its_table() -> None:
    lines = scan("\n[sink]\n")

    assert lines.of(("sink", "topic")) == 2
    assert lines.of(("source", "topic")) == 1


_names = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=6)
_texts = st.text(st.sampled_from("ab= \n\"'#[]{}.,\\"), max_size=12)
_values = st.recursive(
    _texts | st.integers(-9, 9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(_names, _values, max_size=5), st.data())
def test_the_keys_that_are_found_are_those_that_toml_has(tables: dict[str, Any], data: st.DataObject) -> None:
    text = "".join(_written(tables, data))
    assert tomllib.loads(text) == tables

    assert set(scan(text).keys) == set(_keys(tables, ()))


def _written(tables: dict[str, Any], data: st.DataObject) -> Iterator[str]:
    below = {}
    for name, value in tables.items():
        if isinstance(value, dict) and data.draw(st.booleans()):
            below[name] = value
        else:
            comment = data.draw(_texts).replace("\n", "")
            yield f"{_quoted(name)} = {_shown(value, data)} # {comment}\n"
    for name, value in below.items():
        yield f"[ {_quoted(name)} ]\n"
        yield from (f"{_quoted(key)}={_shown(inner, data)}\n\n" for key, inner in value.items())


def _shown(value: Any, data: st.DataObject) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case str():
            is_literal = "'" not in value and "\\" not in value and data.draw(st.booleans())
            if is_literal:
                return f"'''\n{value}'''"
            return (
                f'"""\\\n{_escaped(value)}"""'
                if data.draw(st.booleans()) and value.strip() == value
                else _quoted(value)
            )
        case list():
            between = data.draw(st.sampled_from([", ", ",\n", " , # a = 1\n"]))
            return f"[{''.join(_shown(each, data) + between for each in value)}]"
        case _:
            return f"{{ {', '.join(f'{_quoted(key)} = {_shown(each, data)}' for key, each in value.items())} }}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'.replace("\n", "\\n")


def _keys(value: Any, above: Key) -> Iterator[Key]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*above, name)
            yield from _keys(inner, (*above, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            if isinstance(inner, dict):
                yield (*above, number)
            yield from _keys(inner, (*above, number))


@pytest.mark.parametrize(
    ("written", "expected"), [("250 milliseconds", 0.25), ("1 hour 30 minutes", 5400.0), ("1 week", 604_800)]
)
def test_a_duration_in_seconds(written: str, expected: float) -> None:
    assert seconds(written) == expected
