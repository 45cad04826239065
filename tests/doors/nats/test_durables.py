"""Durable subscriptions of NATS clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from tests.support.nats_clients import connected, numbers, run, settle, take, take_data
from tests.support.process import PATIENCE_S
from tests.support.server import Serve


@pytest.fixture
def patient() -> str:
    return f"patient.{next(numbers)}"


@pytest.fixture
def quick() -> str:
    return f"quick.{next(numbers)}"


# ---- durable subscriptions


def test_a_durable_acknowledges_with_the_methods_of_its_client(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(patient, queue="DURABLE:billing")
            await settle(one)
            for number in range(4):
                await other.publish(patient, b"%d" % number)
            first, second, third, fourth = await take(subscription, 4)
            assert all(message.reply.startswith("$ACK.") for message in (first, second, third, fourth))
            await first.ack()
            await second.ack_sync(timeout=PATIENCE_S)
            await third.nak()
            [again] = await take(subscription, 1)
            assert (again.data, again.headers) == (b"2", {"Delivery-Count": "2"})
            await again.nak(delay=0.1)
            [again] = await take(subscription, 1)
            assert (again.data, again.headers) == (b"2", {"Delivery-Count": "3"})
            await again.ack()
            await fourth.in_progress()
            await fourth.ack()
            await settle(one)
            await other.publish(patient, b"new")
            assert await take_data(subscription, 1) == [b"new"]

    run(work)


def test_in_progress_puts_off_the_deadline(server: Serve, quick: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            subscription = await one.subscribe(quick, queue="DURABLE:billing")
            await settle(one)
            await other.publish(quick, b"first")
            [first] = await take(subscription, 1)
            # Another message comes back meanwhile, so the deadline was over.
            await other.publish(quick, b"clock")
            ticks = 0
            while ticks < 2:
                await first.in_progress()
                try:
                    message = await subscription.next_msg(0.05)
                except nats.errors.TimeoutError:
                    continue
                assert message.data == b"clock", "in_progress came in time, and yet it was delivered again"
                ticks += 1
            await first.ack()

    run(work)


def test_what_a_durable_does_not_acknowledge_comes_again_and_ends_as_a_dead_letter(server: Serve, quick: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            letters = await other.subscribe(f"DLQ.{quick}")
            subscription = await one.subscribe(quick, queue="DURABLE:billing")
            await settle(one)
            await settle(other)
            await other.publish(quick, b"poison", headers={"Trace-ID": "7"})
            tries = await take(subscription, 3)
            assert [message.data for message in tries] == [b"poison"] * 3
            counts = [(message.headers or {}).get("Delivery-Count") for message in tries]
            assert counts == [None, "2", "3"]
            [letter] = await take(letters, 1)
            assert letter.data == b"poison"
            assert letter.subject == f"DLQ.{quick}"
            assert letter.headers is not None
            assert (
                letter.headers.items()
                >= {
                    "Trace-ID": "7",
                    "Dead-Letter-Reason": "not acknowledged",
                    "Dead-Letter-Attempts": "3",
                    "Dead-Letter-Group": f"{quick}:billing",
                    "Dead-Letter-Subject": quick,
                    "Dead-Letter-Topic": "quick",
                }.items()
            )

    run(work)


def test_what_a_durable_terminates_is_a_dead_letter_at_once(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as other:
            letters = await other.subscribe(f"DLQ.{patient}")
            subscription = await one.subscribe(patient, queue="DURABLE:billing")
            await settle(one)
            await settle(other)
            await other.publish(patient, b"poison")
            [message] = await take(subscription, 1)
            await message.term()
            [letter] = await take(letters, 1)
            assert letter.data == b"poison"
            assert letter.headers is not None
            assert letter.headers["Dead-Letter-Reason"] == "refused"
            assert letter.headers["Dead-Letter-Attempts"] == "1"

    run(work)


@pytest.mark.parametrize("word", [b"+TERM", b"-NAK"])
def test_a_dead_letter_says_what_a_client_wrote_behind_term_or_nak(tmp_path: Path, word: bytes) -> None:
    with Serve(tmp_path, topic_deliveries_max=1) as once:

        async def work() -> None:
            async with connected(once) as client:
                letters = await client.subscribe("DLQ.>")
                subscription = await client.subscribe("orders", queue="DURABLE:billing")
                await settle(client)
                await client.publish("orders", b"poison")
                [message] = await take(subscription, 1)
                await client.publish(message.reply, word + b" no such account")
                [letter] = await take(letters, 1)
                assert letter.headers is not None
                assert letter.headers["Dead-Letter-Reason"] == "no such account"

        run(work)


def test_a_durable_gets_what_came_while_it_was_away(tmp_path: Path) -> None:
    with Serve(tmp_path, topic_ack_deadline_ms=3_600_000) as server:

        async def publish(*data: bytes) -> None:
            async with connected(server) as client:
                for each in data:
                    await client.publish("orders.a", each)
                await settle(client)

        @asynccontextmanager
        async def durable() -> AsyncIterator[tuple[Client, Subscription]]:
            async with connected(server) as client:
                subscription = await client.subscribe("orders.>", queue="DURABLE:billing")
                await settle(client)
                yield client, subscription

        async def before() -> None:
            async with durable() as (client, subscription):
                await publish(b"1", b"2", b"3")
                first, second, third = await take(subscription, 3)
                await second.ack()
                await settle(client)
                assert (first.data, third.data) == (b"1", b"3")
            await publish(b"4")
            async with durable() as (client, subscription):
                found = await take(subscription, 3)
                assert [message.data for message in found] == [b"1", b"3", b"4"]
                await found[1].ack()
                await settle(client)
            await publish(b"5")

        async def after() -> None:
            await publish(b"6")
            async with durable() as (client, subscription):
                found = await take(subscription, 4)
                assert [message.data for message in found] == [b"1", b"4", b"5", b"6"]
                for message in found:
                    await message.ack()
                await settle(client)

        async def last() -> None:
            async with durable() as (_, subscription):
                await publish(b"7")
                assert await take_data(subscription, 1) == [b"7"]

        run(before)
        server.kill()
        server.restart()
        run(after)
        server.kill()
        server.restart()
        run(last)


def test_members_of_a_durable_share_its_messages(server: Serve, patient: str) -> None:
    async def work() -> None:
        async with connected(server) as one, connected(server) as two, connected(server) as publisher:
            subscriptions = [await client.subscribe(patient, queue="DURABLE:billing") for client in (one, two)]
            await settle(one)
            await settle(two)
            for number in range(100):
                await publisher.publish(patient, b"%d" % number)
            got = [await take(subscription, 50) for subscription in subscriptions]
            numbers = sorted(int(message.data) for messages in got for message in messages)
            assert numbers == list(range(100))
            # What one has and does not acknowledge is the other's when it goes.
            for message in got[1]:
                await message.ack()
            await settle(two)
            await one.close()
            again = await take_data(subscriptions[1], 50)
            assert again == [message.data for message in got[0]]

    run(work)
