"""Files that something cut short, emptied or took away: what is lost is known, and no offset is given out twice."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import BadDirectory, LogDamaged
from penstock.log.log import Log
from penstock.log.policy import Durability, OnDamage, Policy
from penstock.log.segment import log_name
from penstock.log.witness import Witness
from penstock.model.batch import encode
from penstock.store import inspect
from penstock.store.meta import Change
from penstock.store.repair import repair
from penstock.store.state import Addition
from penstock.store.store import Store
from penstock.testing import FaultyFiles, PowerCut
from tests.support.logs import TIMESTAMP, append, messages, open_log
from tests.support.sampling import sampled

DIRECTORY = Path("/data/log")
SMALL = Policy(segment_bytes=4096)
VALUES = [b"%d:" % number + bytes(300) for number in range(40)]
Image = dict[str, bytes]


def image_of(disk: FaultyFiles) -> Image:
    return {name: disk.content(DIRECTORY / name) for name in sorted(disk.sizes(DIRECTORY))}


def disk_with(image: Image) -> FaultyFiles:
    disk = FaultyFiles()
    disk.make_directory(DIRECTORY)
    for name, content in image.items():
        disk.set_content(DIRECTORY / name, content)
    return disk


def fill(values: Sequence[bytes] = VALUES, *, closed: bool, policy: Policy = SMALL, **options: Any) -> Image:
    disk = FaultyFiles()
    log = open_log(DIRECTORY, files=disk, policy=policy, **options)
    for value in values:
        append(log, value)
        log.flush()
    if closed:
        log.close()
    return image_of(disk)


def known_in(first: int, last: int) -> set[int]:
    """The offsets of a range; where the log left many free, only those near the ends."""
    return {*range(first, min(last, first + 1000)), *range(max(first, last - 1000), last)}


def read_around(log: Log) -> tuple[dict[int, bytes], set[int]]:
    """All messages that are served, and the offsets that are refused."""
    found: dict[int, bytes] = {}
    refused: set[int] = set()
    offset = log.start
    while True:
        try:
            batches = log.read(offset, 1)
        except LogDamaged as damage:
            if damage.last is None or not damage.holds(offset):
                raise AssertionError(f"offset {offset} cannot be read, and others are named") from damage
            refused |= known_in(offset, damage.last)
            offset = damage.last
            continue
        if not batches:
            return found, refused
        for batch in batches:
            found |= dict(zip(batch.columns().offsets(), batch.columns().values(), strict=True))
            offset = batch.end


def told(log: Log) -> set[int]:
    return {offset for damage in log.damage for offset in known_in(damage.first, damage.last or damage.first)}


def judge(disk: FaultyFiles, witness: Witness, end: int, values: Sequence[bytes] = VALUES) -> set[int]:
    """Open it twice, with an append: what is not served was told, and new messages come behind all others."""
    log = open_log(DIRECTORY, files=disk, policy=SMALL, witness=witness)
    known = told(log)
    found, refused = read_around(log)
    assert found.items() <= dict(enumerate(values)).items()
    lost = set(range(end)) - found.keys()
    assert refused == lost, "who reads what is lost is told, and nobody else"
    assert lost <= told(log)
    offset = append(log, b"new")
    assert offset >= end
    log.flush()
    disk.kill()
    log = open_log(DIRECTORY, files=disk, policy=SMALL, witness=witness)
    assert read_around(log) == ({**found, offset: b"new"}, lost)
    report = log.verify()
    assert {each for damage in report.damage for each in range(damage.first, damage.last or 0)} >= lost
    return known


@pytest.mark.parametrize("closed", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("by", ["meta.db", "a position"])
def test_a_last_segment_cut_short_at_any_place_is_noticed(closed: bool, by: str) -> None:
    values = VALUES[:14]
    image = fill(values, closed=closed)
    last = max(name for name in image if name.endswith(".log"))
    witness = Witness(len(values)) if by == "meta.db" else Witness(0, len(values))
    size = len(image[last])
    for length in {*range(0, size, 97), *sampled(range(250)), size - 1, size}:
        disk = disk_with({**image, last: image[last][:length]})
        kept = judge(disk, witness, len(values), values)
        assert kept <= set(range(int(last[:20]), len(values))), f"cut short at byte {length}"


def test_without_a_witness_or_with_one_that_is_behind_nothing_is_said() -> None:
    image = fill(closed=False)
    last = max(name for name in image if name.endswith(".log"))
    disk = disk_with({**image, last: image[last][:-400]})
    log = open_log(DIRECTORY, files=disk, policy=SMALL, witness=Witness(int(last[:20]), int(last[:20])))
    assert not log.damage
    assert append(log, b"new") == len(VALUES) - 1


def test_under_flush_a_position_in_what_was_reserved_is_no_witness_of_a_loss() -> None:
    policy = Policy(segment_bytes=4096, durability=Durability.FLUSH)
    image = fill(VALUES[:3], closed=False, policy=policy)
    [name] = [name for name in image if name.endswith(".log")]
    cut = {**image, name: image[name][:-400]}
    log = open_log(DIRECTORY, files=disk_with(cut), policy=policy, witness=Witness(2, 3))
    assert not log.damage
    assert log.end >= 3
    log = open_log(DIRECTORY, files=disk_with(cut), policy=policy, witness=Witness(3))
    assert told(log) == {2}


def test_a_piped_log_fetches_again_what_it_lost_at_its_end() -> None:
    disk = FaultyFiles()
    log = open_log(DIRECTORY, files=disk, piped=True)
    for number in range(3):
        batch = encode([b"%d" % number], timestamp=TIMESTAMP)
        batch.base_offset = number * 10
        log.append_at(batch)
        log.flush()
    name = log.segments[0].path
    content = disk.content(name)
    for length in (0, 50, len(content) - 10):
        cut = FaultyFiles()
        cut.make_directory(DIRECTORY)
        cut.set_content(name, content[:length])
        log = open_log(DIRECTORY, files=cut, piped=True, witness=Witness(21, 21))
        assert log.end <= 20
        assert not log.damage


Blow = Callable[[Image, str], None]


def cut(image: Image, name: str) -> None:
    image[name] = image[name][: len(image[name]) // 2 + 3]


def empty(image: Image, name: str) -> None:
    image[name] = b""


def take_away(image: Image, name: str) -> None:
    del image[name]


def zero(image: Image, name: str) -> None:
    image[name] = bytes(len(image[name]))


BLOWS: Sequence[Blow] = (cut, empty, take_away, zero)


@pytest.mark.parametrize(
    "blows", list(itertools.product(BLOWS, BLOWS)), ids=lambda pair: "-".join(b.__name__ for b in pair)
)
def test_any_two_segments_can_be_hit_and_all_others_are_served(blows: tuple[Blow, Blow]) -> None:
    values = [value * 4 for value in VALUES[:14]]
    image = fill(values, closed=True)
    names = [name for name in image if name.endswith(".log")]
    assert len(names) > 4
    ends = [*(int(name[:20]) for name in names[1:]), len(values)]
    for pair in itertools.combinations(zip(names, ends, strict=True), 2):
        hit = dict(image)
        may_be_lost: set[int] = set()
        for blow, (name, end) in zip(blows, pair, strict=True):
            blow(hit, name)
            may_be_lost |= set(range(int(name[:20]), end))
        disk = disk_with(hit)
        log = open_log(DIRECTORY, files=disk, policy=SMALL, witness=Witness(len(values)))
        assert read_around(log)[1] <= may_be_lost, pair
        judge(disk_with(hit), Witness(len(values)), len(values), values)


def test_all_segments_can_be_missing() -> None:
    image = fill(closed=True)
    left = {name: content for name, content in image.items() if not name.endswith(".log")}
    assert judge(disk_with(left), Witness(len(VALUES)), len(VALUES)) == set(range(len(VALUES)))
    assert judge(disk_with({}), Witness(len(VALUES)), len(VALUES)) == set(range(len(VALUES)))


@pytest.mark.parametrize("on_damage", list(OnDamage))
def test_a_reader_in_a_hole_before_damage_is_told_of_where_it_stands(on_damage: OnDamage) -> None:
    policy = Policy(segment_bytes=4096, on_damage=on_damage)
    disk = FaultyFiles()
    log = open_log(DIRECTORY, files=disk, piped=True, policy=policy)
    for number in range(3):
        batch = encode([bytes(4000)], timestamp=TIMESTAMP)
        batch.base_offset = number * 10
        log.append_at(batch)
        log.flush()
    _, path, _ = (segment.path for segment in log.segments)
    content = bytearray(disk.content(path))
    content[1000] ^= 1
    disk.set_content(path, bytes(content))
    log = open_log(DIRECTORY, files=disk, piped=True, policy=policy)
    if on_damage is OnDamage.SKIP:
        assert [batch.base_offset for batch in log.read(5, 1)] == [20]
    else:
        with pytest.raises(LogDamaged) as caught:
            log.read(5, 1)
        assert caught.value.holds(5)
    assert [(each.first, each.last) for each in log.damage] == [(10, 20)]


def test_what_retention_dropped_is_not_missing_wherever_it_is_cut() -> None:
    for calls in itertools.count():
        disk = FaultyFiles()
        log = open_log(DIRECTORY, files=disk, policy=SMALL)
        for value in VALUES:
            append(log, value)
            log.flush()
        log.policy = Policy(segment_bytes=4096, retain_bytes=9000)
        disk.cut_after = disk.calls + calls
        with contextlib.suppress(PowerCut):
            log.upkeep.retain()
            break
        log = open_log(DIRECTORY, files=disk.power_cut(), policy=SMALL, witness=Witness(len(VALUES)))
        assert not log.damage
        assert list(messages(log)) == list(range(log.start, len(VALUES))), calls
    assert calls > 5


def test_a_first_segment_that_is_missing_after_retention_is_noticed() -> None:
    disk = FaultyFiles()
    log = open_log(DIRECTORY, files=disk, policy=Policy(segment_bytes=4096, retain_bytes=9000))
    for value in VALUES:
        append(log, value)
        log.flush()
    assert log.upkeep.retain()
    start, following = log.segments[0].base, log.segments[1].base
    image = image_of(disk)
    del image[log_name(start)]
    log = open_log(DIRECTORY, files=disk_with(image), policy=SMALL, witness=Witness(len(VALUES)))
    assert log.start == start
    assert told(log) == set(range(start, following)) == read_around(log)[1]


def test_an_index_that_is_missing_or_garbage_costs_nothing() -> None:
    image = fill(closed=True)
    for name in [name for name in image if name.endswith(".index")]:
        for content in (None, b"", b"garbage" * 50, image[name][:-1]):
            hit = dict(image)
            if content is None:
                del hit[name]
            else:
                hit[name] = content
            log = open_log(DIRECTORY, files=disk_with(hit), policy=SMALL)
            assert messages(log) == dict(enumerate(VALUES))
            assert not log.damage


# A store, its `meta.db` and its state topic.


def store_with_groups(data: Path) -> Path:
    """Ten messages, a position, and other things to remember; return the directory of the log."""
    with Store(data) as store:
        topic = store.create_topic("orders", partitions=2)
        for value in VALUES[:10]:
            store.log(topic.id).append(encode([value], timestamp=TIMESTAMP))
            store.flush()
        store.state.write([Change("position", f"a/b/{topic.id}/0", {"floor": 2, "next": 7})])
        store.state.write([Addition("position", f"a/b/{topic.id}/0", {"floor": 2, "next": 9})])
        store.flush()
        return store.log(topic.id).directory


def lost_in(data: Path) -> set[int]:
    with inspect.inspect(data) as inspection:
        reports = [inspect.verify(log).report for log in inspection.logs]
    return {
        offset
        for report in reports
        for damage in (report.damage if report else ())
        for offset in range(damage.first, damage.last or damage.first)
    }


@pytest.mark.parametrize("has_meta", [True, False], ids=["with meta.db", "without"])
def test_a_store_knows_that_a_log_was_cut_short_and_repair_ends_it(tmp_path: Path, has_meta: bool) -> None:
    data = tmp_path / "data"
    *_, segment = sorted(store_with_groups(data).glob("*.log"))
    segment.write_bytes(segment.read_bytes()[:1500])
    if not has_meta:
        (data / "meta.db").unlink()
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    end = 10 if has_meta else 9
    lost = lost_in(data)
    assert lost == set(range(min(lost), end))
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    with Store(data) as store:
        [log] = store.catalogue.damage
        assert told(log) == lost
        assert append(log, b"new") >= end
    assert lost_in(data) == lost
    with Store(data) as store:
        assert told(store.log(1)) == lost

    outcome = repair(data)

    assert not outcome.problems
    assert {offset for each in outcome.quarantined for offset in range(each.first, each.next)} == lost
    assert not lost_in(data)
    with Store(data) as store:
        assert not store.catalogue.damage
        assert [*messages(store.log(1)).values()] == [*VALUES[: min(lost)], b"new"]


def everything(data: Path) -> set[str]:
    with Store(data) as store:
        return {repr(change) for change in store.state.everything()}


@pytest.mark.parametrize("blow", ["cut", "emptied", "removed", "flipped"])
def test_what_the_state_topic_lost_is_taken_from_meta_db(tmp_path: Path, blow: str) -> None:
    data = tmp_path / "data"
    store_with_groups(data)
    before = everything(data)
    [path] = (data / "topics/0/0").glob("*.log")
    content = path.read_bytes()
    match blow:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "emptied":
            path.write_bytes(b"")
        case "removed":
            path.unlink()
        case _:
            path.write_bytes(content.replace(b'"orders"', b'"ordexs"'))
    with pytest.raises(LogDamaged, match="penstock log repair"):
        Store(data)

    outcome = repair(data)

    assert not outcome.problems
    assert outcome.is_state_hit
    assert outcome.restored > 0
    assert everything(data) == before
    with Store(data) as store:
        assert [topic.name for topic in store.topics] == ["orders"]
        assert messages(store.log(1)) == dict(enumerate(VALUES[:10]))
        assert store.create_topic("next").id == 2


def test_a_topic_that_nobody_knows_is_kept_named_and_adopted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    directory = store_with_groups(data)
    shutil.copytree(directory.parent, data / "topics" / "7")
    with Store(data) as store:
        assert store.catalogue.orphans == [data / "topics" / "7"]
        assert store.create_topic("other").id == 8
    assert (data / "topics/7/0").exists()
    assert [problem for problem in repair(data).problems if "--adopt 7=NAME" in problem]
    with pytest.raises(BadDirectory, match="topic 3 cannot be adopted"):
        repair(data, adopt={3: "missing"})
    assert "there is orders" in repair(data, adopt={7: "orders.eu"}).problems[0]

    outcome = repair(data, adopt={7: "found"})

    assert (outcome.adopted, outcome.problems) == ({7: "found"}, [])
    with Store(data) as store:
        assert not store.catalogue.orphans
        assert {topic.name: topic.partitions for topic in store.topics} == {"orders": 2, "other": 1, "found": 2}
        assert messages(store.log(7)) == dict(enumerate(VALUES[:10]))


def test_topics_without_any_state_are_not_opened_as_if_there_were_none(tmp_path: Path) -> None:
    data = tmp_path / "data"
    store_with_groups(data)
    shutil.rmtree(data / "topics/0")
    (data / "meta.db").unlink()
    with pytest.raises(BadDirectory, match="no topic is known"):
        Store(data)
    assert repair(data, adopt={1: "orders"}).adopted == {1: "orders"}
    with Store(data) as store:
        assert messages(store.log(1)) == dict(enumerate(VALUES[:10]))


@pytest.mark.parametrize("seed", range(12))
def test_any_blows_between_lives_of_a_store(tmp_path: Path, seed: int) -> None:
    """Never a wrong message, never an offset with two contents, nothing lost that was not hit, all of it told."""
    random = Random(seed)
    data = tmp_path / "data"
    with Store(data) as store:
        store.create_topic("orders", policy=SMALL)
    given: dict[int, bytes] = {}
    lost: set[int] = set()
    for life in range(6):
        with Store(data) as store:
            log = store.log(1)
            found, refused = read_around(log)
            assert found.items() <= given.items()
            assert given.keys() - found.keys() <= refused | lost
            assert (refused & given.keys()) - lost <= told(log)
            lost |= refused & given.keys()
            for number in range(random.randint(1, 20)):
                value = b"%d-%d:" % (life, number) + bytes(random.choice((10, 700)))
                offset = append(log, value)
                assert offset not in given
                assert offset > max(given, default=-1)
                store.flush()
                given[offset] = value
        if random.random() < 0.3:
            assert not repair(data).problems
        names = sorted((data / "topics/1/0").iterdir())
        for path in random.sample(names, min(len(names), random.choice((0, 1, 1, 2)))):
            content = bytearray(path.read_bytes())
            match random.randint(0, 3):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(b"")
                case 2 if content:
                    path.write_bytes(content[: random.randrange(len(content))])
                case _ if content:
                    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
                    path.write_bytes(content)
                case _:
                    pass
