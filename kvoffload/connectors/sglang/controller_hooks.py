"""Hooks on HiCache's controller: a failed attach is taken back, and each rank stores its part.

SGLang tells a storage of its last pool after the part of an attach that it takes back. A storage
that refuses then stays attached: each backup fails, and the next attach is answered with success.
SGLang answers for rank 0 alone, and a request ends an engine whose ranks disagree about a storage.

Rank 0 of a MLA model stores for all ranks. Each rank has its own heads of a draft. SGLang lets it
store them with one storage only, whose keys name the rank. Keys of kvoffload do so too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvoffload.connectors.sglang.hicache_settings import CLASS
from kvoffload.errors import ConfigError

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
ATTACH = f"{_CONTROLLER}.attach_storage_backend"
SHOULD_BACKUP = f"{_CONTROLLER}.should_backup"


def around_attach(attach: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    """Detach what a failed attach has left behind, on this rank or on another one.

    Raises:
        ConfigError: another rank could not attach the storage, or this engine cannot do it now.
    """
    was_attached = controller.enable_storage
    if _is_ours(kwargs):
        _check_stages()
    try:
        attach(controller, *args, **kwargs)
    except Exception:
        if controller.enable_storage and not was_attached:
            if _is_ours(kwargs):
                _have_all_attached(controller, False)
            controller.detach_storage_backend()
        raise
    if _is_ours(kwargs) and not _have_all_attached(controller, True):
        controller.detach_storage_backend()
        remedy = "could not be attached by another rank; its log says why"
        raise ConfigError("hicache_storage_backend", "dynamic", remedy)


def _is_ours(arguments: Mapping[str, Any]) -> bool:
    extra = arguments.get("storage_backend_extra_config") or {}
    return bool(extra.get("class_name") == CLASS["class_name"])


def _check_stages() -> None:
    """Refuse an attach while pipeline stages serve.

    The first stage makes groups of all ranks before it passes the call on, and waits for ever.
    """
    from sglang.srt.runtime_context import get_memory, get_parallel

    is_start = get_memory().hicache_storage_backend is not None
    if not is_start and (stages := get_parallel().pp_size) > 1:
        remedy = (
            "SGLang's pipeline stages would wait for each other for ever if a storage was attached "
            "now; set --hicache-storage-backend at the start"
        )
        raise ConfigError("pp_size", stages, remedy)


def _have_all_attached(controller: Any, has_attached: bool) -> bool:
    """Tell each rank whether all have attached the storage, in the groups that the attach made."""
    import torch

    told = torch.tensor(int(has_attached))
    minimum = torch.distributed.ReduceOp.MIN
    controller._all_reduce(told, minimum, controller.prefetch_hits_sync_groups)
    return bool(told)


def around_should_backup(should: Callable[..., bool], controller: Any, transfer: Any) -> bool:
    """Tell whether this rank stores pages of a side pool: also if it is the rank's own part."""
    has_own_part = getattr(controller.storage_backend, "has_own_part", None)
    return should(controller, transfer) or bool(has_own_part and has_own_part(transfer.name))
