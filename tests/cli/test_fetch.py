"""`penstock fetch`, run as its users run it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet
import pytest

from penstock.client.sync import Client
from tests.support.commands import Done, Penstock, at_terminal, interrupt, line_of, publish, wrong_usage
from tests.support.server import Serve


@pytest.fixture(scope="module")
def spread(client: Client) -> list[str]:
    """A topic of three partitions, with twelve messages: their values."""
    client.create_topic("spread", partitions=3)
    values = [f"value {number}" for number in range(12)]
    for number, value in enumerate(values):
        client.publish("spread.it", value.encode(), key=f"key {number}")
    return values


def test_all_partitions_are_fetched_one_after_the_other(penstock: Penstock, spread: list[str]) -> None:
    messages = penstock("fetch", "spread", "--json").documents
    assert sorted(each["value"] for each in messages) == sorted(spread)
    places = [(each["partition"], each["offset"]) for each in messages]
    assert places == sorted(places)
    assert {partition for partition, _ in places} == {0, 1, 2}
    lines = penstock("fetch", "spread", "--partition", 1).lines
    assert lines == [f"spread.it  1:{each['offset']}  {each['value']}" for each in messages if each["partition"] == 1]


def test_a_fetch_begins_and_ends_where_it_is_told(penstock: Penstock, client: Client) -> None:
    publish(client, "ranged", *map(str, range(5)))

    def values(*options: object) -> list[str]:
        return [line.split()[-1] for line in penstock("fetch", "ranged", *options).lines]

    assert values() == ["0", "1", "2", "3", "4"]
    assert values("--from", 2) == ["2", "3", "4"]
    assert values("--from", 1, "--to", 3) == ["1", "2"]
    assert values("--from", 1, "--count", 2) == ["1", "2"]
    assert values("--to", 100) == ["0", "1", "2", "3", "4"]
    assert values("--from", "latest") == []
    assert values("--from", "2000-01-01") == ["0", "1", "2", "3", "4"]
    assert values("--to", "2000-01-01") == values("--to", "@946684800") == values("--to", "-1h") == []
    assert values("--from", "-1h") == ["0", "1", "2", "3", "4"]
    third = penstock("fetch", "ranged", "--from", 3, "--count", 1, "--json").documents[0]["timestamp"]
    assert values("--from", third) == ["3", "4"]
    assert values("--to", third) == ["0", "1", "2"]


def test_what_is_fetched_can_be_published_again(penstock: Penstock, client: Client, spread: list[str]) -> None:
    fetched = penstock("fetch", "spread", "--json")
    lines = [json.dumps(each | {"subject": "again"}) for each in fetched.documents]
    assert penstock("publish", "--file", "-", stdin="\n".join(lines).encode()).code == 0
    again = [(message.key, message.value) for message in client.fetch("again")]
    assert again == [(each["key"].encode(), each["value"].encode()) for each in fetched.documents]


def test_a_fetch_as_csv(penstock: Penstock, client: Client, tmp_path: Path) -> None:
    client.publish("tabular", b'with "quotes", commas')
    client.publish("tabular", b"\xff")
    client.publish("tabular", b"keyed", key="k", headers={"A": "b"})
    printed = penstock("fetch", "tabular", "--format", "csv").out
    path = tmp_path / "out.csv"
    assert penstock("fetch", "tabular", "--format", "csv", "--output", path).out.startswith("wrote 3 messages to ")
    assert path.read_text() == printed
    first, binary, keyed = csv.DictReader(printed.splitlines())
    assert (first["value"], first["offset"], first["key"]) == ('with "quotes", commas', "0", "")
    assert (binary["value"], binary["value_base64"]) == ("", "/w==")
    assert (keyed["key"], json.loads(keyed["headers"])) == ("k", {"A": "b"})


def test_a_fetch_as_parquet(penstock: Penstock, tmp_path: Path, spread: list[str]) -> None:
    path = tmp_path / "out.parquet"
    done = penstock("fetch", "spread", "--format", "parquet", "--output", path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"wrote 12 messages to {path}: ")
    table = pyarrow.parquet.read_table(path)
    fetched = penstock("fetch", "spread", "--json").documents
    for name in ("partition", "offset", "subject"):
        assert table[name].to_pylist() == [each[name] for each in fetched]
    assert [value.decode() for value in table["value"].to_pylist()] == [each["value"] for each in fetched]
    assert [key.decode() for key in table["key"].to_pylist()] == [each["key"] for each in fetched]
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1
    assert penstock("fetch", "spread", "--format", "parquet", "--output", path, "--count", 7).code == 0
    assert pyarrow.parquet.read_table(path).num_rows == 7


def test_parquet_has_the_topics_name_where_a_message_has_no_other_subject(
    penstock: Penstock, client: Client, tmp_path: Path
) -> None:
    publish(client, "nameless", "one")
    path = tmp_path / "out.parquet"
    assert penstock("fetch", "nameless", "--format", "parquet", "--output", path).code == 0
    assert pyarrow.parquet.read_table(path)["subject"].to_pylist() == ["nameless"]


def test_parquet_without_pyarrow_says_what_to_install(
    penstock: Penstock, client: Client, server: Serve, tmp_path: Path
) -> None:
    publish(client, "arrowless", "one")
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    without = Penstock(f"127.0.0.1:{server.port}", PYTHONPATH=str(tmp_path))
    done = without("fetch", "arrowless", "--format", "parquet", "--output", tmp_path / "out.parquet")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: Parquet needs pyarrow: pip install 'penstock[arrow]'\n"


@pytest.mark.parametrize("partitions", [1, 3])
def test_following_goes_on_until_it_is_interrupted(penstock: Penstock, client: Client, partitions: int) -> None:
    topic = f"followed{partitions}"
    client.create_topic(topic, partitions=partitions)
    keys = [f"key {number}" for number in range(6)]
    with penstock.begin("fetch", topic, "--follow", "--json") as process:
        for key in keys:
            client.publish(topic, b"x", key=key)
        assert sorted(json.loads(line_of(process))["key"] for _ in keys) == keys
        assert interrupt(process) == Done(0, "", "")


def test_following_goes_on_in_partitions_that_come(penstock: Penstock, client: Client) -> None:
    publish(client, "growing", "first")
    with penstock.begin("fetch", "growing", "--follow", "--json") as process:
        assert json.loads(line_of(process))["partition"] == 0
        client.alter_topic("growing", partitions=2)
        written = [client.publish("growing", b"x", key=f"key {number}").partition for number in range(8)]
        assert set(written) == {0, 1}
        read = [json.loads(line_of(process))["partition"] for _ in written]
        assert sorted(read) == sorted(written)
        assert interrupt(process) == Done(0, "", "")


def test_following_ends_after_so_many(penstock: Penstock, spread: list[str]) -> None:
    assert len(penstock("fetch", "spread", "--follow", "--count", 5).lines) == 5


def test_a_fetch_to_a_file_shows_progress_at_a_terminal(penstock: Penstock, tmp_path: Path, spread: list[str]) -> None:
    path = tmp_path / "out"
    assert penstock("fetch", "spread", "--output", path).err == ""
    shown = at_terminal(penstock, "fetch", "spread", "--output", path)
    assert shown.code == 0
    assert "fetching" in shown.out
    assert len(path.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "parquet"),
        ("--format", "parquet", "--output", "f", "--follow"),
        ("--follow", "--to", "3"),
        ("--format", "csv", "--json"),
    ],
)
def test_a_fetch_that_cannot_be_is_wrong_usage(options: tuple[str, ...]) -> None:
    assert "Error" in wrong_usage("fetch", "any", *options)


def test_an_offset_that_is_not_there_yet_is_an_error(penstock: Penstock, client: Client) -> None:
    client.publish("short", b"0")

    assert penstock("fetch", "short", "--from", 1) == Done(0, "", "")
    done = penstock("fetch", "short", "--from", 1900000000)
    reason = "short has no offset 1900000000 yet, it ends at 0:1; to give a time, write @1900000000"
    assert done == Done(1, "", f"error: {reason}\n")


def test_a_partition_that_is_not_there_is_an_error(penstock: Penstock, spread: list[str]) -> None:
    done = penstock("fetch", "spread", "--partition", 3)
    assert done == Done(1, "", "error: invalid partition 3: spread has 0 to 2\n")
