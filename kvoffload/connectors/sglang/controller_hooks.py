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
        _check_ranks()
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


def _check_ranks() -> None:
    """Refuse an attach while ranks serve that would wait for each other for ever.

    All ranks make the groups of an attach together. The first pipeline stage makes them before it
    passes the call on. With data-parallel attention, ranks with a request reject the call, and the
    idle ones make groups.
    """
    from sglang.srt.runtime_context import get_memory, get_parallel

    parallel = get_parallel()
    if get_memory().hicache_storage_backend is not None:  # at the start
        return
    remedy = (
        "SGLang's ranks would wait for each other for ever if a storage was attached now; set "
        "--hicache-storage-backend at the start"
    )
    if parallel.pp_size > 1:
        raise ConfigError("pp_size", parallel.pp_size, remedy)
    # A rank alone makes no group.
    if parallel.attn_dp_size > 1 and parallel.attn_tp_size * parallel.attn_cp_size > 1:
        raise ConfigError("attn_dp_size", parallel.attn_dp_size, remedy)


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
