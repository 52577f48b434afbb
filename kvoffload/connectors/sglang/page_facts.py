"""Everything that decides what a rank's stored pages mean, as SGLang has resolved it.

SGLang's keys are hashes of tokens, seeded with ``cache_salt`` and the adapter of a request. They
name neither the model nor the form of a page.
"""

import logging
import re
import uuid
from importlib.metadata import version
from typing import Any

from kvoffload.connectors.model_identity import commit_of, config_digest, weights_identity
from kvoffload.connectors.sglang.hicache_settings import HiCacheSettings
from kvoffload.errors import ConfigError
from kvoffload.offload.namespace import Fact

log = logging.getLogger(__name__)

FIRST, LAST = (0, 5, 23), (0, 5, 23)
_POOL_FACTS = (
    "dtype", "layout", "page_size", "size_per_token", "head_num", "head_dim", "v_head_dim",
    "layer_num", "start_layer", "end_layer", "kv_lora_rank", "qk_rope_head_dim",
    "storage_format_tag", "dcp_size", "dcp_rank",
)  # fmt: skip


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


def pool_facts(pool: Any, page_bytes: int, num_parts: int, is_v1: bool) -> dict[str, Fact]:
    """Collect what decides the form of a page in a host pool."""
    pool = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)
    facts: dict[str, Fact] = {
        "pool": type(pool).__name__,
        "page_bytes": page_bytes,
        # The parts of a page and its flat form have the same bytes in different orders.
        "page_form": f"{num_parts} parts" if is_v1 else "flat",
    }
    for name in _POOL_FACTS:
        if (value := getattr(pool, name, None)) is not None:
            facts[f"pool_{name}"] = value if isinstance(value, int) else str(value)
    return facts


def rank_facts(config: Any) -> dict[str, Fact]:
    """Collect which part of the KV cache this rank has: all ranks of a MLA model have the same."""
    facts: dict[str, Fact] = {
        "engine": "sglang",
        "model": config.model_name,
        "is_mla": config.is_mla_model,
        "pipeline_rank": config.pp_rank,
        "pipeline_parallel": config.pp_size,
        "context_rank": config.attn_cp_rank,
        "context_parallel": config.attn_cp_size,
        "decode_context_rank": config.dcp_rank,
        "decode_context_parallel": config.dcp_size,
    }
    if not config.is_mla_model:
        facts |= {"rank": config.tp_rank, "tensor_parallel": config.tp_size}
    return facts


def model_facts(args: Any, settings: HiCacheSettings) -> dict[str, Fact]:
    """Collect which model computes the pages.

    Args:
        args: SGLang's ``ServerArgs``.
        settings: may name the weights.
    """
    from sglang.srt.utils.hf_transformers.config import get_config

    hf_config = get_config(
        args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision
    )
    commit = commit_of(args.model_path, args.revision)
    weights = weights_identity(
        settings.weights_id,
        commit,
        args.model_path,
        dummy_seed=args.random_seed if args.load_format == "dummy" else None,
        source=args.model_path,
        # Nothing that SGLang tells its ranks has another value in each start: a seed may be set.
        engine=uuid.uuid4().hex,
        strangers="by another instance or rank (of a MLA model, one rank stores for all)",
    )
    return {
        "model_path": args.model_path,
        "revision": commit,
        "weights": weights,
        "hf_config": config_digest(hf_config),
        "model_overrides": args.json_model_override_args,
        "dtype": str(args.dtype),
        "quantization": args.quantization,
        "kv_dtype": str(args.kv_cache_dtype),
        "attention": f"{args.attention_backend} {args.prefill_attention_backend} "
        f"{args.decode_attention_backend}",
    }
