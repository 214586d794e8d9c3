"""Where settings come from: flag before environment (``KVPOOL_META__GRPC_PORT``) before file before default.

Remembers the source of each value, so that an error names it and ``kvpool config show`` can tell.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvpool.core.errors import SettingsError
from kvpool.ops import failpoints
from kvpool.ops.settings import ClientSettings, LogSettings, MetaSettings, NodeSettings, Section, Settings, TlsSettings

CONFIG_VARIABLE = "KVPOOL_CONFIG"
"""The environment variable that names the file when no ``--config`` does."""

_PREFIX = "KVPOOL_"
# A Kubernetes service named kvpool-meta puts variables like KVPOOL_META_PORT_7300_TCP_ADDR into every pod.
_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)|_PORT=(tcp|udp|sctp)://")


class Setting(NamedTuple):
    """The value of one dotted key, and the source that gave it."""

    key: str
    value: object
    source: str


_FLAGS_WITH_SECTION = ("log", "tls")
_SECRETIVE = re.compile(r"tok(?!ens$|en_file$)|secret|passw", re.IGNORECASE)
"""Keys, misspelt ones too, whose values are not shown."""

_SECTIONS: dict[str, type[Section]] = {
    "meta": MetaSettings,
    "node": NodeSettings,
    "client": ClientSettings,
    "tls": TlsSettings,
    "log": LogSettings,
}


def load_settings(
    config: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read, merge and validate all sources.

    Args:
        config: YAML file; by default the one that ``KVPOOL_CONFIG`` names, else none.
        overrides: Values of flags by dotted key, e.g. ``{"meta.grpc_port": 7300}``; None is a flag not given.
        environ: The environment; by default the process's. An empty variable counts as not set.

    Raises:
        SettingsError: An unknown key or a value that cannot be; names key, value, source and fix.
    """
    environ = os.environ if environ is None else environ
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    sources = (_from_file(config) if config else [], _from_environment(environ), _from_flags(overrides or {}))
    given = {setting.key: setting for source in sources for setting in source}
    document: dict[str, dict[str, object]] = {section: {} for section in _SECTIONS}
    for key, value, _ in given.values():
        section, name = key.split(".")
        document[section][name] = value
    try:
        has_tls = any(document["tls"].get(key) is not None for key in ("dir", "ca"))
        settings = Settings.model_validate(document, context={"tls": has_tls})
    except ValidationError as error:
        causes = [cause for cause in error.errors() if cause["type"] != "default_factory_not_called"]
        raise SettingsError("; also ".join(_explain(cause, given) for cause in causes)) from error
    settings._sources.update({key: source for key, _, source in given.values()})
    return settings


def effective(settings: Settings) -> list[Setting]:
    """Every setting in force with its source, section by section."""
    document = settings.model_dump(mode="json")
    return [
        Setting(key, value, settings._sources.get(key, "default"))
        for section, values in document.items()
        for name, value in values.items()
        for key in [f"{section}.{name}"]
    ]


def known_keys() -> list[str]:
    """Every dotted key, e.g. ``meta.grpc_port``."""
    return [f"{section}.{name}" for section, model in _SECTIONS.items() for name in model.model_fields]


def field_of(key: str) -> FieldInfo:
    """The declaration of a dotted key: its type, its default and its description."""
    section, name = key.split(".")
    return _SECTIONS[section].model_fields[name]


def flag_name(key: str) -> str:
    """The flag of a dotted key: ``meta.grpc_port`` is ``--grpc-port``, ``log.level`` is ``--log-level``."""
    section, name = key.split(".")
    flag = (name if name.endswith("_per_s") else name.removesuffix("_s")).replace("_", "-")
    return f"--{section}-{flag}" if section in _FLAGS_WITH_SECTION else f"--{flag}"


def variable_name(key: str) -> str:
    """The environment variable of a dotted key: ``meta.grpc_port`` is ``KVPOOL_META__GRPC_PORT``."""
    return _PREFIX + key.replace(".", "__").upper()


def _from_flags(overrides: Mapping[str, object]) -> list[Setting]:
    return [
        Setting(_known(key, value, "flags"), value, f"flag {flag_name(key)}")
        for key, value in overrides.items()
        if value is not None
    ]


def _from_environment(environ: Mapping[str, str]) -> list[Setting]:
    given = []
    for name, value in environ.items():
        ours = name.startswith(_PREFIX) and name not in (CONFIG_VARIABLE, failpoints.VARIABLE)
        if ours and value and _KUBERNETES.search(f"{name}={value}") is None:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            source = f"environment variable {name}"
            given.append(Setting(_known(key, value, source, variable_name), value, source))
    return given


def _from_file(path: Path) -> list[Setting]:
    source = f"file {path}"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:  # the last: nested without end
        raise SettingsError(f"{source}: {_problem(error)}; `kvpool config default` prints a valid file") from error
    given = []
    for section, content in _mapping(document, "the document", source).items():
        if section not in _SECTIONS:
            _known(str(section), content, source)
        for name, value in _mapping(content, str(section), source).items():
            given.append(Setting(_known(f"{section}.{name}", value, source), value, source))
    return given


def _problem(error: Exception) -> str:
    """What is wrong with a file; what YAML would quote of it may be a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem or error.context}, line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())


def _mapping(content: object, what: str, source: str) -> dict[object, object]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__  # not what it is: it may be a secret
        raise SettingsError(f"{what} ({source}) is a {kind}: it must hold keys, e.g. grpc_port: 7300")
    return content


def _known(key: str, value: object, source: str, spell: Callable[[str], str] = str) -> str:
    known = known_keys()
    if key in known:
        return key
    namesakes = [other for other in known if other.split(".")[1] == key.rsplit(".", maxsplit=1)[-1]]
    nearest = difflib.get_close_matches(key, [*_SECTIONS, *known], n=1, cutoff=0.75) or namesakes
    fix = f"did you mean {spell(nearest[0])}?" if nearest else "`kvpool config default` lists every key"
    raise SettingsError(f"{key} = {_shown(key, value)} ({source}): unknown key; {fix}")


def _explain(cause: ErrorDetails, given: Mapping[str, Setting]) -> str:
    key = ".".join(str(part) for part in cause["loc"][:2])
    _, value, source = given.get(key, Setting(key, cause["input"], "default"))
    problem = cause.get("ctx", {}).get("error")
    if any(isinstance(part, str) for part in cause["loc"][2:]):  # a part of it, e.g. of one tenant's limits
        key, value = ".".join(str(part) for part in cause["loc"] if part != "[key]"), cause["input"]
        problem = problem or f"{cause['msg'][0].lower()}{cause['msg'][1:]}; see docs/design/quotas.md"
    if problem is None:
        problem = f"{cause['msg'][0].lower()}{cause['msg'][1:]}; the default is {field_of(key).default}"
    return f"{key} = {_shown(key, value)} ({source}): {problem}"


def _shown(key: str, value: object) -> str:
    shown = repr(value)
    return "(not shown)" if _SECRETIVE.search(key) or (isinstance(value, dict) and _SECRETIVE.search(shown)) else shown
