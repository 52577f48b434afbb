"""``--hicache-storage-backend-extra-config`` → settings: the same keys as under vLLM."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvoffload.config import Bytes, ByteSize, OffloadConfig, parse_config
from kvoffload.config_sources import gather
from kvoffload.errors import ConfigError
from kvoffload.registry import check_plugins

OF_SGLANG = frozenset(
    {
        "backend_name", "module_path", "class_name", "interface_v1", "allocator",
        "file_storage_path", "prefetch_threshold", "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
    }
)  # fmt: skip
"""Keys of the same object that SGLang reads."""
_HOST = "host memory is HiCache's own: set --hicache-size or --hicache-ratio"
LONGEST_CALL_S = 8.0
"""When SGLang empties its caches, it waits 10 s for calls to end. Then its scheduler ends."""
CLASS = {"module_path": "kvoffload.connectors.sglang", "class_name": "KVOffloadHiCache"}
"""Where SGLang finds the storage."""
NOT_HERE = {
    "cpu_bytes": _HOST,
    "policy": "host memory is HiCache's own: set --radix-eviction-policy",
    "max_inflight_bytes": "stores use at most a half of staging_bytes",
    "blocks_per_chunk": "a chunk is a page of SGLang: set --page-size",
    "store_threshold": "SGLang chooses what is stored: set --hicache-write-policy",
    "promote": "each page is stored on every tier",
    "waiting_share": "host memory is HiCache's own, and it tells nothing of its queue",
    "batched_copies": "HiCache copies between the GPU and its own host memory",
    "record": "SGLang shows no requests to its storage",
    "otel_spans": "SGLang shows no requests to its storage; its own traces have them",
    "control_socket": "the endpoint clear of SGLang empties its storage",
    "client_hints": "SGLang shows no hints of requests to its storage",
    "tp_lcm_size": "pages of a rank hold all of its heads, so engines share them with those of the "
    "same --tp-size",
    "tenants": "SGLang shows no salts of requests to its storage",
    "tenant_share": "host memory is HiCache's own",
    "hint_share": "SGLang shows no hints of requests to its storage",
}
"""Keys of vLLM and of other storages that mean nothing here, with what to do instead."""


class HiCacheSettings(OffloadConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may stand in ``--hicache-storage-backend-extra-config``, but for SGLang's own keys."""

    cpu_bytes: Bytes = msgspec.field(default_factory=lambda: ByteSize(0))
    weights_id: str | None = None
    """A name for the exact weights of the model and its draft, where neither a commit nor files
    tell them, as when they are streamed. New weights need a new name. By default a digest of the
    files' content."""
    trust_image_hashes: bool = False
    """True: attach to models with images, video or audio. Only where a gateway removes from
    requests what names an image, or where all clients trust each other."""
    allow_clear: bool = False
    """True: SGLang's endpoint ``clear`` removes the pages of this namespace from every tier, also
    those that other engines have stored. Set SGLang's ``--admin-api-key`` with it."""
    allow_untested_sglang: bool = False
    """True: go on with a newer version of SGLang than those that are tested."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("load_timeout_s", "lookup_timeout_s"):
            if (seconds := getattr(self, name)) > LONGEST_CALL_S:
                remedy = (
                    f"must be at most {LONGEST_CALL_S:g} under SGLang, which ends itself if it "
                    "empties its caches while a call lasts for 10 s"
                )
                raise ConfigError(name, seconds, remedy)


def read_settings(extra: Mapping[str, Any]) -> HiCacheSettings:
    """Read and check the extra config, the options of each tier among it; no store is opened.

    Raises:
        ConfigError: an unknown key (with a suggestion), one that means nothing here, a bad value.
    """
    settings, _ = gather_settings(extra)
    config = parse_config(settings, HiCacheSettings)
    check_plugins(config)
    return config


def gather_settings(
    extra: Mapping[str, Any], source: str = "engine"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return our settings of the extra config, the environment and the file; the source of each.

    Args:
        extra: the extra config.
        source: what it is called.

    Raises:
        ConfigError: see :func:`kvoffload.config_sources.gather`; a setting means nothing here, or
            no tier is named.
    """
    ours = {name: value for name, value in extra.items() if name not in OF_SGLANG}
    settings, sources = gather(ours, HiCacheSettings.__struct_fields__, source=source)
    for name, value in settings.items():
        if name in NOT_HERE:
            remedy = f"does not apply under SGLang (source: {sources[name]})"
            raise ConfigError(name, value, f"{remedy}; {NOT_HERE[name]}")
    if not settings.get("backends") and not settings.get("serve"):
        remedy = 'name a tier, or more, such as [{"type": "disk", "root": "/var/cache/kv"}]'
        raise ConfigError("backends", settings.get("backends"), remedy)
    return settings, sources
