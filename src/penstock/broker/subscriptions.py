"""All subscriptions: who gets what is committed, and how a subscription begins and ends."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count, groupby
from operator import itemgetter
from typing import Final, Protocol

from penstock.broker.figures import Figures
from penstock.broker.interest import Interest
from penstock.broker.member import Member, Sink
from penstock.broker.opened import is_large
from penstock.broker.order import Order
from penstock.broker.partition import Partition, Waiting
from penstock.broker.start import Begin, Start, offsets_of
from penstock.broker.subscription import Loop, Queue, Subscription, choose_readers
from penstock.broker.topic import Target, Topics, is_reserved, selects
from penstock.errors import PenstockError, TooManySubscriptions
from penstock.health import Usage
from penstock.model.batch import Batch
from penstock.model.run import Run, open_batch
from penstock.model.subject import AUDIT_SUBJECT, is_literal

# Each allowed subscription adds this much to the limit on the bytes of all patterns, IDs and queue names.
_NAME_BYTES_EACH: Final = 512
_NAME_BYTES_MIN: Final = 1 << 20
# A hint looks at this many partitions of a topic, so it may miss rare subjects.
_HINT_PARTITIONS: Final = 8
# Messages that are dealt out in turn before the connections are asked again whether they take more.
_IN_TURN: Final = 16


class SubscriptionHost(Loop, Protocol):
    """The broker, as far as subscriptions need it."""

    figures: Figures
    topics: Topics


class Members:
    """Counts the members of subscriptions and groups, and limits them in number and in the bytes of their names."""

    def __init__(self, members_max: int) -> None:
        self._members_max = members_max
        self._names: dict[Member, int] = {}
        self._name_bytes = 0
        self._name_bytes_max = max(_NAME_BYTES_MIN, _NAME_BYTES_EACH * members_max)

    def add(self, member: Member, pattern: bytes, queue: bytes = b"") -> None:
        size = len(member.sid) + len(pattern) + len(queue)
        self.check(size)
        if member.sink.meter is not None:
            member.sink.meter.begin("subscriptions")
        self._names[member] = size
        self._name_bytes += size

    def remove(self, member: Member) -> None:
        if (size := self._names.pop(member, None)) is not None:
            self._name_bytes -= size
            if member.sink.meter is not None:
                member.sink.meter.end("subscriptions")

    def check(self, name_bytes: int = 0) -> None:
        """Raise TooManySubscriptions if there is no room for another one."""
        if self._name_bytes + name_bytes > self._name_bytes_max:
            raise TooManySubscriptions(
                f"the names of {len(self._names)} subscriptions have {self._name_bytes} bytes, and "
                f"{self._name_bytes_max} are the most: use shorter subjects, or raise server.subscriptions_max"
            )
        if len(self._names) >= self._members_max:
            raise TooManySubscriptions(
                f"there are {len(self._names)} subscriptions: end some, or raise server.subscriptions_max"
            )

    def usage(self) -> dict[str, Usage]:
        return {
            "subscriptions": Usage(len(self._names), self._members_max),
            "subscription_name_bytes": Usage(self._name_bytes, self._name_bytes_max),
        }


class Subscriptions:
    def __init__(self, host: SubscriptionHost, members: Members, unserved: dict[Partition, None]) -> None:
        """`unserved`: the partitions with messages that are appended and not served yet."""
        self._host = host
        self._members = members
        self._unserved = unserved
        self.order = Order(self._find_sinks, host.trail, host.health)
        self.interest: Interest[Subscription] = Interest(choose_readers)
        # The readers of the audit trail, whose subject nobody else gets, and nobody can publish to.
        self._audit: Interest[Subscription] = Interest(choose_readers)
        self._all: dict[Subscription, None] = {}
        # Unsubscribed ones that still receive what was published before, and where they are found by subject.
        self._leaving: dict[Subscription, None] = {}
        self._left: Interest[Subscription] = Interest()
        # Subscriptions with a queue: by its name, then by their patterns.
        self._queues: dict[bytes, dict[bytes, Subscription]] = {}
        self._queue_numbers = count()

    @property
    def slow_count(self) -> int:
        """How many are behind, because their connections do not take what they are given."""
        return sum(bool(subscription.behind) for subscription in self._all)

    # Begin.

    def subscribe(self, pattern: bytes, member: Member, queue: bytes | None = None) -> Subscription:
        """Give `member` what matches from now on; with a queue, its share of it."""
        self._members.add(member, pattern, queue or b"")
        subscription = None if queue is None else self._queues.get(queue, {}).get(pattern)
        if subscription is None:
            if queue is None:
                subscription = Subscription(pattern, self._host)
            else:
                others = self._queues.setdefault(queue, {})
                place = Queue(queue, next(self._queue_numbers), self.interest.match, others)
                subscription = others[pattern] = Subscription(pattern, self._host, place)
            self._skip_unserved(subscription)
            self._index(pattern).add(pattern, subscription)
            self._all[subscription] = None
        subscription.members.append(member)
        return subscription

    async def subscribe_from(self, pattern: bytes, member: Member, begin: Begin) -> Subscription:
        """As `subscribe`, and give `member` what was published before."""
        offsets = await offsets_of(begin, self._host.topics.matching(pattern))
        subscription = self.subscribe(pattern, member)
        for partition in self._host.topics.matching(pattern) if begin is not Start.LATEST else ():
            # Messages that are not committed yet are for it too.
            partition.since.pop(subscription, None)
            offset = offsets.get(partition, partition.start)
            if offset < partition.served:
                subscription.begin_at(partition, offset)
        subscription.wake()
        return subscription

    def _skip_unserved(self, subscription: Subscription) -> None:
        """Leave out what was published before the subscription, though it is committed later."""
        for partition in self._unserved:
            if selects(subscription.pattern, partition.name):
                partition.since[subscription] = partition.end
        for live in self.order.waiting_live(subscription.pattern):
            live.since[subscription] = live.end

    async def hint(self, pattern: bytes) -> str | None:
        """Return a warning for a reader whose pattern names a topic, and misses a part of it."""
        topic = self._host.topics.get(pattern) if is_literal(pattern) else None
        if topic is None or topic.is_internal:
            return None
        for partition in topic.partitions[:_HINT_PARTITIONS]:
            for offset in {partition.start, partition.served - 1} if partition.start < partition.served else ():
                below = await _subject_below(partition, offset)
                if below is not None:
                    name = pattern.decode()
                    return (
                        f"{name!r} reads only messages with the subject {name}; the topic {name} also holds subjects "
                        f"below it, such as {below.decode()}: to read all of it, name the topic (--topic {name}, "
                        f"topic={name!r})"
                    )
        return None

    def positions(self, subscription: Subscription) -> list[tuple[int, int, int]]:
        """Return topic, partition and offset of what comes next, for each partition."""
        found = []
        for partition in self._host.topics.matching(subscription.pattern):
            cursor = subscription.behind.get(partition)
            begin = partition.since.get(subscription, partition.served) if cursor is None else cursor.offset
            found.append((partition.topic_id, partition.number, begin))
        return found

    # End.

    def unsubscribe(self, subscription: Subscription, member: Member) -> None:
        """End a member at once: it gets nothing more."""
        self._members.remove(member)
        subscription.leave(member)
        if not subscription.members:
            self._withdraw(subscription)
        else:
            subscription.wake()

    def finish(
        self, subscription: Subscription, member: Member, done: Callable[[], None], *, after: int | None = None
    ) -> None:
        """End a member when it has received what was published before; with `after`, when it also has received that
        many messages in total.

        `done` is called when it has the former, or is unsubscribed. Other members of a queue group take over at once.
        """
        if len(subscription.members) > 1:
            self._end(subscription, member, after, done)
            return
        if after is None and self._shares_queue(subscription):
            for partition in self._on_the_way(subscription):
                subscription.fall_behind(partition, partition.served)
        ends = self._ends(subscription)
        if after is None:
            self._withdraw(subscription)
            self._leaving[subscription] = None
            self._left.add(subscription.pattern, subscription)
        end = partial(self._end, subscription, member, after, done)
        subscription.stop_at(member, ends, end, after=after)

    def _shares_queue(self, subscription: Subscription) -> bool:
        """Whether there are others with its queue name."""
        return subscription.queue is not None and len(self._queues.get(subscription.queue.name, ())) > 1

    def _end(self, subscription: Subscription, member: Member, after: int | None, done: Callable[[], None]) -> None:
        if subscription in self._leaving:
            del self._leaving[subscription]
            self._left.remove(subscription.pattern, subscription)
        if member in subscription.members:
            if after is None or after <= member.delivered:
                self.unsubscribe(subscription, member)
            else:
                member.remaining = after - member.delivered
        if subscription.members:
            subscription.go_on(member)
        done()

    def _ends(self, subscription: Subscription) -> dict[Waiting, int]:
        """Return the end of each place that may hold undelivered messages for a subscription."""
        places: list[Waiting] = [*subscription.behind, *self._on_the_way(subscription)]
        return {place: place.end for place in [*places, *self.order.waiting_live(subscription.pattern)]}

    def _on_the_way(self, subscription: Subscription) -> list[Partition]:
        """Return the partitions with messages that are not served yet and may be for a subscription."""
        return [
            partition
            for partition in self._unserved
            if not is_reserved(partition.name)
            and max(partition.served, partition.since.get(subscription, 0)) < partition.end
            and selects(subscription.pattern, partition.name)
        ]

    def _withdraw(self, subscription: Subscription) -> None:
        """Give it nothing that is published from now on."""
        if subscription not in self._all:
            return
        del self._all[subscription]
        self._index(subscription.pattern).remove(subscription.pattern, subscription)
        if subscription.queue is not None:
            self._leave_queue(subscription, subscription.queue)

    def _leave_queue(self, subscription: Subscription, queue: Queue) -> None:
        """Let others with its queue name take over what they match, from where the places are served."""
        others = self._queues[queue.name]
        del others[subscription.pattern]
        if not others:
            del self._queues[queue.name]
        heirs = []
        places: list[Waiting] = [*subscription.behind, *self.order.waiting_live(subscription.pattern)]
        for other in others.values():
            assert other.queue is not None, "it is in a queue"
            is_older = other.queue.number < queue.number
            begins = {place: 0 if is_older else max(place.served, place.since.get(other, 0)) for place in places}
            heirs.append((other.pattern, begins))
            if other.behind:
                other.queue.take(subscription.pattern, {partition: partition.served for partition in other.behind})
        queue.leave(heirs)

    def _index(self, pattern: bytes) -> Interest[Subscription]:
        return self._audit if pattern.startswith(AUDIT_SUBJECT) else self.interest

    # Deliver.

    def deliver_audit(self, target: Target, fresh: Batch | Run) -> None:
        """As `deliver`, for the audit trail."""
        self.deliver(target, fresh, self._audit.match)

    def deliver(
        self, target: Target, fresh: Batch | Run, match: Callable[[bytes], tuple[Subscription, ...]] | None = None
    ) -> None:
        """Hand out what was committed. Everything committed comes here once. A batch is opened only if a subscription
        may want it. `match` finds the readers of a subject, if not in the usual index."""
        if isinstance(fresh, Run):
            run = fresh
        elif fresh.has("subject") or self._match(target.name):
            run = open_batch(fresh, target.name)
        else:
            return
        if run.ttls:
            run, expired = run.split_expired(self._host.clock.now_us())
            self._host.figures.expired += len(expired)
            if not run.values:
                return
        wanted: dict[Subscription, Sequence[int]] = {}
        if match is None:
            match = self._match if self._leaving else self.interest.match
        subject = run.subject
        if subject is not None:
            wanted = dict.fromkeys(match(subject), range(len(run)))
        else:
            found: dict[Subscription, list[int]] = {}
            for index, each in enumerate(run.subjects):
                for subscription in match(each):
                    if subscription in found:
                        found[subscription].append(index)
                    else:
                        found[subscription] = [index]
            wanted.update(found)
        was_sent = False
        for subscription, indices in _in_turn(wanted) if len(wanted) > 1 and len(run) > 1 else wanted.items():
            part = run if len(indices) == len(run) else run.select(indices)
            was_sent |= self._hand_over(subscription, target, part)
        if was_sent:
            self._host.figures.delivered(run)

    def pass_over(self, partition: Partition) -> None:
        """Let every subscription read a partition itself from `served` on: what comes next is too large to be handed
        out, or not in memory."""
        for subscription in chain(self._all, self._leaving):
            if selects(subscription.pattern, partition.name) and partition not in subscription.behind:
                subscription.fall_behind(partition, partition.served)
                subscription.wake()

    def is_served(self, subject: bytes, besides: Sink | None = None) -> bool:
        """Return whether a subscription other than those of the connection `besides` gets this subject now."""
        return any(member.sink is not besides for reader in self.interest.match(subject) for member in reader.members)

    def _hand_over(self, subscription: Subscription, target: Target, run: Run) -> bool:
        """Deliver to one subscription. An unexpected exception ends only this subscription."""
        try:
            return subscription.deliver(target, run)
        except Exception as fault:  # noqa: BLE001 - supervises one reader
            subscription.fail(fault)
            return False

    def _match(self, subject: bytes) -> tuple[Subscription, ...]:
        """Return the subscriptions that get this subject, including those that are leaving."""
        return self.interest.match(subject) + self._left.match(subject)

    def _find_sinks(self, subjects: Iterable[bytes]) -> set[Sink]:
        """Return the connections that get what is published under these subjects."""
        readers = {reader for subject in subjects for reader in self._match(subject)}
        return {member.sink for reader in readers for member in reader.members}


async def _subject_below(partition: Partition, offset: int) -> bytes | None:
    """Return a subject below the topic's name that is stored near an offset."""
    with suppress(PenstockError):
        for batch in await partition.cursor(offset).read_batches(1):
            if batch.has("subject") and not is_large(batch):
                return next((each for each in batch.columns().distinct("subject") if each != partition.name), None)
    return None


def _in_turn(wanted: dict[Subscription, Sequence[int]]) -> Iterator[tuple[Subscription, Sequence[int]]]:
    """Yield which messages of a run each subscription gets. A connection with several subscriptions gets one message
    after the other, until it takes no more: a flood for hundreds of subscriptions costs no more steps than messages are
    sent."""
    counts = Counter(member.sink for subscription in wanted for member in subscription.members)
    several: dict[Subscription, Sequence[int]] = {}
    for subscription, indices in wanted.items():
        if any(counts[member.sink] > 1 for member in subscription.members):
            several[subscription] = indices
        else:
            yield subscription, indices
    end = 0
    while several:
        end += _IN_TURN
        steps: list[tuple[int, Subscription]] = []
        for subscription, indices in list(several.items()):
            if subscription.behind or not any(member.sink.is_open for member in subscription.members):
                yield subscription, several.pop(subscription)
                continue
            upto = bisect_left(indices, end)
            steps += [(index, subscription) for index in indices[:upto]]
            several[subscription] = indices[upto:]
            if upto == len(indices):
                del several[subscription]
        steps.sort(key=itemgetter(0))
        for subscription, chosen in groupby(steps, itemgetter(1)):
            yield subscription, [index for index, _ in chosen]
