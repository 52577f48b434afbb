"""What is found out when SGLang has read its command line, before it loads a model."""

from typing import Any

from kvoffload.connectors.sglang.hicache_settings import read_settings
from kvoffload.connectors.sglang.page_facts import check_version

CLASS_NAME = "KVOffloadHiCache"


def check_settings(result: None, args: Any) -> None:
    """Check the extra config of a start with our storage; SGLang's hook after ``resolve_once``.

    Args:
        result: of the function that SGLang has called; not used.
        args: SGLang's ``ServerArgs``.

    Raises:
        ConfigError: a setting is wrong, or this SGLang is not supported.
    """
    if args.hicache_storage_backend != "dynamic" or not args.hicache_storage_backend_extra_config:
        return
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    parse = HybridCacheController.parse_storage_backend_extra_config
    extra, *_ = parse(args.hicache_storage_backend_extra_config)
    if extra.get("class_name") == CLASS_NAME:
        check_version(read_settings(extra).allow_untested_sglang)
