"""The calls that show and change the users. Each changes the file of users, which the server then reads again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from penstock.broker.broker import Broker
from penstock.errors import BadConfig, BadRequest
from penstock.schema import Form, Text, about
from penstock.security.permissions import Permissions, Rule
from penstock.security.quotas import NAMES
from penstock.security.users import User
from penstock.security.users_edit import TOKEN_TTL_MAX_S, UsersEditor
from penstock.server import requests

Json = dict[str, Any]
T = TypeVar("T")

Fields = Annotated[
    dict[str, Any],
    Form(json_type=dict[str, Any]),
    about("as in the file of users: roles, publish, subscribe, groups, topics, quotas, …; null removes one"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeUser:
    name: Annotated[Text, about("the name of the user")]
    password: Annotated[Text | None, about("a new password")] = None
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateToken:
    name: Annotated[Text, about("the name of the user")]
    about: Annotated[str, about("what it is for")] = ""
    ttl_s: Annotated[
        Annotated[int, Meta(ge=1, le=TOKEN_TTL_MAX_S)] | None,
        about("how long it is valid; for ever, if it is not given"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeToken:
    name: Annotated[Text, about("the name of the user")]
    id: Annotated[Text | None, about("the ID of the token; all, if it is not given")] = None


async def users(broker: Broker, asked: requests.Page) -> Json:
    security = broker.security
    rows = sorted(security.users, key=lambda user: user.name)
    page = rows[asked.rows]
    return {
        "users": [_describe(broker, user) for user in page],
        "total": len(rows),
        "roles": list(security.users.roles),
        "problems": list(security.problems),
    }


async def add_user(broker: Broker, asked: ChangeUser) -> Json:
    await _change(broker, lambda editor: editor.add(asked.name, asked.password, asked.fields))
    return _found(broker, asked.name)


async def change_user(broker: Broker, asked: ChangeUser) -> Json:
    def change(editor: UsersEditor) -> None:
        if asked.password is not None:
            editor.set_password(asked.name, asked.password)
        # Without anything to change, it still tells that there is no such user.
        if asked.fields or asked.password is None:
            editor.change(asked.name, asked.fields)

    await _change(broker, change)
    return _found(broker, asked.name)


async def remove_user(broker: Broker, asked: requests.Named) -> Json:
    await _change(broker, lambda editor: editor.remove(asked.name))
    return {}


async def create_token(broker: Broker, asked: CreateToken) -> Json:
    text, number = await _change(
        broker, lambda editor: editor.add_token(asked.name, about=asked.about, ttl_s=asked.ttl_s)
    )
    return {"token": text, "id": number}


async def revoke_token(broker: Broker, asked: RevokeToken) -> Json:
    return {"revoked": await _change(broker, lambda editor: editor.revoke_tokens(asked.name, asked.id))}


async def _change(broker: Broker, change: Callable[[UsersEditor], T]) -> T:
    """Change the file in a thread: a password is hashed, and the file synced."""
    editor = broker.security.editor()
    if editor is None:
        raise BadRequest("there is no file of users: set auth.users")
    try:
        found = await asyncio.to_thread(change, editor)
    except BadConfig as error:
        raise BadRequest("; ".join(error.problems)) from None
    broker.security.reload()
    return found


def _found(broker: Broker, name: str) -> Json:
    user = broker.security.users.get(name)
    return {} if user is None else _describe(broker, user)


def _describe(broker: Broker, user: User) -> Json:
    """Return a user without its secrets."""
    used = broker.security.usage_of(user)
    limits = {name: limit for name in NAMES if (limit := user.quotas.get(name)) is not None}
    return {
        "name": user.name,
        "enabled": user.is_enabled,
        "expires": user.expires,
        "roles": list(user.roles),
        "has_password": user.password_hash is not None,
        "tokens": [{"id": token.id, "about": token.about, "expires": token.expires} for token in user.tokens],
        "nkeys": list(user.nkeys),
        "certificates": list(user.certificates),
        "permissions": _permissions(user.permissions),
        "usage": used,
        "quotas": {name: {"used": used.get(name, 0), "limit": limit} for name, limit in limits.items()},
    }


def _permissions(permissions: Permissions) -> Json:
    def texts(rule: Rule) -> Json:
        return {
            name: [each.decode() for each in patterns]
            for name, patterns in (("allow", rule.allow), ("deny", rule.deny))
            if patterns
        }

    return {
        **{str(action): texts(rule) for action, rule in permissions.rules.items()},
        **{str(action): True for action in sorted(permissions.switches)},
    }
