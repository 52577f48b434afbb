"""SGLang's functions that kvoffload hooks, in the processes of SGLang where they run."""

import sys
from collections.abc import Callable
from typing import Any

from kvoffload.connectors.sglang import (
    controller_hooks,
    engine_start,
    request_keys,
    start_check,
    weight_hooks,
)
from kvoffload.errors import ConfigError

SCHEDULER = "sglang.srt.managers.scheduler"
"""A module of the processes that have pages; the rest need not import it."""


def register_hooks() -> None:
    """Hook SGLang's functions; SGLang applies the hooks of all plug-ins together."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(start_check.RESOLVE, start_check.check_settings)
    HookRegistry.register(engine_start.PUBLISH, engine_start.before_publish, HookType.BEFORE)
    if SCHEDULER not in sys.modules:
        return
    for kind, hooks in _hooks().items():
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, HookType[kind])


def _hooks() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the hooks of each type, by the function that they are on."""
    return {
        "BEFORE": {
            **dict.fromkeys(weight_hooks.UPDATES, weight_hooks.before_update),
            weight_hooks.RELEASE: weight_hooks.before_release,
            weight_hooks.CHECK: weight_hooks.before_check,
        },
        "AFTER": {
            **dict.fromkeys(weight_hooks.ENDS, weight_hooks.after_end),
            weight_hooks.FLUSH: weight_hooks.after_flush,
            request_keys.INIT: request_keys.after_request,
        },
        "AROUND": {
            request_keys.LOAD: request_keys.around_load,
            controller_hooks.ATTACH: controller_hooks.around_attach,
            controller_hooks.SHOULD_BACKUP: controller_hooks.around_should_backup,
        },
    }


def check_hooks() -> None:
    """Refuse a process in which SGLang has not applied all hooks.

    SGLang logs a hook that it cannot apply, and goes on. Without them new weights go unnoticed.

    Raises:
        ConfigError: names what is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    wanted = {target: hook for each in _hooks().values() for target, hook in each.items()}
    hooks = set(wanted.values())
    for target in sorted(wanted):
        registered = {hook for _, hook, _ in HookRegistry._hooks.get(target, ())}
        if target not in HookRegistry._patched or not registered & hooks:
            remedy = (
                "is not hooked, so new weights would go unnoticed; SGLANG_PLUGINS must be unset or "
                "name kvoffload, and its log says why a hook could not be applied"
            )
            raise ConfigError("sglang", target.removeprefix("sglang.srt."), remedy)
