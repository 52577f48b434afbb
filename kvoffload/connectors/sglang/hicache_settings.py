"""``--hicache-storage-backend-extra-config`` → settings: the same keys as under vLLM."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvoffload.config import Bytes, ByteSize, OffloadConfig, parse_config
from kvoffload.errors import ConfigError
from kvoffload.registry import check_plugins

OF_SGLANG = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "allocator",
        "file_storage_path", "tp_lcm_size", "prefetch_threshold", "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
"""Keys of the same object that SGLang reads."""
_HOST = "host memory is HiCache's own: set --hicache-size or --hicache-ratio"
_METRICS = "start SGLang with --enable-metrics: its page has sglang:kvoffload_events"
_NOT_HERE = {
    "cpu_bytes": _HOST,
    "policy": "host memory is HiCache's own: set --radix-eviction-policy",
    "max_inflight_bytes": "stores use at most a half of staging_bytes",
    "blocks_per_chunk": "a chunk is a page of SGLang: set --page-size",
    "store_threshold": "SGLang chooses what is stored: set --hicache-write-policy",
    "promote": "each page is stored on every tier",
    "batched_copies": "HiCache copies between the GPU and its own host memory",
    "record": "SGLang shows no requests to its storage",
    "otel_spans": "SGLang shows no requests to its storage; its own traces have them",
    "metrics_port": _METRICS,
    "metrics_host": _METRICS,
    "client_hints": "SGLang shows no hints of requests to its storage",
}
"""Keys under vLLM that mean nothing here, with what to do instead."""


class HiCacheSettings(OffloadConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may stand in ``--hicache-storage-backend-extra-config``, but for SGLang's own keys."""

    cpu_bytes: Bytes = msgspec.field(default_factory=lambda: ByteSize(0))
    io: Literal["thread", "process"] = "process"
    """See :class:`OffloadConfig`; each rank has an I/O server of its own."""
    weights_id: str | None = None
    """A name for the exact weights, where several machines with copies of a local model folder
    share a tier. By default a fingerprint of the files, which tells copies apart by their times."""
    allow_untested_sglang: bool = False
    """True: go on with a newer version of SGLang than those that are tested."""


def read_settings(extra: Mapping[str, Any]) -> HiCacheSettings:
    """Read and check the extra config, the options of each tier among it; no store is opened.

    Raises:
        ConfigError: an unknown key (with a suggestion), one that means nothing here, a bad value.
    """
    ours = {name: value for name, value in extra.items() if name not in OF_SGLANG}
    for name, value in ours.items():
        if name in _NOT_HERE:
            raise ConfigError(name, value, f"does not apply under SGLang; {_NOT_HERE[name]}")
    if not ours.get("backends"):
        remedy = 'name a tier, or more, such as [{"type": "disk", "root": "/var/cache/kv"}]'
        raise ConfigError("backends", ours.get("backends"), remedy)
    settings = parse_config(ours, HiCacheSettings)
    check_plugins(settings)
    return settings
