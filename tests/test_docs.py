"""What the documents tell people to type works, and what they point at is there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.batch import encode
from penstock.storage.store import Store
from tests.server import Raw, Serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in lines if line.startswith("$ ")]


def run(directory: Path, *arguments: str) -> str:
    environment = os.environ | {"TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What each Python snippet prints, in their order.
PRINTED = [
    "orders.eu first\norders.us second\n",
    "42\n",
    "0 b'a' b'first'\n1 None b'second'\n",
]


@pytest.mark.parametrize(("code", "printed"), list(zip(blocks("python"), PRINTED, strict=True)))
def test_every_snippet_runs(code: str, printed: str, tmp_path: Path) -> None:
    with Serve(tmp_path / "server") as server:
        assert run(tmp_path, "-c", code.replace("127.0.0.1:4222", f"127.0.0.1:{server.port}")) == printed


def test_the_session_by_hand_goes_as_it_is_shown(tmp_path: Path) -> None:
    [shown] = [block.splitlines() for block in blocks("text") if block.startswith("SUB")]
    # What is typed, and how many lines come back.
    typed = {"SUB orders.> 1 workers": 1, "PUB orders.eu 5\r\nhello": 3, "ACK 562949953421312": 1, "REPLAY FIRST 10": 3}
    with Serve(tmp_path) as server, Raw(server.ports["quiet"]) as peer:
        session = []
        for command, lines in typed.items():
            session += [*command.splitlines(), peer.ask(command), *(peer.line() for _ in range(lines - 1))]
    assert session == shown


def test_the_settings_that_are_shown_are_settings(tmp_path: Path) -> None:
    [settings] = blocks("toml")
    (tmp_path / "penstock.toml").write_text(settings)
    shown = json.loads(run(tmp_path, "-m", "penstock", "config", "--config", "penstock.toml", "--json"))
    assert shown["topics.clicks.partitions"]["value"] == 4


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("penstock serve")])
def test_every_server_that_is_started_gets_ready(command: str, tmp_path: Path) -> None:
    flags = shlex.split(command)[2:]
    with Serve(tmp_path, flags=flags) as server:
        assert "ready" in server.ready


@pytest.mark.parametrize(
    "command",
    [command for command in commands() if command.startswith("penstock ") and not command.startswith("penstock serve")],
)
def test_every_command_runs(command: str, tmp_path: Path) -> None:
    with Store(tmp_path / "data") as store:
        log = store.log(store.create_topic("orders").id)
        log.append(encode([b"%d" % number for number in range(200)], timestamp=0))
    assert run(tmp_path, "-m", *shlex.split(command))


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(document.read_text() for document in DOCUMENTS)
    targets = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", text, re.MULTILINE))
    assert {"demo", "test", "bench", "soak", "lock"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_is_there(document: Path) -> None:
    for name in re.findall(r"`((?:src|tests|bench)/[\w./]+)`", document.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w./]+)\)", document.read_text()):
        assert (ROOT / name).exists(), name


def test_the_architecture_knows_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in (ROOT / "src" / "penstock").glob("**/*.py"):
        room = path.relative_to(ROOT / "src" / "penstock")
        if path.stem.startswith("__") or room.parts[0] in ("cli", "testing"):
            continue
        assert path.name in text, f"{room} is not in ARCHITECTURE.md"
