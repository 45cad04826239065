"""`penstock worker`: run the consumers of an app until a signal."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from penstock.app import App
from penstock.cli import logs
from penstock.client.servers import BrokerAddress
from penstock.errors import PenstockError
from penstock.tls.options import TlsOptions


class _BadTarget(Exception):
    """The command line names no app that can run."""


def run(target: str, servers: str | None, tls: TlsOptions | None = None) -> bool:
    """Run the app until it stops; return whether it succeeded. `servers` replaces those of the app: host:port, or
    several separated by commas. `tls` replaces its TLS options."""
    try:
        app = _find(target)
        if servers is not None:
            app.servers = _addresses(servers)
        app.tls = tls or app.tls
    except _BadTarget as problem:
        print(f"error: {problem}", file=sys.stderr)
        return False
    logs.configure()
    done = False
    try:
        app.run()
        done = True
    except* PenstockError as errors:
        for error in errors.exceptions:
            print(f"error: {error}", file=sys.stderr)
    return done


def _find(target: str) -> App:
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise _BadTarget(f"invalid app {target!r}: use module:app, such as shop.billing:app")
    module = _load(name)
    found = getattr(module, attribute, None)
    if found is None:
        raise _BadTarget(f"module {name} has no {attribute!r}{_hint(module)}")
    if not isinstance(found, App):
        raise _BadTarget(f"{target} is a {type(found).__name__}, not a penstock.App{_hint(module)}")
    if not found.consumers:
        raise _BadTarget(
            f"{target} has no consumers: decorate a function with @{attribute}.consumer(pattern, group=...)"
        )
    return found


def _addresses(servers: str) -> list[str]:
    found = servers.split(",")
    try:
        for server in found:
            BrokerAddress.read(server)
    except ValueError as error:
        raise _BadTarget(str(error)) from error
    # Unparsed: a URL may have credentials.
    return found


def _load(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or f"{name}.".startswith(f"{error.name}."):
            raise _BadTarget(f"no module {name!r} in {directory} or on Python's path") from error
        raise  # the module exists, but one of its imports fails


def _hint(module: ModuleType) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"; it has {', '.join(f'{module.__name__}:{name}' for name in apps)}" if apps else ""
