"""Subscriptions and groups with both clients."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import Client
from penstock.client.values import Redriven
from penstock.errors import (
    BadSubject,
    Closed,
    GroupConflict,
    NotOutstanding,
    TimedOut,
    UnknownGroup,
)
from tests.support.client_calls import address_of, take, values, wait_until
from tests.support.process import PATIENCE_S
from tests.support.server import Serve
from tests.support.shells import Shell


class TestSubscribe:
    def test_a_plain_one_gets_what_comes_from_now_on(self, client: Client, topic: str) -> None:
        client.publish(f"{topic}.a", b"before")
        subscription = client.subscribe(f"{topic}.*")

        client.publish(f"{topic}.b", b"0")
        client.publish(f"{topic}.c.d", b"other")
        client.publish(f"{topic}.c", b"1")

        assert values(take(subscription, 2)) == [b"0", b"1"]
        assert (subscription.pattern, subscription.group, subscription.mode) == (f"{topic}.*", None, "shared")

    @pytest.mark.parametrize("group", [None, "all"])
    def test_a_whole_topic(self, client: Client, topic: str, group: str | None) -> None:
        for subject in (topic, f"{topic}.eu", f"{topic}x"):
            client.publish(subject, subject.encode())
        group = group and f"{group}-{topic}"
        with client.subscribe(topic=topic, group=group, start="earliest") as subscription:
            found = values(take(subscription, 2))
            client.publish(f"{topic}.eu.de", b"live")
            assert sorted([*found, *values(take(subscription, 1))]) == sorted(
                [topic.encode(), f"{topic}.eu".encode(), b"live"]
            )
            assert subscription.pattern == f"{topic} {topic}.>"

    def test_a_pattern_that_misses_a_part_of_its_topic_is_hinted_at(
        self, client: Client, topic: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        client.publish(topic, b"0")
        with caplog.at_level("WARNING", "penstock.client"):
            client.subscribe(topic).close()
            assert not caplog.records
            client.publish(f"{topic}.eu", b"1")
            client.subscribe(topic).close()
            client.subscribe(topic=topic).close()
            client.subscribe(f"{topic}.>").close()
        [record] = caplog.records
        assert f"such as {topic}.eu: to read all of it, name the topic (--topic {topic}" in record.getMessage()

    def test_or_from_anywhere(self, client: Client, topic: str) -> None:
        client.publish(topic, b"0")
        client.publish(topic, b"1")
        moment = datetime.now(UTC)
        client.publish(topic, b"2")

        def first(start: Any) -> bytes:
            with client.subscribe(topic, start=start) as subscription:
                return subscription.get(PATIENCE_S).value

        assert [first("earliest"), first(1), first(moment)] == [b"0", b"1", b"2"]
        assert [first(moment.isoformat()), first(f"@{moment.timestamp():.6f}")] == [b"2", b"2"]
        assert [first("-1h"), first(timedelta(hours=-1)), first(time.time() - 3600)] == [b"0", b"0", b"0"]

    def test_what_is_there_is_read_in_lists(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(300))
        subscription = client.subscribe(topic, start="earliest", buffer=50)

        first = subscription.get_many(7, PATIENCE_S)
        found = list(first)
        for batch in subscription.batches():
            found += batch
            if len(found) == 300:
                break

        assert 1 <= len(first) <= 7
        assert values(found) == [b"%d" % number for number in range(300)]

    def test_waiting_for_a_message_can_take_too_long(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)

        with pytest.raises(TimedOut, match=topic):
            subscription.get(0.01)
        with pytest.raises(TimedOut, match=topic):
            subscription.get_many(timeout=0.01)
        client.publish(topic, b"x")

        assert subscription.get(PATIENCE_S).value == b"x"

    def test_close_ends_iteration_in_another_thread(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic)
        found: list[bytes] = []
        first = threading.Event()

        def read() -> None:
            for message in subscription:
                found.append(message.value)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        client.publish(topic, b"x")
        assert first.wait(PATIENCE_S)
        subscription.close()
        reader.join(PATIENCE_S)

        assert not reader.is_alive()
        assert found == [b"x"]
        assert list(subscription) == []
        with pytest.raises(Closed):
            subscription.get(1)
        subscription.close()

    def test_closing_the_client_ends_it_too(self, shell: Shell, server: Serve, topic: str) -> None:
        client = shell.client(address_of(server))
        subscription = client.subscribe(topic)

        client.close()

        assert list(subscription) == []
        assert list(subscription.batches()) == []

    def test_one_that_is_not_read_gets_no_more_than_its_buffer(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(2000))
        subscription = client.subscribe(topic, start="earliest", buffer=20)
        feed = subscription._feed

        wait_until(lambda: len(feed._unread) == 20)
        client.publish(topic, b"2000")
        client.topics()

        assert len(feed._unread) == 20
        assert values(take(subscription, 2001)) == [b"%d" % number for number in range(2001)]

    @pytest.mark.parametrize("options", [{"mode": "other"}, {"buffer": 0}, {"start": "now"}, {"start": -1}])
    def test_what_cannot_be_is_refused(self, client: Client, topic: str, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            client.subscribe(topic, **options)

    def test_a_pattern_that_is_none_is_refused(self, client: Client) -> None:
        with pytest.raises(BadSubject):
            client.subscribe("a..b")


class TestGroups:
    def test_members_of_a_shared_group_share(self, client: Client, shell: Shell, server: Serve, topic: str) -> None:
        other = shell.client(address_of(server))
        client.create_group(topic, topic)
        members = [client.subscribe(topic, group=topic, buffer=10), other.subscribe(topic, group=topic, buffer=10)]
        client.publish_many((topic, b"%d" % number) for number in range(200))
        found: list[list[bytes]] = [[], []]
        all_done = threading.Event()

        def read(member: Any, mine: list[bytes]) -> None:
            for message in member:
                mine.append(message.value)
                message.ack()
                if sum(map(len, found)) == 200:
                    all_done.set()

        readers = [threading.Thread(target=read, args=pair) for pair in zip(members, found, strict=True)]
        for reader in readers:
            reader.start()
        assert all_done.wait(PATIENCE_S)
        for member in members:
            member.flush()
            member.close()
        for reader in readers:
            reader.join(PATIENCE_S)

        assert sorted(map(int, found[0] + found[1])) == list(range(200))
        assert all(found)
        assert client.lag(topic) == 0

    def test_a_partitioned_one_commits_by_offset(self, client: Client, shell: Shell, server: Serve, topic: str) -> None:
        client.create_topic(topic, partitions=2)
        for number in range(20):
            client.publish(topic, b"%d" % number, key=b"%d" % number)
        member = client.subscribe(topic, group=topic, mode="partitioned", start="earliest")
        messages = take(member, 20)
        last = {message.partition: message for message in messages}

        for message in last.values():
            message.ack()
        member.flush()

        assert len(last) == 2
        assert client.group(topic).mode == "partitioned"
        assert [position.lag for position in client.group(topic).positions] == [0, 0]
        with pytest.raises(TypeError, match="shared groups"):
            messages[0].nack()

    def test_what_is_not_acknowledged_comes_again_and_then_is_a_dead_letter(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=200, deliveries_max=2)
        client.publish(topic, b"x", headers={"A": "b"})
        member = client.subscribe(topic, group=topic, start="earliest")

        attempts = [member.get(PATIENCE_S).attempts for _ in range(2)]
        wait_until(lambda: client.group(topic).dead_lettered == 1)

        assert attempts == [1, 2]
        (letter,) = client.dead_letters(topic)
        assert (letter.value, letter.topic, letter.group, letter.attempts) == (b"x", topic, topic, 2)
        assert letter.headers["A"] == "b"
        client.alter_topic(topic, ack_deadline_ms=60_000)
        assert client.redrive(topic) == Redriven(1, 0, None)
        again = member.get(PATIENCE_S)
        again.ack()
        member.flush()
        assert again.value == b"x"
        assert client.dead_letters(topic) == []
        assert [each.redriven for each in client.dead_letters(topic, redriven=True)] == [True]

    def test_nack_reject_and_extend(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=1000)
        client.publish_many((topic, b"%d" % number) for number in range(3))
        member = client.subscribe(topic, group=topic, start="earliest")
        nacked, rejected, extended = take(member, 3)

        nacked.nack(delay=0.05)
        rejected.reject(reason=LookupError("no such\ncustomer"))
        again = member.get(PATIENCE_S)
        again.ack()
        after_the_deadline = time.monotonic() + 1.2
        while time.monotonic() < after_the_deadline:
            extended.extend()
            member.flush()
        extended.ack()
        member.flush()

        assert (again.value, again.attempts) == (b"0", 2)
        [letter] = client.dead_letters(topic)
        assert (letter.value, letter.reason) == (b"1", "LookupError: no such customer")
        assert letter.timestamp_us >= rejected.timestamp_us
        assert (client.lag(topic), client.group(topic).redelivered) == (0, 1)

    def test_what_nobody_looked_at_does_not_count_as_delivered(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(3))
        for _ in range(5):
            with client.subscribe(topic, group=topic, start="earliest") as member:
                wait_until(lambda member=member: len(member.unread()) == 3)  # type: ignore[misc]
        with client.subscribe(topic, group=topic) as member:
            messages = take(member, 3)
            assert [message.attempts for message in messages] == [1, 1, 1]
            messages[0].release()
            assert (member.get(PATIENCE_S).offset, messages[0].attempts) == (messages[0].offset, 1)

    def test_who_takes_the_last_one_it_wants_is_not_sent_another(self, client: Client, topic: str) -> None:
        client.publish_many((topic, b"%d" % number) for number in range(3))
        for number in range(2):
            with client.subscribe(topic, group=topic, start="earliest", buffer=1) as member:
                message = member.get(PATIENCE_S)
                assert (message.value, message.attempts) == (b"%d" % number, 1)
                message.ack()
                member.flush()
                assert client.group(topic).pending == 0

    def test_one_that_comes_too_late_is_told(self, client: Client, topic: str) -> None:
        client.create_topic(topic, ack_deadline_ms=50, deliveries_max=1)
        client.publish(topic, b"x")
        member = client.subscribe(topic, group=topic, start="earliest")
        message = member.get(PATIENCE_S)
        wait_until(lambda: client.group(topic).dead_lettered == 1)

        message.nack()

        with pytest.raises(NotOutstanding, match="too late"):
            member.flush()
        member.flush()

    def test_only_messages_of_a_group_are_acknowledged(self, client: Client, topic: str) -> None:
        subscription = client.subscribe(topic, start="earliest")
        client.publish(topic, b"x")

        with pytest.raises(TypeError, match="group"):
            subscription.get(PATIENCE_S).ack()

    def test_a_member_that_closes_leaves_the_rest_to_others(self, client: Client, topic: str) -> None:
        first = client.subscribe(topic, group=topic)
        client.publish_many((topic, b"%d" % number) for number in range(10))
        done, *_ = take(first, 10)
        done.ack()

        first.close()

        second = client.subscribe(topic, group=topic)
        assert sorted(values(take(second, 9))) == [b"%d" % number for number in range(1, 10)]
        with pytest.raises(Closed):
            done.ack()

    def test_a_group_that_is_another_one_is_a_conflict(self, client: Client, topic: str) -> None:
        client.create_group(topic, topic)

        with pytest.raises(GroupConflict):
            client.subscribe(f"{topic}.>", group=topic)
        with pytest.raises(GroupConflict):
            client.subscribe(topic, group=topic, mode="partitioned")

    def test_one_that_is_deleted_ends_its_members(self, client: Client, topic: str) -> None:
        member = client.subscribe(topic, group=topic)

        client.delete_group(topic)

        with pytest.raises(UnknownGroup):
            member.get(PATIENCE_S)
