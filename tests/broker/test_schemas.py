"""Schemas of topics: versions, what survives, and which messages are refused."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker import schemas, value_check
from penstock.broker.broker import Settings
from penstock.broker.intake import Receipt
from penstock.broker.topic import ServedTopic
from penstock.broker.value_check import EXPLAINED_MAX, ValueCheck, compiled
from penstock.errors import (
    BadSchema,
    PenstockError,
    SchemaConflict,
    SchemaMismatch,
    TooManySchemas,
    UnknownSchema,
    UnknownTopic,
)
from penstock.log.policy import Policy
from penstock.model.batch import Batch, encode
from penstock.model.run import Run
from penstock.outcome import Outcome
from penstock.store.meta import Change
from penstock.testing import FaultyFiles
from penstock.topic_schema.compatibility import Compatibility
from penstock.topic_schema.ddl import read_ddl
from penstock.topic_schema.json_schema import read_document, write_json_schema
from tests.support.broker_logs import stored_in
from tests.support.brokers import SECOND, Life, in_loop
from tests.topic_schema.trees import JSON_VALUES, roots, values

FIRST = "id bigint NOT NULL"
SECOND_VERSION = "id bigint NOT NULL, name string"
ENFORCED = Policy(schema_enforced=True)


async def _topic(life: Life, name: bytes = b"orders", policy: Policy = ENFORCED, *, schema: str | None = FIRST) -> None:
    await life.do(life.broker.changes.create(name, policy=policy))
    if schema is not None:
        await _register(life, schema, name)


async def _register(life: Life, text: str, name: bytes = b"orders") -> int:
    return (await life.do(life.broker.schemas.register(life.broker.topics.named(name), text))).number


def _served(life: Life, name: bytes = b"orders") -> ServedTopic:
    return life.broker.topics.named(name)


def _texts(life: Life, name: bytes = b"orders") -> list[str]:
    return [version.text for version in life.broker.schemas.versions(_served(life, name))]


def _ids(*ids: Any) -> list[bytes]:
    return [json.dumps({"id": each}).encode() for each in ids]


def _failed(receipt: Receipt) -> dict[int, str]:
    return {index: f"{error.code} {error}" for index, error in receipt.failed.items()}


# ---- versions


@in_loop
async def test_versions_count_up_and_the_same_text_is_not_stored_again() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        assert await _register(life, FIRST) == 1
        assert await _register(life, SECOND_VERSION) == 2
        assert await _register(life, SECOND_VERSION) == 2
        # Back to the first is a change like any other.
        assert await _register(life, FIRST) == 3
        assert life.broker.schemas.version(_served(life)).text == FIRST
        assert life.broker.schemas.version(_served(life), 2).text == SECOND_VERSION
        with pytest.raises(UnknownSchema, match="unknown schema version 4: topic orders has 1 to 3"):
            life.broker.schemas.version(_served(life), 4)
        with pytest.raises(UnknownSchema):
            life.broker.schemas.version(_served(life), 0)


@in_loop
async def test_an_incompatible_schema_is_refused_and_the_policy_decides_what_that_is() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        with pytest.raises(SchemaConflict, match=r"version 1 of topic orders \(backward\): .*name is required"):
            await _register(life, "id bigint NOT NULL, name string NOT NULL")
        assert (await life.broker.schemas.verdict(_served(life), "id string")).reason is not None
        await life.do(life.broker.changes.alter(b"orders", policy=Policy(schema_compatibility=Compatibility.FORWARD)))
        assert await _register(life, "id bigint NOT NULL, name string NOT NULL") == 2
        await life.do(life.broker.changes.alter(b"orders", policy=Policy(schema_compatibility=Compatibility.NONE)))
        assert await _register(life, "id string") == 3
        assert _texts(life)[0] == FIRST


@in_loop
async def test_two_registrations_at_once_are_compared_with_each_other() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life, schema=None)
        topic = _served(life)
        texts = ["id bigint", "id string", "id bigint", "id bigint, name string"]
        found = await asyncio.gather(
            *(life.broker.schemas.register(topic, text) for text in texts), return_exceptions=True
        )
        assert found[0] == life.broker.schemas.version(topic, 1)
        assert isinstance(found[1], SchemaConflict)
        assert found[2] == found[0]
        assert found[3] == life.broker.schemas.version(topic, 2)


@in_loop
async def test_registered_versions_survive_a_power_cut_and_go_with_their_topic() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await _topic(life)
        await _topic(life, b"others")
        await _register(life, SECOND_VERSION)
        disk = await life.power_cut()
    async with Life(disk) as life:
        assert _texts(life) == [FIRST, SECOND_VERSION]
        assert _failed(await life.publish(b"orders", b"{}"))
        used = life.broker.usage()["schema_bytes"].used
        await life.do(life.broker.changes.delete(b"orders"))
        assert life.broker.usage()["schema_bytes"].used == used - len(FIRST) - len(SECOND_VERSION)
        await _topic(life, schema=None)
        assert _texts(life) == []
        disk = await life.power_cut()
    async with Life(disk) as life:
        assert _texts(life) == []
        assert _texts(life, b"others") == [FIRST]
        assert [key for key, _ in life.store.state.items("schema")] == [f"{_served(life, b'others').topic.id}/1"]


@in_loop
async def test_versions_of_a_topic_whose_deletion_was_interrupted_are_removed_at_the_next_start() -> None:
    disk = FaultyFiles()
    async with Life(disk) as life:
        await _topic(life)
        deleting = asyncio.ensure_future(life.broker.changes.delete(b"orders"))
        while life.store.state.get("topic", str(_served(life).topic.id)) != {"deleted": True}:
            await asyncio.sleep(0)
        disk = await life.power_cut()
        deleting.cancel()
    async with Life(disk) as life:
        await life.settle()
        assert life.store.state.items("schema") == []
        assert life.broker.usage()["schema_bytes"].used == 0


@in_loop
async def test_a_topic_that_is_deleted_meanwhile_keeps_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life, schema=None)
        topic = _served(life)
        write_state = life.store.write_state

        async def write_after_the_deletion(changes: Sequence[Change]) -> None:
            if life.broker.topics.get(b"orders") is not None:
                await life.do(life.broker.changes.delete(b"orders"))
            await write_state(changes)

        monkeypatch.setattr(life.store, "write_state", write_after_the_deletion)
        with pytest.raises(UnknownTopic):
            await life.do(life.broker.schemas.register(topic, FIRST))
        assert life.store.state.items("schema") == []
        assert life.broker.usage()["schema_versions"].used == 0
        with pytest.raises(UnknownTopic):
            await life.do(life.broker.schemas.register(topic, FIRST))


@in_loop
async def test_the_number_and_the_size_of_versions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "VERSIONS_MAX", 2)
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        await _register(life, SECOND_VERSION)
        with pytest.raises(TooManySchemas, match="2 schema versions, the limit"):
            await _register(life, FIRST)
        assert life.broker.usage()["schema_versions"] == (2, 2)
        monkeypatch.setattr(schemas, "SCHEMAS_BYTES_MAX", 100)
        with pytest.raises(TooManySchemas, match="bytes"):
            await _topic(life, b"others", schema="id bigint" + " " * 100)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"type": "object", "properties": {"a": {"pattern": "(?=x)y"}}}', "/properties/a"),
        ('{"pattern": "' + "(" * 5 + "a{99}){99}" + "){99}" * 4 + '"}', "pattern"),
        ('{"minimum": "x"}', "/minimum"),
        ('{"type": "string", "maxLength": -1}', "/maxLength"),
        ("id", "unexpected end"),
    ],
)
def test_a_schema_that_the_validator_cannot_use_is_refused(text: str, what: str) -> None:
    @in_loop
    async def run() -> None:
        async with Life(FaultyFiles()) as life:
            await _topic(life, schema=None)
            with pytest.raises(BadSchema, match=what):
                await _register(life, text)

    run()


# ---- enforcement


@in_loop
async def test_values_that_do_not_match_are_refused_and_the_others_are_stored_in_order() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        receipt = await life.publish(b"orders", *_ids(1, "x", 2), b"{", b"", *_ids(3))
        assert _failed(receipt) == {
            1: 'SCHEMA_MISMATCH topic orders: the value does not match version 1 of its schema: at /id: "x" is not of '
            'type "integer"',
            3: "SCHEMA_MISMATCH topic orders: the value does not match version 1 of its schema: it is not JSON: Input "
            "data was truncated",
            4: "SCHEMA_MISMATCH topic orders: the value does not match version 1 of its schema: it is not JSON: Input "
            "data was truncated",
        }
        assert stored_in(life, b"orders") == [_ids(1, 2, 3)]


@in_loop
async def test_the_newest_version_counts_from_the_moment_it_is_registered() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life, policy=Policy(schema_enforced=True, schema_compatibility=Compatibility.NONE))
        assert not _failed(await life.publish(b"orders", *_ids(1)))
        await _register(life, "id string NOT NULL")
        assert "version 2" in _failed(await life.publish(b"orders", *_ids(1)))[0]
        assert not _failed(await life.publish(b"orders", *_ids("a")))


@in_loop
async def test_enforcement_is_switched_on_and_off() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life, policy=Policy())
        assert not _failed(await life.publish(b"orders", b"x"))
        await life.do(life.broker.changes.alter(b"orders", policy=ENFORCED))
        assert _failed(await life.publish(b"orders", b"x"))
        await life.do(life.broker.changes.alter(b"orders", policy=Policy()))
        assert not _failed(await life.publish(b"orders", b"x"))


@in_loop
async def test_a_topic_that_enforces_a_schema_it_does_not_have_takes_nothing() -> None:
    async with Life(FaultyFiles(), settings=Settings(policy=ENFORCED)) as life:
        receipt = await life.publish(b"orders", *_ids(1))
        assert "UNKNOWN_SCHEMA topic orders enforces its schema and has none" in _failed(receipt)[0]
        await _register(life, FIRST)
        assert not _failed(await life.publish(b"orders", *_ids(1)))
        # Dead letters are not of the schema.
        assert not (await life.do(life.broker.dead_letter_topic())).topic.policy.schema_enforced


@in_loop
async def test_tombstones_pass_and_keys_headers_and_several_topics_do_not_matter() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        await _topic(life, b"free", Policy(), schema=None)
        run = Run([b"orders", b"free", b"orders.a", b"orders", b"_INBOX.x"], [b"", b"x", *_ids("x"), *_ids(1), b"y"])
        run.tombstones, run.keys = {0}, {0: b"k", 2: b"k"}
        run.headers = {3: b"Msg-ID: 1\r\n"}
        receipt = await life.publish_run(run)
        assert list(receipt.failed) == [2]
        assert stored_in(life, b"orders") == [[b"", *_ids(1)]]
        assert stored_in(life, b"free") == [[b"x"]]


@in_loop
async def test_a_batch_is_refused_as_a_whole_unless_it_is_stored_already() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life, policy=Policy(schema_enforced=True, schema_compatibility=Compatibility.NONE))
        topic_id, intake = _served(life).topic.id, life.broker.intake
        assert not intake.is_batch_ready(topic_id)
        good = encode(_ids(1, 2), timestamp=1, producer=7, sequence=0)
        bad = encode([*_ids(1), b"", b""], tombstones=[False, True, False], timestamp=1)
        assert await intake.prepare_batch(topic_id, good) is None
        refused = await intake.prepare_batch(topic_id, bad)
        assert isinstance(refused, SchemaMismatch)
        assert str(refused).startswith("message 2 of the batch: topic orders: ")
        outcome = Outcome()
        intake.append(topic_id, 0, 1, Batch(bytearray(good.data)), outcome)
        await life.settle()
        await _register(life, "id string")
        assert await intake.prepare_batch(topic_id, good) is not None
        assert intake.is_stored(topic_id, 0, good)
        assert not intake.is_stored(topic_id, 0, bad)


@in_loop
async def test_a_delayed_message_is_checked_when_it_is_published() -> None:
    async with Life(FaultyFiles()) as life:
        await _topic(life)
        headers = b"Penstock-Delay: 5s\r\n"
        assert _failed(await life.publish(b"orders", b"x", headers=headers))
        assert not _failed(await life.publish(b"orders", *_ids(1), headers=headers))
        await life.advance(6 * SECOND)
        assert stored_in(life, b"orders") == [_ids(1)]


@in_loop
async def test_others_use_the_loop_while_a_million_values_are_checked() -> None:
    check = ValueCheck("orders", 1, compiled(write_json_schema(read_ddl(FIRST))))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    failed = await check.run(_ids(1) * 100_000)
    task.cancel()
    assert not failed
    assert turns > 10


@in_loop
async def test_of_many_bad_values_only_the_first_are_explained() -> None:
    check = ValueCheck("orders", 1, compiled(write_json_schema(read_ddl(FIRST))))
    failed = await check.run([b"x"] * 1000)
    assert len(failed) == 1000
    assert len({id(error) for error in failed.values()}) == EXPLAINED_MAX + 1
    assert "this one is not" in str(failed[999])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"NaN", "not JSON"),
        (b'{"id": NaN}', "not JSON"),
        (b'{"id": 1e999}', "not JSON"),
        (b'{"id": 1} {"id": 2}', "not JSON"),
        (b'\xef\xbb\xbf{"id": 1}', "not JSON"),
        (b'{"id": 1, "a": "\\ud800"}', "not JSON"),
        (b'{"id": 1, "a": "\xff"}', "not JSON in UTF-8"),
        (b'{"id": 1, "a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"id": 9223372036854775808}', "at /id"),
        (b'{"id": ' + b"9" * 5000 + b"}", "id|not JSON"),
        (b'{"id": null}', "at /id"),
        (b'{"id": 1, "id": "x"}', "at /id"),
        (b'{"ID": 1}', 'the top: "id" is a required property'),
        (b'[{"id": 1}]', "the top"),
        (b'{"id": 1, "a": "' + b"x" * (1 << 20) + b'"}', "at most 1048576"),
    ],
)
def test_values_that_programs_read_differently(value: bytes, what: str) -> None:
    async def run() -> PenstockError:
        return (await ValueCheck("orders", 1, compiled(write_json_schema(read_ddl(FIRST)))).run([value]))[0]

    error = asyncio.run(run())
    assert what.partition("|")[0] in str(error) or what.partition("|")[2] in str(error)
    assert len(str(error)) < 400


def test_an_error_is_one_printable_line_whatever_the_value_is() -> None:
    document = read_document('{"additionalProperties": {"type": "integer"}}')
    value = json.dumps({"a\r\n+OK\u202e" + "x" * 1000: "y" * 1000}).encode()

    error = asyncio.run(ValueCheck("orders", 1, compiled(document)).run([value]))[0]

    assert str(error).isprintable()
    assert "a\\r\\n+OK" in str(error)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_reference_agrees_about_random_schemas_and_values(data: st.DataObject) -> None:
    document = write_json_schema(data.draw(roots()))
    node = data.draw(roots())
    some = [data.draw(values(node)), data.draw(JSON_VALUES), data.draw(st.builds(dict))]

    failed = asyncio.run(ValueCheck("t", 1, compiled(document)).run([json.dumps(each).encode() for each in some]))

    reference = jsonschema.Draft202012Validator(document)
    assert [index in failed for index in range(len(some))] == [not reference.is_valid(each) for each in some]


@in_loop
async def test_enforcement_needs_its_package_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        await _topic(life)
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    async with Life(tmp_path) as life:
        # What cannot be checked is not stored.
        assert "install penstock[schema]" in _failed(await life.publish(b"orders", *_ids(1)))[0]
        with pytest.raises(BadSchema, match=r"install penstock\[schema\]"):
            await life.do(life.broker.changes.create(b"others", policy=ENFORCED))
        # Versions and their compatibility need nothing.
        await _topic(life, b"others", Policy())
        with pytest.raises(SchemaConflict):
            await _register(life, "id string", b"others")
        with pytest.raises(BadSchema):
            await life.do(life.broker.changes.alter(b"others", policy=ENFORCED))
        assert not value_check.is_installed()
