from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import BadConfig, BadRequest
from penstock.security import users_file
from penstock.security.permissions import Action
from penstock.security.users_edit import UsersEditor, written
from tests.support.users import hashed, write_users

EXPECTED = """\
17: roles.r is 1: it must be a table
7: users.ann.colour is unknown: there are password, roles, tokens, nkeys, certificates, enabled, expires, publish, \
subscribe, groups, topics, dead_letters, transactions, allow_responses, admin, metrics, pipes, quotas
5: users.ann.roles is 'missing': it must be a role: there are none
3: users.ann.publish is 'orders': it must be a list of patterns, or a table of allow and deny
4: users.ann.subscribe.allow.0 is 'a..b': it must be a pattern of subjects, such as orders.*, orders.> or >
6: users.ann.admin is 'yes': it must be true or false
2: users.ann.password: its value is not an Argon2id hash: `penstock user passwd` makes one
9: users.ann.nkeys: its value is not an NKEY: it has 56 characters in base32, with a checksum
8: users.ann.expires is datetime.date(2030, 1, 1): it must be a time with its zone, such as 2030-01-31T12:00:00Z
11: users.bob.groups is ['x']: it must be a table of join, reset, delete
12: users.bob.topics.rename is unknown: there are create, alter, delete, purge
13: users.bob.quotas.speed is unknown: there are connections, subscriptions, messages_in_s, \
bytes_in_s, messages_out_s, bytes_out_s
13: users.bob.quotas.connections is 0: it must be a positive integer
14: users.bob.tokens.0 has no valid id and hash: `penstock user token` makes them
15: the name of a user is 'b d': it must be a name of up to 128 letters, digits and _ . @ -
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    path = write_users(tmp_path / "users.toml", text)
    with pytest.raises(BadConfig) as caught:
        users_file.parse(path, users_file.read_bytes(path))
    return [problem.removeprefix(f"{path}:") for problem in caught.value.problems]


def test_roles_and_own_permissions_add_up(tmp_path: Path) -> None:
    path = write_users(
        tmp_path / "users.toml",
        """
        [roles.reader]
        subscribe = { allow = ["a.>"], deny = ["a.secret"] }
        quotas = { connections = 5, bytes_in_s = "1MiB" }
        [roles.writer]
        publish = ["b"]
        quotas = { connections = 3 }
        [users.ann]
        roles = ["reader", "writer"]
        subscribe = ["c"]
        quotas = { bytes_in_s = "2MiB" }
        """,
    )
    ann = users_file.parse(path, users_file.read_bytes(path)).get("ann")
    assert ann is not None
    assert ann.permissions.allows(Action.SUBSCRIBE, b"a.x")
    assert ann.permissions.allows(Action.SUBSCRIBE, b"c")
    assert ann.permissions.allows(Action.PUBLISH, b"b")
    assert not ann.permissions.allows(Action.SUBSCRIBE, b"a.secret")
    assert (ann.quotas.connections, ann.quotas.bytes_in_s) == (3, 2 << 20)
    # Whoever may not read a subject may not read its dead letters.
    assert ann.permissions.rule(Action.SUBSCRIBE).deny == (b"a.secret", b"DLQ.a.secret")


def test_every_problem_is_told_with_its_line(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """[users.ann]
password = "plain text"
publish = "orders"
subscribe = ["a..b"]
roles = ["missing"]
admin = "yes"
colour = 1
expires = 2030-01-01
nkeys = ["UABC"]
[users.bob]
groups = ["x"]
topics = { create = [">"], rename = ["x"] }
quotas = { connections = 0, speed = 1 }
tokens = [{ id = "x" }]
["users"."b d"]
[roles]
r = 1
""",
    )
    assert found == EXPECTED.splitlines()


def test_a_credential_belongs_to_one_user(tmp_path: Path) -> None:
    found = problems(tmp_path, '[users]\nann = { certificates = ["CN=x"] }\nbob = { certificates = ["CN=x"] }\n')
    assert found == ["3: users.bob.certificates is 'CN=x': it must be of one user, and ann has it too"]


def test_others_must_not_read_it(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.toml", "")
    path.chmod(0o640)
    with pytest.raises(BadConfig, match=r"has the mode 0640: others can read it, run chmod 600"):
        users_file.read_bytes(path)


def test_a_password_is_never_told(tmp_path: Path) -> None:
    found = "\n".join(problems(tmp_path, '[users.ann]\npassword = "tell nobody"\n'))
    assert "tell nobody" not in found


def test_edits_keep_what_they_do_not_change(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    editor = UsersEditor(path)
    editor.add("ann", "secret", {"publish": {"allow": ["a.>"], "deny": ['a."q".x']}, "groups": {"join": ["g*"]}})
    editor.add("b@example.org", None, {"admin": True})
    before = users_file.parse(path, users_file.read_bytes(path))
    text, number = editor.add_token("ann", about="ci", ttl_s=3600)
    editor.set_password("b@example.org", "other")
    editor.enable("ann", is_enabled=False)
    editor.enable("ann", is_enabled=True)
    editor.revoke_tokens("ann", number)

    after = users_file.parse(path, users_file.read_bytes(path))
    ann, bob = before.get("ann"), after.get("b@example.org")
    assert after.get("ann") == ann
    assert bob is not None
    assert bob.permissions.is_admin
    assert bob.password_hash is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert text not in path.read_text()


def test_an_invalid_edit_changes_nothing(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.toml", "[users.ann]\n")
    before = path.read_text()
    editor = UsersEditor(path)
    with pytest.raises(BadConfig):
        editor.change("ann", {"publish": ["a..b"]})
    with pytest.raises(BadRequest, match="there is no user bob"):
        editor.remove("bob")
    with pytest.raises(BadRequest, match="there is a user ann already"):
        editor.add("ann", None, {})
    assert path.read_text() == before


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tables = {
        "roles": {"r": {}},
        "users": {"ann": {"password": hashed(), "tokens": [], "quotas": {"connections": 3}}},
    }
    path = write_users(tmp_path / "users.toml", written(tables))
    assert [user.name for user in users_file.parse(path, path.read_bytes())] == ["ann"]
