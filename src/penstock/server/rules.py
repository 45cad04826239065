"""Who may make which call: a rule for each, in the table of `calls.py`. Each raises PermissionDenied.

What a client may not know of is refused alike whether or not it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.pipeline_reports import PipelineReport
from penstock.security.identity import Identity, authorize, authorize_all, authorize_group
from penstock.security.permissions import Action
from penstock.server import requests

Rule = Callable[[Broker, Any, Identity], None]


def anyone(_broker: Broker, _asked: object, _identity: Identity) -> None:
    """For lists, which show only what the client may know of."""


def switch(action: Action) -> Rule:
    def rule(_broker: Broker, _asked: object, identity: Identity) -> None:
        authorize(identity, action)

    return rule


def topic(action: Action) -> Rule:
    def rule(_broker: Broker, asked: Any, identity: Identity) -> None:
        authorize(identity, action, asked.name.encode())

    return rule


group = topic


def pattern(action: Action) -> Rule:
    def rule(_broker: Broker, asked: Any, identity: Identity) -> None:
        authorize_all(identity, asked.pattern.encode(), action)

    return rule


read_pattern = pattern(Action.SUBSCRIBE)


def resolve(broker: Broker, asked: requests.Resolve, identity: Identity) -> None:
    """A subject without a topic gets one, if the client may publish there."""
    subject = asked.subject.encode()
    owner = broker.topics.owner(subject)
    if not identity.may_publish(subject) and (owner is None or not identity.shows_topic(owner.name)):
        raise identity.refuse(Action.PUBLISH, subject)


def shown_topic(_broker: Broker, asked: Any, identity: Identity) -> None:
    name = asked.name.encode()
    if not identity.shows_topic(name):
        raise identity.refuse(Action.SUBSCRIBE, name)


def shown_places(broker: Broker, asked: requests.Wait, identity: Identity) -> None:
    for topic_id, _, _ in asked.positions:
        broker.topics.public(topic_id, identity)


def shown_group(broker: Broker, asked: requests.Named, identity: Identity) -> None:
    name = asked.name.encode()
    if not identity.shows_group(name, _read_by(broker, name)):
        raise identity.refuse(Action.GROUP_JOIN, name)


def reset_group(broker: Broker, asked: requests.ResetGroup, identity: Identity) -> None:
    name = asked.name.encode()
    authorize_group(identity, Action.GROUP_RESET, name, _read_by(broker, name))


def create_group(_broker: Broker, asked: requests.CreateGroup, identity: Identity) -> None:
    authorize(identity, Action.GROUP_JOIN, asked.name.encode())
    authorize_all(identity, asked.selection)


def commit(broker: Broker, asked: requests.Commit, identity: Identity) -> None:
    name = asked.group.encode()
    authorize_group(identity, Action.GROUP_JOIN, name, _read_by(broker, name))


def _read_by(broker: Broker, group: bytes) -> bytes | None:
    found = broker.groups.get(group)
    return None if found is None else found.pattern


def transaction(_broker: Broker, asked: Any, identity: Identity) -> None:
    authorize(identity, Action.TRANSACTIONS, asked.name.encode())


def pipeline(_broker: Broker, asked: PipelineReport, identity: Identity) -> None:
    """A pipeline reports under its name, which is that of its group."""
    authorize(identity, Action.GROUP_JOIN, asked.name.encode())


def resource(asked: Any) -> str:
    """Return what a call is about, for the audit trail."""
    return str(getattr(asked, "name", getattr(asked, "pattern", "")))
