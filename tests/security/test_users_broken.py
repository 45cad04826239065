"""Mistakes in the file of users, in the paths that name it, and in what is asked about users."""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadConfig, BadRequest
from penstock.security import users_file
from penstock.security.users_edit import UsersEditor
from tests.support import forks
from tests.support.frames import Frames
from tests.support.process import PATIENCE_S
from tests.support.server import Serve, clean_environment
from tests.support.users import PASSWORD, Nkey, write_users
from tests.support.web import ask, basic

USERS = '[users]\nroot = { password = "{password}", admin = true }\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_users(tmp_path / "users.toml", USERS)


@pytest.fixture
def server(tmp_path: Path, path: Path) -> Iterator[Serve]:
    with Serve(tmp_path / "serve", auth_users=path) as found:
        yield found


def root(server: Serve) -> Frames:
    return Frames(server, user="root", password=PASSWORD)


def wait_for(server: Serve, text: str) -> None:
    ends = time.monotonic() + PATIENCE_S
    while text not in server.stderr:
        assert time.monotonic() < ends, server.stderr
        time.sleep(0.01)


def penstock(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    return forks.run(
        ["user", *map(str, arguments)], environment=clean_environment(), stdin=b"secret\n", timeout=PATIENCE_S
    )


# No users.


@pytest.mark.parametrize("text", ["", "[roles.reader]\n", "[users]\n"])
def test_a_file_without_users_keeps_those_that_there_were(server: Serve, path: Path, text: str) -> None:
    path.write_text(text)
    wait_for(server, "stay as they were")
    assert f"{path} has no users" in server.stderr
    assert f"{path} is invalid: the 1 users stay as they were" in server.stderr
    told = ask(server, "GET", "/admin/users", headers=basic("root", PASSWORD)).json
    assert [user["name"] for user in told["users"]] == ["root"]
    assert told["problems"][0].startswith(f"{path} has no users")


def test_a_start_without_users_is_warned_of_and_the_first_one_is_taken(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.toml", "")
    with Serve(tmp_path / "serve", auth_users=path) as server:
        assert f"{path} has no users: nobody can log in" in server.stderr
        path.write_text(write_users(tmp_path / "more.toml", USERS).read_text())
        wait_for(server, "1 users")
        with root(server) as administrator:
            assert administrator.call("topics") is not None


def test_the_last_user_is_not_removed(path: Path) -> None:
    editor = UsersEditor(path)
    with pytest.raises(BadRequest, match="root is the last user: disable it, or add another one first"):
        editor.remove("root")
    editor.add("ann", None, {})
    editor.remove("root")
    assert [user.name for user in users_file.parse(path, path.read_bytes())] == ["ann"]


# Paths.


def test_a_link_to_the_file_stays_one(tmp_path: Path, path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "users.toml"
    link.symlink_to("../users.toml")
    UsersEditor(link).add("ann", None, {})
    assert link.is_symlink()
    assert "ann" in path.read_text()
    # Both have one lock.
    assert os.listdir(link.parent) == ["users.toml"]


def test_a_link_to_no_file_yet_gets_one(tmp_path: Path) -> None:
    link = tmp_path / "users.toml"
    link.symlink_to("real.toml")
    UsersEditor(link).add("ann", None, {})
    assert link.is_symlink()
    assert (tmp_path / "real.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("command", ["add", "passwd", "disable", "token", "list"])
@pytest.mark.parametrize("kind", ["FIFO", "directory"])
def test_what_is_not_a_regular_file_is_refused(tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / "users.toml"
    if kind == "FIFO":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    done = penstock(command, *(["ann"] if command != "list" else []), "--file", path)
    assert done.returncode == 1
    said = " is not a regular file" if kind == "FIFO" else ": Is a directory"
    assert done.stderr.decode() == f"error: {path}{said}\n"
    assert os.listdir(tmp_path) == ["users.toml"]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    done = penstock("add", "ann", "--file", tmp_path / "no" / "users.toml")
    assert done.returncode == 1
    assert done.stderr.decode() == f"error: {tmp_path / 'no'} is not a directory: create it for users.toml\n"


@pytest.mark.parametrize("command", ["passwd", "disable", "enable", "remove", "token", "revoke", "list"])
def test_a_missing_file_is_told_and_leaves_no_lock(tmp_path: Path, command: str) -> None:
    path = tmp_path / "users.toml"
    done = penstock(command, *(["ann"] if command != "list" else []), "--file", path)
    assert done.returncode == 1
    assert f"error: {path} does not exist: create it" in done.stderr.decode()
    assert os.listdir(tmp_path) == []


# Secrets.

SEED = "S" + base64.b32encode(b"not for others to see in any log").decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        f'[users.ann]\nnkeys = ["{SEED}"]\n',
        f'[users.ann]\nnkeys = "{SEED}"\n',
        f'[users.ann]\nnkeys = ["{SEED}", 1]\n',
        f'[users.ann]\nnkeys = ["{SEED.lower()}"]\n',
        f'[users.ann]\npassword = ["{SEED}"]\n',
        f'[users]\nann = "{SEED}"\n',
        f'[[users]]\nname = "ann"\npassword = "{SEED}"\n',
        f'users = "{SEED}"\n',
    ],
)
def test_no_problem_shows_a_credential(tmp_path: Path, text: str) -> None:
    path = write_users(tmp_path / "users.toml", text)
    with pytest.raises(BadConfig) as caught:
        users_file.parse(path, users_file.read_bytes(path))
    assert SEED[2:40].lower() not in "\n".join(caught.value.problems).lower()


def test_a_seed_is_told_from_a_public_key(path: Path) -> None:
    done = penstock("add", "ann", "--no-password", "--nkey", SEED, "--file", path)
    assert done.returncode == 1
    assert SEED not in done.stderr.decode()
    assert "is a seed, which must stay private: give the public key, which begins with U" in done.stderr.decode()
    assert penstock("add", "ann", "--no-password", "--nkey", Nkey().public, "--file", path).returncode == 0


# Requests.


def test_the_ttl_of_a_token_has_a_limit(server: Serve, path: Path) -> None:
    def http(ttl_s: int) -> Any:
        return ask(server, "POST", "/admin/users/root/tokens", {"ttl_s": ttl_s}, headers=basic("root", PASSWORD))

    answer = http(10**12)
    assert (answer.status, "ttl_s is 1000000000000: it must be" in answer.body.decode()) == (400, True)
    assert http(100 * 365 * 86_400).status == 201
    with root(server) as administrator:
        refused = administrator.refused("create_token", name="root", ttl_s=10**12)
        assert (refused["code"], "ttl_s is 1000000000000: it must be" in refused["text"]) == ("BAD_REQUEST", True)
        # The connection is still there.
        assert administrator.call("create_token", name="root", ttl_s=60)["token"]
    done = penstock("token", "root", "--ttl", "999999999999d", "--file", path)
    assert done.returncode == 1
    assert "error: ttl_s is 86399999999913600: it must be at most 3153600000, 100 years" in done.stderr.decode()


def test_a_change_of_no_user_is_refused_also_without_fields(server: Serve) -> None:
    answer = ask(server, "PATCH", "/admin/users/nope", {}, headers=basic("root", PASSWORD))
    assert (answer.status, "there is no user nope" in answer.body.decode()) == (400, True)
    with root(server) as administrator:
        assert administrator.refused("change_user", name="ghost")["text"] == "there is no user ghost"
    assert ask(server, "PATCH", "/admin/users/root", {}, headers=basic("root", PASSWORD)).json["name"] == "root"
