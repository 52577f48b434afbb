"""Hooks on HiCache's controller: a failed attach is taken back, and each rank stores its part.

SGLang tells a storage of its last pool after the part of an attach that it takes back. A storage
that refuses then stays attached: each backup fails, and the next attach is answered with success.

Rank 0 of a MLA model stores for all ranks. Each rank has its own heads of a draft. SGLang lets it
store them with one storage only, whose keys name the rank. Keys of kvoffload do so too.
"""

from collections.abc import Callable
from typing import Any

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
ATTACH = f"{_CONTROLLER}.attach_storage_backend"
SHOULD_BACKUP = f"{_CONTROLLER}.should_backup"


def around_attach(attach: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    """Detach what a failed attach has left behind."""
    was_attached = controller.enable_storage
    try:
        attach(controller, *args, **kwargs)
    except Exception:
        if controller.enable_storage and not was_attached:
            controller.detach_storage_backend()
        raise


def around_should_backup(should: Callable[..., bool], controller: Any, transfer: Any) -> bool:
    """Tell whether this rank stores pages of a side pool: also if it is the rank's own part."""
    has_own_part = getattr(controller.storage_backend, "has_own_part", None)
    return should(controller, transfer) or bool(has_own_part and has_own_part(transfer.name))
