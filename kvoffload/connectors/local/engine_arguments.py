"""Checks of what an engine passes to LocalConnector: a wrong shape must not become wrong KV."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from kvoffload.connectors.local.chunking import BlockTables, ChunkGroups, Keys, Piece, Span
from kvoffload.core.groups import Group
from kvoffload.core.hashing import BlockHasher
from kvoffload.core.interface import KVCacheConfig, KVCacheGroupSpec
from kvoffload.errors import ConfigError, UsageError
from kvoffload.messages import CanonicalKVCaches
from kvoffload.transfer.factory import check_caches as check_rows

_NUMBERS = "must be the numbers of blocks, as [1, 2, 3]; not a list a group, not a mask"


def check_hashes(block_size: int, hasher: BlockHasher | None) -> None:
    """Raise ConfigError unless these are the tokens of a block hash, and a hasher of them."""
    if type(block_size) is not int or block_size < 1:
        raise ConfigError("block_size", block_size, "must be an int, at least 1 token")
    given: object = hasher  # an engine may not check its types
    if given is None:
        return
    tokens = given.block_size if isinstance(given, BlockHasher) else type(given).__name__
    if tokens != block_size:
        remedy = f"must be a BlockHasher of {block_size} tokens, as block_size says, or None"
        raise ConfigError("hasher", tokens, remedy)


def check_groups(kv_cache_config: KVCacheConfig | None) -> None:
    """Raise ConfigError unless these are KV cache groups."""
    config: object = kv_cache_config  # an engine may not check its types
    if config is None:
        return
    if not isinstance(config, KVCacheConfig):
        remedy = "must be a kvoffload.core.interface.KVCacheConfig, or None for one group"
        raise ConfigError("kv_cache_config", type(config).__name__, remedy)
    groups: Sequence[object] = config.kv_cache_groups
    for i, group in enumerate(groups):
        if not isinstance(group, KVCacheGroupSpec):
            field = f"kv_cache_config.kv_cache_groups[{i}]"
            raise ConfigError(field, type(group).__name__, "must be a KVCacheGroupSpec")


def check_caches(kv_caches: CanonicalKVCaches, kinds: Sequence[Group]) -> None:
    """Raise ConfigError unless these are canonical views of each KV cache group."""
    caches: object = kv_caches  # an engine may not check its types
    if not isinstance(caches, CanonicalKVCaches):
        remedy = "must be CanonicalKVCaches, as of kvoffload.canonicalize_kv_caches"
        raise ConfigError("kv_caches", type(caches).__name__, remedy)
    given = len(kv_caches.group_data_refs)
    if given != len(kinds):
        remedy = f"kv_cache_config has {len(kinds)} KV cache groups"
        if len(kinds) == 1:
            remedy += ", as None has: pass one with all groups"
        raise ConfigError("kv_caches", f"{given} groups", remedy)
    check_rows(kv_caches)


def token_count(field: str, value: SupportsIndex) -> int:
    """Return a number of tokens; UsageError: it is none."""
    try:
        count = index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise wrong(field, value, "must be a number of tokens, 0 or more")
    return count


def block_numbers(blocks: Iterable[SupportsIndex], limit: int, field: str = "blocks") -> list[int]:
    """Return block ids as plain numbers; tensors and arrays of one dimension are taken, too.

    Raises:
        UsageError: it is a table a group, or no numbers: as keys these would match no transfer. A
            mask is no numbers either: it would match blocks 0 and 1. Or a number is not below the
            limit.
    """
    try:
        listed = blocks.tolist() if hasattr(blocks, "tolist") else list(blocks)
        numbers = list(map(index, listed))
    except TypeError:
        raise wrong(field, blocks, _NUMBERS) from None
    if listed and isinstance(listed[0], bool):
        raise wrong(field, blocks, _NUMBERS)
    if numbers and not (min(numbers) >= 0 and max(numbers) < limit):
        raise wrong(field, numbers, f"must be below {limit}, the blocks of kv_caches")
    return numbers


def check_tables(tables: BlockTables, groups: ChunkGroups, num_tokens: int) -> None:
    """Raise UsageError unless each KV cache group has a table that covers these tokens."""
    token_count("num_computed_tokens", num_tokens)
    count = len(groups.all)
    try:
        lengths = [len(table) for table in tables]
    except TypeError:
        lengths = []
    if len(lengths) != count:
        remedy = f"must be a sequence of block numbers for each of {count} KV cache groups"
        raise wrong("block_ids", tables, f"{remedy}: [[1, 2, 3]] for one group")
    for group in groups.offloaded:
        if lengths[group.index] < num_tokens // group.block_size:
            remedy = f"has too few blocks for {num_tokens} tokens of {group.block_size} a block"
            raise wrong(f"block_ids[{group.index}]", tables[group.index], remedy)


def check_blocks(span: Span, keys: Keys, tables: BlockTables, num_blocks: int) -> list[int]:
    """Return the numbers of a request's blocks, as plain numbers.

    Raises:
        UsageError: their chunks have no key, or the KV cache does not have the blocks.
    """
    index, blocks = span.group.index, span.blocks
    if span.chunks.stop > len(keys[index]):
        remedy = f"name {len(keys[index])} full chunks; these tokens are more"
        raise wrong("block_hashes", f"group {index}", remedy)
    return block_numbers(
        tables[index][blocks.start : blocks.stop], num_blocks, f"block_ids[{index}]"
    )


def check_pieces(
    pieces: Sequence[Piece], groups: ChunkGroups, keys: Keys, tables: BlockTables, num_blocks: int
) -> None:
    """Check the blocks of chunks to store, from the first of each group to its last."""
    for group in groups.offloaded:
        if chunks := [chunk for index, chunk in pieces if index == group.index]:
            first, end, per = chunks[0], chunks[-1] + 1, group.per_chunk
            span = Span(group, range(first * per, end * per), range(first, end))
            check_blocks(span, keys, tables, num_blocks)


def check_promise(groups: ChunkGroups, num_tokens: SupportsIndex, promised: int) -> int:
    """Return how many tokens an engine wants to load; UsageError: no lookup has promised them.

    A part of a promise must end where blocks of all groups do: what lies behind would not be
    loaded.
    """
    field = "num_external_tokens"
    wanted = token_count(field, num_tokens)
    if wanted > promised or wanted % groups.alignment:
        remedy = f"get_num_new_matched_tokens returned {promised}: pass that, or fewer whole blocks"
        raise wrong(field, wanted, f"{remedy} of {groups.alignment} tokens")
    return wanted


def wrong(field: str, value: object, remedy: str) -> UsageError:
    """Return the error that names a field, its value and the remedy."""
    text = repr(value)
    return UsageError(f"{field} = {text if len(text) <= 80 else text[:76] + ' ...'}: {remedy}")
