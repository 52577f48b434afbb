"""What is found out when SGLang has read its command line, before it loads a model."""

from typing import Any

from kvoffload.connectors.sglang.hicache_settings import CLASS, HiCacheSettings, read_settings
from kvoffload.connectors.sglang.page_facts import check_version
from kvoffload.errors import ConfigError

RESOLVE = "sglang.srt.server_args.ServerArgs.resolve_once"


def check_settings(result: None, args: Any) -> None:
    """Check the extra config of a start with our storage; SGLang's hook after ``resolve_once``.

    Args:
        result: of the function that SGLang has called; not used.
        args: SGLang's ``ServerArgs``.

    Raises:
        ConfigError: a setting is wrong, or this SGLang, its model or this machine is not supported.
    """
    if args.hicache_storage_backend != "dynamic" or not args.hicache_storage_backend_extra_config:
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    parse = HybridCacheController.parse_storage_backend_extra_config
    extra, *_ = parse(args.hicache_storage_backend_extra_config)
    if extra.get("class_name") == CLASS["class_name"]:
        settings = read_settings(extra)
        check_version(settings.allow_untested_sglang)
        check_role(args)
        check_sessions(args)
        check_hicache(args)
        if not settings.trust_image_hashes:
            check_media(settings, model_config_of(args))
        compile_hashes()


def check_hicache(args: Any) -> None:
    """Refuse a start in which SGLang would not open its storage, and would not say so.

    Raises:
        ConfigError: names the option.
    """
    if not args.resolved_dict()["enable_hierarchical_cache"]:
        remedy = (
            "SGLang opens its storage with HiCache alone, so nothing would be stored; set "
            "--enable-hierarchical-cache, or leave out --hicache-storage-backend where SGLang "
            "switches HiCache off, as for diffusion models"
        )
        raise ConfigError("enable_hierarchical_cache", False, remedy)


def check_role(options: Any) -> None:
    """Refuse a decode instance of a disaggregated engine.

    It asks the storage for a prefix, and tells the prefill instance not to send it. So a page that
    is lost before its load ends the request with an error. What such an instance offloads itself
    has another namespace than the pages of prefill instances: SGLang turns its radix cache off.

    Args:
        options: SGLang's, of disaggregation.

    Raises:
        ConfigError: names the option.
    """
    remedy = (
        "a decode instance answers a request with an error where a page is lost after its lookup, "
        "and nothing finds what it offloads itself; leave out --hicache-storage-backend here, and "
        "set it on the prefill instances"
    )
    if options.disaggregation_mode == "decode":
        raise ConfigError("disaggregation_mode", "decode", remedy)
    if options.enable_pd_role_switch and options.disaggregation_decode_enable_radix_cache:
        raise ConfigError("disaggregation_decode_enable_radix_cache", True, remedy)


def check_sessions(options: Any) -> None:
    """Refuse streaming sessions: the second request of one ends SGLang's scheduler.

    It asks its radix cache for the node that storage goes on from, and a session has none there.
    Source: ``Scheduler._prefetch_kvcache`` of SGLang.

    Args:
        options: SGLang's, of serving.

    Raises:
        ConfigError: names the option.
    """
    if options.enable_streaming_session:
        remedy = (
            "SGLang ends at the second request of a streaming session if it has a storage; leave "
            "it out, or --hicache-storage-backend; other sessions work"
        )
        raise ConfigError("enable_streaming_session", True, remedy)


def compile_hashes() -> None:
    """Let SGLang compile what it makes the keys of pages with; else its first request would wait.

    That takes 14 to 28 s once a machine.

    Raises:
        ConfigError: it cannot be compiled. Without this the scheduler would end at a request.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    try:
        get_hash_str([0], page_size=1)
    except RuntimeError as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        remedy = (
            "cannot be compiled, and no page has a key without it; install a C++ compiler, ninja "
            f"and OpenSSL's headers (g++, ninja-build, libssl-dev): {cause[0] if cause else error}"
        )
        raise ConfigError("sglang", "hicache_hash_cpp", remedy) from error


def check_media(settings: HiCacheSettings, model_config: Any) -> None:
    """Refuse a model with images unless the operator vouches for the names of images.

    SGLang stores the pages of an image under 64 bits, which a client may choose. It sends
    ``mm_hashes``, or an item with ``hash`` or ``pad_value``. It may also search for pixels with the
    same 64 bits, because a GPU adds them up.

    Raises:
        ConfigError: names the setting.
    """
    takes_media = model_config.is_multimodal or model_config.is_audio_model
    if takes_media and not settings.trust_image_hashes:
        kinds = ", ".join(model_config.hf_config.architectures or ["?"])
        remedy = (
            f"the model takes images, video or audio ({kinds}), and a client could choose which "
            "pages they share; docs/guides/sglang.md says what a gateway removes before you set "
            "it to true"
        )
        raise ConfigError("trust_image_hashes", False, remedy)
