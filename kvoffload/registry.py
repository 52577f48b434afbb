"""Plug-ins by entry point: built-in and third-party backends and policies are found alike."""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from inspect import isclass
from typing import Any

from kvoffload.backends.admin import COMMANDS
from kvoffload.backends.base import Backend, BackendFactory
from kvoffload.backends.key_files import ENCRYPTION, read_encryption, without
from kvoffload.config import BackendConfig, OffloadConfig, convert, did_you_mean
from kvoffload.errors import HIDDEN, ConfigError
from kvoffload.extras import check_extra
from kvoffload.policies.base import Policy, refusal
from kvoffload.policies.guarded import GuardedPolicy

BACKENDS = "kvoffload.backends"
POLICIES = "kvoffload.policies"


_refusal = cache(refusal)


@cache
def _named(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return found


def _giver(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown package"


def load(group: str, name: str, field: str = "type") -> Any:
    """Return what an entry point names, importing it on first use.

    Raises:
        ConfigError: nothing of that name is installed, or two things are, or it cannot be imported
            or used.
    """
    found = _named(group)
    if name not in found:
        known = ", ".join(sorted(found)) or "none (is the package installed?)"
        hint = did_you_mean(name, found) or f"installed: {known}"
        raise ConfigError(field, name, f"no such plug-in in {group}; {hint}")
    point, *others = found[name]
    if others:
        # Which one comes first depends on the order of folders: neither is what was asked for.
        givers = " and ".join(sorted(f"{each.value} of {_giver(each)}" for each in found[name]))
        raise ConfigError(field, name, f"is registered twice, {givers}: uninstall one of them")
    plugin = f"the plug-in {point.value}"
    try:
        loaded = point.load()
    except Exception as error:  # a plug-in's module may raise anything
        raise ConfigError(field, name, f"{plugin} cannot be imported: {error}") from error
    if group == POLICIES and (reason := _refusal(loaded)):
        raise ConfigError(field, name, f"{plugin} {reason}")
    if group == BACKENDS and not hasattr(loaded, "Options"):
        remedy = f"{plugin} has no Options: a msgspec.Struct of its settings, perhaps empty"
        raise ConfigError(field, name, remedy)
    return loaded


def load_policy(name: str) -> Callable[[int], Policy]:
    """Return what makes the policy of a store, given its capacity; a plug-in's has a guard.

    Raises:
        ConfigError: see :func:`load`.
    """
    make: Callable[[int], Policy] = load(POLICIES, name, "policy")
    return make if make.__module__.startswith("kvoffload.") else partial(GuardedPolicy, make)


def read_options(type: str, options: dict[str, Any], where: str = "") -> Any:
    """Read a backend's options into its own settings struct, without opening the store.

    ``encryption`` is no option of the backend; its keys are read as well.

    Raises:
        ConfigError: unknown type, unknown or bad option, or a key that cannot be used.
    """
    factory: BackendFactory = load(BACKENDS, type, f"{where}type")
    if read_encryption(options, where) is not None and not can_encrypt(factory):
        remedy = f"a tier of type {type!r} cannot encrypt: leave this out, or use another type"
        raise ConfigError(f"{where}{ENCRYPTION}", HIDDEN, remedy)
    return convert(without(options), factory.Options, where)


def can_encrypt(factory: BackendFactory) -> bool:
    """Return whether the tiers of a backend take ``encryption``."""
    return hasattr(factory, "encrypt_with")


def check_plugins(config: OffloadConfig) -> None:
    """Check the policy, the options of each tier, and extras; no store is opened.

    Raises:
        ConfigError: no such plug-in, unknown or bad option, an extra that is not installed, two
            tiers in one folder.
    """
    for setting in ("metrics_port", "otel_spans"):
        if value := getattr(config, setting):
            check_extra(setting, value)
    load(POLICIES, config.policy, "policy")
    check_tiers(config.backends)


def check_tiers(tiers: Sequence[BackendConfig]) -> None:
    """Check the options of each tier, and that no two share a folder; raises ConfigError.

    What a plug-in's tiers must not share, :attr:`Observable.place` says of the open stores.
    """
    first_in: dict[str, int] = {}
    for i, tier in enumerate(tiers):
        options = read_options(tier.type, tier.options, f"backends[{i}].")
        is_ours = type(options).__module__.startswith("kvoffload.")
        if is_ours and (root := getattr(options, "root", "")):
            first = first_in.setdefault(os.path.abspath(root), i)
            if first != i:
                remedy = f"is where backends[{first}] keeps its chunks; one tier is enough there"
                raise ConfigError(f"backends[{i}].root", root, remedy)


def open_backend(
    type: str,
    options: dict[str, Any],
    namespace: str,
    where: str = "",
) -> Backend:
    """Open a backend by its registered name.

    Args:
        type: a name in the ``kvoffload.backends`` entry-point group: ``memory``, ``disk``...
        options: that backend's own settings, and ``encryption``; unknown keys are errors.
        namespace: the digest of everything that decides what the bytes mean
            (:func:`kvoffload.identity.namespace`). Other namespaces are invisible.
        where: prefix for field names in errors.

    Raises:
        ConfigError: unknown type, unknown or bad option, or a root that cannot be used.
    """
    settings = read_options(type, options, where)
    seal = read_encryption(options, where)
    factory: BackendFactory = load(BACKENDS, type)
    try:
        backend: Any = factory(settings, namespace)
        if seal is not None:
            backend.encrypt_with(seal)
        return backend  # type: ignore[no-any-return]
    except ConfigError as error:
        if error.field.startswith(where):
            raise
        raise ConfigError(f"{where}{error.field}", error.value, error.remedy) from error


def offers(type: str, command: str) -> bool:
    """Return whether a backend offers a command, as far as its class tells before it is opened."""
    factory = load(BACKENDS, type)
    factory = getattr(factory, "admin", factory)
    return not isclass(factory) or issubclass(factory, COMMANDS[command])


def open_admin(type: str, options: dict[str, Any]) -> Any:
    """Open a store for an operator's command, by the registered name of its backend.

    Returns:
        An object with protocols of :mod:`kvoffload.backends.admin`, and with ``close()``.

    Raises:
        ConfigError: unknown type, unknown or bad option.
    """
    factory = load(BACKENDS, type)
    if hasattr(factory, "admin"):
        return factory.admin(options)
    return open_backend(type, options, "kvoffload-command-line")
