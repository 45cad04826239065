"""`penstock context`, and how a command finds its broker."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Done, Penstock
from tests.support.server import Serve

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("server"), auth_user="ann", auth_password="s3cret") as serve:
        yield serve


def penstock(home: Path, **environment: str) -> Penstock:
    made = Penstock("", XDG_CONFIG_HOME=str(home), **environment)
    if "PENSTOCK_SERVERS" not in environment:
        del made.environment["PENSTOCK_SERVERS"]
    return made


def test_a_context_has_the_address_and_the_credentials(tmp_path: Path, server: Serve) -> None:
    cli = penstock(tmp_path)
    url = f"nats://127.0.0.1:{server.port}"
    assert cli("context", "add", "here", url, "--user", "ann", "--password", "s3cret").out.endswith(", current\n")
    assert cli("context", "add", "there", f"nats://ann:s3cret@{NOBODY}").code == 0

    assert cli("topic", "list").code == 0
    assert cli("topic", "list", "--context", "there").err.startswith(f"error: no broker at {NOBODY}: ")
    assert penstock(tmp_path, PENSTOCK_CONTEXT="there")("topic", "list").code == 1
    assert cli("context", "use", "there").out == "current context: there\n"
    assert cli("topic", "list").code == 1
    assert cli("context", "remove", "there").code == 0
    assert [each["name"] for each in cli("context", "list", "--json").json["contexts"]] == ["here"]
    unknown = cli("topic", "list", "--context", "there")
    assert unknown == Done(1, "", "error: unknown context 'there' (known: here): add it with `penstock context add`\n")


def test_secrets_are_not_shown_and_nobody_else_can_read_them(tmp_path: Path) -> None:
    cli = penstock(tmp_path)
    done = [
        cli("context", "add", "a", "nats://ann:s3cret@broker:4222"),
        cli("context", "add", "b", "broker", "--token", "s3cret"),
        cli("context", "list"),
        cli("context", "list", "--json"),
    ]
    assert all(each.code == 0 and "s3cret" not in each.out + each.err for each in done)
    assert ["*", "a", "broker:4222", "user", "ann"] in done[2].rows
    assert ["b", "broker:4222", "token"] in done[2].rows
    path = tmp_path / "penstock" / "contexts.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_address_goes_before_a_context_and_the_command_line_before_the_environment(
    tmp_path: Path, server: Serve
) -> None:
    cli = penstock(tmp_path)
    cli("context", "add", "here", f"nats://ann:s3cret@127.0.0.1:{server.port}")

    # The credentials of a context do not go elsewhere.
    refused = cli("topic", "list", "--servers", f"127.0.0.1:{server.port}")
    assert (refused.code, "give --user and --password" in refused.err) == (1, True)
    assert penstock(tmp_path, PENSTOCK_SERVERS=NOBODY)("topic", "list").code == 1
    assert penstock(tmp_path, PENSTOCK_SERVERS=NOBODY)("topic", "list", "--context", "here").code == 0
    assert penstock(tmp_path, PENSTOCK_CONTEXT="here")("topic", "list", "--servers", NOBODY).code == 1
    both = cli("topic", "list", "--servers", NOBODY, "--context", "here")
    assert (both.code, "give --context or --servers, not both" in both.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "a b", "broker"), "invalid name 'a b'"),
        (("add", "a", "broker:x"), "invalid address 'broker:x'"),
        (("use", "none"), "unknown context 'none'"),
        (("remove", "none"), "unknown context 'none'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = penstock(tmp_path)("context", *arguments)
    assert done.code != 0
    assert reason in done.err


def test_a_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "contexts.json").write_text("[")
    done = penstock(tmp_path)("topic", "list")
    assert (done.code, "contexts.json is not a valid file of contexts" in done.err) == (1, True)
