"""Settings from a file, the environment and the engine's dictionary, and where each comes from.

The engine's dictionary precedes the environment, which precedes the file. A setting is taken whole
from one of them: lists are not joined.
"""

import functools
import json
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvoffload.config import OffloadConfig, did_you_mean, parse_config
from kvoffload.errors import HIDDEN, ConfigError

log = logging.getLogger(__name__)

FILE = "KVOFFLOAD_CONFIG"
"""The environment variable that names a file of settings."""
PREFIX = "KVOFFLOAD_SETTING_"
"""Before the upper-case name of a setting; the value is JSON, or else plain text."""
_LISTS = {"backends": '[{"type": "memory"}]', "client_hints": '["offload"]'}
"""Settings that are never plain text, each with an example."""


def gather(
    given: Mapping[str, Any],
    known: Iterable[str],
    environ: Mapping[str, str] = os.environ,
    source: str = "engine",
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of all sources, and the source of each.

    Args:
        given: the engine's dictionary.
        known: names of the settings that the environment may have.
        environ: the environment.
        source: what the engine's dictionary is called.

    Raises:
        ConfigError: a file cannot be read, or a variable names no setting or has no list for it.
    """
    if not isinstance(given, Mapping):
        raise ConfigError("config", given, "must be an object of settings")
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path := environ.get(FILE):
        _add(read_file(path, FILE), f"file {path}", settings, sources)
    _add(_from_environment(known, environ), "environment", settings, sources)
    _add(given, source, settings, sources)
    return settings, sources


def read_config(given: Mapping[str, Any]) -> OffloadConfig:
    """Read the settings of an engine from all sources.

    Raises:
        ConfigError: see :func:`gather` and :func:`kvoffload.config.parse_config`.
    """
    return parse_config(gather(given, OffloadConfig.__struct_fields__)[0])


def _add(
    new: Mapping[str, Any], source: str, settings: dict[str, Any], sources: dict[str, str]
) -> None:
    settings.update(new)
    sources.update(dict.fromkeys(new, source))


def _from_environment(known: Iterable[str], environ: Mapping[str, str]) -> dict[str, Any]:
    names = {PREFIX + name.upper(): name for name in known}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in names:
            hint = did_you_mean(variable, names) or "no setting has this name"
            raise ConfigError(variable, HIDDEN, hint)
        name = names[variable]
        try:
            found[name] = json.loads(text)
        except ValueError as error:
            if text.lstrip().startswith(("[", "{")):  # no text, and may have a password in it
                raise ConfigError(variable, HIDDEN, f"is damaged: {error}") from None
            found[name] = text
        # Also a text may have a password in it: such as a list between quotes of the shell.
        if name in _LISTS and not isinstance(found[name], list):
            raise ConfigError(variable, HIDDEN, f"must be a list in JSON, such as {_LISTS[name]}")
    return found


def read_file(path: str, field: str = "file") -> dict[str, Any]:
    """Read a file of settings: TOML, JSON, or YAML where PyYAML is installed.

    Raises:
        ConfigError: it cannot be read, is damaged, or has no object of settings.
    """
    ending = Path(path).suffix.lower()
    if ending not in _READERS:
        raise ConfigError(field, path, f"must end in {', '.join(_READERS)}")
    try:
        with open(path, encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            _warn_of_writers(path, facts.st_uid, facts.st_mode)
            found = _READERS[ending](file.read())
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read: {error.strerror}") from error
    except ImportError as error:
        raise ConfigError(field, path, "needs PyYAML; or write it as TOML") from error
    except Exception as error:  # each reader has exceptions of its own
        # Those of YAML quote what they could not read: a password may stand there.
        mark = getattr(error, "problem_mark", None)
        told = type(error).__name__ if _READERS[ending] is _yaml else error
        reason = told if mark is None else f"line {mark.line + 1}"
        raise ConfigError(field, path, f"is damaged: {reason}") from None
    if not isinstance(found, dict):
        raise ConfigError(field, path, "must be an object of settings")
    return found


@functools.cache  # an engine's process reads its settings several times
def _warn_of_writers(path: str, owner: int, mode: int) -> None:
    """Warn of a file that another user may change: it names the stores, and so what is loaded."""
    if owner not in (0, os.geteuid()):
        log.warning("settings file %s belongs to user %d: chown it", path, owner)
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("settings file %s may be changed by other users: chmod go-w %s", path, path)


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]  # its types are a package

    return yaml.safe_load(text)


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
