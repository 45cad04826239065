"""The documents: what they are made of, and the parts of them that the code itself can tell.

Such a part stands between two comments, `<!-- from the code: settings -->` and `<!-- end -->`.
`python -m tests.docs --write` brings all of them up to date; a test says when that is needed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
from typer.testing import CliRunner

from penstock.app import App, Consumer, Retry
from penstock.cli import app
from penstock.client.admin import AsyncAdmin
from penstock.client.aio import AsyncClient
from penstock.client.blocking import Stage, Transaction
from penstock.client.channel import ChannelBroker, ChannelMessage, ChannelSubscriber
from penstock.client.message import Message
from penstock.client.qb import BrokerClient, BrokerMessage
from penstock.client.sync import Client, Producer, Subscription
from penstock.client.values import (
    DeadLetter,
    DelayedMessage,
    Group,
    GroupMember,
    GroupPosition,
    Outgoing,
    PartitionPosition,
    Receipt,
    Redriven,
    Refresh,
    RefreshedGroup,
    Topic,
)
from penstock.embedded import Broker
from penstock.pipelines.pipeline import TABLES
from penstock.schema import Field, declared
from penstock.server.config_names import NO_EFFECT
from penstock.server.settings import SETTINGS
from tests.nats.differences import CLIENT_DIFFERENCES, DIFFERENCES

ROOT: Final = Path(__file__).parent.parent
README: Final = ROOT / "README.md"
DOCS: Final = ROOT / "docs"
# Those that are followed from top to end.
PAGES: Final = [README, *sorted(DOCS.glob("*.md"))]
DOCUMENTS: Final = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PART: Final = re.compile(r"(<!-- from the code: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_WIDTH: Final = 100
_CLASSES: Final[tuple[type, ...]] = (
    Client,
    Subscription,
    Producer,
    Transaction,
    Stage,
    Message,
    Receipt,
    Outgoing,
    Topic,
    PartitionPosition,
    Group,
    GroupMember,
    GroupPosition,
    Refresh,
    RefreshedGroup,
    DeadLetter,
    Redriven,
    DelayedMessage,
    BrokerClient,
    BrokerMessage,
    ChannelBroker,
    ChannelSubscriber,
    ChannelMessage,
    Broker,
    App,
    Retry,
    Consumer,
)
# Those that are not made by calling them.
_MADE: Final = (Subscription, Producer, Transaction, Stage, Message, ChannelSubscriber, Retry, Consumer)
# Public, for other modules.
_NOT_FOR_USERS: Final = ("from_json", "dial", "delay_s")


class Block(NamedTuple):
    language: str
    text: str
    # Where it begins in its document.
    line: int
    # Whether it is text, and there is nothing between it and the block before.
    follows: bool


def blocks(document: str) -> list[Block]:
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(document):
        line = document.count("\n", 0, match.start()) + 1
        follows = match[1] == "text" and bool(found) and not document[end : match.start()].strip()
        found.append(Block(match[1], match[2], line, follows))
        end = match.end()
    return found


def table(document: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading; code is told without its backticks."""
    _, _, rest = document.partition(f"\n{heading}\n")
    found = re.search(r"(?:^\|.+\|\n)+", rest, re.MULTILINE)
    assert found, f"there is no table below {heading!r}"
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in found[0].splitlines()[2:]]


# ---- what the code can tell


def parts(document: str) -> list[tuple[str, str]]:
    """The name and the text of each part that the code tells."""
    return [(match[2], match[3]) for match in _PART.finditer(document)]


def told(name: str) -> str:
    return "\n" + "".join(f"{paragraph}\n\n" for paragraph in _PARTS[name]())


def write() -> list[Path]:
    """Bring all documents up to date; which were not."""
    changed = []
    for path in DOCUMENTS:
        before = path.read_text()
        after = _PART.sub(lambda match: match[1] + told(match[2]) + match[4], before)
        if after != before:
            path.write_text(after)
            changed.append(path)
    return changed


# Commands.


def _help(*command: str) -> str:
    """What `--help` prints in a terminal of a fixed width, without colours."""
    environment = {"COLUMNS": str(_WIDTH), "TERM": "dumb", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, [*command, "--help"], env=environment, prog_name="penstock")
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines()).strip("\n")


def _commands() -> Iterator[tuple[str, ...]]:
    """All there are, those of a group behind it."""
    root: Any = typer.main.get_command(app)
    context = root.make_context("penstock", ["config"], resilient_parsing=True)
    for name in root.list_commands(context):
        command = root.resolve_command(context, [name])[1]
        yield (name,)
        for inner in getattr(command, "commands", ()):
            yield name, inner


def _tell_commands() -> Iterator[str]:
    for command in ((), *_commands()):
        yield f"{'##' if len(command) < 2 else '###'} {' '.join(('penstock', *command))}"
        yield f"```text\n{_help(*command)}\n```"


# Settings.


def _variable(setting: str) -> str:
    """How the environment calls it."""
    return f"PENSTOCK_{setting.replace('.', '_').upper()}"


def _tell_settings() -> Iterator[str]:
    for section, names in groupby(SETTINGS, key=lambda name: name.partition(".")[0]):
        rows = ["| setting | default | meaning | allowed | environment |", "|---|---|---|---|---|"]
        for name in names:
            setting = SETTINGS[name]
            cells = (
                f"`{name}`",
                f"`{setting.written_default}`",
                setting.about,
                _allowed(setting),
                f"`{_variable(name)}`",
            )
            rows.append(f"| {' | '.join(cells)} |")
        yield f"### {section}"
        yield "\n".join(rows)


def _tell_no_effect() -> Iterator[str]:
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(NO_EFFECT.items())]
    yield "\n".join(["| name | why it has no effect |", "|---|---|", *rows])


def _allowed(setting: Field) -> str:
    if setting.choices:
        return ", ".join(f"`{str(choice).lower()}`" for choice in setting.choices)
    words = [setting.form.note] if setting.form.note else []
    if setting.low is not None:
        words.append(f"from {setting.low}" if setting.high is None else f"{setting.low} to {setting.high}")
    if setting.is_optional:
        words.append("none")
    return ", ".join(words)


# Pipelines.


def _tell_keys(table: str) -> Iterator[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, key in declared(TABLES[table]).items():
        default = f"`{key.written_default}`" if key.default else ""
        rows.append(f"| `{name}` | {'required' if key.is_required else default} | {key.about} |")
    yield "\n".join(rows)


# Classes.


def _tell_classes() -> Iterator[str]:
    for kind in _CLASSES:
        is_made = kind in _MADE
        yield f"## {kind.__name__}"
        if not is_made:
            yield _signature(kind.__name__, kind)
        yield from _doc(kind)
        # Its own docstring, not one that it would inherit.
        if not is_made and (text := vars(kind)["__init__"].__doc__):
            yield inspect.cleandoc(text)
        if attributes := list(_tell_attributes(kind)):
            yield "\n".join(attributes)
        for name, member in _members(kind):
            if not isinstance(member, property):
                yield _signature(name, getattr(kind, name))
                yield from _doc(member)


def _tell_attributes(kind: type) -> Iterator[str]:
    if kind is Consumer:
        yield from (f"- `{field.name}: {field.type}`" for field in fields(kind) if field.repr)
    for name, member in _members(kind):
        if isinstance(member, property):
            assert member.fget is not None
            text = " ".join(" ".join(_doc(member)).split())
            yield f"- `{name}: {inspect.signature(member.fget).return_annotation}`{text and f': {text}'}"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public members, in the order of the code."""
    # Most methods of `Client` are generated: it has the order of `AsyncClient`.
    names = [*vars(AsyncClient), *vars(AsyncAdmin)] if kind is Client else [*vars(kind)]
    for name in names:
        member = inspect.getattr_static(kind, name, None)
        is_member = isinstance(member, (property, classmethod)) or inspect.isfunction(member)
        if is_member and not name.startswith("_") and name not in _NOT_FOR_USERS:
            yield name, member


def _doc(thing: object) -> Iterator[str]:
    text = inspect.getdoc(thing)
    # A dataclass without a docstring has its signature instead.
    if text and not text.startswith(f"{getattr(thing, '__name__', '')}("):
        yield text


# NATS.


def _tell_nats() -> Iterator[str]:
    scenarios: dict[str, list[str]] = {}
    for name, difference in (*DIFFERENCES.items(), *CLIENT_DIFFERENCES.items()):
        scenarios.setdefault(difference.reason, []).append(f"`{name}`")
    rows = (f"| {reason} | {', '.join(names)} |" for reason, names in scenarios.items())
    yield "\n".join(["| why | scenarios |", "|---|---|", *rows])


class _Plain(str):
    """Text that stands in a signature as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = [_parameter(each) for each in signature.parameters.values() if each.name != "self"]
    returns = inspect.Signature.empty if inspect.isclass(function) else _Plain(signature.return_annotation)
    if inspect.iscoroutinefunction(function):
        name = f"async {name}"
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=returns)}"
    return f"```py\n{text if len(text) <= _WIDTH else _in_lines(name, parameters, text)}\n```"


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if isinstance(default, Retry):
        default = _Plain("Retry.exponential()")
    return parameter.replace(annotation=_Plain(parameter.annotation), default=default)


def _in_lines(name: str, parameters: Sequence[inspect.Parameter], text: str) -> str:
    """One for each parameter."""
    lines = [str(parameter) for parameter in parameters]
    named = [index for index, parameter in enumerate(parameters) if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    if named:
        lines.insert(named[0], "*")
    _, _, returns = text.rpartition(")")
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), f"){returns}"])


_PARTS: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "commands": _tell_commands,
    "settings": _tell_settings,
    "no_effect": _tell_no_effect,
    "classes": _tell_classes,
    "nats": _tell_nats,
    **{f"pipeline_{table}": partial(_tell_keys, table) for table in TABLES},
}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.docs --write")
    for path in write():
        print(path.relative_to(ROOT))
