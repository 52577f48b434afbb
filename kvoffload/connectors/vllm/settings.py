"""``kv_connector_extra_config`` → settings: ours, and the few of vLLM's that still matter."""

from collections.abc import Mapping
from typing import Any, Literal

from kvoffload import registry
from kvoffload.config import OffloadConfig, parse_config
from kvoffload.config_sources import gather
from kvoffload.connectors.vllm.versions import check_version


class VllmConfigSettings(OffloadConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may stand in ``kv_connector_extra_config``."""

    io: Literal["thread", "process"] = "process"
    """See :class:`OffloadConfig`; each worker has an I/O server of its own."""
    offload_prompt_only: bool = True
    """True: store prompts but not what the model generates, as vLLM's own connector does. An answer
    that a later prompt repeats is computed once more there, and then stored."""
    self_describing_kv_events: bool = False
    """True: events of stored chunks carry their tokens, as vLLM's own connector offers."""
    weights_id: str | None = None
    """A name for the exact weights of the model and its draft, where they come from elsewhere than
    the model's folder or a hub. New weights need a new name. By default a commit, or samples of
    each tensor in the folder's files."""
    fixed_weights: bool = False
    """True: the weights never change while the engine runs. A reset or a sleep then empties host
    memory, and the tiers keep what they hold. By default these, and calls to the workers that may
    change weights, give the tiers a new namespace."""
    canary: bool = True
    """Store and load a pattern through every tier before the first request is served."""
    trust_image_uuids: bool = False
    """True: offload requests with images and without ``cache_salt``. Safe only behind a gateway
    that removes ``uuid`` and ``mm_hashes``, because vLLM takes them as hashes of images."""
    allow_weak_hashes: bool = False
    """True: use tiers with a hash whose collisions a client can search for (xxhash)."""
    allow_untested_vllm: bool = False
    """True: go on with a version of vLLM outside the tested range."""


def read_settings(extra: Mapping[str, Any]) -> VllmConfigSettings:
    """Read and check the extra config of a KV transfer config, the options of each tier among it.

    What it lacks may be in the environment or in a file: see :mod:`kvoffload.config_sources`. No
    store is opened. What only a store can tell is found out when it is: a folder that belongs to
    another user, a server that is away.

    Raises:
        ConfigError: an unknown key (with a suggestion), a bad value, an untested vLLM.
    """
    merged, _ = gather(extra, VllmConfigSettings.__struct_fields__)
    settings = parse_config(merged, VllmConfigSettings)
    check_version(settings.allow_untested_vllm)
    registry.check_plugins(settings)
    return settings
