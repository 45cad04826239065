"""`penstock group`: consumer groups, their members, positions and lag."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.options import (
    PLACE,
    ConnectionOptions,
    GroupName,
    Json,
    Yes,
    check_selection,
    complete_topic,
    confirm,
    options,
    read_place,
)
from penstock.cli.text import counted, safe

if TYPE_CHECKING:
    from penstock.client.values import Group

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("create")
@options
def create(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")],
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Subjects to read, such as orders.>")
    ] = None,
    *,
    topic: Annotated[
        str | None,
        typer.Option(autocompletion=complete_topic, help="Read all subjects of this topic, instead of PATTERN."),
    ] = None,
    mode: Annotated[
        Literal["shared", "partitioned"],
        typer.Option(help="Distribute single messages or whole partitions among the members."),
    ] = "shared",
    start: Annotated[
        Any, typer.Option(parser=read_place, metavar=PLACE, help="Where to start in each partition.")
    ] = "latest",
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Create a group before its first member joins."""
    check_selection(pattern, topic)
    with at.client() as client:
        group = client.create_group(name, pattern, topic=topic, mode=mode, start=start)
    _tell("created", group, as_json=json)
    _tell_hint(group)


@app.command("list")
@options
def list_groups(*, json: Json = False, at: ConnectionOptions) -> None:
    """List all groups."""
    with at.client() as client:
        groups = sorted(client.groups(), key=lambda group: group.name)
    from penstock.cli import output

    if json:
        output.print_json([asdict(group) for group in groups])
        return
    rows = [
        (
            group.name,
            group.pattern,
            group.mode,
            len(group.members),
            group.lag,
            group.pending,
            group.redelivered,
            group.dead_lettered,
            group.lost,
            group.expired,
        )
        for group in groups
    ]
    names = ("group", "pattern", "mode", "members", "lag", "pending", "redelivered", "dead letters", "lost", "expired")
    output.console().print(output.table(names, rows, numbers=names[3:]))


@app.command("describe")
@options
def describe(name: GroupName, *, json: Json = False, at: ConnectionOptions) -> None:
    """Show the members of a group, and its position and lag in each partition."""
    with at.client() as client:
        group = client.group(name)
    from penstock.cli import output

    _tell_hint(group)
    if json:
        output.print_json(asdict(group))
        return
    console = output.console()
    console.print(f"{_headline(group)}\n", markup=False)
    members = [(member.name or "-", member.address, member.unacknowledged) for member in group.members]
    if members:
        console.print(output.table(("member", "address", "unacknowledged"), members, numbers=("unacknowledged",)))
        console.print()
    positions = [
        (each.topic, each.partition, str(each.committed), str(each.next), str(each.end), each.pending, each.lag)
        for each in group.positions
    ]
    names = ("topic", "partition", "committed", "next", "end", "pending", "lag")
    console.print(output.table(names, positions, numbers=names[1:]))


@app.command("reset")
@options
def reset(
    name: GroupName,
    *,
    to: Annotated[Any, typer.Option(parser=read_place, metavar=PLACE, help="New position of the group.")],
    topic: Annotated[str | None, typer.Option(autocompletion=complete_topic, help="Only in this topic.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition of --topic.")] = None,
    json: Json = False,
    at: ConnectionOptions,
) -> None:
    """Move a group to another position: back to read messages again, or forward to skip them."""
    if partition is not None and topic is None:
        raise typer.BadParameter("--partition needs --topic")
    with at.client() as client:
        _tell("reset", client.reset_group(name, to, topic=topic, partition=partition), as_json=json)


@app.command("delete")
@options
def delete(name: GroupName, *, yes: Yes = False, json: Json = False, at: ConnectionOptions) -> None:
    """Delete a group and its positions, and notify its members."""
    with at.client() as client:
        group = client.group(name)
        confirm(f"Delete {name}, which is {counted(group.lag, 'message')} behind?", yes=yes)
        client.delete_group(name)
    _tell("deleted", group, as_json=json)


def _tell(deed: str, group: Group, *, as_json: bool) -> None:
    if as_json:
        from penstock.cli import output

        output.print_json(asdict(group))
    else:
        print(f"{deed} {_headline(group)}")


def _tell_hint(group: Group) -> None:
    if group.hint is not None:
        print(safe(f"hint: {group.hint}"), file=sys.stderr, flush=True)


def _headline(group: Group) -> str:
    size = f"{counted(len(group.members), 'member')}, {counted(group.lag, 'message')} behind"
    lost = f", {group.lost:,} lost to retention" if group.lost else ""
    expired = f", {group.expired:,} expired" if group.expired else ""
    return safe(f"{group.name}: {group.mode}, {group.pattern}, {size}{lost}{expired}")
