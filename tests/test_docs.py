"""What the documents tell people to type works, and what they point at is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.batch import encode
from penstock.storage.store import Store

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


@pytest.mark.parametrize("code", blocks("python"))
def test_every_snippet_runs(code: str, tmp_path: Path) -> None:
    assert run(tmp_path, "-c", code) == "0 b'a' b'first'\n1 None b'second'\n"


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("penstock ")])
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
