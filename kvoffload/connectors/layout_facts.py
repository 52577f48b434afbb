"""The part of the namespace that follows from the layout of chunks and the KV cache groups."""

from kvoffload.config import OffloadConfig
from kvoffload.connectors.chunking import ChunkGroups
from kvoffload.core.interface import KVCacheConfig
from kvoffload.offload.namespace import Fact
from kvoffload.transfer.layout import ChunkLayout


def layout_facts(
    config: OffloadConfig,
    block_size: int,
    groups: ChunkGroups,
    layout: ChunkLayout,
    kv_cache_config: KVCacheConfig | None,
) -> dict[str, Fact]:
    """Return the facts that an engine need not name: the layout decides them."""
    pages = [[region.page_bytes for region in regions] for regions in layout.regions]
    facts: dict[str, Fact] = {
        "block_size": block_size,
        "blocks_per_chunk": config.blocks_per_chunk,
        "chunk_layout": f"tensor-major-1 {pages}",
    }
    if len(pages) > 1:
        facts["chunk_tokens"] = f"{[group.chunk_tokens for group in groups.all]}"
    if kv_cache_config is not None:
        # A window or a state decides what its bytes were computed from.
        facts["kv_cache_groups"] = "\n".join(
            f"{group.layer_names} {group.kv_cache_spec}"
            for group in kv_cache_config.kv_cache_groups
        )
    return facts
