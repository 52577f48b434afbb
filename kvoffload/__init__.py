"""Keep an LLM engine's KV cache alive beyond GPU memory: GPU, pinned host memory, disk, Redis.

Importing this package loads neither torch nor any backend; both come with the first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.backends.base import Backend
    from kvoffload.config import OffloadConfig
    from kvoffload.registry import open_backend

__version__ = "0.1.0"

_HOMES = {
    "Backend": "kvoffload.backends.base",
    "OffloadConfig": "kvoffload.config",
    "open_backend": "kvoffload.registry",
}

__all__ = ["Backend", "OffloadConfig", "__version__", "open_backend"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvoffload' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
