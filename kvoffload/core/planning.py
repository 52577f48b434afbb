"""From formats and a memory budget to a plan. Pure functions; nothing is allocated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvoffload.core.interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    ModelLimits,
    UniformTypeKVCacheSpecs,
)
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError

NULL_BLOCKS = 1
"""Block 0 stands for "no block" in block tables; it takes memory but is never given out."""


def create_kv_cache_group_specs(
    kv_cache_spec: Mapping[str, KVCacheSpec], grouped_layer_names: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """Make a group of each list of layers; their formats must merge.

    Raises:
        KVCacheSpecError: layers of a group differ in format.
    """
    groups = []
    for layer_names in grouped_layer_names:
        specs = [kv_cache_spec[name] for name in layer_names]
        groups.append(KVCacheGroupSpec(layer_names, type(specs[0]).merge(specs)))
    return groups


def is_kv_cache_type_uniform(kv_cache_spec: Mapping[str, KVCacheSpec]) -> bool:
    """Whether all layers have formats that merge into one."""
    specs = list(kv_cache_spec.values())
    try:
        type(specs[0]).merge(specs)
    except KVCacheSpecError:
        return False
    return True


def get_kv_cache_config(
    limits: ModelLimits,
    kv_cache_spec: Mapping[str, KVCacheSpec],
    available_memory_bytes: int,
    num_blocks_override: int | None = None,
) -> KVCacheConfig:
    """Plan the KV cache of a model.

    Args:
        limits: of the engine.
        kv_cache_spec: layer name → format, in layer order.
        available_memory_bytes: for all pages together, the null block's included.
        num_blocks_override: so many blocks, whatever the memory given would hold.

    Raises:
        KVCacheSpecError: formats that cannot be served together.
        InsufficientMemoryError: one request of ``max_model_len`` tokens does not fit.
    """
    groups = get_kv_cache_groups(kv_cache_spec)
    num_blocks = _num_blocks(groups, available_memory_bytes, num_blocks_override)
    _check_one_request_fits(limits, groups, num_blocks, available_memory_bytes)
    return get_kv_cache_config_from_groups(groups, num_blocks)


def get_kv_cache_groups(kv_cache_spec: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Decide which layers share a block table."""
    if is_kv_cache_type_uniform(kv_cache_spec):
        return create_kv_cache_group_specs(kv_cache_spec, [list(kv_cache_spec)])
    uniform = UniformTypeKVCacheSpecs.from_specs(kv_cache_spec)
    if uniform is not None:
        return [KVCacheGroupSpec(kv_cache_spec, uniform)]
    raise KVCacheSpecError("layers of different kinds in one model are not planned yet")


def get_kv_cache_config_from_groups(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> KVCacheConfig:
    """Lay out the pages of groups that are decided: one tensor a layer."""
    tensors = [
        KVCacheTensor(group.layer_spec(name).page_size_bytes * num_blocks, (name,))
        for group in groups
        for name in group.layer_names
    ]
    return KVCacheConfig(num_blocks, tensors, groups)


def block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes one block id stands for, over all tensors."""
    return sum(g.layer_spec(name).page_size_bytes for g in groups for name in g.layer_names)


def _num_blocks(
    groups: Sequence[KVCacheGroupSpec], available_memory_bytes: int, override: int | None
) -> int:
    if override is not None:
        if override <= NULL_BLOCKS:
            raise InsufficientMemoryError(
                f"num_blocks_override = {override}: block 0 is reserved, so at least 2 are needed"
            )
        return override
    return max(0, available_memory_bytes) // block_bytes(groups)


def _blocks_of_one_request(limits: ModelLimits, groups: Sequence[KVCacheGroupSpec]) -> int:
    total = 0
    for group in groups:
        spec = group.kv_cache_spec
        total += -(-spec.max_memory_usage_bytes(limits) // spec.page_size_bytes)
    return total


def _check_one_request_fits(
    limits: ModelLimits,
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int,
    available_memory_bytes: int,
) -> None:
    needed = _blocks_of_one_request(limits, groups) + NULL_BLOCKS
    if needed <= num_blocks:
        return
    longest = _longest_fitting_len(limits, groups, num_blocks)
    raise InsufficientMemoryError(
        f"available_memory_bytes = {available_memory_bytes} holds {num_blocks} blocks, but one "
        f"request of max_model_len = {limits.max_model_len} tokens needs {needed} (the reserved "
        f"null block included): give at least {needed * block_bytes(groups)} bytes, or set "
        f"max_model_len to at most {longest}"
    )


def _longest_fitting_len(
    limits: ModelLimits, groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> int:
    low, high = 0, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        needed = _blocks_of_one_request(replace(limits, max_model_len=middle), groups)
        if needed + NULL_BLOCKS <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
