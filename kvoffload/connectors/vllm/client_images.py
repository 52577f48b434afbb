"""What vLLM lets a client decide of block hashes, and which requests the tiers therefore refuse.

vLLM takes the ``uuid`` that a client gives an image as that image's hash. A client can send one
image under the hash of another image. Clients that send the other image are then served its KV. In
vLLM alone that lasts as long as the GPU blocks; a tier would keep it for days.
"""

import logging
from typing import Any

from kvoffload.connectors.vllm.settings import VllmConfigSettings
from kvoffload.errors import ConfigError

log = logging.getLogger(__name__)


def is_trusted(request: Any, settings: VllmConfigSettings) -> bool:
    """Whether the hashes of a request's blocks say what its blocks hold.

    An identifier that a client chose cannot be told from the hash of a content. So a request with
    images is trusted only in the space of its own ``cache_salt``.
    """
    return bool(settings.trust_image_uuids or request.cache_salt or not request.mm_features)


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
    if settings.trust_image_uuids:
        log.warning(
            "kvoffload: trust_image_uuids is set: a client that may send a uuid with an image can "
            "have its own KV served to other clients. Let the gateway remove multi_modal_uuids and "
            "the uuid of each content part."
        )
    else:
        log.info(
            "kvoffload: requests with images and without cache_salt stay out of all tiers, because "
            "vLLM takes a client's uuid as the hash of an image. Where a gateway removes uuids, "
            'set "trust_image_uuids": true.'
        )
