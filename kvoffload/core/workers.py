"""Plans for the workers of one model: tensor-parallel ranks and pipeline stages.

One block manager serves all workers, so all need the same groups and the same number of blocks.
The groups follow from the layers of the whole model. A stage keeps its own layers of each group;
a group may be empty in a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvoffload.core.interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    ModelLimits,
    UniformTypeKVCacheSpecs,
)
from kvoffload.core.planning import (
    block_bytes,
    check_enough_blocks,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError


def get_kv_cache_configs(
    limits: ModelLimits,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory_bytes: Sequence[int],
    num_blocks_override: int | None = None,
    *,
    packed: bool = False,
) -> list[KVCacheConfig]:
    """Plan the KV cache of a model that runs on several workers.

    Args:
        limits: of the engine.
        kv_cache_specs: a worker's layers, each layer name → format, in layer order. Ranks of one
            stage have the same layers.
        available_memory_bytes: by worker, for all its pages together.
        num_blocks_override: this many blocks, not as many as the memory would hold.
        packed: lay all layers of a block side by side in one allocation.

    Returns:
        A plan a worker, all with the groups of the whole model and the smallest worker's blocks.

    Raises:
        KVCacheSpecError: a layer has two formats, or formats that cannot be served together.
        InsufficientMemoryError: one request of ``max_model_len`` tokens does not fit.
    """
    if not kv_cache_specs or len(kv_cache_specs) != len(available_memory_bytes):
        raise KVCacheSpecError(
            f"kv_cache_specs are of {len(kv_cache_specs)} workers, available_memory_bytes of "
            f"{len(available_memory_bytes)}: give both for each worker, and at least one worker"
        )
    groups = get_kv_cache_groups(_whole_model(kv_cache_specs))
    stages = [[_part_of(group, specs) for group in groups] for specs in kv_cache_specs]
    counts = []
    for rank, (stage, memory) in enumerate(zip(stages, available_memory_bytes, strict=True)):
        one_block = block_bytes(stage)
        if not one_block:
            continue  # A stage without cached layers limits no other stage.
        count = max(0, memory) // one_block if num_blocks_override is None else num_blocks_override
        try:
            check_enough_blocks(limits, stage, count)
        except InsufficientMemoryError as error:
            raise InsufficientMemoryError(f"worker {rank}: {error}") from None
        counts.append(count)
    num_blocks = min(counts)
    return [get_kv_cache_config_from_groups(stage, num_blocks, packed=packed) for stage in stages]


def _whole_model(kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """Unite the workers' layers, in order of the stages."""
    whole: dict[str, KVCacheSpec] = {}
    first: dict[str, int] = {}
    for rank, specs in enumerate(kv_cache_specs):
        for name, spec in specs.items():
            first.setdefault(name, rank)
            if whole.setdefault(name, spec) != spec:
                raise KVCacheSpecError(
                    f"layer {name} has format {spec} on worker {rank}, but {whole[name]} on worker "
                    f"{first[name]}: ranks that share a layer need one format for it"
                )
    return whole


def _part_of(group: KVCacheGroupSpec, specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """Leave a group the layers of one worker. The format of an empty group stays as it is."""
    names = [name for name in group.layer_names if name in specs]
    spec = group.kv_cache_spec
    if names and isinstance(spec, UniformTypeKVCacheSpecs):
        spec = replace(spec, kv_cache_specs={name: spec.kv_cache_specs[name] for name in names})
    return KVCacheGroupSpec(names, spec)
