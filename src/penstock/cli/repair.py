"""`penstock log repair`: move damaged bytes to quarantine, and report what was lost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.cli import output
from penstock.model.subject import is_subject
from penstock.store.repair import Quarantined, Repaired, repair
from penstock.store.state import STATE_TOPIC


def run(directory: Path, adopt: list[str], *, as_json: bool) -> bool:
    """Repair the directory; return whether it is sound now."""
    names = dict(map(_adoption, adopt))
    bar = output.progress(TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    task = bar.add_task("", total=None)
    with bar:
        outcome = repair(
            directory, adopt=names, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        output.print_json(
            {
                "directory": str(directory),
                "sound": not outcome.problems,
                "report": None if outcome.report is None else str(outcome.report),
                "quarantined": [asdict(each) for each in outcome.quarantined],
                "restored": outcome.restored,
                "adopted": {str(topic_id): name for topic_id, name in outcome.adopted.items()},
                "problems": outcome.problems,
            }
        )
    else:
        _show(outcome)
    return not outcome.problems


def _adoption(text: str) -> tuple[int, str]:
    number, _, name = text.partition("=")
    if not number.isdecimal() or not is_subject(name.encode()):
        raise typer.BadParameter(f"invalid --adopt {text!r}: use ID=NAME, such as 3=orders", param_hint="--adopt")
    return int(number), name


def _show(outcome: Repaired) -> None:
    console = output.console()
    if outcome.quarantined:
        console.print(_table(outcome.quarantined))
        console.print(f"\nreport: {outcome.report}", soft_wrap=True, highlight=False, markup=False)
    else:
        print("nothing is damaged" if not outcome.problems else "nothing was repaired")
    if outcome.is_state_hit:
        print(
            "Records of the state topic were lost: their topics, groups and positions are missing or outdated.\n"
            "Check `penstock topic list` and `penstock group list` before you let clients connect. The quarantine has "
            "a copy of meta.db."
        )
    if outcome.restored:
        print(f"restored {outcome.restored} of these records from meta.db")
    for topic_id, name in outcome.adopted.items():
        print(f"topic {topic_id} is named {name} again")
    for problem in outcome.problems:
        console.print(problem, soft_wrap=True, highlight=False, markup=False)


def _table(found: list[Quarantined]) -> Table:
    table = output.plain_table()
    table.add_column("topic", overflow="fold")
    for name in ("part", "position", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("lost offsets", no_wrap=True)
    table.add_column("kept in", overflow="fold")
    for each in found:
        name = "(state)" if each.topic_id == STATE_TOPIC else each.topic or f"id {each.topic_id}"
        lost = "none" if each.first == each.next else f"{each.first} to {each.next - 1}"
        size = output.size(each.stop - each.position)
        table.add_row(*map(Text, (name, str(each.partition), str(each.position), size, lost, each.kept)))
    return table
