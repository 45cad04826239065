"""`penstock worker`: the consumers of an app, until a signal ends them."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

from penstock.app import App
from penstock.cli import logs
from penstock.client.link import Address
from penstock.errors import PenstockError


class _Refused(Exception):
    """The command line is wrong: the text says what might be meant."""


def run(target: str, servers: str | None) -> bool:
    """Whether all went well; it returns when it has ended. `servers` are instead of those of the app: host:port, or
    several with commas between them."""
    try:
        app = _find(target)
        if servers is not None:
            app.servers = _addresses(servers)
    except _Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
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
        raise _Refused(f"{target!r} names no app: write module:app, such as shop.billing:app")
    module = _load(name)
    found = getattr(module, attribute, None)
    if found is None:
        raise _Refused(f"the module {name} has no {attribute!r}{_meant(module)}")
    if not isinstance(found, App):
        raise _Refused(f"{target} is of type {type(found).__name__}, no penstock.App{_meant(module)}")
    if not found.consumers:
        raise _Refused(f"{target} has no consumers: decorate a function with @{attribute}.consumer(pattern, group=...)")
    return found


def _addresses(servers: str) -> list[str]:
    found = servers.split(",")
    try:
        for server in found:
            Address.read(server)
    except ValueError as error:
        raise _Refused(str(error)) from error
    # As they are: a URL may have credentials.
    return found


def _load(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or f"{name}.".startswith(f"{error.name}."):
            raise _Refused(f"there is no module {name!r} in {directory} or where Python looks else") from error
        raise  # it is there, and lacks something itself


def _meant(module: ModuleType) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"; it has {', '.join(f'{module.__name__}:{name}' for name in apps)}" if apps else ""
