"""What vLLM lets a client decide of block hashes, and which requests the tiers therefore refuse.

vLLM takes the ``uuid`` that a client gives an image as that image's hash, and with scale-out the
``features.mm_hashes`` of a request. A client can send one
image under the hash of another image. Clients that send the other image are then served its KV. In
vLLM alone that lasts as long as the GPU blocks; a tier would keep it for days.
"""

import logging
from typing import Any

from kvoffload.connectors.vllm.settings import VllmConfigSettings
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)


def are_counted(vllm_config: Any) -> bool:
    """Whether vLLM names media by a counter of each process, in place of a hash.

    It does so where it has no use for their hashes: without prefix caching and processor cache.
    """
    media = vllm_config.model_config.multimodal_config
    return bool(
        media
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def may_have_media(request: Any, vllm_config: Any) -> bool:
    """Whether a request has images, or is a session whose later parts may have some."""
    is_session = bool(getattr(request, "resumable", False))
    return bool(request.mm_features or (is_session and vllm_config.model_config.multimodal_config))


def is_trusted(request: Any, settings: VllmConfigSettings, vllm_config: Any) -> bool:
    """Whether the hashes of a request's blocks say what its blocks hold.

    An identifier that a client chose cannot be told from the hash of a content. So a request with
    images is trusted only in the space of its own ``cache_salt``. A counter names another image
    after each restart, so nothing makes it a name of content.
    """
    if not may_have_media(request, vllm_config):
        return True
    has_names = bool(settings.trust_image_uuids or request.cache_salt)
    return has_names and not are_counted(vllm_config)


def refuse_weak_hashes(vllm_config: Any, settings: VllmConfigSettings) -> None:
    """Refuse block hashes whose collisions a client can search for, where they outlive the GPU.

    Raises:
        ConfigError: a tier is configured and the hash is not cryptographic.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if settings.backends and algorithm.startswith("xxhash") and not settings.allow_weak_hashes:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "a client can make two prompts with the same block hash, and tiers keep what the wrong "
            "one left; set --prefix-caching-hash-algo sha256, or, where every client is trusted, "
            '"allow_weak_hashes": true',
        )


def warn_of_images(vllm_config: Any, settings: VllmConfigSettings) -> None:
    """Say at the start what becomes of requests with images."""
    if not vllm_config.model_config.is_multimodal_model:
        return
    if are_counted(vllm_config):
        log.warning(
            "kvoffload: requests with images stay out of all tiers, because vLLM names images by a "
            "counter with --no-enable-prefix-caching and --mm-processor-cache-gb 0. Leave one out."
        )
    elif settings.trust_image_uuids:
        log.warning(
            "kvoffload: trust_image_uuids is set: a client that may send a uuid with an image can "
            "have its own KV served to other clients. Let the gateway remove multi_modal_uuids, "
            "features.mm_hashes and the uuid of each content part."
        )
    else:
        log.info(
            "kvoffload: requests with images and without cache_salt stay out of all tiers, because "
            "vLLM takes a client's uuid as the hash of an image. Where a gateway removes uuids, "
            'set "trust_image_uuids": true.'
        )
