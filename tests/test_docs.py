"""What the documents tell people to type works, what they say of the code is so, and what they point at is there."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.errors import BadRequest, PenstockError
from penstock.server.calls import call
from penstock.server.config import load
from penstock.server.settings import SETTINGS
from penstock.wire.binary import Type, Verb
from tests.docs import DOCS, DOCUMENTS, PAGES, README, ROOT, blocks, parts, table, told
from tests.nats.python_client import CHECKS
from tests.nats.scenarios import SCENARIOS
from tests.support.certificates import Certificates
from tests.support.reader import Reader
from tests.support.server import Raw, Serve

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


# ---- what is typed


@each_page
def test_a_page_goes_as_it_is_shown(page: Path, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.follow(page.read_text(), page.name)


@each_page
def test_a_page_has_no_block_that_is_not_looked_at(page: Path) -> None:
    found = blocks(page.read_text())

    # `py` is a signature, which the code tells.
    assert {block.language for block in found} <= {"python", "console", "toml", "text", "py"}
    assert page.read_text().count("```") == 2 * len(found)


def test_the_session_by_hand_goes_as_it_is_shown(tmp_path: Path) -> None:
    found = blocks((DOCS / "protocols.md").read_text())
    [shown] = [block.text.splitlines() for block in found if block.text.startswith("SUB")]
    # What is typed, and how many lines come back.
    typed = {
        "SUB invoices.> 1 workers": 1,
        "PUB invoices.eu 5\r\nhello": 3,
        "ACK 562949953421312": 1,
        "REPLAY FIRST 10": 3,
    }
    with Serve(tmp_path) as server, Raw(server.ports["quiet"]) as peer:
        session = []
        for command, lines in typed.items():
            session += [*command.splitlines(), peer.ask(command), *(peer.line() for _ in range(lines - 1))]
    assert session == shown


# ---- what is said of the code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_what_the_code_tells_is_as_it_tells_it(document: Path) -> None:
    for name, text in parts(document.read_text()):
        assert text == told(name), "run `python -m tests.docs --write`"


def test_every_setting_can_be_set_as_its_page_says(certificates: Certificates) -> None:
    page = (DOCS / "configuration.md").read_text()
    sections = dict.fromkeys(name.partition(".")[0] for name in SETTINGS)
    rows = [row for section in sections for row in table(page, f"### {section}")]
    variables = {name: variable for name, *_, variable in rows}
    # What it says is the default; where that is none, something that is allowed.
    given = {variable: some(name) if default == "none" else default for name, default, *_, variable in rows}
    given |= of_certificates(certificates)
    # Whom to follow is said by one of these two.
    for other in ("pipe.parent", "registry.url"):
        known = [name for name in SETTINGS if name != other]

        loaded = load(path=None, environ={variables[name]: given[variables[name]] for name in known}, flags={})

        assert list(variables) == list(SETTINGS)
        assert loaded.origins == {name: f"environment {variables[name]}" for name in known} | {other: "default"}
        unlike = {name for name, value in loaded.shown().items() if value != SETTINGS[name].default}
        assert unlike == {name for name, default, *_ in rows if default == "none"} - {other}


def of_certificates(certificates: Certificates) -> dict[str, str]:
    """Settings that name files, and the one that needs them."""
    server, client = map(list, (map(str, certificates.server()), map(str, certificates.client())))
    names = {"TLS_CERT": server[0], "TLS_KEY": server[1], "PIPE_CERT": client[0], "PIPE_KEY": client[1]}
    cas = {"TLS_CLIENT_CA": str(certificates.ca), "PIPE_CA": str(certificates.ca)}
    return {
        f"PENSTOCK_{name}": value for name, value in {**names, **cas, "TLS_CLIENT_CERTIFICATES": "optional"}.items()
    }


def some(setting: str) -> str:
    """What may be set where nothing is by default."""
    known = SETTINGS[setting]
    if known.choices:
        return str(known.choices[0]).lower()
    return "http://127.0.0.1:1" if getattr(known.base, "pattern", None) else str(known.low or 1)


def test_the_names_of_other_brokers_are_known(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for alias, meant in table((DOCS / "configuration.md").read_text(), "## Names that other brokers use"):
        setting = re.findall(r"[a-z_]+\.[a-z_]+", meant)[0]
        is_switch = alias.endswith((".enabled", "_on_write"))
        path.write_text(json.dumps({alias: is_switch or SETTINGS[setting].default or some(setting)}))

        loaded = load(path=path, environ={}, flags={})

        assert loaded.origins[setting] == f"file {path}", alias


def test_the_variables_of_other_brokers_are_known() -> None:
    for alias, setting in table((DOCS / "configuration.md").read_text(), "### In the environment"):
        loaded = load(path=None, environ={alias: str(SETTINGS[setting].default or some(setting))}, flags={})

        assert loaded.origins[setting] == f"environment {alias}"


def test_every_error_is_told_with_its_code() -> None:
    page = (DOCS / "errors.md").read_text()
    for branch in PenstockError.__subclasses__():
        leaves = branch.__subclasses__() or [branch]

        listed = {name: code for name, code, *_ in table(page, f"## {branch.__name__}")}

        assert listed == {leaf.__name__: leaf.code for leaf in leaves}


def test_every_frame_is_told_with_its_code() -> None:
    page = (DOCS / "protocols.md").read_text()

    assert {name: int(code, 16) for code, name, *_ in table(page, "## Frames")} == {
        kind.name: kind.value for kind in Type
    }
    [verbs] = re.findall(r"\*\*Verbs\*\* of `SETTLE`: (.*?)\(", page)
    assert [(int(number), name.upper()) for number, name in re.findall(r"(\d) (\w+)", verbs)] == [
        (verb.value, verb.name) for verb in Verb
    ]


def test_every_call_is_told() -> None:
    # Who asks for something else is told what there is.
    with pytest.raises(BadRequest) as refused:
        asyncio.run(call(cast(Any, None), {"call": "?"}, None))

    _, _, known = str(refused.value).partition("there are ")
    assert [row[0] for row in table((DOCS / "protocols.md").read_text(), "### Calls")] == known.split(", ")


# ---- what is pointed at


def test_every_make_target_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(document.read_text() for document in DOCUMENTS)
    targets = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", text, re.MULTILINE))
    assert {"demo", "test", "bench", "soak", "lock"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_file_that_is_named_is_there(document: Path) -> None:
    for name in re.findall(r"`((?:src|tests|bench|docs)/[\w./-]+)`", document.read_text()):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w./-]+)\)", document.read_text()):
        assert (document.parent / name).exists(), name


@pytest.mark.parametrize("start", [README, DOCS / "index.md"], ids=lambda path: path.stem)
def test_every_page_is_linked(start: Path) -> None:
    linked = {(start.parent / name).resolve() for name in re.findall(r"\]\(([\w./-]+)\)", start.read_text())}
    assert {page.resolve() for page in PAGES} - linked <= {start.resolve(), (DOCS / "index.md").resolve()}


def test_the_nats_page_names_tests_that_are_there() -> None:
    # How each client's file of checks names one.
    clients = {"nats.js": ("mjs", "\n  {}: "), "libnats": ("c", "CHECK({})"), "nats.go": ("go", '"{}": func')}
    rows = [
        line for line in (DOCS / "nats.md").read_text().splitlines() if line.startswith("| ") and "| test |" not in line
    ]
    for row in rows:
        named = re.findall("`([^`]+)`", row.rpartition("|")[0].rpartition("|")[2])
        assert named or row.endswith(" scenarios |"), f"no test: {row}"
        for name in named:
            client, _, check = name.partition(" ")
            path, _, function = name.partition("::")
            if function:
                assert f"def {function}(" in (ROOT / path).read_text(), name
            elif client == "nats-py":
                assert check in CHECKS, name
            elif client in clients:
                suffix, form = clients[client]
                assert form.format(check) in (ROOT / f"tests/nats/checks.{suffix}").read_text(), name
            else:
                assert name in SCENARIOS, name
    assert len(rows) > 30


def test_the_spark_page_has_every_option_and_column() -> None:
    from penstock.spark import archive_sink, options, row, sink

    text = (DOCS / "spark.md").read_text()
    told = set(re.findall(r"`([\w.]+)`", "\n".join(line for line in text.splitlines() if line.startswith("|"))))
    assert {*options.READ, *sink.OPTIONS, *archive_sink.BATCH} <= told
    assert {*row.COLUMNS, *row.HEADERS} <= told
