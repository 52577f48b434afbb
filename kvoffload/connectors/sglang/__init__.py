"""Attach to SGLang's HiCache: ``--hicache-storage-backend dynamic``.

``docs/guides/sglang.md`` has the command line. The name is imported at its first use, so that an
unknown SGLang is refused with a sentence.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.connectors.sglang.storage import KVOffloadHiCache

__all__ = ["KVOffloadHiCache", "register"]


def register() -> None:
    """Hook SGLang's functions: the settings are checked early, and new weights are noticed.

    SGLang calls this in each of its processes, by the entry-point group ``sglang.srt.plugins``.
    """
    from kvoffload.connectors.sglang.hooks import register_hooks

    register_hooks()


def __getattr__(name: str) -> Any:
    if name != "KVOffloadHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.storage").KVOffloadHiCache
