"""Reading the settings: from a file, the environment and flags.

    defaults  <  file  <  environment  <  flags            the later one wins, setting by setting

`settings` declares them and `config_names` lists the names of other brokers. All problems are reported at once;
nothing is clamped, and nothing is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock import table_file
from penstock.address import hosts, is_loopback
from penstock.errors import BadConfig
from penstock.schema import Invalid, shown, without_credentials
from penstock.server import cursus_names
from penstock.server.config_names import (
    ALIASES,
    CLIENT_NAMES,
    ENVIRONMENT,
    ENVIRONMENT_ALIASES,
    ENVIRONMENT_NO_EFFECT,
    NO_EFFECT,
    PATH_NAMES,
    PREFIX,
    PYTHON_BROKER,
    PYTHON_BROKER_TOPICS,
    Target,
    own,
)
from penstock.server.settings import (
    HOSTS_PATTERN,
    OF_ONE_TOPIC,
    SETTINGS,
    ClientConfig,
    Config,
    build,
    certificate_files,
)
from penstock.table_file import TableFile
from penstock.tls.certificate import ServerCertificate
from penstock.tls.options import TlsOptions
from penstock.toml_lines import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    config: Config
    # "default", "file config.toml", "environment QB_DATA_DIR" or "flag --port", by dotted key.
    origins: dict[str, str]
    warnings: list[str]

    def shown(self) -> dict[str, Any]:
        """Return every value by its dotted key. Secrets are hidden."""
        document = asdict(self.config)
        for topic in (document["topic"], *document["topics"].values()):
            topic |= topic.pop("policy")
        flat = {each.key: each.value for each in _flatten(document)}
        values = {
            key: without_credentials(flat[key]) if isinstance(flat[key], str) else flat[key] for key in self.origins
        }
        secrets = [key for key, setting in SETTINGS.items() if setting.is_secret and values[key] is not None]
        return values | dict.fromkeys(secrets, "***")

    def document(self) -> dict[str, dict[str, Any]]:
        """Return the same, with the origin of each value."""
        return {key: {"value": value, "from": self.origins[key]} for key, value in self.shown().items()}


def load(*, path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Load the configuration from all sources. `flags` has dotted keys; None: not given. Raise BadConfig."""
    notes = _Notes()
    file = _read_file(path, environ, notes)
    topics = _topic_names(file.tables)
    # A topic has the values of `topic` where it does not set its own.
    general = {f"topics.{topic}.{name}": f"topic.{name}" for topic in topics for name in OF_ONE_TOPIC}
    targets = {key: own(key) for key in SETTINGS} | {
        key: Target(key, SETTINGS[default]) for key, default in general.items()
    }
    values = {key: setting.default for key, setting in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, "default")
    places = dict(origins)
    for source in (
        _from_file(file, _flatten(file.tables), targets, environ, notes),
        _from_environment(environ, notes),
        _from_flags(flags, notes),
    ):
        for given in _once(source, notes):
            value = _read(given, notes)
            if (key := given.target.key) is not None:
                values[key], origins[key], places[key] = value, given.origin, given.source
    for key, default in general.items():
        values.setdefault(key, values[default])
        origins.setdefault(key, origins[default])
    notes.problems.extend(_conflicts(values, places))
    if notes.problems:
        raise BadConfig(notes.problems)
    each_topic = {topic: {name: values[f"topics.{topic}.{name}"] for name in OF_ONE_TOPIC} for topic in topics}
    origins = {key: origins[key] for key in targets}
    return Loaded(config=build(values, each_topic), origins=origins, warnings=notes.warnings)


def load_client(*, path: Path | None, environ: Mapping[str, str]) -> ClientConfig:
    """Load only the settings of clients. Problems and warnings of others are for whoever starts the server."""
    notes = _Notes()
    file = _read_file(path, environ, notes)
    entries = [entry for entry in _flatten(file.tables) if entry.key.startswith("client.")]
    variables = {name: value for name, value in environ.items() if name.startswith(f"{PREFIX}CLIENT_")}
    targets = {key: own(key) for key in SETTINGS}
    values: dict[str, Any] = {}
    for source in (_from_file(file, entries, targets, environ, notes), _from_environment(variables, notes)):
        for given in _once(source, notes):
            value = _read(given, notes)
            if given.target.key is not None:
                values[given.target.key.removeprefix("client.")] = value
    if notes.problems:
        raise BadConfig(notes.problems)
    return ClientConfig(**values)


# ---- the sources

_VARIABLE: Final = re.compile(r"\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^}]*))?\})?")


@dataclass(frozen=True, slots=True)
class _Notes:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class _Entry(NamedTuple):
    """A value in a file."""

    key: str  # the dotted key
    written: str  # the same, as it is written
    path: Key
    value: Any


class _Given(NamedTuple):
    name: str  # as it is written
    value: Any
    origin: str  # "file config.toml"
    source: str  # the same, with the line
    target: Target

    @property
    def place(self) -> str:
        return f"{self.name} ({self.source})"


def _read_file(path: Path | None, environ: Mapping[str, str], notes: _Notes) -> TableFile:
    path = path or next((Path(environ[name]) for name in PATH_NAMES if name in environ), None)
    if path is None:
        return TableFile(Path(), {})
    try:
        file = table_file.read(path)
    except BadConfig as error:
        notes.problems.extend(error.problems)
        return TableFile(path, {})
    notes.problems.extend(f"{path}:{line}: {shown(key)} is repeated: keep one of them" for key, line in file.repeated)
    return file


def _flatten(table: Mapping[Any, Any], above: str = "", written: str = "", path: Key = ()) -> Iterator[_Entry]:
    """Yield all values. Tables within `broker` count as if they stood outside."""
    for name, value in table.items():
        # The name of a topic is not ours to spell.
        spelled = str(name) if above == "topics." else str(name).replace("-", "_").removeprefix("broker.")
        key, place = f"{above}{spelled}", (*path, name)
        if isinstance(value, dict):
            yield from _flatten(value, "" if key == "broker" else f"{key}.", f"{written}{name}.", place)
        else:
            yield _Entry(key, f"{written}{name}", place, value)


def _topic_names(table: Mapping[Any, Any]) -> list[str]:
    tables = [place.get("topics") for place in (table, table.get("broker")) if isinstance(place, dict)]
    return [
        str(name)
        for topics in tables
        if isinstance(topics, dict)
        for name, value in topics.items()
        # The Python broker's file has settings of all topics there.
        if isinstance(value, dict) or f"topics.{name}" not in (*PYTHON_BROKER_TOPICS, *NO_EFFECT)
    ]


def _from_file(
    file: TableFile,
    entries: Iterable[_Entry],
    own_targets: Mapping[str, Target],
    environ: Mapping[str, str],
    notes: _Notes,
) -> Iterator[_Given]:
    entries = [entry._replace(key=cursus_names.canonical(entry.key, entry.written)) for entry in entries]
    targets = {**own_targets, **ALIASES}
    if any(entry.key in PYTHON_BROKER for entry in entries):
        # The only port of the Python broker is for clients that speak first.
        targets = targets | PYTHON_BROKER_TOPICS | {"server.port": own("server.quiet_port")}
        notes.warnings.extend(
            f"{entry.written} (file {file.where(entry.path)}) is read as server.quiet_port, as this is a file of the "
            "Python broker"
            for entry in entries
            if entry.key == "server.port"
        )
    if any(each.key == "flow_control.enable_rate_limit" and str(each.value).lower() == "false" for each in entries):
        # Flux's rate counts only where its limit is enabled. It is still checked.
        rates = ("flow_control.default_rate_limit", "flow_control.default_rate_burst")
        targets = {**targets, **{name: targets[name]._replace(key=None) for name in rates}}
    for entry in entries:
        yield from _from_entry(file, entry, targets, environ, notes)


def _from_entry(
    file: TableFile, entry: _Entry, targets: Mapping[str, Target], environ: Mapping[str, str], notes: _Notes
) -> Iterator[_Given]:
    key, value, source = entry.key, entry.value, f"file {file.where(entry.path)}"
    place = f"{entry.written} ({source})"
    if key == "server.port" and isinstance(value, str) and value.startswith(":"):
        notes.warnings.append(f"{place} is {value!r}: only the port is used, server.host sets the address")
    if key in targets:
        try:
            value = _interpolate(value, environ)
        except ValueError as error:
            notes.problems.append(f"{place}: {error}")
        else:
            yield _Given(entry.written, value, f"file {file.path}", source, targets[key])
    elif key in NO_EFFECT:
        notes.warnings.append(f"{place} is {value!r}, which has no effect: {NO_EFFECT[key]}")
    elif not any(name.startswith(f"{key}.") for name in (*targets, *NO_EFFECT, "broker.", "topics.")):
        notes.problems.append(f"{place} is not a setting{_hint(key, targets)}")
    elif value is not None:  # YAML reads an empty table as null
        notes.problems.append(f"{place} must be a table of settings")


def _interpolate(value: Any, environ: Mapping[str, str]) -> Any:
    def replacement(found: re.Match[str]) -> str:
        if found["name"] is None:
            raise ValueError("invalid variable: write ${NAME} or ${NAME:default}")
        text = environ.get(found["name"], found["default"])
        if text is None:
            raise ValueError(
                f"{found['name']} is not in the environment: set it, or write ${{{found['name']}:default}}"
            )
        return text

    return _VARIABLE.sub(replacement, value) if isinstance(value, str) else value


def _from_environment(environ: Mapping[str, str], notes: _Notes) -> Iterator[_Given]:
    ours = {key for name, key in ENVIRONMENT.items() if name in environ}
    aliases = {name: key for name, key in ENVIRONMENT_ALIASES.items() if key not in ours}
    for name, key in (ENVIRONMENT | aliases).items():
        if name in environ:
            yield _Given(key, environ[name], f"environment {name}", f"environment {name}", own(key))
    for name, value in environ.items():
        if name in ENVIRONMENT_NO_EFFECT:
            reason = NO_EFFECT[ENVIRONMENT_NO_EFFECT[name]]
            notes.warnings.append(f"{name} (environment) is {value!r}, which has no effect: {reason}")
        elif name.startswith(PREFIX) and name not in (*ENVIRONMENT, *PATH_NAMES, *CLIENT_NAMES):
            notes.problems.append(f"{name} (environment) is not a setting{_hint(name, [*ENVIRONMENT, *PATH_NAMES])}")


def _from_flags(flags: Mapping[str, Any], notes: _Notes) -> Iterator[_Given]:
    """Flags have dotted keys, and those of Cursus their own names."""
    is_cursus = any(name in cursus_names.FLAGS and value is not None for name, value in flags.items())
    for key, value in flags.items():
        name = cursus_names.FLAGS.get(key, key)
        section, _, last = key.rpartition(".")
        flag = f"--{'tls-' if section == 'tls' else ''}{last.replace('_', '-')}"
        origin = f"flag {flag}"
        if name in NO_EFFECT:
            notes.warnings.append(f"{flag} is {value!r}, which has no effect: {NO_EFFECT[name]}")
        elif name in ALIASES:
            yield _Given(name, value, origin, origin, ALIASES[name])
        elif name not in SETTINGS:
            notes.problems.append(f"{key} ({origin}) is not a setting{_hint(key, SETTINGS)}")
        elif value is None:
            pass
        elif name == "server.port" and is_cursus:
            notes.warnings.append("--port is read as --quiet-port, as these are flags of Cursus")
            yield _Given(name, value, origin, origin, ALIASES["broker_port"])
        else:
            yield _Given(name, value, origin, origin, own(name))


def _hint(wrong: str, right: Collection[str]) -> str:
    """Name the nearest setting: one that is spelled alike, or one with the same last part."""
    last = f".{wrong.rpartition('.')[2]}"
    near = get_close_matches(wrong, right, 1) or [name for name in right if name.endswith(last)]
    return f": did you mean {near[0]}?" if near else ""


def _once(source: Iterable[_Given], notes: _Notes) -> Iterator[_Given]:
    """Refuse a source that sets one thing twice, by whatever names."""
    seen: dict[str, _Given] = {}
    for given in source:
        key = given.target.key
        if key is not None and seen.setdefault(key, given) is not given:
            notes.problems.append(f"{given.place} repeats {seen[key].place}: keep one of them")
        else:
            yield given


def _read(given: _Given, notes: _Notes) -> Any:
    try:
        return given.target.meaning(given.target.form.parse(given.value))
    except Invalid as problem:
        notes.problems.append(problem.of(given.place))
        # An invalid value is still given: a setting that needs it must not be reported as well.
        return given.value


# ---- values that are valid by themselves and contradict each other


def _conflicts(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    yield from _credential_conflicts(values, places)
    yield from _pipe_conflicts(values, places)
    yield from _tls_conflicts(values, places)
    yield from _pipe_tls_problems(values, places)
    yield from _public_hosts(values, places)
    lasts, grace = "server.lame_duck_s", "server.lame_duck_grace_s"
    if isinstance(values[lasts], int) and isinstance(values[grace], int) and 0 < values[lasts] <= values[grace]:
        yield (
            f"{grace} ({places[grace]}) is {values[grace]}, and {lasts} ({places[lasts]}) is {values[lasts]}: the "
            "grace period must be shorter"
        )
    ports = [*combinations(("server.port", "server.quiet_port", "server.http_port"), 2)]
    if places["server.qb_port"] != "default":
        ports += [("server.port", "server.qb_port"), ("server.http_port", "server.qb_port")]
    for one, other in ports:
        if values[one] == values[other] != 0:
            yield f"{one} ({places[one]}) and {other} ({places[other]}) are both {values[one]}: they must differ"


def _credential_conflicts(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    for section in ("auth", "pipe"):
        for one, other in permutations((f"{section}.user", f"{section}.password"), 2):
            if values[one] is not None and values[other] is None:
                yield f"{one} ({places[one]}) needs {other}: set both, or neither"
    for name in ("pipe.user", "pipe.token"):
        if values[name] is not None and values["pipe.parents"] is None and values["pipe.parent"] is None:
            yield f"{name} ({places[name]}) has no parent to go to: list the parents that may get it in pipe.parents"


def _pipe_conflicts(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    for name in ("pipe.topics", "pipe.up"):
        if values[name] is not None and values["pipe.parent"] is None and values["registry.url"] is None:
            yield f"{name} ({places[name]}) has no effect without a parent: set pipe.parent or registry.url as well"
    if values["registry.url"] is not None and values["pipe.parent"] is not None:
        yield (
            f"registry.url ({places['registry.url']}) and pipe.parent ({places['pipe.parent']}) both name a parent: "
            "keep one of them"
        )


def _pipe_tls_problems(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    ca, cert, key = (values[f"pipe.{name}"] for name in ("ca", "cert", "key"))
    if key is not None and cert is None:
        yield f"pipe.key ({places['pipe.key']}) needs pipe.cert: set both, or neither"
    elif ca is not None or cert is not None:
        try:
            TlsOptions(ca=ca, cert=cert, key=key).context()
        except BadConfig as error:
            for problem in error.problems:
                setting = "pipe.ca" if problem.startswith("the CA") else "pipe.cert"
                yield f"{setting} ({places[setting]}): {problem}"


def _tls_conflicts(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    settings = {key.removeprefix("tls."): values[key] for key in SETTINGS if key.startswith("tls.")}
    if settings["cert"] is None:
        for name in ("key", "client_ca", "client_certificates", "required", "handshake_first"):
            if places[f"tls.{name}"] != "default" and settings[name] not in (None, False, "none"):
                yield f"tls.{name} ({places[f'tls.{name}']}) has no effect without a certificate: set tls.cert as well"
        return
    checks, ca = settings["client_certificates"] != "none", settings["client_ca"]
    if checks and ca is None:
        place = places["tls.client_certificates"]
        yield f"tls.client_certificates ({place}) needs the CAs that sign them: set tls.client_ca as well"
    elif ca is not None and not checks:
        place = places["tls.client_ca"]
        yield f"tls.client_ca ({place}) has no effect: set tls.client_certificates to optional or required as well"
    else:
        yield from _certificate_problems(settings, places)


def _certificate_problems(settings: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    try:
        files = certificate_files(settings)
        assert files is not None, "there is a certificate"
        ServerCertificate(files)
    except BadConfig as error:
        for problem in error.problems:
            key, _, rest = problem.partition(" ")
            yield f"{key} ({places[key]}): {rest}"
    except (KeyError, TypeError, ValueError):
        pass  # an invalid value, which is reported


def _public_hosts(values: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[str]:
    host = values["server.host"]
    is_valid = isinstance(host, str) and re.search(HOSTS_PATTERN, host)
    public = [each for each in hosts(host) if not is_loopback(each)] if is_valid else []
    if not public or values["server.insecure"] is True:
        return
    reachable = f"server.host ({places['server.host']}) is {', '.join(public)!r}, which other machines can reach, and "
    if all(values[f"auth.{name}"] is None for name in ("user", "token", "users")):
        yield (
            f"{reachable}no credentials are required: set auth.users, or auth.user and auth.password, or auth.token; "
            "to serve anyone, set server.insecure (--insecure)"
        )
    elif values["tls.cert"] is None or values["tls.required"] is False:
        yield (
            f"{reachable}credentials may cross the network unencrypted: set tls.cert and tls.key, and leave "
            "tls.required on; in a private network, or behind a proxy with TLS, set server.insecure (--insecure)"
        )
