"""Refreshes of real servers: both clients, the command, and kill -9 on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Client
from penstock.client.values import Refresh
from penstock.errors import Closed, NotOutstanding, RefreshAborted, RefreshConflict, TimedOut, UnknownTopic
from tests.support.commands import Penstock
from tests.support.frames import Frames
from tests.support.process import PATIENCE_S
from tests.support.refresh_clients import VALUES, address_of, new_topic, wait_for
from tests.support.server import Serve
from tests.support.shells import SHELLS, Shell, shell_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    with shell_of(request.param) as made:
        yield made


@pytest.fixture
def client(shell: Shell, server: Serve) -> Client:
    return shell.client(address_of(server), name="replica")


@pytest.fixture
def topic() -> str:
    return new_topic()


def wait_state(client: Client, topic: str, state: str) -> Refresh:
    wait_for(lambda: client.refresh_status(topic).state == state, f"{topic} does not get {state}")
    return client.refresh_status(topic)


class Replica:
    """A consumer that keeps a copy, in a thread of its own. What it is not let through waits."""

    def __init__(self, shell: Shell, client: Client, topic: str, pattern: str | None = None, *, reads: bool = True):
        self.story: list[str] = []
        self.copy: dict[int, bytes] = {}
        self.passes = {what: threading.Event() for what in ("RESET", "READY", "message")}
        for passes in self.passes.values():
            passes.set()
        self.error: BaseException | None = None
        self._shell = shell
        options: Any = {name: self._callback(name[3:].upper()) for name in ("on_reset", "on_ready")}
        self.subscription = client.subscribe(pattern or topic, group=topic, start="earliest", **options)
        self._thread = threading.Thread(target=self._run)
        if reads:
            self._thread.start()

    def close(self) -> None:
        for passes in self.passes.values():
            passes.set()
        self.subscription.close()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _callback(self, word: str) -> Any:
        """As the shell wants it."""

        def told(_topic: str) -> None:
            assert self.passes[word].wait(PATIENCE_S)
            if word == "RESET":
                self.copy.clear()

        async def told_in_loop(topic: str) -> None:
            self.story.append(word)
            await asyncio.to_thread(told, topic)

        def told_in_thread(topic: str) -> None:
            self.story.append(word)
            told(topic)

        return told_in_thread if self._shell.kind == "threads" else told_in_loop

    def _run(self) -> None:
        try:
            for message in self.subscription:
                self.story.append(message.value.decode())
                assert self.passes["message"].wait(PATIENCE_S)
                self.copy[message.offset] = message.value
                message.ack()
        except Exception as error:  # noqa: BLE001  a test looks at it
            self.error = error


def fill(client: Client, topic: str) -> None:
    for value in VALUES:
        client.publish(topic, value)


# ---- both clients


def test_a_client_is_told_between_the_messages(client: Client, shell: Shell, topic: str) -> None:
    fill(client, topic)
    assert client.refresh_status(topic) == Refresh(topic, "IDLE", None, None, [])
    with Replica(shell, client, topic) as replica:
        wait_for(lambda: len(replica.story) == 4)
        begun = client.refresh_topic(topic)
        assert (begun.topic, [group.group for group in begun.groups]) == (topic, [topic])
        done = wait_state(client, topic, "COMPLETED")
        assert (done.is_over, done.reason, done.started_us) == (True, None, begun.started_us)
        client.publish(topic, b"live")
        wait_for(lambda: "live" in replica.story)
        assert replica.story == ["0", "1", "2", "3", "RESET", "0", "1", "2", "3", "READY", "live"]


def test_what_came_before_is_handed_over_first_and_nothing_while_it_runs(
    client: Client, shell: Shell, topic: str
) -> None:
    fill(client, topic)
    with Replica(shell, client, topic, f"{topic}", reads=False) as replica:
        wait_for(lambda: len(replica.subscription.unread()) == 4)
        client.refresh_topic(topic)
        status = wait_state(client, topic, "WAITING_FOR_ACKS")
        assert status.groups[0].waits_for == ["replica (127.0.0.1)"]
        assert [replica.subscription.get(PATIENCE_S).value for _ in range(4)] == VALUES
        assert replica.story == [], "the last message may still be worked on"
        replica.passes["RESET"].clear()
        reader = threading.Thread(target=lambda: replica.story.append(f"got {replica.subscription.get().offset}"))
        reader.start()
        wait_for(lambda: replica.story == ["RESET"])
        client.publish(topic, b"more")
        assert client.refresh_status(topic).state == "WAITING_FOR_ACKS"
        if shell.kind == "asyncio":
            with pytest.raises(TimedOut):
                replica.subscription.get(timeout=0.1)
        assert replica.subscription.unread() == []
        replica.passes["RESET"].set()
        reader.join(PATIENCE_S)
        assert replica.story == ["RESET", "got 0"]


def test_a_reader_that_does_not_wait_so_long_does_not_end_what_was_begun(server: Serve, topic: str) -> None:
    with shell_of("asyncio") as shell:
        client = shell.client(address_of(server))
        fill(client, topic)
        with Replica(shell, client, topic, reads=False) as replica:
            for _ in VALUES:
                replica.subscription.get(PATIENCE_S).ack()
            replica.passes["RESET"].clear()
            client.refresh_topic(topic)
            wait_for(lambda: client.refresh_status(topic).state == "WAITING_FOR_ACKS")
            while not replica.story:
                with pytest.raises(TimedOut):
                    replica.subscription.get(timeout=0.05)
            replica.passes["RESET"].set()
            assert replica.subscription.get(PATIENCE_S).offset == 0
            assert replica.story == ["RESET"]


def test_of_several_threads_none_is_given_a_message_while_another_is_told(server: Serve, topic: str) -> None:
    other = f"{topic}-other"
    with shell_of("threads") as shell:
        client = shell.client(address_of(server))
        fill(client, topic)
        with Replica(shell, client, topic, ">") as replica:
            wait_for(lambda: len(replica.story) >= 4)
            replica.passes["RESET"].clear()
            client.refresh_topic(topic)
            wait_for(lambda: "RESET" in replica.story)
            client.publish(other, b"of another topic")
            wait_for(replica.subscription.unread)
            with pytest.raises(TimedOut):
                replica.subscription.get(timeout=0.1)
            replica.passes["RESET"].set()
            wait_for(lambda: "of another topic" in replica.story)
            wait_state(client, topic, "COMPLETED")
        # It would be waited for in every refresh.
        client.delete_group(topic)


def test_one_that_fails_ends_the_subscription_loudly_and_is_not_answered(
    client: Client, shell: Shell, topic: str
) -> None:
    fill(client, topic)

    def broken(topic: str) -> None:
        raise ZeroDivisionError(topic)

    async def broken_in_loop(topic: str) -> None:
        broken(topic)

    on_reset: Any = broken if shell.kind == "threads" else broken_in_loop
    subscription = client.subscribe(topic, group=topic, start="earliest", on_reset=on_reset)
    for _ in VALUES:
        subscription.get(PATIENCE_S).ack()
    client.refresh_topic(topic)
    with pytest.raises(Closed, match=r"on_reset of .* failed") as caught:
        subscription.get(PATIENCE_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(Closed):
        subscription.get(PATIENCE_S)
    wait_for(lambda: not client.group(topic).members, "the broker knows that it has left")
    status = wait_state(client, topic, "WAITING_FOR_ACKS")
    assert status.groups[0].waits_for == ["replica (127.0.0.1)"]
    # The next try goes on with it.
    with Replica(shell, client, topic) as replica:
        wait_state(client, topic, "COMPLETED")
        assert replica.story == ["RESET", "0", "1", "2", "3", "READY"]


def test_who_waits_in_vain_is_told_so_and_goes_on_from_where_it_was(client: Client, shell: Shell, topic: str) -> None:
    client.create_topic(topic, refresh_wait_ms=1500)
    fill(client, topic)
    silent = shell.client(address_of_client(client), name="silent")
    with Replica(shell, client, topic) as replica, Replica(shell, silent, topic, reads=False) as deaf:
        wait_for(lambda: len(replica.story) + len(deaf.subscription.unread()) >= 4)
        for _ in range(len(deaf.subscription.unread())):
            deaf.subscription.get().ack()
        deaf.subscription.flush()
        replica.subscription.flush()
        client.refresh_topic(topic)
        status = wait_state(client, topic, "ABORTED")
        assert status.reason == f"group {topic}: silent (127.0.0.1) did not answer RESET within 1.5 s"
        wait_for(lambda: replica.error)
        assert isinstance(replica.error, RefreshAborted)
        silent.topics()  # what the broker told it before has arrived by then
        with pytest.raises(RefreshAborted):
            deaf.subscription.get(PATIENCE_S)
        assert deaf.story == [], "what is over before it is read is not told"
    client.publish(topic, b"live")
    with Replica(shell, client, topic) as replica:
        wait_for(lambda: replica.story)
        assert replica.story == ["live"]


def test_what_is_said_of_a_message_from_before_comes_too_late(client: Client, shell: Shell, topic: str) -> None:
    fill(client, topic)
    with Replica(shell, client, topic, reads=False) as replica:
        before = [replica.subscription.get(PATIENCE_S) for _ in VALUES]
        client.refresh_topic(topic)
        after = replica.subscription.get(PATIENCE_S)
        assert (after.offset, replica.story) == (0, ["RESET"])
        before[0].ack()
        with pytest.raises(NotOutstanding):
            replica.subscription.flush()
        assert client.lag(topic) == 4
        after.ack()
        replica.subscription.flush()
        assert client.lag(topic) == 3


def test_one_callback_is_enough_and_only_groups_have_them(client: Client, shell: Shell, topic: str) -> None:
    fill(client, topic)
    called: list[str] = []

    async def in_loop(topic: str) -> None:
        called.append(topic)

    on_ready: Any = called.append if shell.kind == "threads" else in_loop
    with client.subscribe(topic, group=topic, start="earliest", on_ready=on_ready) as subscription:
        client.refresh_topic(topic)
        for _ in range(8):
            subscription.get(PATIENCE_S).ack()
        while not called:
            with pytest.raises(TimedOut):
                subscription.get(timeout=0.1)
        wait_state(client, topic, "COMPLETED")
    assert called == [topic]
    with pytest.raises(ValueError, match="for groups"):
        client.subscribe(topic, on_ready=on_ready)


def test_what_cannot_be_refreshed_is_refused(client: Client, shell: Shell, topic: str) -> None:
    with pytest.raises(UnknownTopic):
        client.refresh_topic(topic)
    with pytest.raises(UnknownTopic):
        client.refresh_status(topic)
    fill(client, topic)
    with Replica(shell, client, topic), client.subscribe(topic, group=topic), pytest.raises(RefreshConflict):
        client.refresh_topic(topic)


def address_of_client(client: Any) -> str:
    """Where it is connected to."""
    link = (client._inner if hasattr(client, "_inner") else client._async)._link
    return str(link.address)


# ---- kill -9


@pytest.mark.parametrize("state", ["WAITING_FOR_ACKS", "REPLAYING", "READY_SENT"])
def test_a_refresh_outlives_a_kill(tmp_path: Path, shell: Shell, state: str) -> None:
    with Serve(tmp_path) as server:
        client = shell.client(address_of(server), name="replica")
        count = 300
        client.publish_many([("prices", b"%d" % number) for number in range(count)])
        with Replica(shell, client, "prices") as replica:
            wait_for(lambda: len(replica.copy) == count)
            replica.subscription.flush()
            word = "READY" if state == "READY_SENT" else "RESET"
            replica.passes[word].clear()
            client.refresh_topic("prices")
            wait_for(lambda: replica.story[-1] == word)
            if state == "REPLAYING":
                replica.passes["message"].clear()
                replica.passes["RESET"].set()
            wait_state(client, "prices", state)
            server.kill()
            server.restart()
            client.publish("prices", b"live")
            for passes in replica.passes.values():
                passes.set()
            wait_state(client, "prices", "COMPLETED")
            wait_for(lambda: len(replica.copy) == count + 1)
            assert list(replica.copy.values()) == [*(b"%d" % number for number in range(count)), b"live"]
            assert replica.story.count("READY") == (2 if word == "READY" else 1)
            # The second RESET is of the second life: the first one was not answered in the first.
            assert replica.story.count("RESET") == (2 if state == "WAITING_FOR_ACKS" else 1)


# ---- the command


def test_the_command_begins_a_refresh_follows_it_and_names_who_is_waited_for(server: Serve, topic: str) -> None:
    penstock = Penstock(address_of(server))
    with shell_of("threads") as shell:
        client = shell.client(address_of(server), name="replica")
        fill(client, topic)
        idle = penstock("topic", "refresh-status", topic)
        assert (idle.code, idle.out) == (0, f"{topic}: IDLE\n")
        with Replica(shell, client, topic) as replica:
            wait_for(lambda: len(replica.copy) == 4)
            replica.passes["RESET"].clear()
            with penstock.begin("topic", "refresh", topic, "--wait", "--json") as process:
                assert process.stderr is not None
                lines = iter(process.stderr.readline, b"")
                wanted = f"{topic}: WAITING_FOR_ACKS, waits for replica (127.0.0.1)\n".encode()
                assert wanted in lines
                status = penstock("topic", "refresh-status", topic)
                assert status.lines[0].startswith(f"{topic}: WAITING_FOR_ACKS, started 20")
                assert any("waits for replica (127.0.0.1)" in line for line in status.lines[1:])
                replica.passes["RESET"].set()
                out, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
            done = json.loads(out)
            assert (done["state"], done["groups"][0]["state"]) == ("COMPLETED", "COMPLETED")
            assert penstock("topic", "refresh-status", topic, "--json").json == done


def test_the_command_fails_with_a_refresh_that_is_given_up(server: Serve, topic: str) -> None:
    penstock = Penstock(address_of(server))
    assert penstock("topic", "create", topic, "--refresh-wait", "100ms").code == 0
    nobody = penstock("topic", "refresh", topic, "--wait")
    assert (nobody.code, nobody.lines[1]) == (0, "no group with members that support a refresh reads it")
    with Frames(server) as client:
        client.open(1, topic, group=topic, refresh=True)
        aborted = penstock("topic", "refresh", topic, "--wait")
    assert aborted.code == 1
    assert "tests (127.0.0.1) did not answer RESET within 0.1 s" in aborted.out
