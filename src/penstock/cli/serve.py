"""`penstock serve`: run the server until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import uvloop

from penstock.cli import logs
from penstock.errors import BadConfig, PenstockError
from penstock.server import cursus_names
from penstock.server.config import load
from penstock.server.server import Server
from penstock.store.inspect import explain

logger = logging.getLogger(__name__)


def run(path: Path | None, flags: dict[str, Any], *, creates_admin: bool = False) -> bool:
    """Run the server until it stops; return False if it could not start. `creates_admin`: create an administrator if no
    credentials are configured."""
    try:
        if creates_admin:
            flags = {**flags, **_first_administrator(path, flags)}
        loaded = load(path=path, environ=os.environ, flags=flags)
    except BadConfig as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return False
    logs.configure(loaded.config.server.log_level, loaded.config.log.format)
    for warning in loaded.warnings:
        logger.warning(warning)
    # The workers that write and sync need the interpreter for some µs at a time, and everything that waits for the disk
    # waits for them: with Python's default of 5 ms, one in a hundred messages took that much longer.
    sys.setswitchinterval(0.0001)
    # Messages and sessions leave no reference cycles: searching for cycles costs a few percent and finds nothing.
    gc.set_threshold(100_000, 20, 20)
    _raise_descriptor_limit()
    try:
        server = Server(loaded.config, settings=loaded.document())
        # What is here by now stays, so the collector need not look at it.
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(server))
    except (PenstockError, OSError, ValueError, ExceptionGroup) as error:
        reasons = list(_reasons(error))
        if None in reasons:
            raise
        for reason in reasons:
            print(f"error: {reason}", file=sys.stderr)
        return False
    return True


def _first_administrator(path: Path | None, flags: dict[str, Any]) -> dict[str, str]:
    """Return the flag with the file of users in the data directory, if no credentials are configured. At the first
    start, create the file with an administrator, and print the password: it is told this once."""
    # Without `insecure`, a public address without credentials would be refused.
    config = load(path=path, environ=os.environ, flags={**flags, "server.insecure": True}).config
    if any((config.auth.user, config.auth.token, config.auth.users)):
        return {}
    file = Path(config.storage.data_dir) / "users.toml"
    if not file.exists():
        from penstock.security.users_edit import UsersEditor

        password = secrets.token_urlsafe(18)
        file.parent.mkdir(parents=True, exist_ok=True)
        UsersEditor(file).add("admin", password, {"admin": True})
        print(f"created the user admin in {file}, with the password {password}", flush=True)
    return {"auth.users": str(file)}


def cursus_flags(context: typer.Context) -> dict[str, str]:
    """Return Cursus' flags from the remaining arguments: `-name value` or `--name=value`, as in Go."""
    flags: dict[str, str] = {}
    rest = iter(context.args)
    for argument in rest:
        written, is_given, value = argument.partition("=")
        name = written.removeprefix("-").removeprefix("-")
        if not argument.startswith("-"):
            raise typer.BadParameter(f"unexpected argument {argument!r}: serve takes only options")
        if name not in cursus_names.FLAGS:
            own = [option for parameter in context.command.params for option in parameter.opts]
            near = get_close_matches(written, [*own, *(f"--{flag}" for flag in cursus_names.FLAGS)], 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"unknown option {written}{hint}")
        if not is_given:
            value = "true" if name in cursus_names.SWITCHES else next(rest, "")
        flags[name] = value
    return flags


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the maximum: connections and segments share it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("cannot raise the limit of open files above %d: %s", soft, error)


def _reasons(error: Exception) -> Iterator[str | None]:
    """Yield the reasons of a failure, without the groups around them; None for an unexpected exception."""
    match error:
        case ExceptionGroup():
            for inner in error.exceptions:
                yield from _reasons(inner)
        case PenstockError() | OSError():
            yield explain(error)
        case ValueError():
            yield str(error)
        case _:
            yield None


async def _serve(server: Server) -> None:
    stop, retire = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR2, retire.set)
    if server.tls is not None or server.security.has_users:
        # Without anything to load again, it ends the process, as when a terminal is closed.
        loop.add_signal_handler(signal.SIGHUP, server.reload)
    await server.run(stop, _tell_ready, retire)


def _tell_ready(server: Server) -> None:
    ports = ", ".join(f"{name} on {' and '.join(addresses)}" for name, addresses in server.addresses.items())
    print(f"penstock {server.version} ready: {ports}, data in {server.config.storage.data_dir}", flush=True)
