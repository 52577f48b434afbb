"""An attach that fails leaves SGLang without a storage, so that the next attach can succeed.

SGLang tells a storage of its last pool after the part of an attach that it takes back. A storage
that refuses then stays attached: each backup fails, and the next attach is answered with success.
"""

from collections.abc import Callable
from typing import Any

ATTACH = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller."
    "HybridCacheController.attach_storage_backend"
)


def around_attach(attach: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    """Detach what a failed attach has left behind."""
    was_attached = controller.enable_storage
    try:
        attach(controller, *args, **kwargs)
    except Exception:
        if controller.enable_storage and not was_attached:
            controller.detach_storage_backend()
        raise
