"""Hooks on every call of SGLang that changes weights in a running engine."""

from typing import Any

from kvoffload.connectors.sglang.weight_generations import WEIGHTS

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
RELEASE = f"{_MANAGER}.release_memory_occupation"
CHECK = f"{_MANAGER}.check_weights"
UPDATES = tuple(
    f"{_RUNNER}.{name}"
    for name in (
        "begin_weight_update",
        "load_weights_from_distributed",
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
)
"""The manager's updates end there. So do those without the manager, as of lost experts."""
ENDS = (f"{_MANAGER}.end_weight_update", f"{_MANAGER}.resume_memory_occupation")
_READING = ("snapshot", "compare", "checksum")


def before_update(*args: Any, **kwargs: Any) -> None:
    """Bar the storage before weights change."""
    WEIGHTS.changing("weights are updated")


def before_release(manager: Any, request: Any) -> None:
    """Bar the storage before weights leave the device, unless SGLang brings the same ones back."""
    tags = request.tags or ("weights",)
    is_kept = getattr(manager.scheduler.server_args, "enable_weights_cpu_backup", False)
    if "weights" in tags and not is_kept:
        WEIGHTS.changing("weights leave the device")


def before_check(manager: Any, request: Any) -> None:
    """Bar the storage before a check that overwrites weights."""
    if request.action not in _READING:
        WEIGHTS.changing(f"weights are checked by {request.action!r}")


def after_flush(emptied: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Begin a generation once SGLang has no page of earlier weights."""
    if emptied:
        WEIGHTS.emptied(scheduler.forward_ct)
        _settle(scheduler.weight_updater)


def after_end(answer: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Begin a generation at the end of an update whose last part has emptied the caches."""
    _settle(manager)


def _settle(manager: Any) -> None:
    is_updating = manager._session is not None
    if not is_updating and "weights" not in manager.offload_tags:
        WEIGHTS.settle(manager.scheduler.forward_ct)
