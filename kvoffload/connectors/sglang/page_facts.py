"""What decides the form of a rank's stored pages, and which versions of SGLang are known.

SGLang's keys are hashes of tokens, seeded with ``cache_salt`` and what :mod:`.request_keys` makes
of a request's adapter and ``extra_key``. They name neither the model nor the form of a page.
"""

import logging
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from kvoffload.config import BackendConfig, human_bytes
from kvoffload.connectors.configuration import facts_of, names
from kvoffload.errors import ConfigError
from kvoffload.identity import Fact

log = logging.getLogger(__name__)

FIRST, LAST = (0, 5, 23), (0, 5, 23)
SMALL_BYTES, ENOUGH_BYTES = 128 << 10, 256 << 10
"""Up to the first, a page costs more than its bytes do; the second is the least to advise."""
_COMPUTED = (
    "storage_format_tag", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "dtype", "layout",
    "page_size",
)  # fmt: skip
"""Attributes that a pool may compute, or have from its class."""
_HARMLESS_OF_POOLS = names(
    {
        "how many pages there are, and which are free": (
            "size page_num token_num device_capacity_tokens indexer_page_num device_num_pages "
            "device_slots capacity_bytes release_slots num_release_slots"
        ),
        "where they are, and how they are copied": (
            "device device_pool device_data_ptrs pin_memory fd can_use_jit can_use_write_back_jit "
            "staging_page_capacity staging_token_capacity staging_buffer staging_k_buffer "
            "staging_v_buffer temporal_staging_buffer conv_staging_buffers pool_label "
            "registration_owner slot_state_device_tensors slot_state_buffers "
            "mtp_draft_buffer_infos"
        ),
    }
)
_HARMLESS_OF_RANKS = names(
    {
        "a label": "model_name",
        "replicas compute the same": "dp_rank",
        "settings of the storage": "enable_storage_metrics extra_config",
        "refused at the attach": "tp_lcm_size",
    }
)
_OF_A_HOST = frozenset({"disk", "memory"})
"""Types of tiers that no other host sees."""
_OF_TENSOR_RANKS = frozenset({"tp_rank", "tp_size"})


def check_version(allow_untested: bool, text: str | None = None) -> None:
    """Refuse a SGLang whose keys are not seeded, and a newer one unless told to go on.

    Raises:
        ConfigError: names the version and the remedy.
    """
    found = version("sglang") if text is None else text
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    number = tuple(map(int, match.groups())) if match else (0, 0, 0)
    if number < FIRST:
        remedy = "its keys ignore cache_salt and LoRA, so prompts of other tenants would match"
        raise ConfigError("sglang", found, f"{remedy}; install 0.5.23 or newer")
    if number <= LAST:
        return
    if not allow_untested:
        remedy = 'is newer than the tested 0.5.23; set "allow_untested_sglang": true to try it'
        raise ConfigError("sglang", found, remedy)
    log.warning("SGLang %s is newer than the tested 0.5.23; going on as told", found)


def warn_of_small_pages(page_size: int, page_bytes: int) -> None:
    """Log which ``--page-size`` to set where each page is too small for its costs.

    Args:
        page_size: tokens of a page.
        page_bytes: of a page of the KV pool; 0 if all bytes are in side pools.
    """
    if not 0 < page_bytes <= SMALL_BYTES:
        return
    factor = 1
    while page_bytes * factor < ENOUGH_BYTES:
        factor *= 2
    log.warning(
        "kvoffload: a page of %d tokens has %s on this rank. Each page costs calls, so small "
        "pages are stored and loaded slowly: set --page-size %d, which makes pages of %s",
        page_size,
        human_bytes(page_bytes),
        page_size * factor,
        human_bytes(page_bytes * factor),
    )


def process_number() -> int:
    """Return the number of this process among all that have pages, replicas of the engine too."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Groups of one engine that share out the attention are among its ranks.
    replica = (parallel.dp_rank or 0) // parallel.attn_dp_size
    return int(replica * parallel.launch_world_size + parallel.launch_world_rank)


def pool_facts(pool: Any, part_bytes: list[int], is_v1: bool) -> dict[str, Fact]:
    """Collect what decides the form of a page in a host pool: each plain attribute of the pool."""
    pool = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)
    plain = {name: value for name, value in vars(pool).items() if _is_plain(name, value)}
    for name in _COMPUTED:
        if (value := getattr(pool, name, None)) is not None:
            plain.setdefault(name, value)
    return {
        "pool": type(pool).__name__,
        "page_bytes": sum(part_bytes),
        # The parts of a page and its flat form have the same bytes in different orders.
        "page_form": f"{len(part_bytes)} parts" if is_v1 else "flat",
        "part_bytes": " ".join(map(str, sorted({*part_bytes}))),
        **facts_of(plain, prefix="pool."),
    }


def _is_plain(name: str, value: Any) -> bool:
    """Tell whether an attribute is a number, a text or a dtype, or a list of such ones."""
    if name.startswith("_") or name in _HARMLESS_OF_POOLS or value is None:
        return False
    if isinstance(value, list | tuple):
        return all(_is_plain("", each) for each in value)
    return isinstance(value, int | str) or type(value).__name__ == "dtype"


def check_ranks(config: Any) -> None:
    """Refuse ranks that would find nothing: SGLang lets no rank store their pages.

    One tensor-parallel rank of a MLA model stores for all. Ranks of context parallelism are among
    those ranks, but for data-parallel attention, and their pages may differ.

    Raises:
        ConfigError: names the size of context parallelism.
    """
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    if config.is_mla_model and config.attn_cp_size > 1 and not is_dp_attention_enabled():
        remedy = (
            "rank 0 of a MLA model stores its pages for all ranks, and those of context "
            "parallelism have other ones, so no prefix would ever be found; leave out "
            "--enable-prefill-cp, or --hicache-storage-backend"
        )
        raise ConfigError("attn_cp_size", config.attn_cp_size, remedy)


def check_hosts(config: Any, tiers: Iterable[BackendConfig], parallel: Any) -> None:
    """Refuse tiers of one host for a MLA model whose tensor-parallel ranks are on several.

    Args:
        config: SGLang's ranks.
        tiers: of the settings.
        parallel: SGLang's, of the whole engine.

    Raises:
        ConfigError: names the number of hosts.
    """
    num_hosts = max(parallel.nnodes // parallel.pp_size, 1)  # of a pipeline stage
    types = {tier.type for tier in tiers}
    is_spread = config.is_mla_model and config.tp_size > parallel.tp_size // num_hosts
    if is_spread and types and types <= _OF_A_HOST:
        remedy = (
            "rank 0 of a MLA model stores for all ranks, and those on other hosts would never find "
            "a page; name a tier that the hosts share too, as folder, redis or object"
        )
        raise ConfigError("nnodes", parallel.nnodes, remedy)


def rank_facts(config: Any) -> dict[str, Fact]:
    """Collect which part of the KV cache this rank has: all ranks of a MLA model have the same."""
    left_out = _HARMLESS_OF_RANKS | (_OF_TENSOR_RANKS if config.is_mla_model else frozenset())
    return facts_of(config, {f"rank.{name}" for name in left_out}, prefix="rank.")


def side_pool_facts(name: str, pool: Any, config: Any) -> dict[str, Fact]:
    """Collect which part of a side pool this rank has, where the ranks of a MLA model differ."""
    if differs_by_rank(name, pool):
        return {"name": name, "rank": config.tp_rank, "tensor_parallel": config.tp_size}
    return {"name": name}


def differs_by_rank(name: str, pool: Any) -> bool:
    """Tell whether each rank of a MLA model has a part of its own of a side pool.

    The KV cache is replicated there. A recurrent state is sharded, and so are the heads of a draft.
    """
    has_heads = name.startswith("draft") and getattr(pool, "head_num", None) is not None
    return name == "mamba" or has_heads
