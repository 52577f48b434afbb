"""Keep an LLM engine's KV cache alive beyond GPU memory: GPU, pinned host memory, disk, Redis.

Importing this package loads neither torch nor any backend; both come with the first use. The names
below are public. Modules have more names, which may change between versions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.backends.asynchronous import AsyncBackend
    from kvoffload.backends.base import (
        Backend,
        LocalIndex,
        Observable,
        ReadResult,
        ReadsEach,
        Removal,
        Spares,
        Usage,
    )
    from kvoffload.backends.threaded import InlineBackend, ThreadedBackend
    from kvoffload.config import BackendConfig, ByteSize, OffloadConfig, parse_config
    from kvoffload.connectors.local import LocalConnector
    from kvoffload.connectors.local.request_states import OffloadRequest
    from kvoffload.connectors.local.transfers import LoadOutcome
    from kvoffload.connectors.weights import folder_digest
    from kvoffload.core.tensors import canonicalize_kv_caches
    from kvoffload.errors import ConfigError, KVOffloadError, UsageError
    from kvoffload.identity import namespace
    from kvoffload.messages import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        OffloadKey,
        make_offload_key,
    )
    from kvoffload.metrics import Exporter
    from kvoffload.offload.base import (
        ChunksRemoved,
        ChunksStored,
        OffloadingEvent,
        OffloadingManager,
        OffloadingSpec,
    )
    from kvoffload.policies.base import Policy
    from kvoffload.registry import open_backend

__version__ = "0.1.0"

_MODULES = {
    "backends.asynchronous": ("AsyncBackend",),
    "backends.base": (
        "Backend", "LocalIndex", "Observable", "ReadResult", "ReadsEach", "Removal", "Spares",
        "Usage",
    ),
    "backends.threaded": ("InlineBackend", "ThreadedBackend"),
    "config": ("BackendConfig", "ByteSize", "OffloadConfig", "parse_config"),
    "connectors.local": ("LocalConnector",),
    "connectors.local.transfers": ("LoadOutcome",),
    "connectors.local.request_states": ("OffloadRequest",),
    "connectors.weights": ("folder_digest",),
    "core.tensors": ("canonicalize_kv_caches",),
    "errors": ("ConfigError", "KVOffloadError", "UsageError"),
    "messages": (
        "CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches", "OffloadKey",
        "make_offload_key",
    ),
    "metrics": ("Exporter",),
    "offload.base": (
        "ChunksRemoved", "ChunksStored", "OffloadingEvent", "OffloadingManager", "OffloadingSpec",
    ),
    "identity": ("namespace",),
    "policies.base": ("Policy",),
    "registry": ("open_backend",),
}  # fmt: skip
_HOMES = {name: f"kvoffload.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncBackend", "Backend", "BackendConfig", "ByteSize", "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor", "CanonicalKVCaches", "ChunksRemoved", "ChunksStored", "ConfigError",
    "Exporter", "InlineBackend", "KVOffloadError", "LoadOutcome", "LocalConnector", "LocalIndex",
    "Observable", "OffloadConfig", "OffloadKey", "OffloadRequest", "OffloadingEvent",
    "OffloadingManager", "OffloadingSpec", "Policy", "ReadResult", "ReadsEach", "Removal", "Spares",
    "ThreadedBackend", "Usage", "UsageError", "__version__", "canonicalize_kv_caches",
    "folder_digest", "make_offload_key", "namespace", "open_backend", "parse_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvoffload' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
